"""Observed properties of the configs: sources with grace periods, notices, exits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.core.events import Notice
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.config import TerminationConfig


def watched(config: TerminationConfig) -> dict[str, float | None]:
    return {each.source.name: each.grace_seconds for each in config._notice_sources()}


def left_with(
    config: TerminationConfig,
    committed: bool = True,
    worker: int | None = None,
    *,
    mirrored: bool = True,
) -> object:
    """The exit code of a process alone, or of one of two workers."""
    two = Cluster(worker=worker or 0, jobs=(("worker", 2),))
    cluster = LOCAL if worker is None else two
    with pytest.raises(SystemExit) as caught:
        config._exit(committed, cluster, mirrored=mirrored)
    return caught.value.code


def notices(config: TerminationConfig, give: Callable[[], None]) -> list[Notice]:
    """Returns the notices of a watcher over the config's sources."""
    heard: list[Notice] = []
    came = threading.Event()

    def receive(notice: Notice) -> None:
        heard.append(notice)
        came.set()

    watcher = Watcher(config._notice_sources(), 0, receive)
    watcher.start()
    try:
        give()
        assert came.wait(10)
    finally:
        watcher.close()
    return heard
