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

from tfpreempt import errors
from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.fence import Disk, Found, LeaseDirectory
from tfpreempt.checkpoint.holder import Holder, this_process
from tfpreempt.checkpoint.home import Home
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

_held: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()


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


def attempt(
    place: LeaseDirectory, here: Holder, why_over: Callable[[Found], str | None]
) -> bool:
    """Takes a lease that nobody has, or whose holder counts for nothing.

    Args:
        place: of the directory.
        here: who takes it.
        why_over: why a lease counts for nothing; None if it counts.

    Returns:
        Whether it was taken; else another one has it, or was quicker.

    Raises:
        OSError: as the file system says.
    """
    found = place.look()
    if found is not None:
        why = why_over(found)
        if why is None:
            return False
        place.end(found.token)
        if found.holder is not None:
            _log.warning(
                "tfpreempt: took over %s from %s, %s",
                place.directory,
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
        self._place: LeaseDirectory | None = None
        self._holder: Holder | None = None
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
        if paths.is_url(directory) or self._place is not None:
            return
        place = LeaseDirectory(directory, self._disk)
        with failure.translated("take the lease", directory):
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
        if self._holder is None and not self._lost:
            here = this_process(self._grace)
            if not self._try(self._place, here, Patience(here)):
                self._lose()
        elif self._holder is not None and self._beats.is_lost():
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
        if self._holder is None:
            self.check()
        if self._place is None or self._holder is None:
            yield None
            return
        try:
            yield self._place.way(self._holder.token)
        except FileNotFoundError:
            self.check()
            raise

    def release(self) -> None:
        """Others may have it from now on; a save of this process takes it again."""
        self._end()
        self._holder = None

    def _wait_for(self, place: LeaseDirectory) -> None:
        here = this_process(self._grace)
        patience, said_at = Patience(here), -SAID_EACH
        while not self._try(place, here, patience):
            if patience.is_over:
                raise errors.DirectoryInUseError(
                    f"{place.directory!r} is in use: its lease is held by "
                    f"{patience.holder}, which still renews it after "
                    f"{patience.waited:.0f} s. Two runs in one checkpoint directory "
                    "would mix their steps. Wait until that one has ended, or end it; "
                    "or give this run a directory of its own"
                )
            if patience.waited >= said_at + SAID_EACH:
                said_at = patience.waited
                _log.warning(
                    "tfpreempt: %s is held by %s; waiting up to %.0f s for it to leave",
                    place.directory,
                    patience.holder or "a process that just took it",
                    patience.limit - patience.waited,
                )
            patience.passed(self._pause(POLL))

    def _try(self, place: LeaseDirectory, here: Holder, patience: Patience) -> bool:
        """Takes it unless somebody has it; whether that was done."""

        def why_over(found: Found) -> str | None:
            if mine := _of_this_process(found):
                mine.release()  # the session knows whether two may be open in one
                return "which is this process"
            return patience.why_over(found)

        if not attempt(place, here, why_over):
            return False
        self._holder = here
        _held[here.token] = self
        self._beats = _Beats(place, here.token, weakref.WeakMethod(self._lose))
        self._beats.start()
        self._end = weakref.finalize(self, _release, self._beats, os.getpid())
        return True

    def _lose(self) -> None:
        """Another process has it; any thread."""
        assert self._place is not None
        with contextlib.suppress(OSError):
            found = self._place.look()
        who = "nobody" if found is None or found.holder is None else found.holder
        self._lost = (
            f"the lease of {self._place.directory!r} is lost: it is held by {who} now. "
            "This process was frozen, or cut off from its storage, for longer than "
            f"{EXPIRY:g} s; or somebody removed {layout.LEASE!r}. It commits nothing "
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
        place: LeaseDirectory,
        token: str,
        lose: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        super().__init__("tfpreempt-lease", self._renew)
        self.place, self.token = place, token
        self._lose = lose
        self._home = Home(place.directory)

    def _renew(self) -> None:
        count, is_said = 0, False
        while not self.stop_event.wait(RENEWAL):
            count += 1
            try:
                self.place.beat(self.token, count)
                is_said = False
            except OSError as error:
                if self.is_lost():
                    if not self.stop_event.is_set() and (lose := self._lose()):
                        lose()
                    return
                if not is_said:
                    is_said = True
                    _log.warning(
                        "tfpreempt: the lease of %s cannot be renewed: %s",
                        self.place.directory,
                        error,
                    )

    def is_lost(self) -> bool:
        """Whether it was ended: not where the directory itself is away for a while."""
        try:
            found = self.place.look()
        except OSError:
            return False
        if found is None:
            return self._home.is_same()
        return found.token != self.token or found.holder is None


def _release(beats: _Beats, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has no part in it
    beats.stop_event.set()
    try:
        beats.place.end(beats.token)
    except OSError as error:
        _log.warning("tfpreempt: %s: %s", beats.place.directory, error)


def _of_this_process(found: Found) -> Lease | None:
    """The lease that this process has there already."""
    if found.holder is None or found.holder.pid != os.getpid():
        return None
    return _held.get(found.token)


def _pause(seconds: float) -> float:
    began = time.monotonic()
    threading.Event().wait(seconds)
    return time.monotonic() - began
