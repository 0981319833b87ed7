"""A process that only listens: what its watchers take of the processor while quiet."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfpreempt.core.events import Notice
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.file import FileSource
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.signals import SignalSource
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import WatchedSource, Watcher

ROOT = Path(__file__).parents[2]
WARM_SECONDS = 3.0
"""Before the clock starts: imports, connections, tokens."""


def measure(urls: Mapping[str, str], path: Path, seconds: float) -> dict[str, Any]:
    """Runs the process.

    Args:
        urls: of the metadata servers, by name.
        path: the file to look for.
        seconds: how long.

    Returns:
        Seconds of the `processor`, those of each of its `threads` by name, and those
        that `elapsed`.
    """
    asked = json.dumps(dict(urls)), str(path), str(seconds)
    done = subprocess.run(
        [sys.executable, "-m", __name__, *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the quiet process has failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the process ---------------------------------------------------------------------


def sources(urls: Mapping[str, str], path: Path) -> list[NoticeSource]:
    """One of each kind, with their own intervals; of AWS the two default topics."""
    aws = AwsWatch(url=urls["aws"])
    return [
        GceWatch(url=urls["gce"]).source("preempted"),
        aws.source("spot-interruption"),
        aws.source("lifecycle"),
        AzureWatch(url=urls["azure"]).source("Preempt"),
        FileSource(path),
        SignalSource("TERM"),
    ]


def listen(urls: Mapping[str, str], path: Path, seconds: float) -> dict[str, Any]:
    """Listens; what it took.

    Raises:
        RuntimeError: it was not quiet.
    """
    notices: list[Notice] = []
    watched = [WatchedSource(source) for source in sources(urls, path)]
    watcher = Watcher(watched, 0, notices.append)
    watcher.start()
    time.sleep(WARM_SECONDS)
    before, used, began = by_thread(), time.process_time(), time.monotonic()
    time.sleep(seconds)
    elapsed, processor = time.monotonic() - began, time.process_time() - used
    threads = {name: now - before[name] for name, now in by_thread().items()}
    watcher.close()
    if notices:
        raise RuntimeError(f"it was not quiet: {notices}")
    return {"processor": processor, "threads": threads, "elapsed": elapsed}


def by_thread() -> dict[str, float]:
    """Seconds of the processor that each watching thread has had so far."""
    return {
        each.name.partition(":")[0]: time.clock_gettime(
            time.pthread_getcpuclockid(each.ident)
        )
        for each in threading.enumerate()
        if each.name.startswith("tfpreempt-") and each.ident is not None
    }


if __name__ == "__main__":
    found = listen(json.loads(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps(found))
