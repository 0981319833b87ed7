"""`tfpreempt status`: its output for journals that these tests write."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.fakes.clock import FakeClock
from tfpreempt.checkpoint.lease.lease_record import this_process
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.cli import main
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.sizes import age_text
from tfpreempt.cli.status import read_status as reading
from tfpreempt.cli.status.read_status import read_status
from tfpreempt.cli.status.run_status import SILENT_AFTER, ReportedState, RunStatus
from tfpreempt.cli.status.text import one_line
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.events import BadStep, Commit, Exit, Notice, Outcome, Restored
from tfpreempt.core.journal import Journal, JsonLines
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    _pack,
    status_path,
)

pytestmark = pytest.mark.timeout(30)

OF_WORKER = {"worker": 0, "incarnation": "a"}
COMPLETE: dict[str, dict[str, Any]] = {
    "commit": {
        **OF_WORKER,
        "event": "commit",
        "step": 30,
        "save_seconds": 1.0,
        "bytes": 9,
        "because": "periodic",
    },
    "notice": {
        **OF_WORKER,
        "event": "notice",
        "source": "signal:SIGTERM",
        "grace_seconds": 30.0,
        "received_at": 1.0,
    },
    "exit": {**OF_WORKER, "event": "exit", "outcome": "lost", "step": 1, "code": 143},
}
"""Records of a worker as tfpreempt writes them, without their times."""


class Run:
    """A run whose processes are this test process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.journal = directory / "journal"
        self.journal.mkdir(parents=True)
        self.clock = FakeClock()
        self.journals = JournalTailer(self.journal)

    def look(self, later: float = 0.0) -> RunStatus:
        self.clock.advance(later)
        return read_status(self.journals, self.clock.wall())

    def states(self, later: float = 0.0) -> list[ReportedState]:
        return [each.state for each in self.look(later).workers]

    def restored(self, worker: int, step: int = 0, incarnation: str = "a") -> None:
        path = None if step == 0 else f"/ckpt/{step}"
        event = Restored(path=path, step=step, sequence=1, world_size=2)
        self.record(worker, event, incarnation)

    def record(self, worker: int, event: Any, incarnation: str = "a") -> None:
        self.clock.advance(0.01)
        journal = Journal(self.journal, worker, self.clock, incarnation)
        journal.record(event)
        journal.close()

    def commit(self, step: int) -> None:
        path = f"/ckpt/{step}"
        numbers = {"sequence": step, "world_size": 2, "save_seconds": 1.0, "bytes": 9}
        self.record(0, Commit(step=step, path=path, because="periodic", **numbers))

    def left(
        self,
        worker: int,
        outcome: Outcome,
        step: int,
        code: int,
        incarnation: str = "a",
    ) -> None:
        self.record(worker, Exit(outcome=outcome, code=code, step=step), incarnation)

    def notice(self, worker: int, grace: float | None) -> None:
        received = self.clock.monotonic()
        self.record(
            worker,
            Notice(
                source="signal:SIGTERM",
                worker=worker,
                grace_seconds=grace,
                received_at=received,
            ),
        )

    def says(self, worker: int, step: int, **more: Any) -> None:
        self.clock.advance(0.01)
        values = {"num_workers": 2, "host": f"host-{worker}", "pid": 100 + worker}
        values |= {"doing": WorkerActivity.TRAINING, "steps_per_second": 2.5} | more
        values = {"at": self.clock.wall()} | values
        now = WorkerStatus(worker=worker, step=step, **values)
        status_path(self.journal, worker).write_bytes(_pack(now))

    def supervisor(self, event: str, task: str = "", **values: Any) -> None:
        self.clock.advance(0.01)
        name = f"supervisor-{task}.jsonl" if task else "supervisor.jsonl"
        journal = JsonLines(self.journal / name, self.clock)
        record = {"event": event, "supervisor": "s", "incarnation": "a", **values}
        journal.append(record)
        journal.close()

    def started(self, event: str = "started", workers: int = 2, **more: Any) -> None:
        self.supervisor(event, workers=workers, **more)

    def ended(self, worker: int, returncode: int) -> None:
        self.supervisor("worker_ended", worker=worker, returncode=returncode)

    def decided(
        self, cause: str, *, is_used_up: bool = False, delay: float | None = None
    ) -> None:
        self.supervisor("budget", cause=cause, is_used_up=is_used_up, delay=delay)

    def quits(self, cause: str, code: int) -> None:
        self.supervisor("exited", cause=cause, code=code)

    def status(self, *options: str, place: Path | str | None = None) -> Result:
        arguments = ["status", str(place or self.directory), *options]
        return CliRunner().invoke(main, arguments)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run(tmp_path / "ckpt")
    monkeypatch.setattr(SystemClock, "wall", lambda: made.clock.wall())
    monkeypatch.setattr(reading, "LOOKS_AGAIN", 0.0)
    return made


@pytest.fixture
def training(run: Run) -> Run:
    """Two workers under a supervisor, at step 10."""
    run.started()
    for worker in range(2):
        run.restored(worker)
        run.says(worker, 10)
    return run


def test_a_start_until_the_workers_are_heard(run: Run) -> None:
    run.started()
    assert run.states(5) == [ReportedState.STARTING] * 2
    run.restored(0, step=4)
    status = run.look()
    assert [each.state for each in status.workers] == [ReportedState.STARTING] * 2
    assert [each.step for each in status.workers] == [4, None]
    assert status.is_fine
    assert one_line(run.look(19)).startswith("starting for 24 s | step 4 | no commit")


def test_steps_of_all_and_the_newest_commit(training: Run) -> None:
    training.commit(8)
    training.says(1, 9, doing=WorkerActivity.SAVING)
    status = training.look(30 - 0.5)
    assert [each.state for each in status.workers] == [
        ReportedState.TRAINING,
        ReportedState.SAVING,
    ]
    assert status.step == 9
    assert (status.commits, status.commit_step) == (1, 8)
    assert status.committed_at is not None
    assert status.at - status.committed_at == pytest.approx(29.51)


def commit_without_journal(directory: Path, *steps: int) -> None:
    """Commits as a program with States alone does."""
    opened = open_directory(str(directory), OwnContents(), clock=FakeClock())
    for step in steps:
        save(opened, step)


def test_commits_without_a_journal_are_those_in_the_directory(run: Run) -> None:
    run.started(workers=1)
    commit_without_journal(run.directory, 80, 100)
    status = run.look(5)
    assert (status.commits, status.commit_step) == (2, 100)
    assert status.committed_at is not None
    assert "committed 100, " in one_line(status)
    assert [each.state for each in status.workers] == [ReportedState.STARTING]
    run.restored(0)  # the journal of a worker says it all
    assert run.look().commits == 0


def test_a_commit_after_the_start_shows_training_without_a_journal(run: Run) -> None:
    run.started(workers=1)
    run.clock.advance(20)
    opened = open_directory(str(run.directory), OwnContents(), clock=run.clock)
    save(opened, 80)
    status = run.look(5)
    (worker,) = status.workers
    assert (worker.state, worker.step) == (ReportedState.TRAINING, 80)
    assert one_line(status).startswith("step 80 | committed 80, 5 s ago")
    run.ended(0, 0)
    assert run.states() == [ReportedState.FINISHED]


def test_commits_without_any_journal_are_named(tmp_path: Path) -> None:
    commit_without_journal(tmp_path / "run", 80, 100)
    for command in ("status", "report"):
        done = CliRunner().invoke(main, [command, str(tmp_path / "run")])
        assert done.exit_code == 2
        said = " ".join(done.stderr.replace("│", " ").split())
        assert f"2 commit(s) in {tmp_path / 'run'}, newest step 100" in said


def test_no_step_lags_behind_a_commit(training: Run) -> None:
    """A status file may be five seconds old; the record of a commit is not."""
    training.commit(50)
    assert [each.step for each in training.look().workers] == [50, 50]
    assert one_line(training.look()).startswith("step 50 | ")
    training.says(1, 30, doing=WorkerActivity.WAITING)  # its training was shorter
    training.says(0, 51)
    assert [each.step for each in training.look().workers] == [51, 30]


def test_a_start_at_an_older_commit_is_not_at_the_newest(training: Run) -> None:
    """The newest commit may be corrupt."""
    training.commit(50)
    training.decided("failure")
    training.started("restarted")
    for worker in range(2):
        training.restored(worker, step=40, incarnation="b")
        training.says(worker, 41)
    assert [each.step for each in training.look().workers] == [41, 41]


def test_before_the_first_word_the_step_is_of_the_commit(run: Run) -> None:
    run.restored(0)
    run.commit(40)
    assert one_line(run.look()).startswith("starting for 0 s | step 40 | committed 40")


def test_who_is_not_heard_any_more_is_silent(training: Run) -> None:
    training.clock.advance(SILENT_AFTER)
    training.says(0, 99)
    status = training.look(1)
    assert [each.state for each in status.workers] == [
        ReportedState.TRAINING,
        ReportedState.SILENT,
    ]
    assert not status.is_fine
    assert "no report for 31 s, since 20" in training.status().output


@pytest.mark.parametrize("ahead", [-1000.0, 1000.0])
def test_the_clock_of_another_machine(training: Run, ahead: float) -> None:
    def says(step: int) -> None:
        for worker in range(2):
            training.says(worker, step, at=training.clock.wall() + ahead)

    training.supervisor("started", workers=2, wall=training.clock.wall() + ahead)
    says(11)
    training.look()
    says(12)
    assert training.states() == [ReportedState.TRAINING] * 2
    assert training.states(SILENT_AFTER + 1) == [ReportedState.SILENT] * 2
    says(13)
    assert training.states() == [ReportedState.TRAINING] * 2


def test_a_notice_and_the_time_that_it_leaves(training: Run) -> None:
    training.notice(1, grace=30.0)
    noticed = training.look(10).noticed
    assert noticed is not None
    assert noticed.worker == 1
    assert one_line(training.look()).startswith("NOTICE on worker 1: 20 s left | step")
    told = training.clock.wall()
    for worker in range(2):  # the other has heard of it, and the step is over
        training.says(
            worker, 12, doing=WorkerActivity.SAVING, noticed_at=told, deadline=told + 9
        )
    assert "9 s left | saving | step 12" in one_line(training.look())
    training.says(1, 13)
    training.says(0, 13)  # served, and the process stays
    assert training.look().noticed is None


def test_a_notice_of_which_nobody_knows_the_end(training: Run) -> None:
    training.notice(0, grace=None)
    assert "NOTICE on worker 0: time left unknown" in one_line(training.look())


def test_who_has_left_is_down_and_is_started_again(training: Run) -> None:
    for worker in range(2):
        training.left(worker, Outcome.COMMITTED, 12, 143)
    training.ended(0, 143)
    training.ended(1, 143)
    training.decided("preemption")
    status = training.look()
    assert [each.state for each in status.workers] == [ReportedState.DOWN] * 2
    assert [each.why for each in status.workers] == [
        "committed at step 12, exit code 143"
    ] * 2
    assert status.is_fine
    assert not training.look(1000).is_fine  # its supervisor has gone
    training.started("restarted")
    status = training.look()
    assert [each.state for each in status.workers] == [ReportedState.STARTING] * 2
    assert status.restarts == {"preemption": 1}


def test_restarts_by_what_they_were_for(training: Run) -> None:
    # A journal can be written by another user: other words do not become labels.
    for cause in ("failure", "preemption", "preemption", "hang", "x1", "x2"):
        training.decided(cause)
        training.started("restarted")
    training.quits("stopped", 143)
    training.started()
    training.started()  # of the one before nothing was heard
    assert training.look().restarts == {
        "failure": 1,
        "preemption": 2,
        "hang": 1,
        "stopped": 1,
        "lost": 1,
        "other": 2,
    }


@pytest.mark.parametrize(("delay", "until"), [(None, 120), (0.0, 60), (900.0, 960)])
def test_a_pause_before_a_start_is_fine_as_long_as_it_was_told(
    training: Run, delay: float | None, until: float
) -> None:
    for worker in range(2):
        training.ended(worker, 1)
    training.decided("failure", delay=delay)
    assert training.look(until - 1).is_fine
    assert not training.look(2).is_fine


def test_a_stop_in_the_pause_is_no_restart(training: Run) -> None:
    training.decided("failure")
    training.quits("stopped", 143)
    assert training.look().restarts == {}


def test_a_killed_worker_is_named_by_its_signal(training: Run) -> None:
    training.ended(1, -9)
    status = training.look()
    assert [each.state for each in status.workers] == [
        ReportedState.TRAINING,
        ReportedState.DOWN,
    ]
    assert status.workers[1].why == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("cause", "code", "said", "status"),
    [
        ("finished", 0, "training is complete", 0),
        ("failure", 1, "limit of failures reached", 1),
        ("stopped", 143, "to be restarted", 1),
    ],
)
def test_how_a_job_ended(
    training: Run, cause: str, code: int, said: str, status: int
) -> None:
    for worker in range(2):
        training.ended(worker, code)
    training.quits(cause, code)
    training.clock.advance(1e6)
    result = training.status()
    assert said in result.output
    assert result.exit_code == status


def test_a_supervisor_that_a_signal_ended(training: Run) -> None:
    for worker in range(2):
        training.left(worker, Outcome.COMMITTED, 12, 143)
    training.supervisor("supervisor_terminated")
    status = training.look(1e6)
    assert status.ended == "supervisor terminated by a signal or an error"
    assert not status.is_fine
    training.started()
    assert training.look().ended == ""
    assert training.look().restarts == {"lost": 1}


def test_workers_whose_supervisor_died(run: Run) -> None:
    """They have time to commit; a worker before its first step has ended."""
    run.started()
    run.restored(0)
    run.says(0, 10)
    run.supervisor("supervisor_terminated")
    assert run.states() == [ReportedState.TRAINING, ReportedState.DOWN]
    run.says(0, 11)
    assert run.states(20) == [ReportedState.TRAINING, ReportedState.DOWN]
    run.left(0, Outcome.COMMITTED, 12, 143)
    assert run.states(20) == [ReportedState.DOWN, ReportedState.DOWN]
    assert not run.look().is_fine


def test_without_a_supervisor(run: Run) -> None:
    for incarnation in ("a", "b", "c"):
        for worker in range(2):
            run.restored(worker, incarnation=incarnation)
            run.says(worker, 5)
            if incarnation == "a":
                run.left(worker, Outcome.COMMITTED, 5, 143)
    status = run.look()
    assert [each.state for each in status.workers] == [ReportedState.TRAINING] * 2
    assert status.restarts == {"preemption": 1, "failure": 1}  # b left no word
    for worker in range(2):
        run.record(worker, Exit(outcome=Outcome.FINISHED, code=0, step=9), "c")
    status = run.look(20)
    assert [each.state for each in status.workers] == [ReportedState.FINISHED] * 2
    assert status.is_fine
    assert status.ended == "finished at step 9, exit code 0"


def test_a_process_of_this_machine_that_has_ended_is_down_at_once(run: Run) -> None:
    here = this_process(0.0)
    ended = dataclasses.replace(here, pid=(1 << 31) - 1)  # no process has this pid
    elsewhere = dataclasses.replace(ended, boot="another boot")
    run.restored(0)
    for process in (here, elsewhere, None):
        run.says(0, 5, num_workers=1, process=process)
        assert run.states() == [ReportedState.TRAINING]
    run.says(0, 5, num_workers=1, process=ended)
    status = run.look()
    assert status.workers[0].state is ReportedState.DOWN
    assert status.ended == "process 100 ended without a record"
    run.left(0, Outcome.FINISHED, 5, 0)
    run.says(0, 5, num_workers=1, process=ended)  # the last status of an upload
    assert run.states() == [ReportedState.FINISHED]


@pytest.mark.slow
def test_a_killed_program_is_down_at_once(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time, tfpreempt
config = tfpreempt.TerminationConfig()
handler = tfpreempt.PreemptionCheckpointHandler(None, None, sys.argv[1], config)
handler.run(lambda: None)
status = f"{sys.argv[1]}/journal/worker-0.status"
while not (os.path.exists(status) and os.path.getsize(status)):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "ckpt")]
    assert subprocess.run(command, timeout=30, check=False).returncode == -9
    shown = CliRunner().invoke(main, ["status", str(tmp_path / "ckpt")])
    assert shown.exit_code == 1
    assert "ended without a record" in shown.output


def test_an_error_without_a_supervisor(run: Run) -> None:
    run.restored(0)
    run.says(0, 5)
    error = "ValueError: of the \x1b[1mprogram"
    run.record(0, Exit(outcome=Outcome.FAILED, code=None, step=7, detail=error))
    status = run.look(20)
    assert [each.state for each in status.workers] == [ReportedState.DOWN]
    assert not status.is_fine
    assert status.ended == f"failed at step 7: {error}"
    shown = run.status()
    assert shown.exit_code == 1
    assert "failed at step 7: ValueError" in shown.output
    assert re.search(r"\d\d:\d\d:\d\d [A-Z]{3}", shown.output)  # with the time zone
    assert "\x1b" not in shown.output
    run.restored(0, incarnation="b")
    assert run.look().restarts == {"failure": 1}


BAD = BadStep(
    step=12,
    fit=2,
    epoch=3,
    batch=7,
    batches=1,
    reason="the loss is nan",
    is_crash=False,
)


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_process_that_ended_because_of_a_bad_step(
    run: Run, is_supervised: bool
) -> None:
    """Only the chief records the step."""
    if is_supervised:
        run.started()
    for worker in range(2):
        run.restored(worker)
        run.says(worker, 12)
    run.record(0, BAD)
    assert run.states() == [ReportedState.TRAINING] * 2  # until both exit
    for worker in range(2):
        run.left(worker, Outcome.LOST, 12, 143)
    if is_supervised:
        for worker in range(2):
            run.ended(worker, 143)
    why = "bad step: batch 7 of epoch 3 of fit 2 (the loss is nan), exit code 143"
    status = run.look()
    assert [each.why for each in status.workers] == [why] * 2
    assert one_line(status).endswith("bad steps: 1")
    assert why in run.status().output
    told = json.loads(run.status("--json").output)
    values = {"fit": 2, "epoch": 3, "batch": 7, "is_sought": False}
    values["reason"] = "the loss is nan"
    assert [each["bad_step"] for each in told["workers"]] == [values] * 2
    assert told["bad_steps"] == 1


def test_the_step_after_which_a_bad_step_is_sought(run: Run) -> None:
    """The next start finds the bad step, and its record replaces no bad step."""
    run.restored(0)
    run.record(0, dataclasses.replace(BAD, fit=0, epoch=0, is_sought=True))
    run.left(0, Outcome.LOST, 12, 143)
    status = run.look()
    assert status.workers[0].why.startswith("bad step at or before step 7 (the loss")
    assert status.bad_steps == 0


def test_the_bad_steps_of_earlier_starts_end_no_process(run: Run) -> None:
    """A start on a new machine copies the records of the mirror."""
    run.restored(0)
    journal = JsonLines(run.journal / "worker-0.jsonl", run.clock)
    values = {**OF_WORKER, **dataclasses.asdict(BAD), "found_at": 5.0}
    journal.append({"event": "badstep", **values})
    run.left(0, Outcome.LOST, 12, 143)
    status = run.look()
    assert status.workers[0].why == "lost at step 12, exit code 143"
    assert (status.workers[0].bad_step, status.bad_steps) == (None, 1)


@pytest.mark.parametrize("outcome", [Outcome.FINISHED, Outcome.LOST])
def test_a_worker_that_has_exited_does_not_train(run: Run, outcome: Outcome) -> None:
    """Its thread may write the status file until the process has ended."""
    run.restored(0)
    run.says(0, 5, num_workers=1)
    run.left(0, outcome, 5, 0)
    run.says(0, 5, num_workers=1)
    is_over = outcome is Outcome.FINISHED
    expected = ReportedState.FINISHED if is_over else ReportedState.DOWN
    assert run.states() == [expected]
    run.says(0, 6, num_workers=1)  # the exit function has returned
    assert run.states() == [ReportedState.TRAINING]


def test_restarts_are_counted_in_words(run: Run) -> None:
    for incarnation in ("a", "b", "c", "d"):
        run.restored(0, incarnation=incarnation)
        if incarnation != "c":
            run.left(0, Outcome.COMMITTED, 5, 143, incarnation)
    assert one_line(run.look()).endswith("restarts: 1 failure, 2 preemptions")


def test_restarts_of_a_supervisor_are_named(training: Run) -> None:
    training.quits("stopped", 143)
    training.started()
    shown = "restarts: 1 after the supervisor was stopped"
    assert shown in one_line(training.look())


def test_who_leaves_and_still_copies_is_not_down_yet(run: Run) -> None:
    run.restored(0)
    run.left(0, Outcome.COMMITTED, 5, 143)
    run.says(0, 5, num_workers=1, doing=WorkerActivity.SAVING)
    assert run.states() == [ReportedState.SAVING]
    assert run.states(later=15) == [ReportedState.DOWN]


def test_a_run_that_is_smaller_than_before(run: Run) -> None:
    for worker in range(4):
        run.restored(worker)
        run.says(worker, 5, num_workers=4)
    run.restored(0, incarnation="b")
    run.says(0, 5, num_workers=1)
    assert [each.worker for each in run.look().workers] == [0]


def test_machines_that_are_gone_are_no_part_of_a_smaller_run(run: Run) -> None:
    """They had no time for a record. A new worker without a report is a part."""
    for index in range(3):
        run.supervisor("started", f"worker-{index}", workers=1, first_worker=index)
        run.restored(index)
        run.says(index, 5, num_workers=3)
    run.supervisor("restarted", "worker-0", workers=1, first_worker=0)
    run.restored(0, incarnation="b")
    run.says(0, 6, num_workers=1)
    status = run.look(SILENT_AFTER + 1)
    run.says(0, 90, num_workers=1)
    status = run.look()
    assert [(w.worker, w.state) for w in status.workers] == [
        (0, ReportedState.TRAINING)
    ]
    run.supervisor("started", "worker-1", workers=1, first_worker=1)
    assert [each.worker for each in run.look().workers] == [0, 1]


def test_a_supervisor_on_each_machine(run: Run) -> None:
    for index in range(2):
        task = f"worker-{index}"
        run.supervisor("started", task, workers=1, first_worker=index + 1)
    run.supervisor("started", "chief-0", workers=1, first_worker=0)
    run.supervisor("started", "evaluator-0", workers=1, first_worker=None)
    run.supervisor("worker_ended", "worker-1", worker=0, returncode=1)
    status = run.look()
    assert [each.worker for each in status.workers] == [0, 1, 2]
    assert [each.state for each in status.workers][1:] == [
        ReportedState.STARTING,
        ReportedState.DOWN,
    ]
    own = JournalTailer(run.journal, {2}, "supervisor-worker-1.jsonl")
    found = read_status(own, run.clock.wall())
    assert [each.worker for each in found.workers] == [2]


def test_a_supervisor_of_before_says_nothing_of_a_start_without_one(
    training: Run,
) -> None:
    for worker in range(2):
        training.ended(worker, 0)
    training.quits("finished", 0)
    for worker in range(2):
        training.restored(worker, 10, incarnation="b")
        training.says(worker, 11)
    status = training.look()
    assert [each.state for each in status.workers] == [ReportedState.TRAINING] * 2
    assert status.ended == ""


def test_the_report_of_a_run_that_has_not_ended_is_as_of_now(training: Run) -> None:
    def report(*options: str) -> Result:
        return CliRunner().invoke(main, ["report", str(training.directory), *options])

    training.commit(7)
    for worker in range(2):
        training.says(worker, 12)
    shown = report()
    assert shown.stdout.startswith("running at step 12, ")
    assert "no report of" not in shown.stderr
    training.clock.advance(SILENT_AFTER + 1)
    shown = report()
    assert shown.exit_code == 0
    assert shown.stdout.startswith("silent at step 12, ")
    assert "no report of 2 worker(s) for 31 s" in shown.stderr
    assert "the steps after the newest commit (7) are lost" in shown.stderr
    assert json.loads(report("--json").stdout)["outcome"] == "silent"


def test_what_is_said_below_is_not_said_beside(training: Run) -> None:
    """The error of one worker without a supervisor is how the run ended."""
    error = "CheckpointMismatchError: the model has other layers"
    alone = Run(training.directory / "alone")
    alone.restored(0, 7)
    told = Exit(outcome=Outcome.FAILED, code=None, step=7, detail=error)
    alone.record(0, told)
    shown = alone.status().stdout
    assert shown.count(error) == 1


def test_a_run_that_stands_still(training: Run) -> None:
    since = training.clock.wall()
    training.clock.advance(299.5)
    for worker in range(2):
        training.says(worker, 10, stepped_at=since - worker)
    assert "| no step for 5 min 0 s |" in one_line(training.look())
    assert "no step for 5 min 1 s" in training.status().output
    training.says(0, 11, stepped_at=training.clock.wall())
    assert "no step" not in one_line(training.look())


def test_an_upload(training: Run) -> None:
    upload = MirrorStatus(
        uri="gs://bucket/run",
        latest_step=8,
        mirrored_step=6,
        uploading=8,
        sent_bytes=3 << 20,
        total_bytes=12 << 20,
        last_error="503",
    )
    training.says(0, 10, upload=upload)
    said = "uploading 8: 3 MiB of 12 MiB (failing: 503)"
    assert said in one_line(training.look())
    assert said.capitalize()[:8] + said[8:] in training.status().output
    upload = dataclasses.replace(upload, uploading=None, last_error=None)
    training.says(0, 10, upload=upload)
    assert one_line(training.look()).endswith("uploaded 6")


def test_the_line_of_a_quiet_run(training: Run) -> None:
    training.commit(8)
    training.decided("preemption")
    training.started("restarted")
    for worker in range(2):
        training.says(worker, 1234)
    assert one_line(training.look(59.9)) == (
        "silent | step 1234 | committed 8, 1 min 0 s ago | restarts: 1 preemption"
    )
    for worker in range(2):
        training.says(worker, 1240 + worker)
    assert one_line(training.look()) == (
        "step 1240 | 2.5 steps/s | committed 8, 1 min 0 s ago | restarts: 1 preemption"
    )


def test_json(training: Run) -> None:
    training.says(0, 11, upload=MirrorStatus(uri="gs://bucket/run"))
    result = training.status("--json")
    told = json.loads(result.output)
    assert (result.exit_code, told["is_fine"]) == (0, True)
    assert [each["state"] for each in told["workers"]] == ["training", "training"]
    assert told["workers"][0]["upload"]["uri"] == "gs://bucket/run"
    assert told["workers"][1]["pid"] == 101


def test_the_journal_itself_may_be_named(training: Run) -> None:
    assert training.status(place=training.journal).exit_code == 0


def test_a_file_uri_is_its_path(training: Run) -> None:
    assert training.status(place=training.directory.as_uri()).exit_code == 0
    result = training.status(place=f"file://elsewhere{training.directory}")
    assert result.exit_code == 2
    assert "with three slashes" in result.output


@pytest.mark.parametrize("command", ["status", "report", "inspect"])
def test_who_names_the_directory_above_is_shown_the_runs(
    training: Run, tmp_path: Path, command: str
) -> None:
    shown = CliRunner().invoke(main, [command, str(tmp_path)])
    said = " ".join(shown.output.split())
    assert f"Name one of the runs in it: {training.directory}." in said


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_directory_that_is_not_there_is_named(tmp_path: Path, command: str) -> None:
    missing = tmp_path / "missing"
    shown = CliRunner().invoke(main, [command, str(missing)])
    assert shown.exit_code == 2
    assert f"The directory {str(missing)!r} does not exist." in " ".join(
        shown.output.split()
    )


def test_where_nothing_is_told(run: Run, tmp_path: Path) -> None:
    result = run.status()
    assert result.exit_code == 2
    assert "no worker has started" in result.output
    result = run.status(place=tmp_path / "typo")
    assert result.exit_code == 2
    assert "Expected the checkpoint directory" in result.output


def test_journals_are_read_on_as_they_grow(training: Run) -> None:
    path = training.journal / "worker-0.jsonl"
    training.look()
    commit = json.dumps({"wall": 5, "monotonic": 5, **COMPLETE["commit"]}).encode()
    with path.open("ab") as file:
        file.write(commit[:30])
    assert training.look().commits == 0
    with path.open("ab") as file:
        file.write(commit[30:] + b"\n")
    assert training.look().commits == 1
    assert training.look().commits == 1
    text = path.read_bytes()
    path.unlink()
    path.write_bytes(text + text)  # another file in its place
    assert training.look().commits == 2


def test_what_is_no_record_is_passed_over(training: Run) -> None:
    for path in training.journal.glob("*.jsonl"):
        with path.open("ab") as file:
            for event in ("restored", "notice", "commit", "exit", "started", "budget"):
                file.write(json.dumps({"wall": 2e9, "event": event}).encode() + b"\n")
                wrong = {"step": "x", "outcome": 7, "cause": [], "workers": None}
                file.write(json.dumps({"wall": 1, "event": event} | wrong).encode())
                file.write(b"\n")
            file.write(b'[1]\n{"wall": NaN}\nnoise\xff\n')
    assert training.states() == [ReportedState.TRAINING] * 2


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("started", {"workers": 3_000_000_000}),  # all of them were painted
        ("started", {"workers": -1}),
        ("started", {"workers": 2, "first_worker": -5}),
        ("exited", {"cause": "finished", "code": 0, "wall": 1 << 63}),
        ("exited", {"cause": "finished", "code": 0, "wall": 9e18}),
        ("exited", {"cause": "finished", "code": 0, "wall": -9e18}),
        ("worker_ended", {"worker": 0, "returncode": 1, "wall": 1e15}),
        ("worker_ended", {"worker": 0, "returncode": 10**400}),
        ("worker_ended", {"worker": "0", "returncode": 1}),
        ("budget", {"cause": "failure"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_no_supervisor_writes_is_passed_over(
    training: Run, event: str, values: dict[str, Any]
) -> None:
    """Anybody may have written it; it is shown in no time and no memory."""
    training.supervisor(event, **values)
    assert training.states() == [ReportedState.TRAINING] * 2
    assert training.status().exit_code == 0


@pytest.mark.parametrize(
    ("event", "values", "is_shown"),
    [
        ("commit", {"step": 10**400}, False),
        ("commit", {"step": -1}, False),
        ("commit", {"worker": 1}, False),
        ("commit", {}, True),
        ("notice", {"grace_seconds": 1e300}, False),
        ("notice", {"grace_seconds": float("inf")}, False),
        ("notice", {"wall": 1e18}, False),
        ("notice", {}, True),
        ("exit", {"code": 10**400}, False),
        ("exit", {}, True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_no_worker_writes_is_passed_over(
    training: Run, event: str, values: dict[str, Any], is_shown: bool
) -> None:
    training.clock.advance(0.01)
    before = dataclasses.replace(training.look(), at=0.0)
    journal = JsonLines(training.journal / "worker-0.jsonl", training.clock)
    journal.append(COMPLETE[event] | values)
    journal.close()
    after = dataclasses.replace(training.look(), at=0.0)
    assert (after != before) is is_shown
    assert training.status().exit_code == 0


def test_in_a_pipe_a_row_is_one_line(training: Run) -> None:
    host = "a-node-with-a-long-name." * 6
    training.says(0, 10, host=host)
    training.notice(0, 30.0)
    [row] = [line for line in training.status().output.splitlines() if host in line]
    assert row.rstrip().endswith("left")


def test_no_text_of_others_moves_the_cursor(training: Run) -> None:
    training.says(0, 10, host="\x1b[2Jhost")
    assert "\x1b[2J" not in training.status().output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 0 s"),
        (3725, "1 h 2 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
