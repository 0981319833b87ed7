"""Amazon EC2 Spot: the metadata service announces an interruption two minutes ahead."""

from __future__ import annotations

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.deadline import remaining_after_delay
from tfpreempt.notice.aws import INTERVAL_SECONDS, AwsWatch
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.platforms.config import ConfigOptions, TerminationConfig

INTERRUPTION_SECONDS = 120.0
SHUTDOWN_SECONDS = 30.0
"""Longest time that is left after SIGTERM, which the shutdown sends at the end of the
two minutes."""


class AwsSpotTerminationConfig(TerminationConfig):
    """Config of an EC2 Spot instance.

    Notices are the interruption of the instance, its termination by its Auto Scaling
    group, and SIGTERM. The grace period of a termination by the group is unknown, so
    the step is committed at once. The process exits with code 143.

    Args:
        grace_period: seconds from the interruption notice until the instance is
            terminated. tfpreempt subtracts 5 s, because it polls the service every 5 s.
            After SIGTERM the grace period is at most 30 s.
        rebalance: whether a rebalance recommendation is a notice, too. It comes early
            and without a time, and sometimes no interruption follows. tfpreempt commits
            the step and exits at once, so that the job can be restarted on an instance
            with a lower risk. Recommendations from before the creation of the handler
            are ignored.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        *,
        grace_period: Grace = INTERRUPTION_SECONDS,
        rebalance: bool = False,
        **options: Unpack[ConfigOptions],
    ) -> None:
        grace = check_grace(grace_period)
        shutdown = None if grace is None else min(grace, SHUTDOWN_SECONDS)
        super().__init__(grace_period=shutdown, **options)
        left = None if grace is None else remaining_after_delay(grace, INTERVAL_SECONDS)
        self._graces = {"spot-interruption": left, "lifecycle": None}
        if rebalance:
            self._graces["rebalance"] = None

    def _notice_sources(self) -> tuple[NoticeSourceConfig, ...]:
        """Returns the sources of the base class, and one for each topic watched."""
        found = AwsWatch(self._graces).watched_sources(self._graces)
        return (*super()._notice_sources(), *found)
