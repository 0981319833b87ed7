"""Google Compute Engine: a config for every kind of machine."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.deadline import remaining_after_delay
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.gce import HANG_BETWEEN_SINGLES_SECONDS, GceWatch
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.platforms.config import ConfigOptions, TerminationConfig

SHUTDOWN_SECONDS = 30.0
"""Longest time from SIGTERM to the end of the VM, which ACPI soft-off shuts down."""


class GceTerminationConfig(TerminationConfig):
    """Base class of the configs for GCE machines; use a subclass.

    Notices are entries of the metadata server (topics), each with a separate grace
    period, and SIGTERM, which the shutdown sends. The process exits with code 143.

    Args:
        grace_period: seconds from the notice of a preemption: 30, or 120 if the VM is
            configured with this notice duration. After SIGTERM the grace period is at
            most 30 s.
        maintenance_grace_period: seconds from the notice of a maintenance that ends the
            VM; None: the default of the subclass.
        graceful_shutdown_period: duration in seconds of the graceful shutdown that is
            configured for the VM. If given, the entry `stop-state` is polled every 5 s,
            so 5 s are subtracted from the grace period. None: the VM has no graceful
            shutdown.
        upcoming_maintenance_period: seconds from the notice of an announced maintenance
            to the start of its window. The grace period is the remaining time until the
            window. (On TPUs, a maintenance is announced up to 7 days ahead.) None:
            announcements are not watched.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    maintenance_seconds: ClassVar[float | None] = None
    """Seconds from a notice of `maintenance-event` to the end of the VM.

    None: the entry is not watched."""

    def __init__(
        self,
        *,
        grace_period: Grace = SHUTDOWN_SECONDS,
        maintenance_grace_period: Grace = None,
        graceful_shutdown_period: Grace = None,
        upcoming_maintenance_period: Grace = None,
        **options: Unpack[ConfigOptions],
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
            # Subtract 5 s: `stop-state` is polled every 5 s, because the answers to
            # hanging GETs do not contain the entry before a shutdown is pending.
            graceful = remaining_after_delay(graceful, HANG_BETWEEN_SINGLES_SECONDS)
        if graceful_shutdown_period is not None:
            self._graces["stop-state"] = graceful
        period = upcoming_maintenance_period
        self._lead = check_grace(period, "upcoming_maintenance_period")
        if self._lead is not None:
            self._graces["upcoming-maintenance"] = self._lead
        elif period is not None:
            raise ConfigurationError(
                f"upcoming_maintenance_period is {period!r}; expected the seconds "
                "from the exit of the job to the maintenance, more than 0, or None to "
                "watch no announcements"
            )

    def _notice_sources(self) -> tuple[NoticeSourceConfig, ...]:
        """Returns the sources of the base class, and one for each topic watched."""
        watch = GceWatch(self._graces, maintenance_lead_seconds=self._lead)
        return (*super()._notice_sources(), *watch.watched_sources(self._graces))


class GceCpuTerminationConfig(GceTerminationConfig):
    """Config of a VM without accelerators: a maintenance is announced 60 s ahead."""

    maintenance_seconds: ClassVar[float | None] = 60.0


class GceGpuTerminationConfig(GceTerminationConfig):
    """Config of a VM with GPUs: a maintenance is announced one hour ahead.

    A VM with GPUs cannot migrate, so a maintenance ends the VM. After the notice the
    step is committed at once, and training continues. A second commit is made shortly
    before the hour is over.
    """

    maintenance_seconds: ClassVar[float | None] = 3600.0


class GceTpuTerminationConfig(GceTerminationConfig):
    """Config of a TPU VM, on demand or preemptible."""

    maintenance_seconds: ClassVar[float | None] = 60.0


class GceSpotTerminationConfig(GceTerminationConfig):
    """Config of a Spot or preemptible VM.

    A preemption is announced 30 s ahead, or 120 s if the VM is configured so. At a
    maintenance these VMs are preempted, so the entry `maintenance-event` is watched
    only if `maintenance_grace_period` is given.
    """
