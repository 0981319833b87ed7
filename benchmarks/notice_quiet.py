"""Measures the processor time of the watchers of an idle process.

One row for each cloud, watched alone as by the platform's configuration, and one row
for all sources together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.row import alone
from tfpreempt.core.events import Notice
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.file import FileSource
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.signals import SignalSource
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import NoticeSourceConfig, Watcher

ROOT = Path(__file__).parents[1]
WARM_SECONDS = 3.0
"""Before the clock starts: imports, connections, tokens."""


BAR = 0.1
SECONDS = 20.0
CLOUDS = ("azure", "aws", "gce")
ALL = (*CLOUDS, "file", "signal")


def rows(seconds: float = SECONDS) -> Iterator[dict[str, Any]]:
    """Yields a row for each cloud, and a row for all sources.

    Args:
        seconds: duration of each process.
    """
    from benchmarks.notice_world import World  # not in the process that is measured

    with (
        tempfile.TemporaryDirectory() as directory,
        World(Path(directory, "preempted")) as world,
    ):
        for places in (*((cloud,) for cloud in CLOUDS), ALL):
            before = world.requests()
            found = measure(world.urls, world.path, seconds, places)
            yield alone(
                "notice_quiet",
                [100 * found["processor"] / found["elapsed"]],
                unit="% of one core",
                bar=BAR,
                digits=4,
                source=places[0] if len(places) == 1 else "all",
                by_thread={
                    name: round(100 * used / found["elapsed"], 4)
                    for name, used in found["threads"].items()
                },
                seconds=round(found["elapsed"], 1),
                requests=world.requests() - before,
            )


def measure(
    urls: Mapping[str, str],
    path: Path,
    seconds: float,
    places: Sequence[str] = ALL,
) -> dict[str, Any]:
    """Runs the idle process.

    Args:
        urls: URLs of the metadata servers, by name.
        path: path of the notice file.
        seconds: duration of the process.
        places: names of the watched sources.

    Returns:
        Seconds of the `processor`, seconds of each of the `threads` by name, and the
        `elapsed`
        seconds.
    """
    asked = json.dumps(dict(urls)), str(path), str(seconds), *places
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


def sources(
    urls: Mapping[str, str], path: Path, places: Sequence[str] = ALL
) -> list[NoticeSource]:
    """Returns the sources of each place, with default intervals and topics."""
    aws = AwsWatch(url=urls["aws"])
    known: dict[str, list[NoticeSource]] = {
        "gce": [GceWatch(url=urls["gce"]).source("preempted")],
        "aws": [aws.source("spot-interruption"), aws.source("lifecycle")],
        "azure": [AzureWatch(url=urls["azure"]).source("Preempt")],
        "file": [FileSource(path)],
        "signal": [SignalSource("TERM")],
    }
    return [source for place in places for source in known[place]]


def listen(
    urls: Mapping[str, str],
    path: Path,
    seconds: float,
    places: Sequence[str] = ALL,
) -> dict[str, Any]:
    """Watches the sources; returns the used processor time.

    Raises:
        RuntimeError: a notice arrived.
    """
    notices: list[Notice] = []
    watched = [NoticeSourceConfig(source) for source in sources(urls, path, places)]
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
    """Returns the processor seconds of each watcher thread so far."""
    return {
        each.name.partition(":")[0]: time.clock_gettime(
            time.pthread_getcpuclockid(each.ident)
        )
        for each in threading.enumerate()
        if each.name.startswith("tfpreempt-") and each.ident is not None
    }


if __name__ == "__main__":
    servers, file, duration, *listened = sys.argv[1:]
    found = listen(json.loads(servers), Path(file), float(duration), listened)
    print(json.dumps(found))
