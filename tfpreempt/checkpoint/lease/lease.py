"""Allows one run per directory: the chief holds and renews the directory's lease.

A second run waits for the holder to exit: at most for the holder's grace period, the
expiry time and a margin. If the holder has certainly exited, or has not renewed the
lease for the expiry time, the second run takes over the lease. If the wait times out,
the second run fails with an error. No clocks of two machines are compared: the waiting
process adds up the time between its own polls while the holder's number of renewals
does not change (`lease_timeouts.py`).

`directory_lease.py` has the files of a lease, and the fence: protection against
commits by an earlier holder that was only suspended.
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

LOG_INTERVAL = 10.0  # seconds between two log lines of a wait
RELEASE = 2.0  # timeout of a release in seconds, because storage may hang

_held: weakref.WeakValueDictionary[str, Lease] = (
    weakref.WeakValueDictionary()  # key: token of the holder's record
)


class LeaseBackend(Protocol):
    """The storage of a lease: a directory, or a mirror in an object store.

    Methods may raise OSError or CheckpointError.

    Attributes:
        where: path or URL of the directory or mirror, for messages.
        pace: renewal, expiry and poll times of the lease.
    """

    where: str
    pace: RenewalIntervals

    def read_owner(self) -> ObservedLease | None:
        """Returns the lease that some process holds. None if the lease is free."""
        ...

    def take(self, holder: LeaseOwner) -> str | None:
        """Takes the lease, unless another process took it after the last `read_owner`.

        Returns the token of the new lease; None if another process was faster.
        """
        ...

    def has(self, token: str) -> bool:
        """Returns whether the lease with this token still exists. Raises an error if
        the storage gives no answer."""
        ...

    def end(self, token: str) -> None:
        """Ends the lease with this token, so that its holder can no longer commit."""
        ...

    def renew(self, token: str, count: int) -> None:
        """Renews the lease with this token, for the `count`-th time. Raises an error if
        the lease was ended."""
        ...

    def sweep(self) -> None:
        """Removes files of processes killed while taking the lease; never raises."""
        ...


def try_acquire(
    backend: LeaseBackend,
    here: LeaseOwner,
    why_over: Callable[[ObservedLease], str | None],
) -> str | None:
    """Takes a lease that is free, or that may be taken over. Does not wait.

    Args:
        backend: storage of the lease.
        here: record of the calling process.
        why_over: function that decides whether the found lease may be taken over.
            Returns the reason as text for people, or None if the lease is still valid.

    Returns:
        The token of the lease; None if another process holds the lease.

    Raises:
        SaveError: the files of the old lease belong to another user, and cannot be
            removed.
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
            owner = found.holder or "an unknown process"
            raise errors.SaveError(
                f"{backend.where!r} still has the lease of {owner} ({why}), and this "
                f"user has no permission to delete the lease: {error}. Delete the "
                "lease as its owner, or give both users write permission"
            ) from error
        if found.holder is not None and why:
            _log.info(
                "took over the lease of %s from %s (%s)",
                backend.where,
                found.holder,
                why,
            )
    return backend.take(here)


@dataclasses.dataclass(eq=False)
class Lease:
    """A lease held by the process from `acquire` to `release`, or until the object is
    garbage collected.

    A background thread renews the lease. Use the object on the main thread, or on the
    single thread that makes commits. A forked child does not hold the lease.

    Args:
        grace_seconds: grace period of this process, in seconds; written to the record.
        pause: function that waits for a number of seconds, and returns the seconds
            since the last poll; by default a wait in real time.
        disk: file operations on directories; by default the file system of this
            machine.

    Attributes:
        head: newest known commit by another process; shows whether another run has
            committed while this process did not hold the lease.
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
        """The token of the lease. None if this process does not hold the lease."""
        tenure = self._tenure
        is_mine = tenure is not None and tenure.process == os.getpid()
        return tenure.token if tenure is not None and is_mine else None

    def acquire(self, where: str | LeaseBackend) -> None:
        """Takes the lease. If another process holds the lease, waits for its exit.

        The wait has the timeout of `LeaseWait`. Does nothing if the lease was acquired
        before.

        Args:
            where: path of an existing checkpoint directory; or the storage of the
                lease, for a mirror.

        Raises:
            DirectoryLockedError: the holder is running, and did not exit in time.
            SaveError: error of the disk.
            CheckpointError: error of the object store.
        """
        if self._backend is not None:
            return
        name = where if isinstance(where, str) else where.where
        with os_errors.translated("acquire the lease", name):
            backend: LeaseBackend = (
                DirectoryLease(where, self.disk) if isinstance(where, str) else where
            )
            here = this_process(self.grace_seconds)
            wait, logged_at = LeaseWait(here, backend.pace), -LOG_INTERVAL
            pause = self.pause or _PollTimer()
            while not self._try(backend, here, wait):
                if wait.is_over:
                    raise errors.DirectoryLockedError(_in_use(backend, wait))
                if wait.waited >= logged_at + LOG_INTERVAL:
                    logged_at = wait.waited
                    _log.info(
                        "the lease of %s is held by %s; waiting up to %.0f s for that "
                        "process to exit (each run needs a separate directory)",
                        backend.where,
                        wait.holder or "a process that just acquired the lease",
                        wait.limit - wait.waited,
                    )
                wait.passed(pause(backend.pace.poll))
            backend.sweep()

    def acquire_if_free(self, directory: str) -> bool:
        """Takes the lease of a directory, unless another process or another `Lease`
        object holds the lease. Does not wait.

        Args:
            directory: path of an existing checkpoint directory.

        Returns:
            Whether the lease was taken.

        Raises:
            SaveError: error of the disk.
        """
        with os_errors.translated("acquire the lease", directory):
            backend = DirectoryLease(directory, self.disk)
            found = backend.read_owner()
            if found is not None and _of_this_process(found) is not None:
                return False
            here = this_process(self.grace_seconds)
            return self._try(backend, here, LeaseWait(here, backend.pace))

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Registers a function to be called when the lease is lost; calls the function
        at once if the lease is already lost.

        Args:
            call: function that receives the reason, as text for people; called on any
                thread.
        """
        with self._telling:
            self._on_loss = call
            lost = self._lost
        if lost:
            call(lost)

    def check(self) -> None:
        """Checks that the process holds the lease. If the process has released the
        lease, and the lease is free, takes the lease again.

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
            # Another process has ended the lease: this process has not released the
            # lease.
            self._lose()
        if self._lost:
            raise errors.LeaseLostError(self._lost)

    def lose_to_another_run(self) -> NoReturn:
        """Marks the lease as lost for good. Called if another run has committed while
        this process did not hold the lease.

        Raises:
            LeaseLostError: always.
        """
        self._lose(
            "another run has acquired the lease and committed, while this process did "
            "not hold the lease"
        )
        raise errors.LeaseLostError(self._lost)

    @contextlib.contextmanager
    def moving(self) -> Iterator[str | None]:
        """Returns a context for moving a file into the directory of the lease, or from
        there to its final name. If the lease is lost, the move fails.

        Yields:
            A new path in the directory of the lease; None for the lease of an object
            store.

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
        # Read only once: the thread that renews the lease may set the token to None.
        token = self.token
        if token is None:
            raise errors.LeaseLostError(self._lost)
        try:
            yield backend.fenced_path(token)
        except OSError as error:
            if error.errno in GONE:
                self.check()
            raise

    def release(self) -> None:
        """Releases the lease, so that another process can take it. The next save of
        this process takes the lease again (by `check`)."""
        tenure, self._tenure = self._tenure, None
        if tenure is None:
            return
        try:
            call_within(RELEASE, tenure.end)
        except CallTimeoutError:
            _log.warning(
                "%s does not respond, so the lease is not released; the next start may "
                "have to wait until the lease expires",
                tenure.backend.where,
            )
        except RuntimeError:  # the interpreter is exiting, and starts no more threads
            tenure.end()

    def _try(self, backend: LeaseBackend, here: LeaseOwner, wait: LeaseWait) -> bool:
        """Tries to take the lease, without waiting. Returns whether the lease was
        taken.

        Args:
            backend: storage of the lease.
            here: record of this process.
            wait: decides whether the lease of another process may be taken over.
        """

        def why_over(found: ObservedLease) -> str | None:
            if mine := _of_this_process(found):
                # A closed handler of this process has kept this lease: release it, so
                # that `try_acquire` can take it. (No open handler can hold it, because
                # two open handlers cannot use the same directory.)
                mine.release()
                return ""
            return wait.expiry_reason(found)

        token = try_acquire(backend, here, why_over)
        if token is None:
            return False
        # Set the attributes before the thread starts: the thread may find at once that
        # the lease is lost.
        self._backend = backend
        self._tenure = _ActiveLease(backend, token, self)
        self._tenure.start()
        _held[here.token] = self
        return True

    def _lose(self, why: str = "") -> None:
        """Marks the lease as lost, for good, and calls the function that `on_loss` has
        registered. Does nothing if the lease is already lost. Any thread may call.

        Args:
            why: reason of the loss; "" to find the reason: the process is a fork, or
                another process holds the lease.
        """
        assert self._backend is not None
        tenure = self._tenure
        is_forked = tenure is not None and tenure.process != os.getpid()
        if tenure is not None and is_forked:
            why = (
                f"process {tenure.process} holds the lease, and this process is a fork "
                f"of process {tenure.process}; save in process {tenure.process}, or in "
                "a separate directory"
            )
        why = why or (
            f"the lease is now held by {_who_has(self._backend)}. Either this process "
            "was suspended, or without access to the storage, for longer than "
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
    """Releases all leases of this process. Called before an exit without cleanup.

    So the next run need not wait for the leases to expire. In an ordinary exit, the
    owner of a `Lease` calls `release`, or Python's finalizers end the lease.
    """
    # Iterate over a copy, because a thread may take a lease during the loop.
    for found in _held.valuerefs():
        if (lease := found()) is not None:
            lease.release()


class _ActiveLease(ManagedThread):
    """A lease that this process has taken, and the thread that renews the lease.

    Args:
        backend: storage of the lease.
        token: token of the lease.
        owner: the `Lease` that is marked as lost if the lease is lost. Only a weak
            reference is kept: garbage collection of the owner ends the lease.

    Attributes:
        end: function that ends the lease; further calls do nothing. Never raises.
        backend: storage of the lease.
        token: token of the lease.
        process: id of the process that took the lease; a forked child does not hold the
            lease.
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
        count, is_logged = 0, False
        while not self.stop_event.wait(self.backend.pace.renewal):
            count += 1
            try:
                self.backend.renew(self.token, count)
                is_logged = False
            except (OSError, errors.CheckpointError) as error:
                if self.is_lost():
                    if not self.stop_event.is_set() and (lose := self._lose()):
                        lose()
                    return
                if not is_logged:
                    is_logged = True
                    _log.warning(
                        "could not renew the lease of %s; retrying while training "
                        "continues: %s",
                        self.backend.where,
                        error,
                    )

    def is_lost(self) -> bool:
        """Returns whether the lease no longer exists.

        False if the storage does not answer.
        """
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
    """Waits between two polls of a lease: the default `pause` of `Lease`. A call waits
    for a number of seconds, and returns the seconds since the last call."""

    last: float = dataclasses.field(default_factory=lambda: time.monotonic())

    def __call__(self, seconds: float) -> float:
        threading.Event().wait(seconds)
        before, self.last = self.last, time.monotonic()
        return self.last - before


def _of_this_process(found: ObservedLease) -> Lease | None:
    """Returns the `Lease` object of this process that holds the found lease; None if
    another process holds the found lease.

    The holder's record in the lease is compared, not the path of the directory, because
    two paths can lead to the same directory.
    """
    if found.holder is None or found.holder.pid != os.getpid():
        return None
    return _held.get(found.holder.token)


def _who_has(backend: LeaseBackend) -> LeaseOwner | str:
    with contextlib.suppress(OSError, errors.CheckpointError):
        found = backend.read_owner()
        if found is not None and found.holder is not None:
            return found.holder
    return "no process"


def _in_use(backend: LeaseBackend, wait: LeaseWait) -> str:
    if wait.holder is None:
        return (
            f"{backend.where!r} has a lease without an owner, which cannot be "
            f"acquired: {layout.LEASE!r} in this directory has entries that are not "
            "leases of tfpreempt. Move these entries elsewhere, and delete "
            f"{layout.LEASE!r}"
        )
    return (
        f"{backend.where!r} is in use: its lease is held by {wait.holder}, which still "
        f"renews the lease after {wait.waited:.0f} s. Two runs in one checkpoint "
        "directory would overwrite each other's commits. Wait until the other run "
        "ends, or end the other run, or use a separate directory for this run"
    )
