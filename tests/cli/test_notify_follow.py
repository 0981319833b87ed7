"""`tfpreempt notify --follow`: what it reads of a journal that is being written."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tfpreempt.cli.notify.follow import Ending, Follower
from tfpreempt.core.events import Commit, Exit, Notice, Outcome
from tfpreempt.core.journal import Journal, journal_directory
from tfpreempt.testing.clock import FakeClock


def tell(directory: Path, outcome: Outcome) -> None:
    journal = Journal(journal_directory(directory), 1)
    journal.record(
        Notice(source="signal:SIGTERM", worker=1, grace_seconds=None, received_at=0.0)
    )
    if outcome is Outcome.COMMITTED:
        journal.record(
            Commit(
                step=7,
                path="/ckpt/7",
                sequence=1,
                world_size=2,
                save_seconds=0.1,
                bytes=10,
                because="preemption",
            )
        )
    journal.record(Exit(outcome=outcome, code=143, step=7))
    journal.close()


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.LOST])
def test_follow_tells_what_the_job_does(outcome: Outcome, tmp_path: Path) -> None:
    tell(tmp_path, Outcome.LOST)  # of an earlier preemption
    follower = Follower(tmp_path)
    lines: list[str] = []
    writer = threading.Thread(target=tell, args=(tmp_path, outcome))
    writer.start()
    ending = follower.follow(10.0, lines.append)
    writer.join()
    was_committed = outcome is Outcome.COMMITTED
    assert ending is (Ending.COMMITTED if was_committed else Ending.LOST)
    told = "\n".join(lines)
    assert told.count("worker 1 has the notice of signal:SIGTERM") == 1
    assert ("step 7 is committed in /ckpt/7" in told) is was_committed
    assert f"leaves with code 143 at step 7: {outcome.value}" in told


def test_follow_sees_what_is_written_later_with_an_earlier_time(
    tmp_path: Path,
) -> None:
    """The clocks of two machines are never the same; that of worker 1 is behind."""
    behind = FakeClock(wall=time.time() - 3600.0)
    journals = [
        Journal(journal_directory(tmp_path), 0),
        Journal(journal_directory(tmp_path), 1, behind),
    ]
    heard = Notice(source="signal:SIGTERM", worker=0, grace_seconds=None, received_at=0)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        journals[1].record(Exit(outcome=Outcome.COMMITTED, code=143, step=7))

    follower = Follower(tmp_path)
    journals[0].record(heard)
    assert follower.follow(10.0, say) is Ending.COMMITTED
    for journal in journals:
        journal.close()
    assert [line.split(" s  ")[1] for line in lines] == [
        "worker 0 has the notice of signal:SIGTERM",
        "worker 1 leaves with code 143 at step 7: committed",
    ]
