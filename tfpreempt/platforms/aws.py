"""Amazon EC2 Spot: two minutes, announced by the instance's metadata service."""

from __future__ import annotations

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.deadline import remaining_after_delay
from tfpreempt.notice.aws import INTERVAL_SECONDS, AwsWatch
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.platforms.config import ConfigOptions, TerminationConfig

INTERRUPTION_SECONDS = 120.0
SHUTDOWN_SECONDS = 30.0
"""Longest time left after SIGTERM, which comes with the shutdown after the notice."""


class AwsSpotTerminationConfig(TerminationConfig):
    """Config of a Spot instance: an interruption, or a termination by Auto Scaling.

    Exits with 143. A termination by the Auto Scaling group has an unknown grace period,
    so the step is committed at once.

    Args:
        grace_period: seconds from the interruption notice until the instance is
            terminated. The notice is polled every 5 s, which are subtracted. After
            SIGTERM at most 30 s remain in any case.
        rebalance: treat the rebalance recommendation as a notice too. The
            recommendation comes early, sometimes without a later interruption, and
            names no time: the step is committed and the process exits at once, to be
            started on a machine with less risk. A recommendation from before the
            handler was made is ignored.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        *,
        grace_period: Grace = INTERRUPTION_SECONDS,
        rebalance: bool = False,
        **options: Unpack[ConfigOptions],
    ) -> None:
        told = check_grace(grace_period)
        shutdown = None if told is None else min(told, SHUTDOWN_SECONDS)
        super().__init__(grace_period=shutdown, **options)
        left = None if told is None else remaining_after_delay(told, INTERVAL_SECONDS)
        self._graces = {"spot-interruption": left, "lifecycle": None}
        if rebalance:
            self._graces["rebalance"] = None

    def _notice_sources(self) -> tuple[NoticeSourceConfig, ...]:
        """Returns the base's sources, and a source per topic on a shared thread."""
        found = AwsWatch(self._graces).watched_sources(self._graces)
        return (*super()._notice_sources(), *found)
