"""The whole path at once: `tfpreempt run`, two workers, two preemptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    LIMIT,
    Place,
    records,
    wait_until,
)
from tests.multiprocess.supervised import run
from tests.ports import free_ports
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.status.read_status import read_status
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.journal import journal_directory

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]


def scraped(port: int) -> dict[str, float]:
    """Values by the metric's name and its labels, but for the run's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as got:
        text = got.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = [value for name, value in each.labels.items() if name != "run"]
            found[" ".join([each.name, *labels])] = each.value
    return found


def status(here: Place) -> tuple[int, dict[str, Any]]:
    """Returns the status of the run from another process."""
    command = [sys.executable, "-m", "tfpreempt", "status", "--json"]
    ended = subprocess.run(
        [*command, str(here.checkpoints)],
        stdout=subprocess.PIPE,
        env=here.environment(),
        timeout=LIMIT,
    )
    return ended.returncode, json.loads(ended.stdout)


def test_two_preemptions_under_the_supervisor(
    here: Place, reference: Reference
) -> None:
    """H: two preemptions under the real supervisor, and the undisturbed run's bytes.

    It is looked at from outside before, under and after the first one.
    """
    here.hold()
    [port] = free_ports(1)
    journals = JournalTailer(journal_directory(here.checkpoints))

    def wait_seen(step: int, *, is_noticed: bool) -> None:
        """Waits until the status of all workers says so."""

        def is_seen() -> bool:
            status = read_status(journals, SystemClock.wall())
            return all(
                (each.step, each.noticed_at is not None) == (step, is_noticed)
                for each in status.workers
            )

        wait_until(is_seen, f"step {step} to be seen")

    # A notice that comes in the round of a snapshot is the others' after that.
    options = ("--snapshots", "off", "--metrics-port", f"127.0.0.1:{port}")
    program = ("train.py", "--strategy", "mwms", "--hold-at", "3", "8")
    with run(here, 2, *options, program=program) as made:
        workers = made.workers
        for count, (victim, step) in enumerate([(1, 3), (0, 8)], start=1):
            for worker in workers:
                worker.wait_line("holding", count)
            wait_seen(step, is_noticed=False)
            os.kill(int(workers[victim].lines("pid")[-1][0]), signal.SIGTERM)
            wait_until(
                lambda: len(records(here.checkpoints, "notice")) >= count,  # noqa: B023
                "a notice",
            )
            wait_seen(step, is_noticed=True)
            if count == 2:
                found = scraped(port)
            here.release()
            if count == 1:
                wait_until(lambda: len(records(here.checkpoints, "commit")), "a commit")
                here.hold()
        made.wait()
    assert "preemptions: 2, failures: 0" in made.supervisor.output
    commits = [(r["step"], r["because"]) for r in records(here.checkpoints, "commit")]
    assert commits == [(4, "preemption"), (9, "preemption"), (12, "finished")]
    assert [worker.result() for worker in workers] == reference("mwms", 2)
    # The state at the second notice.
    assert found["tfpreempt_restarts_total preemption"] == 1
    assert found["tfpreempt_commits_total"] == 1
    assert found["tfpreempt_last_commit_step"] == 4
    assert found["tfpreempt_step 0"] == found["tfpreempt_step 1"] == 8
    assert found["tfpreempt_worker_state training 0"] == 1
    assert found["tfpreempt_notice_timestamp_seconds 1"] > 0
    code, told = status(here)
    assert (code, told["ended"]) == (0, "training is complete, exit code 0")
    assert (told["commits"], told["restarts"]) == (3, {"preemption": 2})
    assert [(w["state"], w["step"]) for w in told["workers"]] == [("finished", 12)] * 2


def test_a_slow_worker_of_a_synchronous_loop_is_named(here: Place) -> None:
    """All step times are equal, because worker 0 waits for worker 1.

    Without --measure-often the warning comes after half a minute.
    """
    pauses = ("--pause", "0.25", "--slow", "0.35", "--steps", "500")
    program = ("train.py", "--strategy", "mwms", *pauses, "--measure-often")
    with run(here, 2, "--snapshots", "off", program=program) as made:
        made.supervisor.wait_text("WARNING: worker 1 on ")
        steps = len(made.workers[1].lines("step"))
        _, told = status(here)
        assert told["slow"] == [1]
        times = [worker["step_seconds"] for worker in told["workers"]]
        assert times[0] == pytest.approx(times[1], rel=0.1)
    assert steps <= 100
    assert [each["worker"] for each in records(here.checkpoints, "slow_worker")] == [1]
