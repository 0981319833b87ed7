"""What a running job makes of a notice, read from its journal as it is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfpreempt.journal import journal_directory, read_journal

_POLL_SECONDS = 0.1


def follow(
    directory: Path, since: float, seconds: float, say: Callable[[str], None]
) -> bool | None:
    """Tells what happens, until a worker leaves or the time is up.

    Args:
        directory: the job's.
        since: wall time from which on records count.
        seconds: how long to look at most.
        say: takes each line for people.

    Returns:
        Whether a worker has left with its step committed; None: nobody has left.
    """
    told = 0
    never = threading.Event()
    deadline = time.monotonic() + seconds
    while True:
        is_last = time.monotonic() >= deadline
        records = [
            each
            for each in read_journal(journal_directory(directory))
            if each["wall"] >= since
        ]
        for record in records[told:]:
            line = _line(record)
            if line:
                say(f"{record['wall'] - since:6.2f} s  {line}")
            if record.get("event") == "exit":
                return bool(record.get("outcome") == "committed")
        told = len(records)
        if is_last:
            return None
        never.wait(_POLL_SECONDS)


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
