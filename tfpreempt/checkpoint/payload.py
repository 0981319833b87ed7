"""What a saver asks of the part of a checkpoint that TensorFlow writes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from tfpreempt import errors
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.shares import DenseTensor, Part
from tfpreempt.checkpoint.state import State


class Permit:
    """Whether an asynchronous save may go on, and commit. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = self._is_given_up = False

    def check(self) -> None:
        """Between its parts.

        Raises:
            SaveError: it was given up.
        """
        if self._is_given_up:
            raise errors.SaveError("an asynchronous save was given up for a newer one")

    def take(self) -> None:
        """Just before the marker: it is committed from here on.

        Raises:
            SaveError: it was given up.
        """
        with self._lock:
            self.check()
            self._is_taken = True

    def give_up(self) -> bool:
        """It commits nothing any more; False where it has begun to."""
        with self._lock:
            self._is_given_up = not self._is_taken
            return self._is_given_up

    @property
    def is_given_up(self) -> bool:
        """Whether nothing will come of it."""
        return self._is_given_up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One worker's part of a save; durable, but not committed, once it was written.

    Attributes:
        step: the step that is saved.
        attempt: the save's identity, equal on all workers.
        directory: the staging directory.
        started_at: monotonic seconds at which writing started.
        number: the directory number in the own form.
        prefix: where a flat checkpoint lies; None in the own form.
        is_empty: a save_fn returned None: there is nothing to commit.
        permit: of an asynchronous save, which is written while training goes on, and
            changes all tensors; None where training waits.
        tensors: those that were captured, and are not written yet; where the workers
            write a share each, all of them, until the commit.
        is_dealt: whether the workers write a share each of those that all hold.
        capture_seconds: for which training waited, to have it captured.
        share_seconds: that this worker took to write its share, where it `is_dealt`.
        parts: data files that are on the disk, and in no index yet.
        sums: size and crc32c of files that are on the disk already, by path.
    """

    step: int
    attempt: str
    directory: str
    started_at: float
    number: int
    prefix: str | None = None
    is_empty: bool = False
    permit: Permit | None = None
    tensors: Sequence[DenseTensor] = ()
    is_dealt: bool = False
    capture_seconds: float = 0.0
    share_seconds: float = 0.0
    parts: Sequence[Part] = ()
    sums: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        """Whether training goes on while it is written."""
        return self.permit is not None


class Payload:
    """The part that TensorFlow, or a save_fn, writes; here none: named States alone.

    Attributes:
        states: what each worker keeps apart of it.
        can_be_async: whether its saves can be written while training goes on.
    """

    states: Sequence[State] = ()
    can_be_async: ClassVar[bool] = True

    def write(
        self, save: Staged, prepare: Callable[..., None], *args: Any, **kwargs: Any
    ) -> Staged:
        """Takes part in the save on this worker; the chief writes, or captures.

        Main thread. What needs all workers is done even where the rest fails: peers
        wait for it. Large tensors may be left to `write_tensors`: as they are where
        nothing changes them until then, as copies where the save `is_async`.

        Args:
            save: what is known of it so far.
            prepare: makes the staging directory; to be called before anything is
                written, in the flat form on the chief with the prefix. It may fail.
            *args: the user's arguments for the save.
            **kwargs: likewise.

        Returns:
            The same, with what was written, and the tensors that were not.
        """
        prepare()
        number = kwargs.get("checkpoint_number")
        return save if number is None else dataclasses.replace(save, number=int(number))

    def take_part(self) -> None:
        """Does what needs all workers in a save, and no more; main thread."""

    def held_bytes(self) -> int:
        """About how much `write` has to write, without reading it."""
        return 0

    def free_copies(self) -> None:
        """Keeps no memory for the next asynchronous save; any thread."""

    def write_tensors(self, save: Staged) -> Staged:
        """Writes what `write` has left; any thread.

        Returns:
            The same, with all of it written.
        """
        return save

    def complete(self, save: Staged, workers: Collection[int]) -> Staged:
        """Before the commit of a save that `is_dealt`; on the chief.

        Nothing may have changed since `write`.

        Args:
            save: what `write_tensors` returned.
            workers: those that are known to have written their share.

        Returns:
            The same with the shares of all workers.
        """
        return save

    def committed(self) -> None:
        """Deletes what a user's manager no longer wants; on the chief."""

    def check(self, prefix: str) -> None:
        """Reads what `restore` reads first, and assigns nothing.

        Args:
            prefix: TensorFlow's files.

        Raises:
            CheckpointDamagedError: TensorFlow cannot read them.
        """

    def restore(self, prefix: str, *, with_data: bool = True) -> None:
        """Compares the structure, then restores this worker's objects.

        Args:
            prefix: TensorFlow's files.
            with_data: whether the dataset iterators in them are this worker's. Those
                whose place is the same on all workers are restored anyway.
        """

    def left(self) -> Sequence[str]:
        """Names of variables in what was restored that nothing has yet.

        They are lost in a save before something has.
        """
        return ()

    def warn_of_left(self) -> None:
        """Names these in a warning, once."""

    def check_shares(self) -> None:
        """Before a restore of what another number of workers saved.

        Raises:
            ConfigurationError: the workers of now cannot share the data equally.
        """

    def restored(self, candidate: Entry) -> None:
        """Lets a user's manager go on from the restored checkpoint."""

    def needs_peers(self) -> bool:
        """Whether `write` needs all workers at once (a collective read)."""
        return False
