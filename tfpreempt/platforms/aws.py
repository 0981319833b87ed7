"""Amazon EC2 Spot: two minutes, told by the instance's metadata service."""

from __future__ import annotations

from typing_extensions import Unpack

from tfpreempt.core.deadline import after_travel
from tfpreempt.notice.aws import INTERVAL_SECONDS, AwsWatch
from tfpreempt.notice.watcher import WatchedSource
from tfpreempt.platforms.config import Grace, Options, TerminationConfig, check_grace

INTERRUPTION_SECONDS = 120.0
SHUTDOWN_SECONDS = 30.0
"""What SIGTERM leaves at most: it comes with the shutdown, at the end of the notice."""


class AwsSpotTerminationConfig(TerminationConfig):
    """A Spot instance that is interrupted, or taken by its Auto Scaling group.

    Leaves with 143. The end of a life in an Auto Scaling group comes with an unknown
    grace, so it is committed at once.

    Args:
        grace_period: seconds from the interruption notice until the instance goes. It
            is looked for every 5 s, which are taken off. SIGTERM leaves 30 s at most in
            any case.
        rebalance: take the rebalance recommendation for a notice too. It comes early,
            at times without an interruption after it, and says no time: the step is
            committed and the process leaves at once, to be started on a machine that
            is less at risk. One from before the handler was made is passed over.
        **options: the other arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        *,
        grace_period: Grace = INTERRUPTION_SECONDS,
        rebalance: bool = False,
        **options: Unpack[Options],
    ) -> None:
        told = check_grace(grace_period)
        shutdown = None if told is None else min(told, SHUTDOWN_SECONDS)
        super().__init__(grace_period=shutdown, **options)
        left = None if told is None else after_travel(told, INTERVAL_SECONDS)
        self._graces = {"spot-interruption": left, "lifecycle": None}
        if rebalance:
            self._graces["rebalance"] = None

    def watched_sources(self) -> tuple[WatchedSource, ...]:
        """The base's, and the topics, which share one thread."""
        found = AwsWatch(self._graces).watched_sources(self._graces)
        return (*super().watched_sources(), *found)
