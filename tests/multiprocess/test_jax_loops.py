"""Loops on JAX: real processes of `jax.distributed`, preempted, killed and resumed."""

from __future__ import annotations

import functools
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.multiprocess.harness import RESTART, Zygote, records, wait_until
from tests.multiprocess.jax_processes import (
    JaxProcess,
    ended,
    jax_processes,
    kill_the_peer_under_a_notice,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]

Start = Callable[..., AbstractContextManager[list[JaxProcess]]]


@pytest.fixture
def start(zygote_of: Callable[[str], Zygote]) -> Start:
    """`jax_processes` in forks of a process that has imported JAX."""
    return functools.partial(jax_processes, zygote=zygote_of("jax"))


@pytest.mark.parametrize("word", ["replicated", "sharded"])
def test_two_processes_resume_exactly(tmp_path: Path, start: Start, word: str) -> None:
    """SIGTERM to either process, at any step: all exit, and resume byte for byte."""
    seed = random.SystemRandom().randrange(1000)
    print("seed", seed)
    chance = random.Random(seed)
    with start(tmp_path, str(tmp_path / "undisturbed"), word) as processes:
        ended(processes, 0, 0)
        expected = [each.lines("final") for each in processes]
        assert [each.lines("TensorFlow") for each in processes] == [["False"]] * 2
    directory = tmp_path / "run"
    step = 0
    for signalled in (1, 0):
        step += chance.randrange(1, 15)
        with start(tmp_path, str(directory), word) as processes:
            first = int(processes[0].wait_line("starts"))
            processes[signalled].wait_line("step", max(1, step - first))
            processes[signalled].process.send_signal(signal.SIGTERM)
            ended(processes, RESTART, RESTART)
    commits = records(directory, "commit", because="preemption")
    assert len(commits) == 2
    with start(tmp_path, str(directory), word) as processes:
        assert int(processes[1].wait_line("starts")) == commits[-1]["step"]
        ended(processes, 0, 0)
        assert [each.lines("final") for each in processes] == expected


@pytest.mark.parametrize("word", ["replicated", "sharded"])
def test_a_peer_that_is_killed_under_a_notice_costs_no_hang_and_no_commit(
    tmp_path: Path, start: Start, word: str
) -> None:
    """Process 1 is killed in its step, when both have computed: process 0 commits.

    Not if process 1 alone has shards of an array.
    """
    directory = tmp_path / "run"
    holds = [tmp_path / f"hold-{index}" for index in range(2)]
    for each in holds:
        each.touch()
    words = (str(directory), word, "hold=9", "grace=8")
    with start(tmp_path, *words) as processes:
        kill_the_peer_under_a_notice(processes, holds[0])
    commits = records(directory, "commit", because="preemption")
    step = 10 if word == "replicated" else 0
    assert [each["step"] for each in commits] == [step] * (step > 0)
    with start(tmp_path, str(directory), word) as processes:
        assert processes[1].wait_line("starts") == f"{step}"
        ended(processes, 0, 0)


def test_without_the_host_of_the_service_the_rest_ends_and_resumes(
    tmp_path: Path, start: Start
) -> None:
    """JAX aborts the others after the end of process 0, if they do not exit before."""
    directory = tmp_path / "run"
    with start(tmp_path, str(directory)) as processes:
        processes[0].wait_line("step", 16)
        processes[1].process.send_signal(signal.SIGTERM)
        processes[0].process.kill()
        ended(processes, -signal.SIGKILL, None)
        assert processes[1].process.returncode in (RESTART, -signal.SIGABRT)
    # Process 0 may have been killed before it recorded its last commit.
    newest = max(int(path.parent.name) for path in directory.glob("*/COMMITTED"))
    with start(tmp_path, str(directory)) as processes:
        assert int(processes[1].wait_line("starts")) == newest
        ended(processes, 0, 0)


def test_a_process_that_waits_for_the_others_ends_before_its_deadline(
    tmp_path: Path, start: Start
) -> None:
    """The program of process 0 has ended, and JAX waits until process 1 ends, too."""
    (tmp_path / "hold-1").touch()
    with start(tmp_path, str(tmp_path / "run"), "early", "grace=4") as both:
        both[0].wait_line("TensorFlow")
        both[1].wait_line("holds")
        time.sleep(1.0)  # until the main thread waits
        both[0].process.send_signal(signal.SIGTERM)
        ended(both, RESTART, None, limit=30.0)  # JAX aborts process 1
        # Then process 0 waits one second for the others, within the four seconds.
        [left] = re.findall(r"the process exits in ([\d.]+) s", both[0].output)
        assert float(left) <= 2.6


def test_an_error_in_one_process_ends_both_soon(tmp_path: Path, start: Start) -> None:
    """Without tfpreempt each waits for the other, until JAX's timeout of minutes."""
    with start(tmp_path, str(tmp_path / "run"), "fail=5") as processes:
        ended(processes, 1, 1, limit=60.0)
        assert "RuntimeError: a bug of process 1" in processes[1].output
        assert "worker 1 failed first: RuntimeError: a bug" in processes[0].output


def test_processes_that_jax_connects_after_the_handler_are_an_error(
    tmp_path: Path, start: Start
) -> None:
    with start(tmp_path, str(tmp_path / "run"), "late") as processes:
        ended(processes, 1, 1)
        for index, each in enumerate(processes):
            error = f"this process, {index} of 2, would train and commit alone"
            assert error in each.output


def test_a_notice_before_the_handler_ends_every_process(
    tmp_path: Path, start: Start
) -> None:
    """JAX's own SIGTERM handler, which is in C++, gets the signal there."""
    with start(tmp_path, str(tmp_path / "run"), "slow") as processes:
        processes[1].wait_line("waits")
        processes[1].process.send_signal(signal.SIGTERM)
        ended(processes, RESTART, RESTART)
        assert "notice from jax:preemption-notice" in processes[0].output


def test_divided_arrays_are_restored_by_other_numbers_of_processes(
    tmp_path: Path, start: Start
) -> None:
    """From two to one, and from one to four."""
    rows = []
    for count in (2, 1, 4):
        words = (str(tmp_path / "run"), "sharded")
        with start(tmp_path, *words, count=count) as processes:
            ended(processes, *[0] * count)
            starts = {each.wait_line("starts") for each in processes}
            assert starts == {"0" if count == 2 else "40"}
            rows.append(
                sorted({row for each in processes for row in each.lines("row")})
            )
    assert len(rows[0]) == 8
    assert rows[1] == rows[2] == rows[0]


def test_process_0_loads_compiled_functions(tmp_path: Path, start: Start) -> None:
    """On CPUs, JAX's keys of the other processes differ. The result is exact."""
    words = (str(tmp_path / "run"), "sharded", "cached", "hold=9")
    with start(tmp_path, str(tmp_path / "undisturbed"), "sharded") as processes:
        ended(processes, 0, 0)
        expected = [each.lines("final") for each in processes]
    (tmp_path / "hold-0").touch()
    with start(tmp_path, *words) as processes:
        compiled = tmp_path / "run" / ".tfpreempt-compiled"
        wait_until(lambda: list(compiled.glob("*.zip")), "functions are kept")
        processes[1].process.send_signal(signal.SIGTERM)
        (tmp_path / "hold-0").unlink()
        ended(processes, RESTART, RESTART)
    with start(tmp_path, *words[:-1]) as processes:
        ended(processes, 0, 0)
        assert [each.lines("final") for each in processes] == expected
        assert int(processes[0].wait_line("loaded")) >= 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "bad", "starts"),
    [("replicated", "bad", 1), ("sharded", "spoiled", 2)],
)
def test_a_bad_step_of_one_process_is_left_out(
    tmp_path: Path, start: Start, word: str, bad: str, starts: int
) -> None:
    directory = tmp_path / "run"
    for codes in [[RESTART] * 2] * starts + [[0, 0]]:
        words = (str(directory), word, f"{bad}=10", "steps=20")
        with start(tmp_path, *words) as processes:
            ended(processes, *codes)
            final = [each.lines("final") for each in processes]
    found = records(directory, "badstep")[-1]
    assert (found["batch"], found["worker"]) == (10, 0)
    words = (str(tmp_path / "clean"), word, "without=10", "steps=19")
    with start(tmp_path, *words) as processes:
        ended(processes, 0, 0)
        assert [each.lines("final") for each in processes] == final
