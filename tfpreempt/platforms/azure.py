"""Azure: Scheduled Events, such as a preemption in 30 s or a reboot in 15 min."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.errors import NoticeError
from tfpreempt.notice.azure import DEFAULT_KINDS, AzureWatch
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.platforms.config import ConfigOptions, TerminationConfig

_logger = logging.getLogger(__name__)

PREEMPT = "Preempt"
PREEMPT_SECONDS = 30.0
PLANNED_SECONDS = 300.0
"""Shortest time from the notice of an event that is no preemption to the event:
Terminate 5 to 15 min, Redeploy 10 min, Reboot 15 min.
"""


class AzureTerminationConfig(TerminationConfig):
    """Config of an Azure VM, Spot or not, with its Scheduled Events.

    The process exits with code 143.

    Args:
        grace_period: seconds from the notice of a preemption, or from SIGTERM, until
            the VM is taken away.
        planned_grace_period: seconds from the notice of an event of another kind until
            the event. (For Terminate, a VM can be configured with 300 to 900 s.)
        kinds: kinds of events that are notices: any of Preempt, Terminate, Reboot,
            Redeploy and Freeze.
        acknowledge: whether to acknowledge the event after the commit, so that Azure
            starts the event at once, not at the announced time. An exiting worker sends
            the acknowledgement for all machines, if the event names its machine first.
            The event may start while other workers are still exiting, but not before
            the commit is complete.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        *,
        grace_period: Grace = PREEMPT_SECONDS,
        planned_grace_period: Grace = PLANNED_SECONDS,
        kinds: Sequence[str] = DEFAULT_KINDS,
        acknowledge: bool = False,
        **options: Unpack[ConfigOptions],
    ) -> None:
        super().__init__(grace_period=grace_period, **options)
        planned = check_grace(planned_grace_period, "planned_grace_period")
        chosen = AzureWatch(kinds).topics  # raises for an unknown kind
        self._graces = {
            kind: self.grace_seconds if kind == PREEMPT else planned for kind in chosen
        }
        self._acknowledges = acknowledge

    def _notice_sources(self) -> tuple[NoticeSourceConfig, ...]:
        """Returns the sources of the base class, and one for each kind of event."""
        found = AzureWatch(self._graces).watched_sources(self._graces)
        return (*super()._notice_sources(), *found)

    def _exit(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Acknowledges the events if a commit was made, then exits.

        Events are acknowledged only if `acknowledge` is True. The arguments are those
        of the base class.
        """
        try:
            super()._exit(committed, cluster, mirrored=mirrored)
        except SystemExit:
            # Acknowledge only here: if an exit_fn returns, training continues, and the
            # VM must not be ended early.
            if committed and self._acknowledges:
                self._acknowledge()
            raise

    def _acknowledge(self) -> None:
        try:
            for event in AzureWatch(self._graces).acknowledge():
                _logger.info("event %s of Azure is acknowledged", event)
        except Exception as error:
            # Ignore the error: it must not change the exit code.
            _logger.warning(
                "the event of Azure could not be acknowledged (%s). No work is lost: "
                "Azure takes the VM away at the announced time instead of at once",
                error,
                exc_info=not isinstance(error, NoticeError),
            )
