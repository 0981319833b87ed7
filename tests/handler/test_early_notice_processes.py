"""Processes that protection ends, without TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfpreempt.checkpoint.directory import layout

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]  # new interpreters for each

PROGRAM = """
import os, signal, sys, time
import tfpreempt


class Config(tfpreempt.TerminationConfig):
    def _exit(self, committed, cluster=None, *, mirrored=True):
        print("leaves as worker", cluster.worker, "of", cluster.num_workers)
        super()._exit(committed, cluster, mirrored=mirrored)


def fail():
    raise ValueError("the exit function is wrong")


tfpreempt.handle_early_notices(Config({arguments}))
{before}
os.kill(os.getpid(), signal.SIGTERM)
{after}
"""
CLUSTER = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 1},
}


def run(
    arguments: str = "",
    before: str = "",
    after: str = "time.sleep(30)",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a program that receives a notice.

    Args:
        arguments: arguments of the program's config.
        before: code before the notice.
        after: code after the notice, if the process still runs.
        **environment: more environment variables.
    """
    program = PROGRAM.replace("{arguments}", arguments)
    program = program.replace("{before}", before).replace("{after}", after)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_the_config_gets_the_index_of_the_exiting_worker() -> None:
    """The index comes from TF_CONFIG, because no handler exists yet."""
    done = run("grace_period=0.3", TF_CONFIG=json.dumps(CLUSTER))
    assert done.returncode == 143, done.stderr
    assert done.stdout == "leaves as worker 1 of 2\n"


def test_the_lease_of_the_directory_ends_with_the_process(tmp_path: Path) -> None:
    """A start on another machine cannot see that this process has ended."""
    before = (
        "counter = tfpreempt.states.StepCounter('step'); tfpreempt.save_all_states()"
    )
    done = run(before=before, TFPREEMPT_CHECKPOINT_DIR=str(tmp_path))
    assert done.returncode == 143, done.stderr
    assert list(tmp_path.glob("*/COMMITTED"))
    assert list(tmp_path.joinpath(layout.LEASE).glob("*")) == []


def test_an_exit_function_that_raises_ends_the_program_by_its_error() -> None:
    """As at a boundary, but here no code of the program catches the error."""
    done = run("exit_fn=fail")
    assert done.returncode == 1, done.stderr
    assert "ValueError: the exit function is wrong" in done.stderr


@pytest.mark.parametrize("code", [0, 143])
def test_a_signal_while_the_interpreter_ends_changes_no_code(code: int) -> None:
    """Python has put the defaults back by then."""
    last = """
class Last:
    def __del__(self, write=os.write, kill=os.kill, pid=os.getpid()):
        write(1, b"last")
        kill(pid, 15)

sys.last = Last()
"""
    after = f"raise SystemExit({code})"
    done = run(before=last, after=after, TF_CONFIG=json.dumps(CLUSTER))
    assert (done.returncode, done.stdout) == (code, "last"), done.stderr


def in_a_cluster(after: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A worker of a cluster, which keeps the notice for a handler."""
    return run(after=f"time.sleep(0.3)\n{after}", TF_CONFIG=json.dumps(CLUSTER), **more)


def test_an_error_before_the_handler_is_no_failure_under_a_notice() -> None:
    """The disk of the machine may be gone. Otherwise the next run fails, too."""
    done = in_a_cluster("raise OSError('the data are gone')")
    assert done.returncode == 143, done.stderr
    assert "the next handler of this process will handle the notice" in done.stderr
    assert done.stderr.count("OSError: the data are gone") == 1
    assert done.stderr.count("Traceback") == 1


def test_the_error_is_raised_if_the_exit_function_returns() -> None:
    done = in_a_cluster(
        "raise OSError('the data are gone')", arguments="exit_fn=lambda: None"
    )
    assert done.returncode == 1, done.stderr


def test_a_program_that_ends_by_itself_under_a_notice_has_ended() -> None:
    done = in_a_cluster("print('done')")
    assert done.returncode == 0, done.stderr


def test_ctrl_c_under_a_notice_is_the_users() -> None:
    done = in_a_cluster("raise KeyboardInterrupt")
    assert done.returncode in (-2, 130), done.stderr


def test_a_child_that_fails_has_no_part_in_the_notice() -> None:
    """The child inherits the notice that is kept for its parent's handler."""
    fork = """
import sys
if os.fork() == 0:
    raise OSError('in the child')
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = in_a_cluster(fork)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
