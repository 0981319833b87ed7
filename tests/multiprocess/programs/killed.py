"""Runs another program, which is killed at one of its file operations.

Usage: killed.py CHECKPOINT_DIR PROGRAM ARGUMENT...

KILL_AT is a JSON object with a `worker`, a `kind` of operation and a `count` (from 1):
before this operation the worker sends itself SIGKILL. Without KILL_AT the program
writes the kinds of all operations to operations-<worker>, one per line. The operations
are those of Python, in any thread, on files of this test; operations of TensorFlow are
not counted.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import file_events
from toy_model import INDEX

from tfpreempt.checkpoint.directory import layout
from tfpreempt.handler import activity

PLACE = os.environ["HOLD_DIRECTORY"]
OPERATIONS = Path(PLACE) / f"operations-{INDEX}"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")

SNAPSHOT_EACH = 0.05
"""Seconds between snapshots, for any cost of a snapshot."""
activity.SHORTEST = SNAPSHOT_EACH
activity.IntervalPolicy.after = lambda *_, **__: SNAPSHOT_EACH  # type: ignore[assignment]
activity._LOOKS = 0.01


def kind_of(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Returns the purpose of an operation; None for operations without a kind."""
    path = str(arguments[0]) if arguments else ""
    if (event != "open" and event not in CHANGES) or not path.startswith(PLACE):
        return None
    if "/journal/" in path or path == str(OPERATIONS) or "/process-" in path:
        return None
    if "/memory/" in path:
        return "snapshot"
    target = str(arguments[1]) if event == "os.rename" else ""
    if f"{layout.LEASE}/" in target and "/move-" in target:
        return "retention"
    if event == "os.rename" and f"{layout.LEASE}." not in path:
        return "merge" if f"{layout.PARTS_SUFFIX}/" in path else "rename"
    if "/mirror/" in path:
        return "upload"
    if layout.LEASE in path:
        return "lease"
    if f"{layout.PARTS_SUFFIX}/" in path:
        return "share"
    if event in ("os.remove", "os.rmdir"):
        return "retention"
    if event == "open" and not arguments[2] & WRITING:
        return "read"
    return "save"


def watch() -> None:
    """Starts to count the operations."""
    text = os.environ.get("KILL_AT")
    plan = json.loads(text) if text else None
    counts: collections.Counter[str] = collections.Counter()

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        kind = kind_of(event, arguments)
        if kind is None:
            return
        counts[kind] += 1
        if plan is None:
            with OPERATIONS.open("a") as file:
                file.write(f"{kind}\n")
        elif plan == {"worker": INDEX, "kind": kind, "count": counts[kind]}:
            os.kill(os.getpid(), signal.SIGKILL)

    file_events.watch(see)


watch()
program = Path(sys.argv[0]).with_name(sys.argv.pop(2))
sys.argv[0] = __file__ = str(program)
exec(compile(program.read_text(), program, "exec"))
