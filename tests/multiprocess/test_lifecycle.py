"""Many handlers and many notices in one process; long grace periods."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    FRAMEWORKS,
    RESTART,
    Place,
    records,
    wait_until,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_fits_and_three_notices(here: Place) -> None:
    """FACTS 2.7, 2.6, A.6: a second handler, fit and notice in one process all work.

    The `exit_fn` returns, so training continues after a commit. If one worker drops a
    handler, all workers still watch for notices.
    """
    here.hold("in-step-3", "in-step-7", "in-step-14")
    cluster = here.start("two_fits.py", world=2)
    second = Path(f"{here.checkpoints}-second")
    for count, (step, victim) in enumerate([(3, 1), (7, 0), (14, 1)], start=1):
        for worker in cluster:
            worker.wait_line("holding", count)
        cluster[victim].send(signal.SIGTERM)
        directory = second if step == 14 else here.checkpoints
        wait_until(
            lambda: len(records(directory, "notice")) >= (count if step < 14 else 1),  # noqa: B023
            f"notice {count}",
        )
        wait_until(
            lambda: records(directory, "decision", boundary=step + 1),  # noqa: B023
            f"decision {count}",
        )
        here.release(f"in-step-{step}")
    cluster.expect(RESTART, RESTART)
    assert cluster[1].lines("dropped") == [[]]
    for worker in cluster:
        assert worker.lines("exit_fn") == [[], []]
        assert worker.lines("fitted") == [["12"]]
    commits = [(r["step"], r["because"]) for r in records(here.checkpoints, "commit")]
    assert commits == [(4, "preemption"), (8, "preemption"), (12, "finished")]
    assert len(records(second, "commit")) == 1
    ends = [(r["outcome"], r["code"]) for r in records(second, "exit")]
    assert ends == [("committed", RESTART)] * 2


@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_a_long_grace_period_has_two_commits(
    here: Place, victims: tuple[int, ...]
) -> None:
    """A.3: grace 10 s, one or all workers notified: a commit at once, one near the end.

    Training continues between the two commits.
    """
    here.hold()
    cluster = here.train("mwms", 2, "--hold-at", 5, "--steps", 1 << 40, "--grace", 10)
    for worker in cluster:
        worker.wait_line("holding")
    for victim in victims:
        cluster[victim].send(signal.SIGTERM)
    for victim in victims:
        cluster.wait_record("notice", worker=victim)
    cluster.wait_record("decision")
    here.release()
    cluster.expect(RESTART, RESTART)
    early, late = records(here.checkpoints, "commit")
    assert early["step"] == 6
    assert late["step"] > 6
    assert [r["step"] for r in records(here.checkpoints, "exit")] == [late["step"]] * 2
    for worker in cluster:
        assert worker.lines("step")[-1] == [str(late["step"])]
    second = here.train("mwms", 2, "--steps", 1)
    second.expect(0, 0)
    assert [w.lines("restored") for w in second] == [[[str(late["step"])] * 2]] * 2


def test_all_notified_without_grace(here: Place, reference: Reference) -> None:
    """A.4: all workers notified at once, grace 0: one commit, then exact resume.

    A.5: TensorFlow's own TerminationConfig is accepted.
    """
    here.hold()
    config = ("--config", "tensorflow", "--grace", 0)
    first = here.train("mwms", 2, "--hold-at", 5, *config)
    for worker in first:
        worker.wait_line("holding")
    for worker in first:
        worker.send(signal.SIGTERM)
    for index in range(2):
        first.wait_record("notice", worker=index)
    first.wait_record("decision")
    here.release()
    first.expect(RESTART, RESTART)
    assert [r["step"] for r in records(here.checkpoints, "commit")] == [6]
    second = here.train("mwms", 2, *config)
    second.expect(0, 0)
    assert second.results() == reference("mwms", 2)
