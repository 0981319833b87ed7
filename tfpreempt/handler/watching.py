"""What a handler listens to: the config's sources, and TensorFlow's own key."""

from __future__ import annotations

from collections.abc import Callable

from tfpreempt.core.cluster import Cluster
from tfpreempt.core.deadline import after_travel
from tfpreempt.core.events import Notice
from tfpreempt.handler.remote_cluster import Connection
from tfpreempt.notice.native import NativeKeySource
from tfpreempt.notice.watcher import WatchedSource, Watcher
from tfpreempt.platforms.config import TerminationConfig

NATIVE_DELAY = 1.0
"""Seconds: TensorFlow looks for its SIGTERM that often, so its key is that late."""


def make_watcher(
    config: TerminationConfig,
    cluster: Cluster,
    receive: Callable[[Notice], None],
    connection: Connection | None,
) -> Watcher:
    """What is to listen, once it is started; that is the main thread's to do.

    Args:
        config: names the sources and their grace.
        cluster: one with jobs has TensorFlow's key too.
        receive: is told a notice, on the thread of its source.
        connection: to remote workers; then their SIGTERM is heard of by that key.
    """
    sources = list(config.watched_sources())
    if cluster.jobs or connection is not None:
        from tfpreempt.coordination import tf_service

        grace = config.grace_seconds
        left = None if grace is None else after_travel(grace, NATIVE_DELAY)
        identity = None if connection is None else connection.notice_identity
        read = tf_service.read_native_notice
        alone = connection is not None
        native = NativeKeySource(read, identity=identity, is_alone=alone)
        sources.append(WatchedSource(native, left))
    return Watcher(sources, cluster.worker, receive)
