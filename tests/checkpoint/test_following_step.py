"""A loop that does not continue with the next step after a restart is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import pytest

from tfpreempt.checkpoint.state.following_step import FollowingStepCheck
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Event, FollowingStep
from tfpreempt.states import ArrayDictState, JsonState, StepCounter

BATCHES = [np.arange(4.0) + step for step in range(4)]
WORDS = [np.array(["a", str(step)], object) for step in range(4)]
MASK = np.ones(3)
OTHER = "the first step after this restart does not get the values"


class Journal:
    """Records of a run, as a restarted process reads them."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def record(self, event: Event) -> None:
        assert isinstance(event, FollowingStep)
        self.records.append(json.loads(json.dumps(dataclasses.asdict(event))))

    def start(
        self,
        trained: int,
        workers: int = 1,
        worker: int = 0,
        states: StateRegistry | None = None,
        rates: Mapping[str, str] | None = None,
    ) -> FollowingStepCheck:
        return FollowingStepCheck(
            trained,
            Cluster(worker=worker, jobs=(("worker", workers),)),
            states or StateRegistry(),
            self.record,
            lambda: self.records,
            rates or {},
        )


def other_print() -> None:
    """A function with another name."""


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ((BATCHES[3],), (BATCHES[3],), ""),
        ((BATCHES[3],), (BATCHES[0],), "args[0]"),
        (({"x": BATCHES[3]}, 1), ({"x": BATCHES[2]}, 1), "args[0]"),
        ((WORDS[3],), (WORDS[3].copy(),), ""),
        ((WORDS[3],), (WORDS[0],), "args[0]"),
        ((BATCHES[3], 0.5), (BATCHES[3], 0.25), "args[1]"),
        ((7,), (0,), "args[0]"),
        ((np.float32(1),), (np.float32(0),), "args[0]"),
        ((object(),), (object(),), ""),
        (({"x": MASK, "y": 1},), ({"y": 1, "x": MASK},), ""),  # another order
        (({"x": BATCHES[0], "y": BATCHES[1]},), ({"x": BATCHES[1]},), "args[0]"),
        ((BATCHES[3], "logs/1"), (BATCHES[3], "logs/2"), ""),
        ((BATCHES[3], 3), (BATCHES[3], np.int64(3)), ""),
        ((np.array([object()]),), (np.array([object()]),), ""),
        ((), (), ""),
        ((BATCHES[3],), (), ""),
    ],
)
def test_other_values_than_before_the_restart_are_named(
    before: tuple[Any, ...],
    after: tuple[Any, ...],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = Journal()
    journal.start(0).before_commit(7, print, before, {"mask": MASK})
    journal.start(7).compare(7, print, after, {"mask": MASK})
    assert (f"{OTHER} that the step would have got" in caplog.text) == bool(named)
    assert not named or f"without the restart: {named}. " in caplog.text


def test_another_learning_rate_of_the_program_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The restore sets the rate of the checkpoint, so a change had no effect."""
    journal = Journal()
    before = {"a/learning_rate": "0.1", "b/learning_rate": "0.2", "old": "1"}
    now = {"a/learning_rate": "0.01", "b/learning_rate": "0.2", "new": "1"}
    journal.start(0, rates=before).before_commit(3, print, (), {})
    for _ in range(2):
        start = journal.start(3, rates=now)
        start.compare(3, print, (), {})
        start.before_commit(3, print, (), {})
    [text] = caplog.messages
    assert "program: a/learning_rate is 0.01, was 0.1. The rates of" in text


@pytest.mark.parametrize("args", [(), (iter(()),)])
def test_the_arrays_of_a_function_with_an_iterator_are_not_compared(
    args: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The step reads its batch from the iterator."""
    journal, words = Journal(), [np.array(["a", "b"])]
    step = lambda *args: words  # noqa: E731
    journal.start(0).before_commit(3, step, args, {})
    words[0] = np.array(["c", "d"])
    journal.start(3).compare(3, step, args, {})
    assert ("without the restart: words[0]. " in caplog.text) == (not args)


def test_another_function_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Such as the step of a GAN's discriminator before the step of its generator."""
    journal = Journal()
    journal.start(0).before_commit(7, print, (), {})
    journal.start(7).compare(7, other_print, (), {})
    assert "calls other_print; without the restart the step would" in caplog.text
    assert "have called print. " in caplog.text


def test_only_the_first_step_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """A step may fail, and the program may go on with the next batch."""
    journal = Journal()
    journal.start(0).before_commit(3, print, (BATCHES[3],), {})
    start = journal.start(3)
    start.compare(3, print, (BATCHES[3],), {})
    start.compare(3, print, (BATCHES[0],), {})
    assert caplog.messages == []


RESULT = np.zeros(2)


def test_the_results_of_a_function_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other warnings name results that the next step reads."""
    loss = np.zeros(2)

    def step() -> None:
        global RESULT
        nonlocal loss
        RESULT, loss = RESULT + 1, loss + 1

    journal = Journal()
    journal.start(0).before_commit(3, step, (), {})
    step()
    journal.start(3).compare(3, step, (), {})
    assert caplog.messages == []


def test_the_newest_record_of_the_boundary_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An earlier process may have come to the boundary with other values, and has
    logged the warning then."""
    journal = Journal()
    for trained, batch in ((3, 0), (3, 1), (4, 2)):
        journal.start(0).before_commit(trained, print, (BATCHES[batch],), {})
    journal.start(3).compare(3, print, (BATCHES[1],), {})
    assert caplog.messages == []
    journal.start(3).compare(3, print, (BATCHES[0],), {})
    assert OTHER in caplog.text


@pytest.mark.parametrize(
    ("trained", "workers", "is_at_run"), [(5, 1, False), (3, 2, True), (0, 1, False)]
)
def test_other_boundaries_and_numbers_of_workers_are_not_compared(
    trained: int, workers: int, is_at_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit of step 5 was made without a following step, such as in an
    evaluation."""
    journal = Journal()
    journal.start(0).before_commit(3, print, (BATCHES[3],), {})
    start = journal.start(trained, workers)
    start.compare(trained, print, (BATCHES[0],), {})
    assert start.is_at_run == is_at_run
    assert caplog.messages == []


class Loader:
    """A loader that restores its order when the first batch is read."""

    def __init__(self) -> None:
        self.order = np.arange(4)

    def read(self) -> Any:
        return self.order[0]


def test_the_attributes_of_other_objects_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only arrays that the function uses itself, and attributes of its own object."""
    journal, loader, words = Journal(), Loader(), [np.array(["a", "b"])]
    step = lambda: (loader.read(), words)  # noqa: E731
    journal.start(0).before_commit(3, step, (), {})
    loader.order += 1
    journal.start(3).compare(3, step, (), {})
    assert caplog.messages == []
    words[0] = np.array(["c", "d"])
    journal.start(3).compare(3, step, (), {})
    assert "without the restart: words[0]. " in caplog.text
    caplog.clear()
    journal.start(0).before_commit(3, loader.read, (), {})
    loader.order += 1
    journal.start(3).compare(3, loader.read, (), {})
    assert "without the restart: self.order. " in caplog.text


def test_an_object_without_a_fingerprint_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(np.ndarray):
        @property
        def flat(self) -> Any:
            raise RuntimeError

    journal, odd = Journal(), np.zeros(3).view(Odd)
    journal.start(0).before_commit(3, print, (odd,), {})
    journal.start(3).compare(3, print, (BATCHES[0],), {})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("worker", "chiefs", "own", "later", "named"),
    [
        (1, 10, 0, 20, True),  # a position in data of its own
        (1, 10, 0, 10, False),  # the same value as the chief
        (1, 10, 0, 0, False),  # only the chief changes the value
        (0, 10, 0, 20, False),  # the chief's own value is restored
    ],
)
def test_a_value_of_a_worker_that_only_the_chief_saves_is_named(
    worker: int,
    chiefs: object,
    own: object,
    later: object,
    named: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal, states = Journal(), StateRegistry()
    cursor = JsonState("cursor", own, registry=states)
    check = journal.start(0, workers=2, worker=worker, states=states)
    cursor.value = later
    late = JsonState("late", later, registry=states)  # loaded by load_state()
    check.before_commit(7, print, (), {})
    late.unregister()
    cursor.value = chiefs  # restored
    check = journal.start(7, workers=2, worker=worker, states=states)
    check.compare(7, print, (), {})
    assert ("another value of cursor than the chief" in caplog.text) == named
    assert "late" not in caplog.text


def test_values_of_each_worker_and_of_classes_of_the_program_are_not_compared() -> None:
    class Own(JsonState):
        def save(self, fileobj: IO[bytes]) -> None:
            pytest.fail("only the chief saves this State")

    journal, states = Journal(), StateRegistry()
    own = Own("own", 0, registry=states)
    cursor = JsonState("cursor", 0, per_worker=True, registry=states)
    arrays = ArrayDictState("arrays", {"x": BATCHES[0].copy()}, registry=states)
    step = StepCounter(registry=states)
    check = journal.start(0, workers=2, worker=1, states=states)
    own.value = cursor.value = step.value = 3
    arrays.arrays["x"] += 1
    check.before_commit(3, print, (), {})
    assert set(journal.records[0]["shared"]) == {"arrays", "step"}


@pytest.mark.parametrize("damage", [{"values": 5}, {"shared": ["cursor"]}, {}])
def test_a_corrupt_record_is_not_compared(
    damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal()
    journal.start(0).before_commit(7, print, (BATCHES[3],), {})
    journal.records[0] |= damage
    journal.start(7).compare(7, print, (BATCHES[0],), {})
    assert (OTHER in caplog.text) == (not damage)
