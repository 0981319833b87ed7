"""Allows one run per directory: the chief holds and renews the directory's lease.

A second start waits for the holder to exit, up to the holder's grace period, the expiry
time and a margin. The second start takes the lease over at once if the holder provably
ended, or if the lease has not been renewed for the expiry time. Otherwise the start is
refused. No two clocks are compared: the waiting process adds up the time between its
own polls while the holder's counter does not change (`lease_timeouts.py`).

The files of a lease, and the fence against a holder that was only suspended:
`directory_lease.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.head import Head
from tfpreempt.checkpoint.lease.directory_lease import (
    GONE,
    DirectoryLease,
    LeaseFileSystem,
)
from tfpreempt.checkpoint.lease.lease_record import (
    LeaseOwner,
    ObservedLease,
    this_process,
)
from tfpreempt.checkpoint.lease.lease_timeouts import GRACE, LeaseWait, RenewalIntervals
from tfpreempt.core.threads import CallTimeoutError, ManagedThread, call_within
from tfpreempt.storage import os_errors

_log = logging.getLogger(__name__)

SAID_EACH = 10.0  # seconds from one log line of a wait to the next
RELEASE = 2.0  # timeout in seconds of a release, for storage that hangs

_held: weakref.WeakValueDictionary[str, Lease] = (
    weakref.WeakValueDictionary()  # by the token of the holder's record
)


class LeaseBackend(Protocol):
    """The storage of a lease: a directory, or a mirror in an object store.

    Every method raises OSError or CheckpointError.
    """

    where: str
    pace: RenewalIntervals

    def read_owner(self) -> ObservedLease | None:
        """Returns the lease held here by some process; None if the lease is free."""
        ...

    def take(self, holder: LeaseOwner) -> str | None:
        """Takes the lease if nothing has changed since the last `look`.

        Returns the token of the lease; None if another process was faster.
        """
        ...

    def has(self, token: str) -> bool:
        """Returns whether a lease still exists; raises if the answer is unknown."""
        ...

    def end(self, token: str) -> None:
        """Ends a lease: the holder can commit nothing from now on."""
        ...

    def renew(self, token: str, count: int) -> None:
        """Renews a lease; raises if the lease was ended."""
        ...

    def sweep(self) -> None:
        """Removes the remains of killed starts; never raises."""
        ...


def try_acquire(
    backend: LeaseBackend,
    here: LeaseOwner,
    why_over: Callable[[ObservedLease], str | None],
) -> str | None:
    """Takes a free lease, or a lease whose holder no longer counts.

    Args:
        backend: storage of the lease.
        here: record of the calling process.
        why_over: function that returns why a lease can be taken over, for people; None
            if the lease still counts.

    Returns:
        The token of the lease; None if another process holds the lease, or was faster.

    Raises:
        SaveError: the lease belongs to another user, and cannot be removed.
        OSError: error of the file system.
        CheckpointError: error of the object store.
    """
    found = backend.read_owner()
    if found is not None:
        why = why_over(found)
        if why is None:
            return None
        try:
            backend.end(found.token)
        except PermissionError as error:
            who = found.holder or "a process"
            raise errors.SaveError(
                f"{backend.where!r} still has the lease of {who}, {why}, which this "
                f"user may not delete: {error}. Delete the lease as its owner, or "
                "give both users write permission"
            ) from error
        if found.holder is not None and why:
            _log.info(
                "took over %s from %s, %s",
                backend.where,
                found.holder,
                why,
            )
    return backend.take(here)


@dataclasses.dataclass(eq=False)
class Lease:
    """A lease held by this process from `acquire` to `release`, or until garbage
    collection.

    For the main thread, or the single thread that writes under the lease. A forked
    child does not hold the lease.

    Args:
        grace_seconds: grace period of this process, in seconds.
        pause: function that waits for a number of seconds, and returns the seconds
            since the last poll; by default a wait in real time.
        disk: file operations on directories; by default the file system of this
            machine.

    Attributes:
        head: head of the directory or mirror; keeps the commits of two runs apart.
    """

    grace_seconds: float = dataclasses.field(default_factory=lambda: GRACE)
    _: dataclasses.KW_ONLY
    pause: Callable[[float], float] | None = None
    disk: LeaseFileSystem | None = None
    head: Head = dataclasses.field(default_factory=Head, init=False)
    _backend: LeaseBackend | None = dataclasses.field(default=None, init=False)
    _tenure: _ActiveLease | None = dataclasses.field(default=None, init=False)
    _telling: Any = dataclasses.field(default_factory=threading.Lock, init=False)
    _on_loss: Callable[[str], None] | None = dataclasses.field(default=None, init=False)
    _lost: str = dataclasses.field(default="", init=False)

    @property
    def token(self) -> str | None:
        """The token of the lease; None if this process does not hold the lease."""
        tenure = self._tenure
        is_mine = tenure is not None and tenure.process == os.getpid()
        return tenure.token if tenure is not None and is_mine else None

    def acquire(self, where: str | LeaseBackend) -> None:
        """Takes the lease; waits for the holder to exit, at most as `LeaseWait` says.

        A lease taken before is kept unchanged.

        Args:
            where: path of an existing checkpoint directory; or the storage of another
                kind of lease.

        Raises:
            DirectoryLockedError: the holder runs, and does not exit.
            SaveError: error of the disk.
            CheckpointError: error of the object store.
        """
        if self._backend is not None:
            return
        name = where if isinstance(where, str) else where.where
        with os_errors.translated("take the lease", name):
            backend: LeaseBackend = (
                DirectoryLease(where, self.disk) if isinstance(where, str) else where
            )
            here = this_process(self.grace_seconds)
            wait, said_at = LeaseWait(here, backend.pace), -SAID_EACH
            pause = self.pause or _PollTimer()
            while not self._try(backend, here, wait):
                if wait.is_over:
                    raise errors.DirectoryLockedError(_in_use(backend, wait))
                if wait.waited >= said_at + SAID_EACH:
                    said_at = wait.waited
                    _log.info(
                        "%s is held by %s; waiting up to %.0f s for that process to "
                        "exit (each run needs a separate directory)",
                        backend.where,
                        wait.holder or "a process that just acquired the lease",
                        wait.limit - wait.waited,
                    )
                wait.passed(pause(backend.pace.poll))
            backend.sweep()

    def acquire_if_free(self, directory: str) -> bool:
        """Takes the lease unless another process or another `Lease` holds the lease.

        Args:
            directory: path of an existing checkpoint directory.

        Returns:
            Whether the lease was taken.

        Raises:
            SaveError: error of the disk.
        """
        with os_errors.translated("take the lease", directory):
            backend = DirectoryLease(directory, self.disk)
            found = backend.read_owner()
            if found is not None and _of_this_process(found) is not None:
                return False
            here = this_process(self.grace_seconds)
            return self._try(backend, here, LeaseWait(here, backend.pace))

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Registers a function to be called with the reason when the lease is lost."""
        with self._telling:
            self._on_loss = call
            lost = self._lost
        if lost:
            call(lost)

    def check(self) -> None:
        """Raises if the lease is lost; takes a released lease again.

        Raises:
            LeaseLostError: the lease is lost.
            OSError: error of the file system.
        """
        if self._backend is None:
            return
        tenure = self._tenure
        if self.token is None and not self._lost:
            here = this_process(self.grace_seconds)
            if not self._try(self._backend, here, LeaseWait(here, self._backend.pace)):
                self._lose()
        elif tenure is not None and tenure.is_lost() and self._tenure is tenure:
            self._lose()  # and no other thread released the lease meanwhile
        if self._lost:
            raise errors.LeaseLostError(self._lost)

    def lose_to_another_run(self) -> NoReturn:
        """Loses the lease for good: another run held it meanwhile, and committed.

        Raises:
            LeaseLostError: always.
        """
        self._lose("another run has held the lease meanwhile, and committed")
        raise errors.LeaseLostError(self._lost)

    @contextlib.contextmanager
    def moving(self) -> Iterator[str | None]:
        """Yields a path by which to move a file; None for storage without such paths.

        Raises:
            LeaseLostError: the lease is lost.
            OSError: error of the file system.
        """
        backend = self._backend
        if not isinstance(backend, DirectoryLease):
            yield None
            return
        if self.token is None:
            self.check()
        token = self.token  # read once: the renewing thread may lose it now
        if token is None:
            raise errors.LeaseLostError(self._lost)
        try:
            yield backend.fenced_path(token)
        except OSError as error:
            if error.errno in GONE:
                self.check()
            raise

    def release(self) -> None:
        """Releases the lease for other processes; the next save here takes the lease
        again."""
        tenure, self._tenure = self._tenure, None
        if tenure is None:
            return
        try:
            call_within(RELEASE, tenure.end)
        except CallTimeoutError:
            _log.warning(
                "%s does not answer; the next start may have to wait until the lease "
                "expires",
                tenure.backend.where,
            )
        except RuntimeError:  # the interpreter exits, and starts no more threads
            tenure.end()

    def _try(self, backend: LeaseBackend, here: LeaseOwner, wait: LeaseWait) -> bool:
        """Takes the lease if possible; returns whether the lease was taken."""

        def why_over(found: ObservedLease) -> str | None:
            if mine := _of_this_process(found):
                mine.release()  # the session decides whether two may be open at once
                return ""
            return wait.expiry_reason(found)

        token = try_acquire(backend, here, why_over)
        if token is None:
            return False
        # Set before the thread starts: the thread may lose the lease at once.
        self._backend = backend
        self._tenure = _ActiveLease(backend, token, self)
        self._tenure.start()
        _held[here.token] = self
        return True

    def _lose(self, why: str = "") -> None:
        """Marks the lease as lost, once and for good; any thread."""
        assert self._backend is not None
        tenure = self._tenure
        is_forked = tenure is not None and tenure.process != os.getpid()
        if tenure is not None and is_forked:
            why = (
                f"process {tenure.process} holds the lease, and this process was "
                "forked from that process; save there, or in a separate directory"
            )
        why = why or (
            f"{_who_has(self._backend)} holds the lease now. This process was "
            "suspended, or cut off from the storage, for longer than "
            f"{self._backend.pace.expiry:g} s; or the lease was deleted"
        )
        with self._telling:
            if self._lost:
                return
            self._lost = (
                f"the lease of {self._backend.where!r} is lost: {why}. This process "
                "makes no more commits, and exits"
            )
            call = self._on_loss
        _log.error("%s", self._lost)
        self.release()
        if call is not None and not is_forked:
            call(self._lost)


def release_all() -> None:
    """Releases every lease of this process, which is about to exit without cleanup.

    The next start then need not wait for the leases to expire. On other paths the owner
    of a `Lease` releases the lease, or Python's finalizers do at exit.
    """
    for found in _held.valuerefs():  # a copy: a thread may take a lease meanwhile
        if (lease := found()) is not None:
            lease.release()


class _ActiveLease(ManagedThread):
    """A lease between its taking and its end; a thread renews the lease.

    Args:
        backend: storage of the lease.
        token: token of the lease.
        owner: the `Lease` to inform of a loss; held weakly. Its garbage collection ends
            the lease.

    Attributes:
        end: ends the lease, once; never raises.
        backend: storage of the lease.
        token: token of the lease.
        process: id of the process that took the lease; a forked child does not hold it.
    """

    def __init__(
        self,
        backend: LeaseBackend,
        token: str,
        owner: Lease,
    ) -> None:
        super().__init__("tfpreempt-lease", self._renew)
        self.backend, self.token = backend, token
        self.process = os.getpid()
        self._lose = weakref.WeakMethod(owner._lose)
        self.end = weakref.finalize(owner, self._end)

    def _renew(self) -> None:
        count, is_said = 0, False
        while not self.stop_event.wait(self.backend.pace.renewal):
            count += 1
            try:
                self.backend.renew(self.token, count)
                is_said = False
            except (OSError, errors.CheckpointError) as error:
                if self.is_lost():
                    if not self.stop_event.is_set() and (lose := self._lose()):
                        lose()
                    return
                if not is_said:
                    is_said = True
                    _log.warning(
                        "could not renew the lease of %s; retrying while training "
                        "continues: %s",
                        self.backend.where,
                        error,
                    )

    def is_lost(self) -> bool:
        """Returns whether the lease was ended; False while the storage gives no
        answer."""
        try:
            return not self.backend.has(self.token)
        except (OSError, errors.CheckpointError):
            return False

    def _end(self) -> None:
        if os.getpid() != self.process:
            return
        self.stop_event.set()
        try:
            self.backend.end(self.token)
        except (OSError, errors.CheckpointError, RuntimeError) as error:
            _log.warning(
                "could not release the lease of %s, so the next start may have to "
                "wait until the lease expires: %s",
                self.backend.where,
                error,
            )


@dataclasses.dataclass
class _PollTimer:
    """Pauses between polls, and returns the seconds since the last poll of the
    lease."""

    last: float = dataclasses.field(default_factory=lambda: time.monotonic())

    def __call__(self, seconds: float) -> float:
        threading.Event().wait(seconds)
        before, self.last = self.last, time.monotonic()
        return self.last - before


def _of_this_process(found: ObservedLease) -> Lease | None:
    """Returns the lease of the found record, if this process holds that lease; else
    None.

    The path may differ: two names can lead to one directory.
    """
    if found.holder is None or found.holder.pid != os.getpid():
        return None
    return _held.get(found.holder.token)


def _who_has(backend: LeaseBackend) -> LeaseOwner | str:
    with contextlib.suppress(OSError, errors.CheckpointError):
        found = backend.read_owner()
        if found is not None and found.holder is not None:
            return found.holder
    return "nobody"


def _in_use(backend: LeaseBackend, wait: LeaseWait) -> str:
    if wait.holder is None:
        return (
            f"{backend.where!r} has a lease without an owner, which cannot be "
            f"acquired: {layout.LEASE!r} there is not a lease. Delete "
            f"{layout.LEASE!r} there"
        )
    return (
        f"{backend.where!r} is in use: its lease is held by {wait.holder}, which "
        f"still renews the lease after {wait.waited:.0f} s. Two runs in one "
        "checkpoint directory would mix their steps. Wait until the other run ends, "
        "or end it; or give this run a separate directory"
    )
