"""Choice of bad steps, and of the steps to leave out; without TensorFlow."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.fakes import open_directory, save
from tfpreempt import errors
from tfpreempt.checkpoint.mirror.journal_mirror import JournalMirror
from tfpreempt.cli.inspect.replay import _copy_bad_steps
from tfpreempt.core.cluster import LOCAL
from tfpreempt.core.events import BadStep
from tfpreempt.core.journal import Journal
from tfpreempt.handler.bad_steps import positions
from tfpreempt.keras import BadSteps, PreemptionCallback
from tfpreempt.keras.bad_steps import BadStepGuard, problem
from tfpreempt.storage.local import LocalStore


@pytest.mark.parametrize(
    ("before", "trained", "mean", "size", "factor", "why"),
    [
        (1.0, 3, math.nan, 1, None, "the loss is nan"),
        (None, 0, -math.inf, 1, None, "the loss is -inf"),
        (1.0, 3, 1e9, 1, None, ""),
        # The mean of four batches is 4, the mean of the first three was 1: 13.
        (1.0, 3, 4.0, 1, 13.5, ""),
        (1.0, 3, 4.0, 1, 12.5, "the loss 13 is more than 12.5 times the mean 1 of"),
        (1.0, 6, 4.0, 2, 12.5, "the loss 13 is more than 12.5 times the mean 1 of"),
        # Nothing to compare with: the first step of an epoch, or no positive mean.
        (None, 0, 1e9, 1, 2.0, ""),
        (1.0, 0, 1e9, 1, 2.0, ""),
        (-1.0, 3, 1e9, 1, 2.0, ""),
    ],
)
def test_a_step_is_bad(
    before: float | None,
    trained: int,
    mean: float,
    size: int,
    factor: float | None,
    why: str,
) -> None:
    found = problem(before, trained, mean, size, factor)
    assert found.startswith(why) if why else found == ""


def record(batch: int, *, is_crash: bool = False) -> BadStep:
    return BadStep(
        step=9, fit=1, epoch=0, batch=batch, batches=1, reason="", is_crash=is_crash
    )


def test_a_crash_counts_only_if_repeated(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    for batch, is_crash in ((5, True), (2, True), (7, False), (5, True), (7, False)):
        journal.record(record(batch, is_crash=is_crash))
    records = journal.read_earlier(BadStep)
    assert positions(records, 2) == [(1, 0, 5), (1, 0, 7)]
    assert positions(records, 3) == positions(records, None) == [(1, 0, 7)]


def test_a_record_of_the_first_bad_step_replaces_a_later_one(tmp_path: Path) -> None:
    """Also in a copy of the journal, whose times are those of another machine."""
    journal = Journal(tmp_path / "local", 0)
    journal.record(record(7))
    guard = started(journal, None)
    guard.record((1, 0, 5), "NaN")
    journal.record(dataclasses.replace(record(9), is_sought=True))
    JournalMirror(LocalStore(str(tmp_path / "mirror")), tmp_path / "local").put_within(
        10.0
    )
    for begun in (
        started(journal, None),
        started(
            Journal(tmp_path / "new" / "journal", 0),
            LocalStore(str(tmp_path / "mirror")),
        ),
        started(Journal(tmp_path / "new" / "journal", 0), None),
    ):
        assert [each for each in range(10) if begun.leaves_out(each)] == [5]


@pytest.mark.parametrize(
    "given",
    [
        {"spike_factor": 1},
        {"spike_factor": "2"},
        {"crashes": 1},
        {"crashes": True},
        {"limit": 0},
        {"check_every": None},
    ],
)
def test_a_bad_argument_is_named(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(errors.ConfigurationError, match=f"^{name} is {value!r}; exp"):
        BadSteps(**given)


@pytest.mark.parametrize("given", [{"on_bad_step": True}, {"restore": False}])
def test_the_callback_checks_the_argument(given: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"^on_bad_step is "):
        PreemptionCallback("ckpt", **{"on_bad_step": BadSteps()} | given)


def test_crashes_of_several_workers_are_refused() -> None:
    session: Any = SimpleNamespace(cluster=SimpleNamespace(num_workers=2))
    nothing: Any = None
    with pytest.raises(errors.ConfigurationError, match=r"^crashes is 2 in a run of 2"):
        BadStepGuard(BadSteps(crashes=2), nothing, nothing, session, nothing)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_commit_needs_the_confirmation_of_each_worker(
    tmp_path: Path, is_needed: bool
) -> None:
    """A worker that was killed may have found a bad step."""
    directory = open_directory(tmp_path, world=2)
    directory.contents.needs_every_worker = is_needed
    assert directory.needs_peers() == is_needed
    if is_needed:
        with pytest.raises(errors.SaveError, match=r"workers \[1\] .*on_bad_step="):
            save(directory, 5, workers=[0])
    else:
        assert save(directory, 5, workers=[0]).step == 5
    assert save(directory, 6, workers=[0, 1]).step == 6


def test_a_mirror_that_cannot_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "local", 0)
    journal.record(record(5))
    too_large = tmp_path / "mirror" / "journals" / "worker-0-12345678.jsonl"
    too_large.parent.mkdir(parents=True)
    too_large.touch()
    os.truncate(too_large, 1 << 30)
    guard = started(journal, LocalStore(str(tmp_path / "mirror")))
    assert guard.leaves_out(5)
    assert "cannot be read from the mirror" in caplog.text


def started(journal: Journal, store: LocalStore | None) -> BadStepGuard:
    """The guard of a fit that begins.

    Args:
        journal: journal of this machine.
        store: the mirror; None without a mirror.
    """

    class Model:
        def train_step(self) -> None: ...

    mirror = None if store is None else SimpleNamespace(store=store)
    fit: Any = SimpleNamespace(model=Model())
    session: Any = SimpleNamespace(cluster=LOCAL)
    run: Any = SimpleNamespace(
        journal=journal,
        directory=SimpleNamespace(mirror=mirror),
        record=journal.record,
        step=9,
    )
    variables: Any = None
    guard = BadStepGuard(BadSteps(crashes=2), fit, variables, session, run)
    guard.begin(1, 0, {}, 1)
    return guard


def test_the_journal_gets_the_records_of_other_machines(tmp_path: Path) -> None:
    """A replay has no mirror, and reads the journal; each crash counts once."""
    store = LocalStore(str(tmp_path / "mirror"))
    for worker, batches in ((0, [(5, False), (7, True)]), (1, [(9, False)])):
        other = Journal(tmp_path / "other", worker)
        for batch, is_crash in batches:
            other.record(record(batch, is_crash=is_crash))
    JournalMirror(store, tmp_path / "other").put_within(10.0)
    for name in ("new", "local", "local"):
        local = tmp_path / name / "journal"
        guard = started(Journal(local, 0), store)
        assert [guard.leaves_out(each) for each in (5, 7, 9)] == [True, False, False]
        JournalMirror(store, local).put_within(10.0)
        assert (local / "worker-0.jsonl").read_text().count('"badstep"') == 2
    # No machine has replaced the journal of another machine in the mirror.
    journals = [each for each in store.list("journals/") if "worker-0" in each]
    assert len(journals) == 3
    (tmp_path / "copy").mkdir()
    _copy_bad_steps(str(tmp_path / "local"), str(tmp_path / "copy"))
    copied = Journal(tmp_path / "copy" / "journal", 0)
    guard = started(copied, None)
    assert [guard.leaves_out(each) for each in (5, 7)] == [True, False]
    copied.record(record(7, is_crash=True))
    assert started(copied, None).leaves_out(7)
