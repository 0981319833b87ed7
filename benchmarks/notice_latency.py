"""Measures the time from an event of a cloud, a file or a signal to the handler's flag.

The servers, the file and the sender of the signal are in a separate process
(`notice_world`). The real `Watcher` runs in this process, and each notice sets a flag.
The latency of a notice is the time from just before the event until the flag is set.

`gce` waits in a blocked GET, and receives an event at once. Each watcher is new, and
the event comes within its first half second. A tenth of this time is the pause after a
reply, so events meet this pause more often than in reality. This row watches the one
entry of preemptions; `gce-maintenance` watches the directory, because both entries are
watched there. A polled source is late by up to its interval: several watchers start at
random moments of an interval, so one event meets each watcher at another moment. All
moments are drawn from the seed in the row.

The bar is for the 95th percentile. For a polled source the bar is the interval plus a
tenth of a second.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.notice_world import SIGNAL, World
from benchmarks.row import alone
from tfpreempt.core.events import Notice
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.file import FileSource
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.signals import SignalSource
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import NoticeSourceConfig, Watcher

HANG_BAR = 0.250
EXTRA = 0.1
SETTLE = 0.03
"""Seconds after which a started watcher has its first answer."""

LOST_SECONDS = 30.0
"""After so long a notice is not late, it is lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The source and the limits that one row measures.

    Attributes:
        place: server, file or signal at which the event occurs.
        make: function that creates a source.
        bar: largest accepted latency in seconds.
        window: seconds within which the event occurs.
        interval: seconds between two polls; None without polls.
        together: number of watchers that receive the same event.
    """

    place: str
    make: Callable[[], NoticeSource]
    bar: float
    window: float
    interval: float | None = None
    together: int = 1


class Flag:
    """The flag of the handler, which a notice sets."""

    def __init__(self) -> None:
        self.set_at = 0.0
        self._is_set = threading.Event()

    def receive(self, notice: Notice) -> None:
        """Records the notice, as the handler does."""
        self.set_at = self.set_at or time.monotonic()
        self._is_set.set()

    def wait(self, name: str) -> float:
        """Returns the time at which the flag was set.

        Raises:
            RuntimeError: the flag was not set.
        """
        if not self._is_set.wait(LOST_SECONDS):
            raise RuntimeError(f"{name}: no notice within {LOST_SECONDS:.0f} s")
        return self.set_at


def rows(rounds: int = 40, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields a row for each source.

    Args:
        rounds: number of notices of each source.
        seed: seed of the random moments; None: a random seed.
    """
    seed = random.randrange(2**32) if seed is None else seed
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as directory,
        World(Path(directory, "preempted")) as world,
    ):
        listed = cases(world.urls, world.path)
        for case in listed:
            if case.interval is None:
                measure(world, case, 1, rng)  # a warm-up: imports
        for case in listed:
            yield row(case, measure(world, case, rounds, rng), seed)


def cases(urls: Mapping[str, str], path: Path) -> list[Case]:
    """Returns all sources with their default intervals; for AWS, one second.

    Args:
        urls: URLs of the servers, by name.
        path: path of the file.
    """

    def aws(interval: float) -> NoticeSource:
        watch = AwsWatch(url=urls["aws"], interval=interval)
        return watch.source("spot-interruption")

    def azure() -> NoticeSource:
        return AzureWatch(url=urls["azure"], interval=1.0).source("Preempt")

    def maintenance() -> NoticeSource:
        watch = GceWatch(["preempted", "maintenance-event"], url=urls["gce"])
        return watch.source("maintenance-event")

    return [
        Case(
            place="signal",
            make=lambda: SignalSource(SIGNAL),
            bar=EXTRA,
            window=0.05,
        ),
        Case(
            place="gce",
            make=lambda: GceWatch(["preempted"], url=urls["gce"]).source("preempted"),
            bar=HANG_BAR,
            window=0.5,
        ),
        Case(place="gce-maintenance", make=maintenance, bar=HANG_BAR, window=0.5),
        polled("file", lambda: FileSource(path, 1.0), 1.0, together=20),
        polled("azure", azure, 1.0, together=20),
        polled("aws", lambda: aws(0.5), 0.5, together=10),
        polled("aws", lambda: aws(5.0), 5.0, together=40),
    ]


def polled(
    place: str, make: Callable[[], NoticeSource], interval: float, together: int
) -> Case:
    """Returns the case of a source that polls."""
    return Case(
        place=place,
        make=make,
        bar=interval + EXTRA,
        window=interval,
        interval=interval,
        together=together,
    )


def measure(world: World, case: Case, notices: int, rng: random.Random) -> list[float]:
    """Returns the latency of each notice in seconds."""
    found: list[float] = []
    while len(found) < notices:
        found += meet(world, case, min(case.together, notices - len(found)), rng)
    return found


def meet(world: World, case: Case, count: int, rng: random.Random) -> list[float]:
    """Makes one event; returns the seconds until each watcher reports the event."""
    world.calm(case.place)
    flags = [Flag() for _ in range(count)]
    watchers = [
        Watcher([NoticeSourceConfig(case.make())], 0, flag.receive) for flag in flags
    ]
    spread = 0.0 if case.interval is None else case.interval
    began = time.monotonic()
    try:
        for watcher, moment in zip(watchers, moments(rng, count, spread), strict=True):
            sleep_until(began + moment)
            watcher.start()
        time.sleep(SETTLE + rng.uniform(0.0, case.window))
        if early := sum(flag.set_at > 0 for flag in flags):
            raise RuntimeError(f"{case.place}: {early} notices before the change")
        changed = world.change(case.place)
        return [flag.wait(case.place) - changed for flag in flags]
    finally:
        for watcher in watchers:
            watcher.close()


def moments(rng: random.Random, count: int, spread: float) -> list[float]:
    """Returns sorted random moments from 0 to the spread."""
    return sorted(rng.uniform(0.0, spread) for _ in range(count))


def sleep_until(moment: float) -> None:
    """Sleeps until a time of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))


def row(case: Case, seconds: Sequence[float], seed: int) -> dict[str, Any]:
    """Returns the row of one source."""
    return alone(
        "notice_latency",
        seconds,
        unit="s",
        bar=round(case.bar, 3),
        bar_of="ours_p95",
        digits=4,
        source=case.place,
        interval=case.interval,
        longest=round(max(seconds), 4),
        seed=seed,
    )
