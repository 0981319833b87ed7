"""Values of Python and NumPy that a step changes are named, wherever they are."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import logging
import random
from collections.abc import Callable
from random import random as draw_of_python
from typing import Any

import numpy as np
import pytest
from numpy.random import normal as draw_of_numpy

from tfpreempt.checkpoint.state.state import State, StateRegistry
from tfpreempt.checkpoint.state.unsaved_state_check import (
    UnsavedStateCheck,
    mark_of_generator,
)
from tfpreempt.core.source_code import GLOBAL_GENERATORS
from tfpreempt.states import NumpyRandomState

Step = Callable[[], Any]
LOSSES: list[float] = []
SEEDS = np.random.SeedSequence(1)
BITS = np.random.PCG64(SEEDS)
SAVED = np.random.Generator(BITS)
LEGACY = np.random.RandomState(1)


class Base:
    """A class of the program, from which another class inherits."""

    entered = 0

    def __init__(self) -> None:
        self.total = 0.0
        self.last: float | None = None

    def step(self) -> None:
        self.total = self.total + 1

    def smooth(self) -> None:
        value = random.random()
        if self.last is not None:
            value += self.last
        self.last = value

    @classmethod
    def count(cls) -> None:
        cls.entered += 1


class Scope:
    """An object with methods that Python calls."""

    def __init__(self) -> None:
        self.total = 0.0

    def __enter__(self) -> None:
        self.total += 1

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self) -> None:
        self.total += 1

    def __setitem__(self, key: str, value: float) -> None:
        self.total += value


class Shared:
    """A class whose attribute can be called, like a layer."""

    scope = Scope()


class Derived(Base):
    """A class whose method calls the method of its base class."""

    def step(self) -> None:
        super().step()


class Replaced(Base):
    """A class whose method takes the place of the method of its base class."""

    def step(self) -> None:
        self.total = random.random()

    def of_a_sum(self) -> None:
        total = 0.0
        for _ in range(3):
            total += random.random()
        self.total = total


def a_default_value() -> Step:
    def step(rng: Any = np.random.default_rng(1)) -> None:  # noqa: B008
        rng.normal()

    return step


def a_list_as_default() -> Step:
    def step(*, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(1)

    return lambda: step()


def a_bound_method() -> Step:
    draw = random.Random(1).random
    return lambda: draw()


def a_bound_append() -> Step:
    seen: list[int] = []
    append = seen.append
    return lambda: append(1)


def a_bound_next() -> Step:
    following = itertools.count().__next__
    return lambda: following()


def a_bit_generator() -> Step:
    bits = np.random.PCG64(1)
    return lambda: np.random.Generator(bits).normal()


def spawned_seeds() -> Step:
    seeds = np.random.SeedSequence(1)
    return lambda: seeds.spawn(1)


def spawned_generators() -> Step:
    rng = np.random.default_rng(1)
    return lambda: rng.spawn(1)


def an_updated_counter() -> Step:
    counts = collections.Counter("a")
    return lambda: counts.update("a")


def a_dict_with_other_keys() -> Step:
    numbers = itertools.repeat(1)
    newest = {"a": 1, "b": 2}

    def step() -> None:
        key = next(iter(newest))
        newest[key + "a"] = newest.pop(key) + next(numbers)

    return step


def a_base_class() -> Step:
    derived = Derived()
    return lambda: derived.step()


def a_with_statement() -> Step:
    scope = Scope()

    def step() -> None:
        with scope:
            pass

    return step


def an_assigned_item() -> Step:
    scope = Scope()

    def step() -> None:
        scope["a"] = 1.0

    return step


def a_decorator() -> Step:
    calls = 0

    def counted(function: Step) -> Step:
        @functools.wraps(function)
        def wrapper() -> None:
            nonlocal calls
            calls += 1
            function()

        return wrapper

    return counted(lambda: None)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[Step], list[str]]:
    """Returns a function that returns the warnings of a step's second call."""

    def warnings(step: Step) -> list[str]:
        registry = StateRegistry()
        states = [
            NumpyRandomState("saved", SAVED, registry=registry),
            NumpyRandomState("legacy", LEGACY, registry=registry),
        ]
        check = UnsavedStateCheck(None, registry)
        step()
        check.before_call(step, (), {})
        step()
        check.after_call()
        assert states
        return caplog.messages

    caplog.set_level(logging.WARNING)
    return warnings


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (a_default_value, "commits: rng. "),
        (a_list_as_default, "commits: seen. "),
        (a_bound_method, "commits: draw. "),
        (a_bound_append, "commits: append. "),
        (a_bound_next, "reads from following, "),
        (a_bit_generator, "commits: bits. "),
        (spawned_seeds, "commits: seeds. "),
        (spawned_generators, "commits: rng. "),
        (an_updated_counter, "commits: counts. "),
        (a_dict_with_other_keys, "commits: newest. "),
        (a_base_class, "commits: derived.total. "),
        (a_with_statement, "commits: scope.total. "),
        (an_assigned_item, "commits: scope.total. "),
        (a_decorator, "commits: calls. "),
        (lambda: lambda: Base.count(), "commits: Base.entered. "),
        (lambda: lambda: Shared.scope(), "commits: Shared.scope.total. "),
        (lambda: Base().smooth, "commits: self.last. "),
    ],
)
def test_a_changed_value_is_named(
    make: Callable[[], Step], name: str, warnings: Callable[[Step], list[str]]
) -> None:
    """After a restart each value was the initial value again, without a warning."""
    [text] = warnings(make())
    assert name in text


class Losses(State):
    """A State whose attribute has the name of a global of the program."""

    def __init__(self, losses: list[float], registry: StateRegistry) -> None:
        super().__init__("losses", registry=registry)
        self.LOSSES = losses

    def save(self, fileobj: Any) -> None:
        fileobj.write(repr(self.LOSSES).encode())

    def load(self, fileobj: Any) -> None:
        self.LOSSES = [float(fileobj.read())]


def test_a_list_that_a_state_has_replaced_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restarted run appended to the list from before the restore, in no commit."""
    registry = StateRegistry()
    state = Losses(LOSSES, registry)
    state.load(io.BytesIO(b"1.0"))
    check = UnsavedStateCheck(None, registry)
    check.before_call(append_loss, (), {})
    append_loss()
    check.after_call()
    assert "commits: LOSSES. " in caplog.text


@pytest.mark.parametrize(
    ("count", "named_at"), [(10, [5]), (6_000, [10])], ids=["few", "many"]
)
def test_many_values_of_a_fit_are_not_compared_at_each_save(
    count: int, named_at: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A comparison of 20,000 values takes a second, which a save does not have."""
    values: list[list[float]] = [[] for _ in range(count)]
    check = UnsavedStateCheck(None, StateRegistry())
    check.watch({"step": lambda: values[0].append(1.0)}, called=(), kept=(), savers=())
    found = []
    for number in range(1, 12):
        if number == 5:
            values[0].append(1.0)
        caplog.clear()
        check.compare()
        found += [number] if "commits: values[0]. " in caplog.text else []
    assert found == named_at


def append_loss() -> None:
    LOSSES.append(1.0)


def a_system_generator() -> Step:
    system = random.SystemRandom()
    return lambda: system.random()


def a_bit_generator_of_a_random_state() -> Step:
    generators: list[Any] = [LEGACY, GLOBAL_GENERATORS[1]]
    bits, of_numpy = (each._bit_generator for each in generators)
    return lambda: (bits.random_raw(), of_numpy.random_raw())


def a_dict_with_the_newest_loss() -> Step:
    newest: dict[str, float] = {}

    def step() -> None:
        newest.clear()
        newest.update(loss=random.random())

    return step


@pytest.mark.parametrize(
    "make",
    [
        # Commits have the global generators.
        lambda: lambda: (draw_of_numpy(), draw_of_python()),
        a_system_generator,
        a_bit_generator_of_a_random_state,
        lambda: lambda: (SEEDS.spawn(1), SAVED.normal(), BITS.random_raw()),
        lambda: Replaced().step,
        lambda: Replaced().of_a_sum,
        a_dict_with_the_newest_loss,
    ],
)
def test_a_value_that_no_later_step_needs_is_not_named(
    make: Callable[[], Step], warnings: Callable[[Step], list[str]]
) -> None:
    assert warnings(make()) == []


class Key:
    """A key during whose comparison a thread of the program adds an item."""

    def __init__(self, owner: dict[Any, int]) -> None:
        self._owner = owner
        self.is_read = False

    def __hash__(self) -> int:
        if self.is_read:
            self._owner[len(self._owner)] = 1
        return 1


def test_a_dict_may_change_while_its_keys_are_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The comparison failed, and named no later value."""
    items: dict[Any, int] = {}
    key = Key(items)
    items[key] = 1

    def step() -> None:
        items["step"] = 1

    check = UnsavedStateCheck(None, StateRegistry())
    check.before_call(step, (), {})
    step()
    key.is_read = True
    check.after_call()
    assert "commits: items. " in caplog.text
    assert "cannot check" not in caplog.text


def test_an_attribute_of_a_dataset_keeps_its_checksum() -> None:
    """Existing commits have the checksum of this text."""
    rng = np.random.default_rng(1)
    assert mark_of_generator(rng) == repr(rng.bit_generator.state)
    rng.spawn(1)
    assert mark_of_generator(rng) != repr(rng.bit_generator.state)
