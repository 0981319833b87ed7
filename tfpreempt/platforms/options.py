"""What every variant takes beside its own arguments: those of TerminationConfig."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from tfpreempt.platforms.config import SourceMaker


class Options(TypedDict, total=False):
    """Keyword arguments of `TerminationConfig`, which describes them.

    All but `grace_period`: that has another default on each platform.
    """

    termination_watcher_fn: Callable[[], Any] | None
    exit_fn: Callable[[], Any] | None
    save_fn: Callable[..., Any] | None
    signals: Sequence[str | int]
    notice_file: str | os.PathLike[str] | None
    sources: Sequence[SourceMaker]
    uncommitted_exit_code: int | None
    unmirrored_exit_code: int | None
