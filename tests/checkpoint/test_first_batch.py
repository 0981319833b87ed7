"""Data that start from the beginning after a restart are named; others are not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tfpreempt.checkpoint.state.first_batch import FirstBatch
from tfpreempt.core.events import Batches, Event

BATCHES = [np.arange(4.0) + step for step in range(4)]
WORDS = [np.array(["a", str(step)], object) for step in range(4)]
MASK = np.ones(3)
AGAIN = "the data start again from the beginning"


class Journal:
    """Records of a run, as a restarted process reads them."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def record(self, event: Event) -> None:
        assert isinstance(event, Batches)
        self.records.append(json.loads(json.dumps(dataclasses.asdict(event))))

    def start(self, trained: int, *steps: tuple[Any, ...]) -> FirstBatch:
        check = FirstBatch(trained, self.record, lambda: self.records)
        for number, args in enumerate(steps):
            check.before_step(number, print, args, {"mask": MASK})
        return check


@pytest.mark.parametrize(
    ("first", "after_restart", "named"),
    [
        ([(BATCHES[0],), (BATCHES[1],)], (BATCHES[0],), "args[0]"),
        ([({"x": BATCHES[0]},), ({"x": BATCHES[1]},)], ({"x": BATCHES[0]},), "x"),
        ([(WORDS[0],), (WORDS[1],)], (WORDS[0],), "args[0]"),
        ([(BATCHES[0],), (BATCHES[1],)], (BATCHES[2],), ""),
        ([(BATCHES[0],), (BATCHES[0],)], (BATCHES[0],), ""),  # the whole data
        ([(BATCHES[0],)], (BATCHES[0],), ""),  # one step: a batch or the whole data
        ([(MASK,), (BATCHES[1],)], (MASK,), ""),  # a mask of another batch
        ([(0,), (1,)], (0,), ""),
        ([(np.float32(0),), (np.float32(1),)], (np.float32(0),), ""),
        ([(), ()], (), ""),
    ],
)
def test_data_that_start_again_are_named(
    first: list[tuple[Any, ...]],
    after_restart: tuple[Any, ...],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = Journal()
    check = journal.start(0, *first)
    check.before_commit(7, print, (BATCHES[3],), {"mask": MASK})
    assert caplog.messages == []
    journal.start(7, after_restart)
    assert (AGAIN in caplog.text) == bool(named)
    if named:
        assert f"{named}" in caplog.text
        assert "although 7 steps are trained" in caplog.text


def test_only_the_first_step_after_a_restart_is_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A later epoch may begin with the same batch."""
    journal = Journal()
    check = journal.start(0, (BATCHES[0],), (BATCHES[1],))
    check.before_commit(3, print, (BATCHES[3],), {"mask": MASK})
    journal.start(3, (BATCHES[3],), (BATCHES[0],))
    assert caplog.messages == []


@pytest.mark.parametrize("trained", [2, 3, 4])
def test_an_epoch_that_begins_after_a_commit_is_no_new_start(
    trained: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of data in a fixed order. Also in a later process of the run. A commit of step 4
    was made without a following step, such as in an evaluation."""
    journal = Journal()
    journal.start(0, (BATCHES[0],), (BATCHES[1],))
    later = journal.start(1, (BATCHES[1],))
    later.before_commit(2, print, (BATCHES[0],), {"mask": MASK})
    later.before_commit(3, print, (BATCHES[1],), {"mask": MASK})
    start = journal.start(trained, (BATCHES[0],))
    assert (AGAIN in caplog.text) == (trained == 3)
    assert start.is_at_run == (trained != 4)


def test_an_object_without_a_fingerprint_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(np.ndarray):
        @property
        def flat(self) -> Any:
            raise RuntimeError

    odd = np.zeros(3).view(Odd)
    Journal().start(0, (odd,), (odd,))
    assert caplog.messages == []
