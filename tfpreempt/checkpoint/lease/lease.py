"""One run, one directory: its chief holds the directory's lease, and renews it.

A second start waits as long as the first may need to leave, and at most that long. It
takes the lease over at once where its holder provably died, and where nothing renewed
it for a while; else it is refused. No two clocks are compared: who waits counts the
time between its own looks, over which the holder's counter stood still
(`lease_timeouts.py`).

How it lies on a disk, and what fences a holder that was only suspended:
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
from tfpreempt.checkpoint.lease.directory_lease import GONE, Disk, LeaseDirectory
from tfpreempt.checkpoint.lease.lease_record import Found, Holder, this_process
from tfpreempt.checkpoint.lease.lease_timeouts import GRACE, Patience, Renewal
from tfpreempt.core.threads import OutOfTimeError, OwnedThread, call_within
from tfpreempt.storage import failure

_log = logging.getLogger(__name__)

SAID_EACH = 10.0  # seconds of waiting
RELEASE = 2.0  # seconds that letting go may take where the storage hangs

_held: weakref.WeakValueDictionary[str, Lease] = (
    weakref.WeakValueDictionary()  # by the token in the holder's record
)


class Place(Protocol):
    """What one run at a time has: a directory, or a place in an object store.

    All methods raise OSError or CheckpointError.
    """

    where: str
    pace: Renewal

    def look(self) -> Found | None:
        """Who has it; None if nobody."""
        ...

    def take(self, holder: Holder) -> str | None:
        """Takes it, as it was at the last look; its token, None if that failed."""
        ...

    def has(self, token: str) -> bool:
        """Whether a lease is not over; raises where nothing is known for now."""
        ...

    def end(self, token: str) -> None:
        """Ends a lease: its holder commits nothing any more."""
        ...

    def beat(self, token: str, count: int) -> None:
        """Renews a lease; raises where it is over."""
        ...

    def sweep(self) -> None:
        """Removes what was left by starts that were killed; never raises."""
        ...


def attempt(
    place: Place, here: Holder, why_over: Callable[[Found], str | None]
) -> str | None:
    """Takes a lease that nobody has, or whose holder counts for nothing.

    Args:
        place: of the directory.
        here: who takes it.
        why_over: why a lease counts for nothing, for people; None if it counts.

    Returns:
        Its token; None where another one has it, or was quicker.

    Raises:
        SaveError: another user left it.
        OSError: as the file system says.
        CheckpointError: as the object store says.
    """
    found = place.look()
    if found is not None:
        why = why_over(found)
        if why is None:
            return None
        try:
            place.end(found.token)
        except PermissionError as error:
            who = found.holder or "a process"
            raise errors.SaveError(
                f"{place.where!r} still has the lease of {who}, {why}, which this user "
                f"may not remove: {error}. Remove it as the user that it belongs to, "
                "or let both write there"
            ) from error
        if found.holder is not None and why:
            _log.warning(
                "tfpreempt: took over %s from %s, %s",
                place.where,
                found.holder,
                why,
            )
    return place.take(here)


@dataclasses.dataclass(eq=False)
class Lease:
    """Held by this process from `acquire` to `release`, or until it is dropped.

    Main thread, or the one thread that writes under it. A child that was forked does
    not hold it.

    Args:
        grace_seconds: that this process may need to leave.
        pause: waits so many seconds, and says how many passed since the last look.
        disk: where directories are.

    Attributes:
        head: of the directory or mirror; keeps apart the commits of two runs.
    """

    grace_seconds: float = dataclasses.field(default_factory=lambda: GRACE)
    _: dataclasses.KW_ONLY
    pause: Callable[[float], float] | None = None
    disk: Disk | None = None
    head: Head = dataclasses.field(default_factory=Head, init=False)
    _place: Place | None = dataclasses.field(default=None, init=False)
    _tenure: _Tenure | None = dataclasses.field(default=None, init=False)
    _telling: Any = dataclasses.field(default_factory=threading.Lock, init=False)
    _on_loss: Callable[[str], None] | None = dataclasses.field(default=None, init=False)
    _lost: str = dataclasses.field(default="", init=False)

    @property
    def token(self) -> str | None:
        """Of the lease, where this process holds it."""
        tenure = self._tenure
        is_mine = tenure is not None and tenure.process == os.getpid()
        return tenure.token if tenure is not None and is_mine else None

    def acquire(self, where: str | Place) -> None:
        """Takes the lease; waits for its owner, as long as the owner may need to exit.

        A lease that was taken before stays as it is.

        Args:
            where: path of the checkpoint directory, which exists; or the place of
                another lease.

        Raises:
            DirectoryInUseError: the owner lives, and does not exit.
            SaveError: the disk.
            CheckpointError: the object store.
        """
        if self._place is not None:
            return
        name = where if isinstance(where, str) else where.where
        with failure.translated("take the lease", name):
            place: Place = (
                LeaseDirectory(where, self.disk) if isinstance(where, str) else where
            )
            here = this_process(self.grace_seconds)
            patience, said_at = Patience(here, place.pace), -SAID_EACH
            pause = self.pause or _Looks()
            while not self._try(place, here, patience):
                if patience.is_over:
                    raise errors.DirectoryInUseError(_in_use(place, patience))
                if patience.waited >= said_at + SAID_EACH:
                    said_at = patience.waited
                    _log.warning(
                        "tfpreempt: %s is held by %s; waiting up to %.0f s for it to "
                        "leave (two runs need a directory each)",
                        place.where,
                        patience.holder or "a process that just took it",
                        patience.limit - patience.waited,
                    )
                patience.passed(pause(place.pace.poll))
            place.sweep()

    def acquire_if_free(self, directory: str) -> bool:
        """Takes the lease unless another process or another `Lease` holds the lease.

        Args:
            directory: the checkpoint directory, which exists.

        Returns:
            Whether the lease was taken.

        Raises:
            SaveError: the disk.
        """
        with failure.translated("take the lease", directory):
            place = LeaseDirectory(directory, self.disk)
            found = place.look()
            if found is not None and _of_this_process(found) is not None:
                return False
            here = this_process(self.grace_seconds)
            return self._try(place, here, Patience(here, place.pace))

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Calls, on any thread, when it is lost, with the reason; at once if it was."""
        with self._telling:
            self._on_loss = call
            lost = self._lost
        if lost:
            call(lost)

    def check(self) -> None:
        """Refuses to go on without it. One that was released is taken again.

        Raises:
            LeaseLostError: another process has it.
            OSError: as the file system says.
        """
        if self._place is None:
            return
        tenure = self._tenure
        if self.token is None and not self._lost:
            here = this_process(self.grace_seconds)
            if not self._try(self._place, here, Patience(here, self._place.pace)):
                self._lose()
        elif tenure is not None and tenure.is_lost() and self._tenure is tenure:
            self._lose()  # and did not let go of it meanwhile, on another thread
        if self._lost:
            raise errors.LeaseLostError(self._lost)

    def lose_to_another_run(self) -> NoReturn:
        """Loses the lease for good: another run had it meanwhile, and committed.

        Raises:
            LeaseLostError: always.
        """
        self._lose("another run has had it meanwhile, and committed")
        raise errors.LeaseLostError(self._lost)

    @contextlib.contextmanager
    def moving(self) -> Iterator[str | None]:
        """A path by which to move a file; None where there is no lease to be had.

        Raises:
            LeaseLostError: another process has it.
            OSError: as the file system says.
        """
        place = self._place
        if not isinstance(place, LeaseDirectory):
            yield None
            return
        if self.token is None:
            self.check()
        token = self.token  # read once: the thread that renews may lose it now
        if token is None:
            raise errors.LeaseLostError(self._lost)
        try:
            yield place.way(token)
        except OSError as error:
            if error.errno in GONE:
                self.check()
            raise

    def release(self) -> None:
        """Others may have it from now on; a save of this process takes it again."""
        tenure, self._tenure = self._tenure, None
        if tenure is None:
            return
        try:
            call_within(RELEASE, tenure.end)
        except OutOfTimeError:
            _log.warning(
                "tfpreempt: %s does not answer; the next start may have to wait until "
                "its lease expires",
                tenure.place.where,
            )
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            tenure.end()

    def _try(self, place: Place, here: Holder, patience: Patience) -> bool:
        """Takes it unless somebody has it; whether that was done."""

        def why_over(found: Found) -> str | None:
            if mine := _of_this_process(found):
                mine.release()  # the session knows whether two may be open in one
                return ""
            return patience.why_over(found)

        token = attempt(place, here, why_over)
        if token is None:
            return False
        self._place = place  # before the thread begins, which may find it lost at once
        self._tenure = _Tenure(place, token, self)
        self._tenure.start()
        _held[here.token] = self
        return True

    def _lose(self, why: str = "") -> None:
        """It is lost, once and for all; any thread."""
        assert self._place is not None
        tenure = self._tenure
        is_forked = tenure is not None and tenure.process != os.getpid()
        if tenure is not None and is_forked:
            why = (
                f"process {tenure.process} holds it, from which this process was "
                "forked; save there, or in a directory of this process's own"
            )
        why = why or (
            f"it is held by {_who_has(self._place)} now. This process was frozen, or "
            f"cut off from its storage, for longer than {self._place.pace.expiry:g} s; "
            "or somebody removed its lease"
        )
        with self._telling:
            if self._lost:
                return
            self._lost = (
                f"the lease of {self._place.where!r} is lost: {why}. This process "
                "commits nothing any more, and leaves"
            )
            call = self._on_loss
        _log.error("tfpreempt: %s", self._lost)
        self.release()
        if call is not None and not is_forked:
            call(self._lost)


def release_all() -> None:
    """The process ends hard: the next start need not wait for what it holds.

    Elsewhere the owner of a lease releases it, or Python, which ends what is left.
    """
    for found in _held.valuerefs():  # a copy: threads may take one meanwhile
        if (lease := found()) is not None:
            lease.release()


class _Tenure(OwnedThread):
    """A lease from its taking to its end; a thread renews it.

    Args:
        place: of the directory.
        token: of the lease.
        owner: is told of its loss; held weakly. Dropped, it has ended the lease.

    Attributes:
        end: lets others have it, once; never raises.
        place: see above.
        token: see above.
        process: which took it; a child that was forked has no part in it.
    """

    def __init__(
        self,
        place: Place,
        token: str,
        owner: Lease,
    ) -> None:
        super().__init__("tfpreempt-lease", self._renew)
        self.place, self.token = place, token
        self.process = os.getpid()
        self._lose = weakref.WeakMethod(owner._lose)
        self.end = weakref.finalize(owner, self._end)

    def _renew(self) -> None:
        count, is_said = 0, False
        while not self.stop_event.wait(self.place.pace.renewal):
            count += 1
            try:
                self.place.beat(self.token, count)
                is_said = False
            except (OSError, errors.CheckpointError) as error:
                if self.is_lost():
                    if not self.stop_event.is_set() and (lose := self._lose()):
                        lose()
                    return
                if not is_said:
                    is_said = True
                    _log.warning(
                        "tfpreempt: the lease of %s cannot be renewed, and is tried "
                        "again; training goes on: %s",
                        self.place.where,
                        error,
                    )

    def is_lost(self) -> bool:
        """Whether it was ended: not where nothing is known of it for a while."""
        try:
            return not self.place.has(self.token)
        except (OSError, errors.CheckpointError):
            return False

    def _end(self) -> None:
        if os.getpid() != self.process:
            return
        self.stop_event.set()
        try:
            self.place.end(self.token)
        except (OSError, errors.CheckpointError, RuntimeError) as error:
            _log.warning(
                "tfpreempt: the lease of %s cannot be given back, so the next start "
                "may have to wait until it expires: %s",
                self.place.where,
                error,
            )


@dataclasses.dataclass
class _Looks:
    """Pauses, and returns the seconds from the last look at the lease to the next."""

    last: float = dataclasses.field(default_factory=lambda: time.monotonic())

    def __call__(self, seconds: float) -> float:
        threading.Event().wait(seconds)
        before, self.last = self.last, time.monotonic()
        return self.last - before


def _of_this_process(found: Found) -> Lease | None:
    """The lease that this process has there already, by whatever name."""
    if found.holder is None or found.holder.pid != os.getpid():
        return None
    return _held.get(found.holder.token)


def _who_has(place: Place) -> Holder | str:
    with contextlib.suppress(OSError, errors.CheckpointError):
        found = place.look()
        if found is not None and found.holder is not None:
            return found.holder
    return "nobody"


def _in_use(place: Place, patience: Patience) -> str:
    if patience.holder is None:
        return (
            f"{place.where!r} has a lease of nobody, which cannot be taken: something "
            f"that is no lease lies where leases do. Remove {layout.LEASE!r} there"
        )
    return (
        f"{place.where!r} is in use: its lease is held by {patience.holder}, which "
        f"still renews it after {patience.waited:.0f} s. Two runs in one checkpoint "
        "directory would mix their steps. Wait until that one has ended, or end it; or "
        "give this run a directory of its own"
    )
