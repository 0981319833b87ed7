"""Real processes in one directory: killed, frozen, and started at the same moment.

The processes save only named States, so none of them imports TensorFlow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.multiprocess.harness import wait_until
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.restore.restore import newest_verified

pytestmark = pytest.mark.slow  # new interpreters for each

PROGRAM = """
import sys, time
import tfpreempt
from tfpreempt.checkpoint.lease import directory_lease, lease, lease_timeouts
from tfpreempt.states import StepCounter
renewal, expiry, grace, lease_timeouts.MARGIN = map(float, sys.argv[1:5])
pace = directory_lease.PACE
directory_lease.PACE = lease_timeouts.RenewalIntervals(
    renewal=renewal, expiry=expiry, poll=pace.poll
)
lease.GRACE = lease_timeouts.GRACE = grace
step = StepCounter()
tfpreempt.load_state(step)
began = time.monotonic()
print("loaded", flush=True)
for line in iter(sys.stdin.readline, ""):
    step.increment()
    try:
        if line.strip() == "save":
            path = tfpreempt.save_all_states()
        else:
            tfpreempt.save_state(step, path := sys.argv[5])
        print("saved", path, time.monotonic() - began, flush=True)
    except tfpreempt.errors.CheckpointError as error:
        print(type(error).__name__, error, flush=True)
"""


class Run:
    """A program that saves when the test requests it."""

    def __init__(
        self,
        directory,
        log,
        renewal=0.1,
        expiry=1.0,
        grace=1.0,
        margin=5.0,
        wrap=(),
    ):
        self._log = log
        times = map(str, (renewal, expiry, grace, margin))
        self._process = subprocess.Popen(
            [*wrap, sys.executable, "-c", PROGRAM, *times, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
            env=dict(os.environ, TFPREEMPT_CHECKPOINT_DIR=str(directory)),
        )
        self.pid = self._process.pid
        assert self.hear() == "loaded\n"

    def tell(self, what="save"):
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def hear(self):
        return self._process.stdout.readline()

    def save(self):
        self.tell()
        return self.hear()

    def save_one(self):
        """The State alone, outside of any commit."""
        self.tell("save one")
        return self.hear()

    def send(self, signum):
        self._process.send_signal(signum)

    @property
    def log(self):
        return self._log.read_text()

    def end(self):
        """Ends the program; returns its log."""
        self._process.communicate(timeout=60)
        return self.log

    def kill(self):
        if self._process.poll() is None:
            self.send(signal.SIGKILL)
            self._process.communicate(timeout=60)


@pytest.fixture
def run(tmp_path):
    made = []

    def start(**times):
        made.append(Run(tmp_path / "ckpt", tmp_path / f"log-{len(made)}", **times))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def newest(tmp_path):
    return newest_verified(str(tmp_path / "ckpt"), lambda problem: None).step


def test_one_that_ended_leaves_nothing_to_wait_for(run, tmp_path):
    first = run()
    assert first.save().startswith("saved")
    assert (tmp_path / "ckpt" / layout.LEASE).exists()
    first.end()
    assert not (tmp_path / "ckpt" / layout.LEASE).exists()


def test_after_a_kill_the_next_start_waits_for_nothing(run, tmp_path):
    first = run(expiry=1000.0)
    first.save()
    first.kill()
    second = run(expiry=1000.0, grace=1000.0)
    word, path, seconds = second.save().split()
    assert (word, path) == ("saved", str(tmp_path / "ckpt" / "2"))
    assert float(seconds) < 2.0
    assert "which has terminated" in second.end()


def unshared(*options):
    """Returns a command that runs a program in new namespaces, or skips the test."""
    command = ["unshare", "-r", *options]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(command)} is not possible here")
    return command


def test_a_running_holder_in_another_time_namespace_has_not_exited(run):
    """The start time of a process is different in that namespace."""
    wrap = unshared("--time", "--fork", "--boottime", "100000", "--")
    first = run()
    first.save()
    second = run(grace=0.5, margin=0.0, wrap=wrap)
    assert second.save().startswith("DirectoryLockedError")
    assert first.save().startswith("saved")


HIDDEN = ["sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]


@pytest.mark.parametrize(
    "options", [["--mount", *HIDDEN], ["--pid", "--fork"]], ids=["none", "foreign"]
)
def test_a_start_needs_no_proc(run, options):
    """Some containers have no /proc, others that of another pid namespace."""
    first = run(wrap=unshared(*options))
    assert first.save().startswith("saved")
    second = run(grace=0.5, margin=0.0, wrap=unshared(*options))
    assert second.save().startswith("DirectoryLockedError")


def test_a_frozen_one_that_wakes_after_a_takeover_commits_nothing(run, tmp_path):
    first = run(renewal=1000.0)  # so that the next save detects the loss
    first.save()
    first.send(signal.SIGSTOP)
    first.tell()
    second = run(expiry=1.0)
    assert second.save().startswith("saved")
    assert newest(tmp_path) == 2
    first.send(signal.SIGCONT)
    assert first.hear().startswith("LeaseLostError")
    assert first.save().startswith("LeaseLostError")
    assert str(second.pid) in first.save()
    second.save()
    assert newest(tmp_path) == 3
    assert first.end().count("is lost") == 1
    second.save()  # the end of the other program does not release the lease
    assert newest(tmp_path) == 4


def test_one_of_two_starts_is_refused_with_the_name_of_the_holder(run, tmp_path):
    runs = [run(expiry=2.0, grace=0.5, margin=0.0) for _ in range(2)]
    for each in runs:
        each.tell()
    said = [each.hear() for each in runs]
    words = [each.split()[0] for each in said]
    assert sorted(words) == ["DirectoryLockedError", "saved"]
    winner, loser = sorted(range(2), key=lambda i: words[i] != "saved")
    assert f"process {runs[winner].pid} on " in said[loser]
    assert "which still renews the lease after" in said[loser]
    assert "waiting up to" in runs[loser].end()
    assert runs[winner].save().startswith("saved")


def test_a_separate_state_respects_the_lease(run, tmp_path):
    """At its restart the first program would load this State over its own commit."""
    first = run()
    first.save()
    second = run(grace=0.5, margin=0.0)
    said = second.save_one()
    assert said.startswith("DirectoryLockedError")
    assert f"process {first.pid} on " in said
    assert list(tmp_path.glob("ckpt/states/*")) == []
    assert first.save_one().startswith("saved")
    first.end()


def test_a_separate_state_acquires_the_lease(run):
    first = run()
    assert first.save_one().startswith("saved")
    second = run(grace=0.5, margin=0.0)
    assert second.save().startswith("DirectoryLockedError")
    assert first.save_one().startswith("saved")
    assert first.save().startswith("saved")
    first.end()
    assert second.save().startswith("DirectoryLockedError")  # its steps would be undone


def test_a_frozen_one_that_wakes_after_a_takeover_saves_no_state(run, tmp_path):
    first = run(renewal=1000.0)
    first.save_one()
    first.send(signal.SIGSTOP)
    first.tell("save one")
    second = run(expiry=1.0)
    assert second.save().startswith("saved")
    first.send(signal.SIGCONT)
    assert first.hear().startswith("LeaseLostError")


def test_a_start_continues_when_the_first_run_has_exited(run, tmp_path):
    first = run()
    first.save()
    second = run(grace=30.0)
    second.tell()
    wait_until(lambda: "waiting up to" in second.log, "the second one waits")
    first.end()
    assert second.hear().startswith("saved")
    assert newest(tmp_path) == 2


def test_a_program_that_loaded_before_another_one_committed_is_refused(run, tmp_path):
    """Otherwise both programs would undo each other's steps."""
    first = run()
    first.save()
    second = run()
    first.save()
    first.end()
    assert second.save().startswith("DirectoryLockedError")
    assert newest(tmp_path) == 2
