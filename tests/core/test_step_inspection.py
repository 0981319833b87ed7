"""The objects that a step can reach, and the values that a step updates."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import randint
from typing import Any

import numpy as np
import pytest

from tfpreempt.checkpoint.state.state import State
from tfpreempt.core import object_graph
from tfpreempt.core.reachable_values import reachable
from tfpreempt.core.source_code import (
    derived_keys,
    draws_globally,
    fetched_by_loops,
    is_updated,
    set_at_begin,
    updated_keys,
)

TOTAL = 0
TABLE = {"seen": 0, "last": 0, "other": 0}


class Trainer:
    """An object whose methods are steps."""

    scale = 2
    steps = 0

    def __init__(self) -> None:
        self.count = self.newest = self.both = 0
        self.counts = [0]

    def step(self, value: int) -> None:
        self.count += 1
        self.newest = self.scaled
        both = value
        both += 1
        self.both = both

    @property
    def scaled(self) -> int:
        TABLE["seen"] = TABLE["seen"] + self.scale
        return self.scale

    def count_one(self, index: int) -> None:
        self.counts[index] += 1

    def evaluate(self) -> None:
        TABLE["other"] += 1

    def count_all(self) -> None:
        Trainer.steps += 1


def counting() -> None:
    counting.calls += 1  # type: ignore[attr-defined]


counting.calls = 0  # type: ignore[attr-defined]


def add_to_total(trainer: Trainer, value: int) -> None:
    global TOTAL
    TOTAL = max(TOTAL, value)
    TABLE["last"] = value
    trainer.newest = value


def with_a_closure() -> Callable[[], None]:
    seen = newest = 0

    def step() -> None:
        nonlocal seen, newest
        total = 0
        seen += 1
        for value in [1, 2]:
            total += value
        newest = total

    return step


def compiled(function: Any) -> Any:
    """A stand-in for a tf.function."""
    kind = type("Compiled", (), {"python_function": None, "__call__": function})
    made = kind()
    made.python_function = function
    return made


class Averaged:
    """A program whose loss is replaced before the sum reads the loss."""

    loss = 0.0

    def epoch(self, losses: list[float]) -> None:
        total = 0.0
        for loss in losses:
            self.loss = loss * 2
            total += self.loss
        self.loss = total / len(losses)


def places_of(
    function: Any, *args: Any, **kwargs: Any
) -> list[object_graph.ObjectPath]:
    call = functools.partial(function, *args, **kwargs)
    return reachable({"": call}, object_graph.is_user_code)


@pytest.mark.parametrize(
    ("function", "args", "paths"),
    [
        (Trainer().step, (1,), ["self.count", "TABLE['seen']"]),
        (Trainer().count_one, (0,), ["self.counts[0]"]),
        (Trainer().count_all, (), ["Trainer.steps"]),
        (counting, (), ["counting.calls"]),
        (add_to_total, (Trainer(), 1), ["TOTAL"]),
        (functools.partial(add_to_total, value=1), (Trainer(),), ["TOTAL"]),
        (lambda: add_to_total(Trainer(), 1), (), ["TOTAL"]),
        (with_a_closure(), (), ["seen"]),
        (compiled(with_a_closure()), (), ["seen"]),
        (eval("lambda: None"), (), []),
        (Averaged().epoch, ([1.0],), []),
    ],
)
def test_an_update_is_computed_from_the_old_value(
    function: Any, args: tuple[Any, ...], paths: list[str]
) -> None:
    places = places_of(function, *args)
    keys = updated_keys(places)
    assert [each.path for each in places if is_updated(each, keys)] == paths


def test_only_methods_that_the_step_names_are_searched() -> None:
    values = [place.value for place in places_of(Trainer().step, 1)]
    functions = [each for each in values if isinstance(each, types.FunctionType)]
    assert [each.__name__ for each in functions] == ["step", "scaled"]


def test_modules_that_name_each_other_are_walked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType(__name__)
    vars(module).update(trainer_module=module, found_there=[0])
    monkeypatch.setitem(globals(), "trainer_module", module)
    places = places_of(lambda: trainer_module.trainer_module.found_there)  # type: ignore[name-defined]  # noqa: F821
    assert [p.path for p in places if p.value == [0]] == ["trainer_module.found_there"]


def of_python() -> float:
    return random.random()


def of_a_name() -> int:
    return randint(1, 2)


def of_numpy() -> list[float]:
    return [np.random.normal() for _ in range(2)]


def of_its_own(index: int) -> float:
    return np.random.default_rng(index).random() + random.Random(index).random()


def of_a_seed(index: int) -> float:
    np.random.seed(index)
    return np.random.normal()


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (of_python, True),
        (of_a_name, True),
        (of_numpy, True),
        (of_its_own, False),
        (of_a_seed, False),
        (eval("lambda: None"), False),
    ],
)
def test_draws_from_global_generators_are_found(function: Any, draws: bool) -> None:
    assert draws_globally(function) == draws


class Cell:
    """A variable of a framework."""

    def assign(self, value: float) -> None:
        pass

    assign_add = assign


class Schedule:
    """A callback with a variable, and the hooks that a test gives it."""

    def __init__(self, **hooks: Callable[..., None]) -> None:
        self.weight = Cell()
        self.epochs = 0
        vars(self).update(hooks)


SCHEDULE = Schedule()


def by_number(epoch: int, logs: Any = None) -> None:
    share = min(1.0, epoch / 10)
    SCHEDULE.weight.assign(share)


def by_itself(epoch: int, logs: Any = None) -> None:
    SCHEDULE.weight.assign(SCHEDULE.weight * 0.9)  # type: ignore[operator]


def by_adding(epoch: int, logs: Any = None) -> None:
    SCHEDULE.weight.assign_add(0.1)


def by_a_counter(epoch: int, logs: Any = None) -> None:
    SCHEDULE.weight.assign(SCHEDULE.epochs / 10)


def count_epochs(epoch: int, logs: Any = None) -> None:
    SCHEDULE.epochs += 1


def by_the_optimizer(epoch: int, logs: Any = None) -> None:
    SCHEDULE.weight.assign(SCHEDULE.model.optimizer.iterations / 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hooks", "is_found"),
    [
        ({"on_epoch_begin": by_number}, True),
        (
            {
                "on_epoch_begin": lambda epoch, logs: SCHEDULE.weight.assign(
                    epoch / 10
                ),
                "on_epoch_end": lambda epoch, logs: None,
            },
            True,
        ),
        ({"on_epoch_end": by_number}, False),
        ({"on_epoch_begin": by_number, "on_epoch_end": by_adding}, False),
        ({"on_epoch_begin": by_itself}, False),
        ({"on_epoch_begin": by_adding}, False),
        ({"on_epoch_begin": by_a_counter, "on_epoch_end": count_epochs}, False),
        ({"on_epoch_begin": by_the_optimizer}, False),
    ],
)
def test_a_variable_set_from_the_number_of_the_epoch(
    hooks: dict[str, Callable[..., None]], is_found: bool
) -> None:
    """A restart calls `on_epoch_begin` again, so such a variable needs no save."""
    roots = {f"Callback.{name}": hook for name, hook in hooks.items()}
    places = reachable(roots, object_graph.is_user_code)
    found = set_at_begin(places, updated_keys(places))
    assert (SCHEDULE.weight in [each.value for each in found]) == is_found


def a_loop(handler: Any, kept: Cell, losses: list[float]) -> set[str]:
    """Returns the names of the variables that this loop updates."""
    step = handler.total_run_calls
    lr, best, least, total, number = 0.1, 9.0, 9.0, 0.0, 0
    lowest, at = 9.0, 0
    epoch = id(kept)
    for loss in losses:
        loss = loss * 2
        target = loss + 1
        target = target * 2
        target += 1
        best = min(best, loss, target)
        if loss < least:
            least = loss
        if loss < lowest:
            lowest, at = loss, number
        total += loss
        lr *= 0.9
        with contextlib.nullcontext():
            inside = loss
            inside = inside + 1
        try:
            tried: float = loss
            tried = tried + 1
        finally:
            pass
        number = step
        step += 1
        epoch += 1

    def inner(inside_only: float) -> float:  # not called by the loop
        seen = inside_only
        seen = seen + 1
        return seen * 2

    seen = inside + tried + at
    frame = sys._getframe()
    places = reachable({"": frame}, object_graph.is_user_code)
    assert any(place.value is losses for place in places)
    keys = updated_keys(places) - derived_keys(frame, {id(kept)}, State)
    return {each.path for each in places if is_updated(each, keys)} - {
        str(number),
        str(seen),
    }


def a_trainer(
    handler: Any, settings: types.SimpleNamespace, sums: dict[Any, Any]
) -> set[str]:
    """Returns the names of the variables and attributes that a restart of this loop
    does not set again."""
    settings.step = handler.total_run_calls
    settings.epoch = settings.step // 10
    start = handler.total_run_calls
    epoch, settings.kept = start // 10, settings.kept + start
    rng = np.random.default_rng(start)
    history, batch, other, losses = np.zeros(9), np.zeros(2), np.zeros(2), [0.0]
    sums["start"] = start
    found = set[Any]()
    while epoch < 1:
        found = derived_keys(sys._getframe(), set(), Stored)
        settings.step += 1
        settings.epoch += 1
        settings.kept += 1
        batch[:] = other[...] = start
        history[start] = sums["last"] = losses[0] = start
        sums["all"] += start
        rng.random()
        total = 0.0
        if start % 3 == 0:
            count = 0
            for each in losses:
                count += each
                total += each
            print(count, total)
        epoch += 1
    names = {"settings.step", "settings.epoch", "settings.kept", "epoch", "rng"}
    names |= {"history", "batch", "other", "losses", "sums", "count", "total"}
    return names - {name for _, name in found}


def test_values_that_a_restart_does_not_set_again() -> None:
    """An item that each pass sets does not set the other items."""
    handler = types.SimpleNamespace(total_run_calls=0)
    settings = types.SimpleNamespace(step=0, kept=0)
    found = a_trainer(handler, settings, {"all": 0})
    assert found == {"settings.kept", "rng", "history", "losses", "sums"}


def sums_of_evaluations(calls: list[int]) -> set[str]:
    """Returns the variables that this loop needs in later passes."""
    found = set[str]()
    late = 0
    for number in calls:
        if number % 2:
            early = late = kept = 0
            for each in calls:
                early += each
                late += each
                kept += each
            calls.append(early)
        across = 0
        found = {name for _, name in derived_keys(sys._getframe(), set(), Stored)}
        across += number
        across += late
        calls.clear()
        break
    if calls:
        calls.append(kept)
    return {"early", "late", "kept", "across"} - found


def test_the_sum_of_an_evaluation_needs_no_save() -> None:
    assert sums_of_evaluations([1]) == {"late", "kept", "across"}


def a_global_in_an_evaluation(calls: list[int]) -> set[str]:
    """Returns the variables that this loop needs in later passes: the step, a function
    of its own, may read the global."""
    global SCALE
    found = set[str]()
    for _ in calls:
        if calls:
            SCALE = total = 0
            calls.append(SCALE + total)
        found = {name for _, name in derived_keys(sys._getframe(), set(), Stored)}
        break
    return {"SCALE", "total"} - found


def test_a_global_that_an_evaluation_sets_may_be_used_elsewhere() -> None:
    assert a_global_in_an_evaluation([1]) == {"SCALE"}


class Hook:
    def __init__(self) -> None:
        self.count = 0

    def after_step(self) -> None:
        self.count += 1


def call_hook(name: str, hook: Hook) -> None:
    getattr(hook, name)()


def test_a_method_that_is_called_by_its_name_in_a_text_is_searched() -> None:
    hook = Hook()

    def step() -> None:
        for name in ("before_step", "after_step"):
            call_hook(name, hook)

    places = reachable({"": step}, object_graph.is_user_code)
    found = {each.path for each in places if is_updated(each, updated_keys(places))}
    assert found == {"hook.count"}


def test_a_loop_updates_variables_of_its_own() -> None:
    """The step and the epoch have saved values, and the target is set in each pass. The
    step of the lowest loss, `at`, belongs to the lowest loss."""
    handler = types.SimpleNamespace(total_run_calls=0)
    updated = {"best", "least", "lowest", "at", "total", "lr"}
    assert a_loop(handler, Cell(), [1.0]) == updated


class Handler:
    """A handler that records the saved iterators from which its loop fetches."""

    def __init__(self, saved: Any) -> None:
        self.saved = {id(saved)}
        self.found: dict[str, None] = {}

    def run(self, *args: Any) -> None:
        self.found |= fetched_by_loops([sys._getframe(1)], self.saved)


def for_each_batch(handler: Handler, batches: Any) -> None:
    for number, batch in enumerate(batches):
        handler.run(number, batch)


def in_the_arguments(handler: Handler, batches: Any) -> None:
    for _ in range(2):
        handler.run(next(batches))


def in_a_statement(handler: Handler, batches: Any) -> None:
    data = types.SimpleNamespace(batches=batches)
    while not handler.found:
        batch, number = next(data.batches), 1
        handler.run(number, batch)


def inside_of_the_step(handler: Handler, batches: Any) -> None:
    for number in range(2):
        handler.run(lambda: next(batches), number)
        if number == 1:  # an evaluation, complete before the next step
            batch = next(batches)
            assert batch


class Loader:
    """An iterator with attributes of its own."""

    epoch = 0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        return 1


def for_each_remaining_epoch(handler: Handler, batches: Any) -> None:
    loader = Loader()
    handler.saved.add(id(loader))
    for epoch in range(loader.epoch, 2):
        handler.run(loader, epoch)


def for_each_batch_of_an_evaluation(handler: Handler, batches: Any) -> None:
    for batch in range(2):
        handler.run(batch)
        for batch in batches:
            assert batch
        for _ in range(1):
            batch = next(batches, 1)
            assert batch


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (for_each_batch, ["batches"]),
        (for_each_remaining_epoch, []),
        (for_each_batch_of_an_evaluation, []),
        (in_the_arguments, ["batches"]),
        (in_a_statement, ["data.batches"]),
        (inside_of_the_step, []),
    ],
)
def test_a_saved_iterator_from_which_a_loop_fetches_is_found(
    loop: Callable[[Handler, Any], None], named: list[str]
) -> None:
    """Each restart lost the batch that was fetched before the save."""
    batches = iter([1, 2, 3])
    handler = Handler(batches)
    loop(handler, batches)
    assert list(handler.found) == named


@pytest.mark.parametrize("form", ["folder", "zip file"])
def test_source_code_is_read_without_a_look_at_the_imported_modules(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A look at `__file__` loads a lazy module; thousands of modules take a second."""

    class LazyModule(types.ModuleType):
        @property
        def __file__(self) -> str:  # type: ignore[override]
            looks.append(self.__name__)
            raise AttributeError("__file__")

    looks: list[str] = []
    name, source = (
        f"of_a_{form.replace(' ', '_')}",
        "def step(self):\n    self.n += 1\n",
    )
    if form == "zip file":
        tmp_path /= "archive.zip"
        with zipfile.ZipFile(tmp_path, "w") as archive:
            archive.writestr(f"{name}.py", source)
    else:
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    step = importlib.import_module(name).step
    monkeypatch.setitem(sys.modules, "lazy", LazyModule("lazy"))
    assert updated_keys(places_of(step, None)) == {"n"}
    assert not looks


class Stored:
    """A State with a value."""

    value = 0


class Created:
    """A handler that restores the States when it is created."""

    total_run_calls = 0

    def __enter__(self) -> Created:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def in_two_phases(state: Stored) -> set[Any]:
    found = set[Any]()
    with Created() as handler:
        best = state.value
        for _ in range(1):
            best = best + 1
            found = derived_keys(sys._getframe(), set(), Stored)
    with Created() as handler:
        assert handler
    return found


def in_a_later_with(state: Stored) -> set[Any]:
    handler = Created()
    best = state.value
    with handler as same:
        for _ in range(1):
            best = best + same.total_run_calls
    return derived_keys(sys._getframe(), set(), Stored)


def with_a_second_name(state: Stored) -> set[Any]:
    handler: Created = Created()
    best = state.value
    same = handler
    handler = contextlib.ExitStack().enter_context(same)
    for _ in range(1):
        best = best + handler.total_run_calls
    return derived_keys(sys._getframe(), set(), Stored)


@pytest.mark.parametrize("loop", [in_two_phases, in_a_later_with, with_a_second_name])
def test_a_state_that_is_read_after_the_restore_sets_a_variable(
    loop: Callable[[Stored], set[Any]],
) -> None:
    """A warning named the variable, although a restart sets the variable again."""
    assert ("name", "best") in loop(Stored())


def with_an_annotation(state: Stored) -> set[Any]:
    best = state.value
    handler: Created = Created()
    for _ in range(1):
        best = best + handler.total_run_calls
    return derived_keys(sys._getframe(), set(), Stored)


def around_a_handler(state: Stored) -> set[Any]:
    before = after = number = state.value
    handler = Created()
    after = state.value
    number = handler.total_run_calls
    for _ in range(1):
        before, after, number = before + 1, after + 1, number + 1
    return derived_keys(sys._getframe(), set(), Stored)


def test_a_state_that_is_read_before_the_restore_sets_no_variable() -> None:
    """A restarted loop continued with the initial value, without a warning."""
    names = {name for _, name in around_a_handler(Stored())}
    assert names >= {"after", "number"}
    assert "before" not in names
    assert ("name", "best") not in with_an_annotation(Stored())
