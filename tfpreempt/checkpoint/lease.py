"""One run, one directory: its chief holds the directory's lease, and renews it.

A second start waits as long as the first may need to leave, and at most that long. It
takes the lease over at once where its holder provably died, and where nothing renewed
it for `EXPIRY` seconds; else it is refused. No two clocks are compared: who waits
counts its own looks, between which the holder's counter stood still.

How it lies on a disk, and what fences a holder that only was frozen: `fence`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from tfpreempt import errors
from tfpreempt.checkpoint.fence import Disk, Found, LeaseDirectory
from tfpreempt.checkpoint.holder import Holder, this_process
from tfpreempt.core.threads import OwnedThread
from tfpreempt.storage import failure, paths

_log = logging.getLogger(__name__)

RENEWAL = 5.0  # seconds from one beat to the next
EXPIRY = 30.0  # without a beat; a node's lease in Kubernetes has 40
GRACE = 30.0  # seconds that a holder may need to leave, where nobody knows
LONGEST_GRACE = 180.0  # that is waited for: the other workers wait for this start
MARGIN = 10.0  # more than the grace and the expiry
POLL = 0.2
SAID_EACH = 10.0

_held: weakref.WeakValueDictionary[tuple[str, str], Lease] = (
    weakref.WeakValueDictionary()
)


class Patience:
    """What a start may do about a lease that another process has; no clock, no I/O.

    Args:
        here: the process that waits.

    Attributes:
        holder: who has it, as far as was seen.
        limit: seconds that the wait may take.
        waited: seconds that it took so far.
    """

    def __init__(self, here: Holder) -> None:
        self._here = here
        self._last: tuple[str, bytes] | None = None
        self._silent = 0.0
        self.holder: Holder | None = None
        self.limit = GRACE + EXPIRY + MARGIN
        self.waited = 0.0

    def passed(self, seconds: float) -> None:
        """So long after the last look. A pause of this process, or of its machine,
        says nothing of the holder: it counts as a few looks."""
        seconds = min(max(seconds, POLL), 5 * POLL)
        self.waited += seconds
        self._silent += seconds

    def why_over(self, found: Found) -> str | None:
        """Why a lease counts for nothing, by what is seen now; None if it counts."""
        if self._last != (found.token, found.beat):
            self._last, self._silent = (found.token, found.beat), 0.0
        self.holder = found.holder
        if found.holder is None:
            return "which was leaving"
        if found.holder.is_dead(self._here):
            return "which is dead"
        if self._silent >= EXPIRY:
            return f"which did not renew it for {self._silent:.0f} s"
        grace = found.holder.grace_seconds
        is_one = 0.0 <= grace <= LONGEST_GRACE  # and a number
        self.limit = (grace if is_one else LONGEST_GRACE) + EXPIRY + MARGIN
        return None

    @property
    def is_over(self) -> bool:
        """Whether the wait is: its holder would have left, or died, by now."""
        return self.waited >= self.limit


class Place(Protocol):
    """What one run at a time has: a directory, or a place in an object store.

    All methods raise OSError or CheckpointError.
    """

    where: str

    def look(self) -> Found | None:
        """Who has it; None if nobody."""
        ...

    def take(self, holder: Holder) -> str | None:
        """Takes it, as it was at the last look; its token, None if that failed."""
        ...

    def end(self, token: str) -> None:
        """Ends a lease: its holder commits nothing any more."""
        ...

    def beat(self, token: str, count: int) -> None:
        """Renews a lease; raises where it is over."""
        ...

    def is_away(self) -> bool:
        """Whether nothing is known of it for now."""
        ...

    def sweep(self) -> None:
        """Removes what was left by starts that were killed."""
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
        OSError: as the file system says.
        CheckpointError: as the object store says.
    """
    found = place.look()
    if found is not None:
        why = why_over(found)
        if why is None:
            return None
        place.end(found.token)
        if found.holder is not None and why:
            _log.warning(
                "tfpreempt: took over %s from %s, %s",
                place.where,
                found.holder,
                why,
            )
    return place.take(here)


class Lease:
    """Held by this process from `acquire` to `release`, or until it is dropped.

    Main thread. Of a directory that is a URL there is none.

    Args:
        grace_seconds: that this process may need to leave; None where nobody knows.
        pause: waits so many seconds, and says how many passed.
        disk: where directories are.

    Attributes:
        token: of the lease that is held; None without one.
    """

    def __init__(
        self,
        grace_seconds: float | None = None,
        *,
        pause: Callable[[float], float] | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._grace = GRACE if grace_seconds is None else grace_seconds
        self._pause = pause or _pause
        self._disk = disk
        self._place: Place | None = None
        self._files: LeaseDirectory | None = None
        self.token: str | None = None
        self._on_loss: Callable[[str], None] = lambda reason: None
        self._lost = ""
        self._end: Callable[[], object] = lambda: None

    def acquire(self, directory: str) -> None:
        """Takes the lease; waits for its holder, as long as that may need to leave.

        Args:
            directory: the checkpoint directory, which exists.

        Raises:
            DirectoryInUseError: its holder lives, and does not leave.
            SaveError: the disk.
        """
        if not paths.is_url(directory) and self._place is None:
            with failure.translated("take the lease", directory):
                files = LeaseDirectory(directory, self._disk)
                self.acquire_at(files)
            self._files = files

    def acquire_at(self, place: Place) -> None:
        """As `acquire`, wherever the lease is.

        Raises:
            DirectoryInUseError: its holder lives, and does not leave.
            CheckpointError: the object store.
            OSError: as the file system says.
        """
        if self._place is None:
            self._wait_for(place)
            place.sweep()
            self._place = place

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Calls, on any thread, when it was lost, with the reason."""
        self._on_loss = call

    def check(self) -> None:
        """Refuses to go on without it. One that was released is taken again.

        Raises:
            LeaseLostError: another process has it.
            OSError: as the file system says.
        """
        if self._place is None:
            return
        if self.token is None and not self._lost:
            here = this_process(self._grace)
            if not self._try(self._place, here, Patience(here)):
                self._lose()
        elif self.token is not None and self._beats.is_lost():
            self._lose()
        if self._lost:
            raise errors.LeaseLostError(self._lost)

    @contextlib.contextmanager
    def moving(self) -> Iterator[str | None]:
        """A path by which to move a file; None where there is no lease to be had.

        Raises:
            LeaseLostError: another process has it.
            OSError: as the file system says.
        """
        if self._files is None:
            yield None
            return
        if self.token is None:
            self.check()
        token = self.token  # read once: the thread that renews may lose it now
        if token is None:
            raise errors.LeaseLostError(self._lost)
        try:
            yield self._files.way(token)
        except FileNotFoundError:
            self.check()
            raise

    def release(self) -> None:
        """Others may have it from now on; a save of this process takes it again."""
        self._end()
        self.token = None

    def _wait_for(self, place: Place) -> None:
        here = this_process(self._grace)
        patience, said_at = Patience(here), -SAID_EACH
        while not self._try(place, here, patience):
            if patience.is_over:
                raise errors.DirectoryInUseError(
                    f"{place.where!r} is in use: its lease is held by "
                    f"{patience.holder}, which still renews it after "
                    f"{patience.waited:.0f} s. Two runs in one checkpoint directory "
                    "would mix their steps. Wait until that one has ended, or end it; "
                    "or give this run a directory of its own"
                )
            if patience.waited >= said_at + SAID_EACH:
                said_at = patience.waited
                _log.warning(
                    "tfpreempt: %s is held by %s; waiting up to %.0f s for it to leave",
                    place.where,
                    patience.holder or "a process that just took it",
                    patience.limit - patience.waited,
                )
            patience.passed(self._pause(POLL))

    def _try(self, place: Place, here: Holder, patience: Patience) -> bool:
        """Takes it unless somebody has it; whether that was done."""

        def why_over(found: Found) -> str | None:
            if mine := _of_this_process(place, found):
                mine.release()  # the session knows whether two may be open in one
                return ""
            return patience.why_over(found)

        self.token = attempt(place, here, why_over)
        if self.token is None:
            return False
        _held[place.where, self.token] = self
        self._beats = _Beats(place, self.token, weakref.WeakMethod(self._lose))
        self._beats.start()
        self._end = weakref.finalize(self, _release, self._beats, os.getpid())
        return True

    def _lose(self) -> None:
        """Another process has it; any thread."""
        assert self._place is not None
        found = None
        with contextlib.suppress(OSError, errors.CheckpointError):
            found = self._place.look()
        who = "nobody" if found is None or found.holder is None else found.holder
        self._lost = (
            f"the lease of {self._place.where!r} is lost: it is held by {who} now. "
            "This process was frozen, or cut off from its storage, for longer than "
            f"{EXPIRY:g} s; or somebody removed its lease. It commits nothing "
            "any more, and leaves"
        )
        _log.error("tfpreempt: %s", self._lost)
        self.release()
        self._on_loss(self._lost)


class _Beats(OwnedThread):
    """Renews one lease until it is over.

    Args:
        place: of the directory.
        token: of the lease.
        lose: a method of its owner, held weakly.
    """

    def __init__(
        self,
        place: Place,
        token: str,
        lose: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        super().__init__("tfpreempt-lease", self._renew)
        self.place, self.token = place, token
        self._lose = lose

    def _renew(self) -> None:
        count, is_said = 0, False
        while not self.stop_event.wait(RENEWAL):
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
                        "tfpreempt: the lease of %s cannot be renewed: %s",
                        self.place.where,
                        error,
                    )

    def is_lost(self) -> bool:
        """Whether it was ended: not where the directory itself is away for a while."""
        try:
            found = self.place.look()
        except (OSError, errors.CheckpointError):
            return False
        if found is None:
            return not self.place.is_away()
        return found.token != self.token or found.holder is None


def _release(beats: _Beats, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has no part in it
    beats.stop_event.set()
    try:
        beats.place.end(beats.token)
    except (OSError, errors.CheckpointError) as error:
        _log.warning("tfpreempt: %s: %s", beats.place.where, error)


def _of_this_process(place: Place, found: Found) -> Lease | None:
    """The lease that this process has there already."""
    if found.holder is None or found.holder.pid != os.getpid():
        return None
    return _held.get((place.where, found.token))


def _pause(seconds: float) -> float:
    began = time.monotonic()
    threading.Event().wait(seconds)
    return time.monotonic() - began
