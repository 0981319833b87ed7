"""What a running job makes of a notice, read from its journal as it is written."""

from __future__ import annotations

import enum
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.cli.notify.workers import Worker
from tfpreempt.core.journal import journal_directory, parse_record

_POLL_SECONDS = 0.1


class Ending(enum.Enum):
    """What a follower has seen in the end."""

    COMMITTED = "committed"  # a worker has left, its step is committed
    LOST = "lost"  # a worker has left in another way
    UNTOLD = "untold"  # a process has ended, and no worker has recorded its exit
    NOBODY = "nobody"  # has left in the time


class Follower:
    """Reads what is appended to a job's journal after this was made.

    By position in each file, never by the records' times: the workers' clocks differ,
    so a record that is written later may have an earlier time.

    Args:
        directory: the job's.

    Attributes:
        journal: what is read.
    """

    def __init__(self, directory: Path) -> None:
        self.journal = journal_directory(directory)
        self._since = time.time()
        self._offsets = {path: path.stat().st_size for path in self._files()}

    def follow(
        self, seconds: float, say: Callable[[str], None], told: Sequence[Worker] = ()
    ) -> Ending:
        """Tells what happens, until a worker leaves or the time is up.

        Args:
            seconds: how long to look at most.
            say: takes each line for people.
            told: who was told; their end is an end too.

        Raises:
            OSError: a file of the journal cannot be read.
        """
        deadline = time.monotonic() + seconds
        while True:
            is_late = time.monotonic() >= deadline
            # First: what was written last is read below.
            ended, _, _ = select.select(told, [], [], _POLL_SECONDS)
            for record in self._read_new():
                line = _line(record)
                if line:
                    say(f"{record['wall'] - self._since:6.2f} s  {line}")
                if record.get("event") == "exit":
                    is_committed = record.get("outcome") == "committed"
                    return Ending.COMMITTED if is_committed else Ending.LOST
            if ended or is_late:
                return Ending.UNTOLD if ended else Ending.NOBODY

    def _files(self) -> list[Path]:
        return sorted(self.journal.glob("*.jsonl"))

    def _read_new(self) -> list[dict[str, Any]]:
        """Each record once; of those that are found together the exits last."""
        found = []
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # the rest is still being written
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found += [parse_record(line) for line in whole.splitlines()]
        records = [record for record in found if record is not None]
        return sorted(
            records, key=lambda each: (each.get("event") == "exit", each["wall"])
        )


def _line(record: dict[str, Any]) -> str:
    who = f"worker {record.get('worker')}"
    match record.get("event"):
        case "notice":
            return f"{who} has the notice of {record.get('source')}"
        case "commit":
            return f"step {record.get('step')} is committed in {record.get('path')}"
        case "exit":
            return (
                f"{who} leaves with code {record.get('code')} at step "
                f"{record.get('step')}: {record.get('outcome')}"
            )
    return ""
