"""TerminationConfig: how a machine says that it goes, how long it leaves, how to leave.

A config is data: sources, grace, exit. A platform is a variant: a subclass with other
defaults, never an `if` in the handler.
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypedDict

from tfpreempt.core.arguments import is_seconds
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.callable import CallableSource
from tfpreempt.notice.file import FileSource, checked_path
from tfpreempt.notice.readers import guard_children
from tfpreempt.notice.signals import SignalSource, parse_signal
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import FindSources, WatchedSource

NOTICE_FILE_VARIABLE = "TFPREEMPT_NOTICE_FILE"

Grace = float | datetime.timedelta | None
SourceMaker = Callable[[], NoticeSource | WatchedSource]

FIELDS = ("termination_watcher_fn", "exit_fn", "grace_period", "save_fn")
"""As TensorFlow's config calls them too."""


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


class TerminationConfig:
    """When, with how much grace, and how to leave. Immutable.

    The first four parameters are those of
    `tf.distribute.experimental.TerminationConfig`. Unlike there, SIGTERM is watched
    beside a `termination_watcher_fn` too.

    Args:
        termination_watcher_fn: called every second on a thread of its own; True means
            that the machine is going away. What it raises is logged and tried again.
        exit_fn: leaves the process, usually `lambda: sys.exit(CODE)`; called on the
            main thread, or, where no boundary came before the deadline, on another. If
            it returns, training goes on. None: `sys.exit(exit_code)`.
        grace_period: seconds, or a timedelta, from a notice until the machine goes.
            None or 0: nobody knows; commit at once.
        save_fn: saves in place of tfpreempt, on every worker; a path that it returns
            gets a manifest.
        signals: watched signals, by name or number.
        notice_file: a file whose appearing is a notice; by default what the environment
            variable TFPREEMPT_NOTICE_FILE names, if set.
        sources: functions that each make one more NoticeSource, or a WatchedSource with
            a grace of its own; called anew for every handler that the config serves.
        uncommitted_exit_code: left with in place of `exit_fn` and `exit_code` by a
            preemption that committed nothing; None makes no difference.
        unmirrored_exit_code: the same for a commit whose copy in
            `remote_checkpoint_dir` was not whole in time.

    Attributes:
        termination_watcher_fn: the argument, as are `exit_fn` and `save_fn`.
        grace_seconds: the grace period in seconds; None where nobody knows.
        grace_period: the same, under TensorFlow's name.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    exit_code: ClassVar[int] = 143
    """What the platform restarts on: 128 + SIGTERM, as a killed process has."""

    def __init__(
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: Grace = None,
        save_fn: Callable[..., Any] | None = None,
        *,
        signals: Sequence[str | int] = ("SIGTERM",),
        notice_file: str | os.PathLike[str] | None = None,
        sources: Sequence[SourceMaker] = (),
        uncommitted_exit_code: int | None = None,
        unmirrored_exit_code: int | None = None,
    ) -> None:
        check_callable("termination_watcher_fn", termination_watcher_fn)
        check_callable("exit_fn", exit_fn)
        check_callable("save_fn", save_fn)
        for make in sources:
            check_callable("a member of sources", make)
        special = {
            "uncommitted_exit_code": uncommitted_exit_code,
            "unmirrored_exit_code": unmirrored_exit_code,
        }
        for name, code in special.items():
            if code is not None:
                check_code(name, code, self.exit_code if exit_fn is None else None)
        if isinstance(signals, str | int):
            signals = (signals,)
        grace = check_grace(grace_period)
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = self.grace_seconds = grace
        self.save_fn = save_fn
        self._signals = [(parse_signal(signum), grace) for signum in signals]
        if notice_file is None:
            notice_file = os.environ.get(NOTICE_FILE_VARIABLE) or None
        self._notice_file = None if notice_file is None else checked_path(notice_file)
        self._sources = tuple(sources)
        self._uncommitted_exit_code = uncommitted_exit_code
        self._unmirrored_exit_code = unmirrored_exit_code

    def __setattr__(self, name: str, value: object) -> None:
        if name in (*FIELDS, "grace_seconds") and name in vars(self):
            raise AttributeError(
                f"{name} of a {type(self).__name__} cannot be changed; make a new one"
            )
        super().__setattr__(name, value)

    def guard_children(self) -> None:
        """Keeps children that multiprocessing forks from now on from these signals."""
        for signum, _ in self._signals:
            guard_children(signum)

    def watched_signals(self) -> tuple[WatchedSource, ...]:
        """The signals alone; new sources at each call."""
        return tuple(
            WatchedSource(SignalSource(signum), grace)
            for signum, grace in self._signals
        )

    def watched_sources(self) -> tuple[WatchedSource, ...]:
        """What is to be watched; new sources at each call."""
        found: list[NoticeSource | WatchedSource] = [*self.watched_signals()]
        if self.termination_watcher_fn is not None:
            found.append(CallableSource(self.termination_watcher_fn))
        if self._notice_file is not None:
            found.append(FileSource(self._notice_file))
        found += [make() for make in self._sources]
        return tuple(
            each
            if isinstance(each, WatchedSource)
            else WatchedSource(each, self.grace_seconds)
            for each in found
        )

    def finder(self) -> FindSources | None:
        """Returns a function that finds more sources; None if there are no more.

        The function may take seconds, and may be called on any thread.
        """
        return None

    def code(self, committed: bool, mirrored: bool = True) -> int | None:
        """The exit code of `leave`; None where an `exit_fn` decides."""
        if not committed and self._uncommitted_exit_code is not None:
            return self._uncommitted_exit_code
        if committed and not mirrored and self._unmirrored_exit_code is not None:
            return self._unmirrored_exit_code
        return None if self.exit_fn is not None else self.exit_code

    def leave(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Leaves the process.

        Args:
            committed: whether this preemption made a commit.
            cluster: the workers, and which of them this is.
            mirrored: whether the newest commit is in `remote_checkpoint_dir`, or there
                is none.

        Raises:
            SystemExit: unless an `exit_fn` returns.
        """
        code = self.code(committed, mirrored)
        if code is None and self.exit_fn is not None:
            self.exit_fn()
            return
        sys.exit(code)

    def __repr__(self) -> str:
        try:
            says = f"{self._watch_text()}; {self._exit_text()}"
        except Exception as error:  # noqa: BLE001 - a repr helps with other errors
            says = f"cannot be told: {type(error).__name__}: {error}"
        return f"{type(self).__name__}({says})"

    def _watch_text(self) -> str:
        # Of a copy without what users make: that is not made for this.
        probe = copy.copy(self)
        probe._sources = ()
        texts = []
        for each in probe.watched_sources():
            grace = each.grace_seconds
            left = f"{grace:g} s" if grace else "with unknown grace"
            texts.append(f"{each.source.name} {left}")
        if self._sources:
            texts.append(f"{len(self._sources)} of sources=")
        return ", ".join(texts) or "watches nothing"

    def _exit_text(self) -> str:
        code, lost = self.code(True), self.code(False)
        texts = [] if code is None else [f"exit code {code}"]
        if lost not in (code, None):
            texts.append(f"{lost} where nothing was committed")
        if self._unmirrored_exit_code is not None:
            texts.append(f"{self._unmirrored_exit_code} where the copy was not in time")
        for name, function in (("exit_fn", self.exit_fn), ("save_fn", self.save_fn)):
            if function is not None:
                called = getattr(function, "__qualname__", type(function).__name__)
                texts.append(f"{name}={called}")
        return ", ".join(texts)


class GenericTerminationConfig(TerminationConfig):
    """Any platform that restarts a process which ends as if by SIGTERM (143)."""


class BorgTerminationConfig(TerminationConfig):
    """Borg-like platforms, which restart on exit code 42."""

    exit_code: ClassVar[int] = 42


def check_callable(name: str, value: Any) -> None:
    """Checks an optional function."""
    if value is not None and not callable(value):
        raise ConfigurationError(
            f"{name} is {value!r}, which cannot be called; expected a function or None"
        )


def check_code(name: str, code: Any, restart_code: int | None) -> None:
    """Checks an exit code that tells something apart from `restart_code`, if given."""
    whole = isinstance(code, int) and not isinstance(code, bool) and 0 < code < 256
    if not whole or code == restart_code:
        but = f" other than {restart_code}, with which a commit is left"
        raise ConfigurationError(
            f"{name} is {code!r}; expected an exit code from 1 to 255"
            f"{'' if restart_code is None else but}"
        )


def check_grace(grace: Any, name: str = "grace_period") -> float | None:
    """A grace period in seconds; 0 and None both mean that nobody knows: None."""
    if isinstance(grace, datetime.timedelta):
        grace = grace.total_seconds()
    if grace is not None and not is_seconds(grace):
        raise ConfigurationError(
            f"{name} is {grace!r}; expected a finite number of seconds from 0 on, a "
            "datetime.timedelta, or None where the platform does not say"
        )
    return float(grace) if grace else None
