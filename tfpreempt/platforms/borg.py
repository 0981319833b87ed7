"""Borg-like platforms with TPUs: the coordinator leaves after its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from typing_extensions import Unpack

from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.core.threads import OwnedThread
from tfpreempt.platforms.config import (
    BorgTerminationConfig,
    Grace,
    Options,
    check_callable,
)

_logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class BorgTpuTerminationConfig(BorgTerminationConfig):
    """Leaves with 42 once the TPU workers are gone.

    The coordinator of a TPU cluster is started again at once. If it left first, it
    would connect to workers that are about to be taken away.

    Args:
        has_workers: tells, by the truth of what it returns, whether workers are still
            there; asked every half second on a thread of its own. If it raises, nobody
            can be reached any more, so they are gone. It may also block until they are.
            None: nobody is waited for.
        wait_limit: seconds to wait for them at most; then it leaves all the same.
        grace_period: as in `TerminationConfig`.
        **options: the other arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        *,
        has_workers: Callable[[], object] | None = None,
        wait_limit: float = 60.0,
        grace_period: Grace = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(grace_period=grace_period, **options)
        check_callable("has_workers", has_workers)
        self._has_workers = has_workers
        self._wait_limit = check_seconds("wait_limit", wait_limit)

    def leave(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Waits for the workers to be gone, with a limit, and leaves."""
        if self._has_workers is not None:
            self._wait(self._has_workers)
        super().leave(committed, cluster, mirrored=mirrored)

    def _wait(self, has_workers: Callable[[], object]) -> None:
        def look() -> None:
            try:
                while has_workers() and not thread.stop_event.wait(POLL_SECONDS):
                    pass
            except Exception as error:  # noqa: BLE001 - whoever can't be asked is gone
                _logger.info("the workers are gone (%s: %s)", type(error), error)

        thread = OwnedThread("tfpreempt-borg-tpu-exit", look)
        thread.start()
        if not thread.join(self._wait_limit):
            thread.stop_event.set()
            _logger.warning(
                "tfpreempt: the TPU workers are still there after %.0f s; leaving "
                "without waiting any longer. A larger wait_limit waits longer",
                self._wait_limit,
            )
