"""Google Compute Engine: what its metadata server says of each kind of machine."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import Unpack

from tfpreempt.core.deadline import after_travel
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.gce import HANG_BETWEEN_SINGLES_SECONDS, GceWatch
from tfpreempt.notice.watcher import WatchedSource
from tfpreempt.platforms.config import Grace, Options, TerminationConfig, check_grace

SHUTDOWN_SECONDS = 30.0
"""What the ACPI soft-off leaves at most: from SIGTERM, or from a preemption notice."""


class GceTerminationConfig(TerminationConfig):
    """What all machines of GCE share; use one of the variants. Leaves with 143.

    The metadata server is watched for the variant's topics, each with its own grace,
    beside SIGTERM, which comes with the shutdown.

    Args:
        grace_period: seconds from the notice of a preemption: 30, or the notice
            duration that the VM was made with (120), which only the metadata server
            tells. SIGTERM leaves 30 s at most in any case.
        maintenance_grace_period: seconds from the notice of a maintenance that ends
            the VM; None: what the variant says.
        graceful_shutdown_period: seconds of the graceful shutdown that the VM was made
            with; its `stop-state` is watched then, every 5 s, which are taken off.
            None: it has none.
        upcoming_maintenance_period: take a maintenance that is announced, on TPUs up to
            7 days ahead, for a notice once its window begins within so many seconds.
            The grace is what is left until then. None: announcements are not watched.
        **options: the other arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    maintenance_seconds: ClassVar[float | None] = None
    """From `maintenance-event` until the VM goes; None: it is not watched."""

    def __init__(
        self,
        *,
        grace_period: Grace = SHUTDOWN_SECONDS,
        maintenance_grace_period: Grace = None,
        graceful_shutdown_period: Grace = None,
        upcoming_maintenance_period: Grace = None,
        **options: Unpack[Options],
    ) -> None:
        preempted = check_grace(grace_period)
        shutdown = None if preempted is None else min(preempted, SHUTDOWN_SECONDS)
        super().__init__(grace_period=shutdown, **options)
        self._graces = {"preempted": preempted}
        if maintenance_grace_period is None:
            maintenance_grace_period = self.maintenance_seconds
        if maintenance_grace_period is not None:
            self._graces["maintenance-event"] = check_grace(
                maintenance_grace_period, "maintenance_grace_period"
            )
        graceful = check_grace(graceful_shutdown_period, "graceful_shutdown_period")
        if graceful is not None:
            # No part of what the server tells in a hanging GET until it is there.
            graceful = after_travel(graceful, HANG_BETWEEN_SINGLES_SECONDS)
        if graceful_shutdown_period is not None:
            self._graces["stop-state"] = graceful
        period = upcoming_maintenance_period
        self._lead = check_grace(period, "upcoming_maintenance_period")
        if self._lead is not None:
            self._graces["upcoming-maintenance"] = self._lead
        elif period is not None:
            raise ConfigurationError(
                f"upcoming_maintenance_period is {period!r}; expected the seconds "
                "ahead of the maintenance at which the job is to leave, more than 0, "
                "or None not to watch announcements"
            )

    def watched_sources(self) -> tuple[WatchedSource, ...]:
        """The base's, and the topics, which share one thread."""
        watch = GceWatch(self._graces, maintenance_lead_seconds=self._lead)
        return (*super().watched_sources(), *watch.watched_sources(self._graces))


class GceCpuTerminationConfig(GceTerminationConfig):
    """A VM without accelerators: a maintenance that ends it is told 60 s ahead."""

    maintenance_seconds: ClassVar[float | None] = 60.0


class GceGpuTerminationConfig(GceTerminationConfig):
    """A VM with GPUs, which cannot migrate: maintenance is told an hour ahead.

    The step is committed at once, training goes on, and is committed once more at the
    end of the hour.
    """

    maintenance_seconds: ClassVar[float | None] = 3600.0


class GceTpuTerminationConfig(GceTerminationConfig):
    """A TPU VM, on demand or preemptible."""

    maintenance_seconds: ClassVar[float | None] = 60.0


class GceSpotTerminationConfig(GceTerminationConfig):
    """A Spot or preemptible VM: 30 s, or 120 where it was made with that.

    For maintenance such a VM is preempted, so that is not watched unless
    `maintenance_grace_period` is given.
    """
