"""The contents of a checkpoint that TensorFlow, or a save_fn, writes.

`Contents` is the interface, with a subclass for each form (tensor_contents.py);
`Staged` is the part of a save that contents see.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from tfpreempt import errors
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.commit import StagedFiles
from tfpreempt.checkpoint.state.partitioning import DenseTensor, Part
from tfpreempt.checkpoint.state.state import State


@dataclasses.dataclass(eq=False, kw_only=True)
class Staged(StagedFiles):
    """One worker's part of a save, as far as it is captured or written.

    One owner at a time: the main thread until the part is captured, then the thread
    that writes and publishes the save.

    Attributes:
        is_empty: whether a save_fn returned None: there is nothing to commit.
        tensors: the tensors that were captured and are not written yet. If `is_dealt`,
            all of them until the commit.
        is_dealt: whether the workers write a share each of the tensors that all hold.
        parts: data files that are on the disk, and in no index yet.
        capture_seconds: time for which training waited for the capture.
        share_seconds: time that this worker took to write its share, if `is_dealt`.
    """

    is_empty: bool = False
    tensors: Sequence[DenseTensor] = ()
    is_dealt: bool = False
    parts: Sequence[Part] = ()
    capture_seconds: float = 0.0
    share_seconds: float = 0.0

    @property
    def is_async(self) -> bool:
        """Whether training continues while the save is written."""
        return self.permit is not None

    def create_staging(self, prefix: str | None = None) -> None:
        """Creates the staging directory; called before anything is written.

        Args:
            prefix: TensorFlow's prefix on the chief, in the flat form.

        Raises:
            SaveError: the checkpoint directory was replaced.
            OSError: the disk.
        """
        raise NotImplementedError

    def take_path(self, path: Any) -> None:
        """Takes the path that a save_fn returned.

        Args:
            path: the path that the save_fn wrote; None if nothing is to be committed.

        Raises:
            SaveError: the path is neither.
        """
        if path is None:
            self.is_empty = True
            return
        try:
            self.prefix = os.path.abspath(os.fsdecode(os.fspath(path)))
        except TypeError:
            raise errors.SaveError(
                f"save_fn returned {path!r}; expected the path that it wrote, or None."
            ) from None


class Contents:
    """The part that TensorFlow, or a save_fn, writes. The base class: none.

    Attributes:
        states: States of the contents that each worker saves itself.
        can_be_async: whether saves can be written while training continues.
        needs_prefix: whether a restore needs TensorFlow's files: a commit of named
            States alone is passed over.
    """

    states: Sequence[State] = ()
    can_be_async: ClassVar[bool] = True
    needs_prefix: ClassVar[bool] = False

    def capture(self, save: Staged, *args: Any, **kwargs: Any) -> None:
        """Captures this worker's part; the chief writes what is small.

        Main thread. The work that needs all workers is done even if the rest fails:
        peers wait for it. Large tensors may be left to `write`: as references if
        nothing changes them until then, as copies if the save `is_async`.

        Args:
            save: gets what was captured. `create_staging` is called before anything is
                written, and may fail.
            *args: the user's arguments for the save.
            **kwargs: the user's arguments for the save.
        """
        save.create_staging()
        if (number := kwargs.get("checkpoint_number")) is not None:
            save.number = int(number)

    def take_part(self) -> None:
        """Does the work that needs all workers, without a save; main thread."""

    def held_bytes(self) -> int:
        """Returns about how many bytes a save has; reads no tensor."""
        return 0

    def free_copies(self) -> None:
        """Frees the memory kept for the next asynchronous save; any thread."""

    def write(self, save: Staged) -> None:
        """Writes the tensors that `capture` has left; any thread."""

    def complete(self, save: Staged, workers: Collection[int]) -> None:
        """Adds the shares of all workers to a save that `is_dealt`; on the chief.

        No tensor may have changed since `capture`.

        Args:
            save: `write` was called.
            workers: the workers that are known to have written their share.
        """

    def committed(self) -> None:
        """Deletes what a user's manager no longer wants; on the chief."""

    def read_ahead(self, prefix: str) -> Mapping[str, tuple[int, int]]:
        """Reads the numeric tensors of a commit, and keeps them for `restore`.

        Args:
            prefix: TensorFlow's files; nothing of them is verified yet.

        Returns:
            Size and crc32c of the files of which all bytes were read, by path.
        """
        return {}

    def free_read_ahead(self) -> None:
        """Frees the tensors that `read_ahead` has kept; a save does so, too."""

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
            with_data: whether the dataset iterators in them are this worker's.
                Iterators whose position is equal on all workers are always restored.
        """

    def unrestored_variables(self) -> Sequence[str]:
        """Returns names of variables of the restored commit that no object has yet.

        A save before an object has them loses them.
        """
        return ()

    def warn_of_unrestored(self) -> None:
        """Warns of the unrestored variables, once."""

    def check_shares(self) -> None:
        """Before a restore of what another number of workers saved.

        Raises:
            ConfigurationError: the workers of now cannot share the data equally.
        """

    def restored(self, candidate: Entry) -> None:
        """Sets a CheckpointManager to the state after the restored checkpoint."""

    def needs_peers(self) -> bool:
        """Whether `capture` needs all workers at once (a collective read)."""
        return False
