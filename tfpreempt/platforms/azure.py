"""Azure: Scheduled Events, from a preemption in 30 s to a reboot in 15 min."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from typing_extensions import Unpack

from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.errors import NoticeError
from tfpreempt.notice.azure import DEFAULT_KINDS, AzureWatch
from tfpreempt.notice.watcher import WatchedSource
from tfpreempt.platforms.config import Grace, Options, TerminationConfig, check_grace

_logger = logging.getLogger(__name__)

PREEMPT = "Preempt"
PREEMPT_SECONDS = 30.0
PLANNED_SECONDS = 300.0
"""The shortest of what the others leave: Terminate 5 to 15 min, Redeploy 10, Reboot 15.
"""


class AzureTerminationConfig(TerminationConfig):
    """A Spot VM that is evicted, or any VM that is maintained. Leaves with 143.

    Args:
        grace_period: seconds from the notice of a preemption until the VM goes, and
            from SIGTERM.
        planned_grace_period: the same of all other kinds of events; a VM's own setting
            for Terminate is from 300 to 900.
        kinds: which events are notices, of Preempt, Terminate, Reboot, Redeploy and
            Freeze.
        acknowledge: after the commit, tell Azure that it need not wait any longer.
            That counts for all machines that an event names, so the worker on the first
            of them does it when it leaves. The event may start while others still
            leave; the commit is durable by then.
        **options: the other arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        *,
        grace_period: Grace = PREEMPT_SECONDS,
        planned_grace_period: Grace = PLANNED_SECONDS,
        kinds: Sequence[str] = DEFAULT_KINDS,
        acknowledge: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(grace_period=grace_period, **options)
        planned = check_grace(planned_grace_period, "planned_grace_period")
        chosen = AzureWatch(kinds).topics  # raises for one that is unknown
        self._graces = {
            kind: self.grace_seconds if kind == PREEMPT else planned for kind in chosen
        }
        self._acknowledges = acknowledge

    def watched_sources(self) -> tuple[WatchedSource, ...]:
        """The base's, and the kinds of events, which share one thread."""
        found = AzureWatch(self._graces).watched_sources(self._graces)
        return (*super().watched_sources(), *found)

    def leave(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Leaves, having acknowledged the events if that is wanted."""
        try:
            super().leave(committed, cluster, mirrored=mirrored)
        except SystemExit:
            # Not before: an exit_fn that returns trains on, and the VM would be gone.
            if committed and self._acknowledges:
                self._acknowledge()
            raise

    def _acknowledge(self) -> None:
        try:
            for event in AzureWatch(self._graces).acknowledge():
                _logger.warning("tfpreempt: acknowledged Azure's event %s", event)
        except Exception as error:
            # The exit code must go on.
            _logger.error(
                "tfpreempt: Azure's event could not be acknowledged (%s). Nothing is "
                "lost: the machine goes at the announced time instead of at once",
                error,
                exc_info=not isinstance(error, NoticeError),
            )
