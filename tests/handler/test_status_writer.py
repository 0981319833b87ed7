"""The status that a handler reports."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import IO

import pytest

from tests.handler.program import Program, wait_until
from tfpreempt.core.journal import journal_directory
from tfpreempt.handler import status_file
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    read_worker_status,
    status_path,
)
from tfpreempt.states.api import State

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "_LOOKS_EVERY", 0.01)
    monkeypatch.setattr(status_file, "REPORT_INTERVAL", 0.01)


def told(program: Program) -> WorkerStatus | None:
    return read_worker_status(status_path(journal_directory(program.directory), 0))


def wait_told(program: Program, doing: WorkerActivity, step: int) -> WorkerStatus:
    def is_told() -> bool:
        newest = told(program)
        return newest is not None and (newest.doing, newest.step) == (doing, step)

    wait_until(is_told)
    newest = told(program)
    assert newest is not None
    return newest


def tells() -> bool:
    """Whether a thread is there that does."""
    return "tfpreempt-now" in [each.name for each in threading.enumerate()]


class Watched(State):
    """A State whose save waits until the test has seen the status."""

    def __init__(self, program: Program) -> None:
        super().__init__("watched")
        self.program = program
        self.is_awaited = False

    def save(self, fileobj: IO[bytes]) -> None:
        if self.is_awaited:
            wait_told(self.program, WorkerActivity.SAVING, 2)

    def load(self, fileobj: IO[bytes]) -> None:
        pass


def test_from_the_start_to_the_end(program: Program) -> None:
    watched = Watched(program)
    with program.handler(config={"grace_period": 100.0}) as handler:
        assert told(program) is None
        handler.run(program.step)
        first = wait_told(program, WorkerActivity.TRAINING, 1)
        assert (first.worker, first.num_workers, first.noticed_at) == (0, 1, None)
        handler.run(program.step)
        assert wait_told(program, WorkerActivity.TRAINING, 2).at > first.at
        watched.is_awaited = True
        handler.save()
        watched.is_awaited = False
        program.button.press()

        def is_noticed() -> bool:
            newest = told(program)
            return newest is not None and newest.noticed_at is not None

        wait_until(is_noticed)
        noticed = told(program)
        assert noticed is not None
        assert noticed.noticed_at is not None
        assert noticed.deadline is not None
        assert noticed.deadline - noticed.noticed_at == pytest.approx(100.0, abs=0.1)
    newest = told(program)
    assert newest is not None
    assert newest.step == 2


def test_a_closed_handler_writes_no_status(program: Program) -> None:
    with program.handler() as handler:
        handler.run(program.step)
        wait_told(program, WorkerActivity.TRAINING, 1)
    wait_until(lambda: not tells())


def test_the_status_thread_does_not_keep_a_dropped_handler(program: Program) -> None:
    handler = program.handler()
    assert not tells()  # or the signals might not be put back here
    del handler


def test_a_copy_that_is_made(program: Program, tmp_path: Path) -> None:
    copy = (tmp_path / "copy").as_uri()
    with program.handler(mirror_dir=copy) as handler:
        handler.run(program.step)
        handler.save()
        assert handler.wait_for_mirror(20)

        def is_told() -> bool:
            newest = told(program)
            return (
                newest is not None
                and newest.upload is not None
                and newest.upload.mirrored_step == 1
            )

        wait_until(is_told)


def test_an_upload_that_ends_with_the_training_is_in_the_last_report(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_file, "_LOOKS_EVERY", 1000.0)
    copy = (tmp_path / "copy").as_uri()
    with program.handler(mirror_dir=copy) as handler:
        handler.run(program.step)
    newest = told(program)
    assert newest is not None
    assert newest.upload is not None
    assert newest.upload.mirrored_step == 1


def test_the_next_start_records_the_last_reported_step(
    program: Program,
) -> None:
    handler = program.handler()
    for _ in range(2):
        handler.run(program.step)
    wait_told(program, WorkerActivity.TRAINING, 2)
    handler.close()
    program.handler().close()
    assert [each["reached"] for each in program.events("restored")] == [None, 2]
