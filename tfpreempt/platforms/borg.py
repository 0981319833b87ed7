"""Borg-like platforms with TPUs: the coordinator exits after the TPU workers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_seconds
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.core.threads import ManagedThread
from tfpreempt.platforms.config import (
    BorgTerminationConfig,
    ConfigOptions,
    check_callable,
)

_logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class BorgTpuTerminationConfig(BorgTerminationConfig):
    """Config of a TPU coordinator: exits with code 42 when the TPU workers have ended.

    The platform restarts the coordinator immediately. If the coordinator exited before
    the workers had ended, the restarted coordinator would connect to workers that are
    about to be taken away.

    Args:
        has_workers: function that returns true while TPU workers are running. Before
            the exit, a separate thread calls the function every half second. If it
            raises an error, the workers are assumed to have ended. The function may
            also block until the workers have ended. None: the exit does not wait.
        wait_limit: maximum seconds that the exit waits for the workers.
        grace_period: grace period, as in `TerminationConfig`.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        *,
        has_workers: Callable[[], object] | None = None,
        wait_limit: float = 60.0,
        grace_period: Grace = None,
        **options: Unpack[ConfigOptions],
    ) -> None:
        super().__init__(grace_period=grace_period, **options)
        check_callable("has_workers", has_workers)
        self._has_workers = has_workers
        self._wait_limit = check_seconds("wait_limit", wait_limit)

    def _exit(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Waits until the TPU workers have ended, at most `wait_limit`, and exits.

        The arguments are those of the base class.
        """
        if self._has_workers is not None:
            self._wait(self._has_workers)
        super()._exit(committed, cluster, mirrored=mirrored)

    def _wait(self, has_workers: Callable[[], object]) -> None:
        def look() -> None:
            try:
                while has_workers() and not thread.stop_event.wait(POLL_SECONDS):
                    pass
            except Exception as error:  # noqa: BLE001 - unreachable workers are gone
                _logger.info(
                    "the TPU workers are unreachable, and count as terminated (%s: %s)",
                    type(error).__name__,
                    error,
                )

        thread = ManagedThread("tfpreempt-borg-tpu-exit", look)
        thread.start()
        if not thread.join(self._wait_limit):
            thread.stop_event.set()
            _logger.warning(
                "the TPU workers still run after %.0f s; exiting without waiting "
                "longer. A larger wait_limit makes the process wait longer",
                self._wait_limit,
            )
