"""What the user of the callback asked for, checked."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from tfpreempt import errors
from tfpreempt.handler.registration import CheckpointOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options(CheckpointOptions):
    """See the arguments of `PreemptionCallback`.

    Raises:
        ConfigurationError: the directory is no path, or `save_freq` none of the kinds.
    """

    checkpoint_dir: str
    save_freq: str | int | datetime.timedelta | None
    termination_config: Any
    save_timeout: float

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint_dir, str) or not self.checkpoint_dir:
            raise errors.ConfigurationError(
                f"checkpoint_dir is {self.checkpoint_dir!r}; expected the path of a "
                "directory of its own for this run, on storage that all workers share"
            )
        every: Any = self.save_freq
        is_time = isinstance(every, datetime.timedelta) and every.total_seconds() > 0
        is_count = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if not (every is None or every == "epoch" or is_time or is_count):
            raise errors.ConfigurationError(
                f'save_freq is {every!r}; expected "epoch", a positive number of '
                "batches (an int), a positive datetime.timedelta "
                "(timedelta(minutes=5)), or None for notices only"
            )
