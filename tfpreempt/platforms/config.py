"""TerminationConfig: which notices are watched, the grace period, and how to exit.

Each platform has a subclass with other defaults, so the handler needs no code for a
particular platform.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypedDict

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.callable import CallableSource
from tfpreempt.notice.file import FileSource, checked_path
from tfpreempt.notice.forked_children import guard_children
from tfpreempt.notice.signals import SignalSource, parse_signal
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import FindSources, NoticeSourceConfig

NOTICE_FILE_VARIABLE = "TFPREEMPT_NOTICE_FILE"

SourceMaker = Callable[[], NoticeSource | NoticeSourceConfig]

FIELDS = ("termination_watcher_fn", "exit_fn", "grace_period", "save_fn")
"""Arguments that TensorFlow's TerminationConfig has, too."""


class ConfigOptions(TypedDict, total=False):
    """Types of the keyword arguments of `TerminationConfig`; see its documentation.

    `grace_period` is not included, because each subclass defines its own default.
    """

    termination_watcher_fn: Callable[[], object] | None
    exit_fn: Callable[[], object] | None
    save_fn: Callable[..., Any] | None
    signals: Sequence[str | int]
    notice_file: str | os.PathLike[str] | None
    sources: Sequence[SourceMaker]
    uncommitted_exit_code: int | None
    mirror_incomplete_exit_code: int | None


class TerminationConfig:
    """Defines which notices are watched, the grace period, and how to exit. Immutable.

    The first four parameters are those of
    `tf.distribute.experimental.TerminationConfig`. In contrast to TensorFlow, SIGTERM
    is also watched if there is a `termination_watcher_fn`.

    Args:
        termination_watcher_fn: function called every second on a separate thread;
            returns True if the machine is about to be terminated. If the function
            raises an error, the error is logged, and the function is called again.
        exit_fn: function that exits the process, usually `lambda: sys.exit(CODE)`. It
            is called on the main thread; on another thread if the running step did not
            end before the deadline. If the function returns, training continues. None:
            `sys.exit(exit_code)`.
        grace_period: seconds, or a timedelta, from a notice until the machine is
            terminated. None or 0: unknown; the step is committed at once.
        save_fn: function that writes the checkpoint on every worker; tfpreempt then
            writes none. If the function returns the path of its checkpoint, tfpreempt
            adds a manifest file with checksums.
        signals: signals to watch, by name or number.
        notice_file: path of a file whose appearance is a notice; by default the value
            of the environment variable TFPREEMPT_NOTICE_FILE, if set.
        sources: further sources of notices. Each item is a result of `gce_source`,
            `aws_source` or `azure_source` in `tfpreempt.notice`, or a function without
            arguments. The function returns a `tfpreempt.notice.NoticeSourceConfig`, or
            a `tfpreempt.notice.NoticeSource`; for a NoticeSource the `grace_period` of
            this config applies. Each handler with this config calls the functions
            again.
        uncommitted_exit_code: exit code if no commit could be made at a preemption; it
            replaces `exit_fn` and `exit_code`. None: no special exit code.
        mirror_incomplete_exit_code: exit code if the commit could not be uploaded to
            `mirror_dir` in time; it replaces `exit_fn` and `exit_code`. None: no
            special exit code.

    Attributes:
        termination_watcher_fn: the argument of the same name.
        exit_fn: the argument of the same name.
        save_fn: the argument of the same name.
        grace_seconds: the grace period in seconds; None if unknown.
        grace_period: equal to `grace_seconds`; the name in TensorFlow.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    exit_code: ClassVar[int] = 143
    """Exit code that requests a restart. 143 is 128 + SIGTERM: the code of a process
    that SIGTERM has killed."""

    def __init__(
        self,
        termination_watcher_fn: Callable[[], object] | None = None,
        exit_fn: Callable[[], object] | None = None,
        grace_period: Grace = None,
        save_fn: Callable[..., Any] | None = None,
        *,
        signals: Sequence[str | int] = ("SIGTERM",),
        notice_file: str | os.PathLike[str] | None = None,
        sources: Sequence[SourceMaker] = (),
        uncommitted_exit_code: int | None = None,
        mirror_incomplete_exit_code: int | None = None,
    ) -> None:
        check_callable("termination_watcher_fn", termination_watcher_fn)
        check_callable("exit_fn", exit_fn)
        check_callable("save_fn", save_fn)
        for make in sources:
            check_callable("an item of sources", make)
        special = {
            "uncommitted_exit_code": uncommitted_exit_code,
            "mirror_incomplete_exit_code": mirror_incomplete_exit_code,
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
        self._unmirrored_exit_code = mirror_incomplete_exit_code

    def __setattr__(self, name: str, value: object) -> None:
        if name in (*FIELDS, "grace_seconds") and name in vars(self):
            raise AttributeError(
                f"{name} of a {type(self).__name__} cannot be changed; make a new one"
            )
        super().__setattr__(name, value)

    def _shield_children(self) -> None:
        """Makes future children of multiprocessing survive the watched signals."""
        for signum, _ in self._signals:
            guard_children(signum)

    def _signal_sources(self) -> tuple[NoticeSourceConfig, ...]:
        """Returns a new source for every watched signal; no other sources."""
        return tuple(
            NoticeSourceConfig(SignalSource(signum), grace)
            for signum, grace in self._signals
        )

    def _notice_sources(self) -> tuple[NoticeSourceConfig, ...]:
        """Returns new sources for all that the config watches, signals included."""
        found: list[NoticeSource | NoticeSourceConfig] = [*self._signal_sources()]
        if self.termination_watcher_fn is not None:
            found.append(CallableSource(self.termination_watcher_fn))
        if self._notice_file is not None:
            found.append(FileSource(self._notice_file))
        found += [make() for make in self._sources]
        return tuple(
            each
            if isinstance(each, NoticeSourceConfig)
            else NoticeSourceConfig(each, self.grace_seconds)
            for each in found
        )

    def _source_finder(self) -> FindSources | None:
        """Returns a function that searches for more sources; None: no search is needed.

        The returned function may take seconds, and may be called on any thread.
        """
        return None

    def _exit_code_for(self, committed: bool, mirrored: bool = True) -> int | None:
        """Returns the exit code that `_exit` uses; None if `exit_fn` chooses the code.

        Args:
            committed: whether a commit was made at this preemption.
            mirrored: whether the newest commit was uploaded to `mirror_dir`; True
                without a mirror.
        """
        if not committed and self._uncommitted_exit_code is not None:
            return self._uncommitted_exit_code
        if committed and not mirrored and self._unmirrored_exit_code is not None:
            return self._unmirrored_exit_code
        return None if self.exit_fn is not None else self.exit_code

    def _exit(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Exits the process.

        Args:
            committed: whether a commit was made at this preemption.
            cluster: the workers of the run, and the index of this worker.
            mirrored: whether the newest commit was uploaded to `mirror_dir`; True
                without a mirror.

        Raises:
            SystemExit: always, except if an `exit_fn` returns.
        """
        code = self._exit_code_for(committed, mirrored)
        if code is None and self.exit_fn is not None:
            self.exit_fn()
            return
        sys.exit(code)

    def __repr__(self) -> str:
        try:
            details = f"{self._watch_text()}; {self._exit_text()}"
        except Exception as error:  # noqa: BLE001 - a repr must not raise
            details = f"cannot be shown: {type(error).__name__}: {error}"
        return f"{type(self).__name__}({details})"

    def _watch_text(self) -> str:
        # Use a copy without `sources`, because a call of the user's functions may have
        # side effects.
        probe = copy.copy(self)
        probe._sources = ()
        texts = []
        for each in probe._notice_sources():
            grace = each.grace_seconds
            left = f"{grace:g} s" if grace else "with an unknown grace period"
            texts.append(f"{each.source.name} {left}")
        if self._sources:
            texts.append(f"{len(self._sources)} of sources=")
        return ", ".join(texts) or "watches nothing"

    def _exit_text(self) -> str:
        code, lost = self._exit_code_for(True), self._exit_code_for(False)
        texts = [] if code is None else [f"exit code {code}"]
        if lost not in (code, None):
            texts.append(f"{lost} if nothing was committed")
        if self._unmirrored_exit_code is not None:
            texts.append(f"{self._unmirrored_exit_code} if the mirror is incomplete")
        for name, function in (("exit_fn", self.exit_fn), ("save_fn", self.save_fn)):
            if function is not None:
                called = getattr(function, "__qualname__", type(function).__name__)
                texts.append(f"{name}={called}")
        return ", ".join(texts)


class GenericTerminationConfig(TerminationConfig):
    """Config of a platform that restarts a process after exit code 143."""


class BorgTerminationConfig(TerminationConfig):
    """Config of a Borg-like platform, which restarts a process after exit code 42."""

    exit_code: ClassVar[int] = 42


def check_callable(name: str, value: Any) -> None:
    """Raises ConfigurationError unless the value is a function or None.

    Args:
        name: name of the user's argument, for the error message.
        value: value of the user's argument.
    """
    if value is not None and not callable(value):
        raise ConfigurationError(
            f"{name} is {value!r}, which is not callable; expected a function or None"
        )


def check_code(name: str, code: Any, restart_code: int | None) -> None:
    """Raises ConfigurationError unless `code` is valid and differs from `restart_code`.

    Args:
        name: name of the user's argument, for the error message.
        code: exit code to check; valid are 1 to 255.
        restart_code: exit code after a commit; None if unknown.
    """
    whole = isinstance(code, int) and not isinstance(code, bool) and 0 < code < 256
    if not whole or code == restart_code:
        but = f" other than {restart_code}, the exit code after a commit"
        raise ConfigurationError(
            f"{name} is {code!r}; expected an exit code from 1 to 255"
            f"{'' if restart_code is None else but}"
        )
