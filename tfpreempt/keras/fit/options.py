"""What the user of the callback asked for, checked."""

from __future__ import annotations

import dataclasses
import datetime
import os
from typing import Any

from tfpreempt import errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See the arguments of `PreemptionCallback`."""

    checkpoint_dir: str
    save_freq: str | int | datetime.timedelta | None
    termination_config: Any
    restore: bool
    save_timeout: float
    max_to_keep: int | None
    remote_checkpoint_dir: Any


def check_directory(given: Any) -> str:
    """Checks the argument `checkpoint_dir`.

    Raises:
        ConfigurationError: it is no path.
    """
    directory = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if not directory or not isinstance(directory, str):
        raise errors.ConfigurationError(
            f"checkpoint_dir is {given!r}; expected the path of a directory of its own "
            "for this run, on storage that all workers share"
        )
    return directory


def check_save_freq(given: Any) -> str | int | datetime.timedelta | None:
    """Checks the argument `save_freq`.

    Raises:
        ConfigurationError: it is none of the four kinds.
    """
    is_time = isinstance(given, datetime.timedelta) and given.total_seconds() > 0
    is_count = isinstance(given, int) and not isinstance(given, bool) and given > 0
    if given is None or given == "epoch" or is_time or is_count:
        return given  # type: ignore[no-any-return]  # checked
    raise errors.ConfigurationError(
        f'save_freq is {given!r}; expected "epoch", a positive number of batches (an '
        "int), a positive datetime.timedelta (timedelta(minutes=5)), or None for "
        "notices only"
    )
