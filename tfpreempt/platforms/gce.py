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
"""Longest time that the ACPI soft-off leaves after SIGTERM or a preemption notice."""


class GceTerminationConfig(TerminationConfig):
    """Base class of the configs for GCE machines; use a subclass. Exits with code 143.

    Watches entries of the metadata server (topics), each with its own grace period.
    Also watches SIGTERM, which is sent at the shutdown.

    Args:
        grace_period: seconds from the notice of a preemption: 30, or 120 if the VM is
            configured with this notice duration. After SIGTERM the grace period is at
            most 30 s.
        maintenance_grace_period: seconds from the notice of a maintenance that ends the
            VM; None: the default of the subclass.
        graceful_shutdown_period: seconds of the graceful shutdown with which the VM is
            configured. `stop-state` is then polled every 5 s, so 5 s are subtracted.
            None: the VM has no graceful shutdown.
        upcoming_maintenance_period: so many seconds before its window, an announced
            maintenance is a notice; the grace period is the remaining time until the
            window. (On TPUs, a maintenance is announced up to 7 days ahead.) None:
            announcements are not watched.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    maintenance_seconds: ClassVar[float | None] = None
    """Seconds from `maintenance-event` to the end of the VM; None: not watched."""

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
            # Subtract 5 s: stop-state is polled, because answers to hanging GETs do not
            # have it before a shutdown is pending.
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
        """Returns the sources of the base class, and a source per topic."""
        watch = GceWatch(self._graces, maintenance_lead_seconds=self._lead)
        return (*super()._notice_sources(), *watch.watched_sources(self._graces))


class GceCpuTerminationConfig(GceTerminationConfig):
    """Config of a VM without accelerators: a maintenance is announced 60 s ahead."""

    maintenance_seconds: ClassVar[float | None] = 60.0


class GceGpuTerminationConfig(GceTerminationConfig):
    """Config of a VM with GPUs: a maintenance is announced one hour ahead.

    A VM with GPUs cannot migrate. After the notice the step is committed at once, and
    training continues; a second commit follows at the end of the hour.
    """

    maintenance_seconds: ClassVar[float | None] = 3600.0


class GceTpuTerminationConfig(GceTerminationConfig):
    """Config of a TPU VM, on demand or preemptible."""

    maintenance_seconds: ClassVar[float | None] = 60.0


class GceSpotTerminationConfig(GceTerminationConfig):
    """Config of a Spot or preemptible VM: 30 s of notice, or 120 s if so configured.

    A maintenance preempts these VMs, so `maintenance-event` is watched only if
    `maintenance_grace_period` is given.
    """
