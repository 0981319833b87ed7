"""What a running job makes of a notice, read from its journal as it is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfpreempt.journal import journal_directory, parse_record

_POLL_SECONDS = 0.1


class Follower:
    """Reads what is appended to a job's journal after this was made.

    By position in each file, never by the records' times: the workers' clocks differ,
    so a record that is written later may have an earlier time.

    Args:
        directory: the job's.
    """

    def __init__(self, directory: Path) -> None:
        self._journal = journal_directory(directory)
        self._since = time.time()
        self._offsets = {path: path.stat().st_size for path in self._files()}

    def follow(self, seconds: float, say: Callable[[str], None]) -> bool | None:
        """Tells what happens, until a worker leaves or the time is up.

        Args:
            seconds: how long to look at most.
            say: takes each line for people.

        Returns:
            Whether a worker has left with its step committed; None: nobody has left.

        Raises:
            OSError: a file of the journal cannot be read.
        """
        never = threading.Event()
        deadline = time.monotonic() + seconds
        while True:
            is_last = time.monotonic() >= deadline
            for record in self._read_new():
                line = _line(record)
                if line:
                    say(f"{record['wall'] - self._since:6.2f} s  {line}")
                if record.get("event") == "exit":
                    return bool(record.get("outcome") == "committed")
            if is_last:
                return None
            never.wait(_POLL_SECONDS)

    def _files(self) -> list[Path]:
        return sorted(self._journal.glob("*.jsonl"))

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
