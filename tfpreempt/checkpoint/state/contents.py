"""The contents of a checkpoint, as written by TensorFlow or a save_fn.

`Contents` is the interface, with a subclass for each form (tensor_contents.py).
`StagedSave` is the part of a save visible to contents.
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
class StagedSave(StagedFiles):
    """A worker's part of a save, captured or written so far.

    The part has one owner at a time: the main thread until the capture ends, then the
    thread that writes and publishes the save.

    Attributes:
        is_empty: whether a save_fn returned None, so that there is nothing to commit.
        tensors: captured tensors not written yet. If `is_dealt`, the captured tensors
            stay here until the commit.
        is_dealt: whether every worker writes a share of the tensors replicated on all
            workers.
        parts: data files already written, and not in an index yet.
        capture_seconds: time that training waited for the capture.
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
        """Creates the staging directory; called before any file is written.

        Args:
            prefix: TensorFlow's prefix on the chief, in the flat form.

        Raises:
            SaveError: the checkpoint directory was replaced.
            OSError: the disk failed.
        """
        raise NotImplementedError

    def take_path(self, path: Any) -> None:
        """Records the path returned by a save_fn.

        Args:
            path: path written by the save_fn; None if there is nothing to commit.

        Raises:
            SaveError: the value is neither a path nor None.
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
    """The part of a checkpoint that TensorFlow or a save_fn writes; by default empty.

    Attributes:
        states: States of the contents that every worker saves by itself.
        can_be_async: whether saves can be written while training continues.
        needs_prefix: whether a restore needs TensorFlow's files. If so, a commit of
            named States alone is skipped.
    """

    states: Sequence[State] = ()
    can_be_async: ClassVar[bool] = True
    needs_prefix: ClassVar[bool] = False

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        """Captures this worker's part of the state; the chief writes small values.

        Main thread. Collective work is done even if the rest fails, because peers wait
        for the worker. Large tensors may be kept for `write`: as references if the
        tensors cannot change before `write`, as copies if the save `is_async`.

        Args:
            save: receives the captured state. `create_staging` is called before any
                file is written, and may fail.
            *args: the user's positional arguments for the save.
            **kwargs: the user's keyword arguments for the save.
        """
        save.create_staging()
        if (number := kwargs.get("checkpoint_number")) is not None:
            save.number = int(number)

    def take_part(self) -> None:
        """Does the collective work of a save, without a save; main thread."""

    def prepare(self) -> None:
        """Searches for the keys of all objects, so that the first save need not.

        Main thread, at the boundary after the first step, when all objects exist. Reads
        no tensor and needs no other worker. A save finds the changes since then.
        """

    def held_bytes(self) -> int:
        """Returns the approximate size of a save in bytes; reads no tensor."""
        return 0

    def free_copies(self) -> None:
        """Frees the memory kept for the next asynchronous save; any thread."""

    def write(self, save: StagedSave) -> None:
        """Writes the tensors kept by `capture`; any thread."""

    def complete(self, save: StagedSave, workers: Collection[int]) -> None:
        """Adds the shares of the workers to a save that `is_dealt`; on the chief.

        No tensor may have changed since `capture`.

        Args:
            save: save after a call of `write`.
            workers: workers known to have written their share.
        """

    def committed(self) -> None:
        """Deletes checkpoints that a user's manager no longer keeps; on the chief."""

    def read_ahead(self, prefix: str) -> Mapping[str, tuple[int, int]]:
        """Reads the numeric tensors of a commit, and keeps them for `restore`.

        Args:
            prefix: prefix of TensorFlow's files, not verified yet.

        Returns:
            Size and crc32c of the files that were read as a whole, by path.
        """
        return {}

    def free_read_ahead(self) -> None:
        """Frees the tensors kept by `read_ahead`; a save frees them too."""

    def check(self, prefix: str) -> None:
        """Reads the files that `restore` reads first, and assigns nothing.

        Args:
            prefix: prefix of TensorFlow's files.

        Raises:
            CheckpointCorruptedError: TensorFlow cannot read the files.
        """

    def restore(self, prefix: str, *, with_data: bool = True) -> None:
        """Compares the structure, then restores this worker's objects.

        Args:
            prefix: prefix of TensorFlow's files.
            with_data: whether the dataset iterators in the files belong to this worker.
                Iterators with the same position on every worker are always restored.
        """

    def unrestored_variables(self) -> Sequence[str]:
        """Returns variables of the restored commit that no object has created yet.

        Returns the names. A save before the creation of the objects loses the
        variables.
        """
        return ()

    def warn_of_unrestored(self) -> None:
        """Warns of the unrestored variables, once."""

    def check_shares(self) -> None:
        """Checks the data shares, before a restore with a different number of workers.

        Raises:
            ConfigurationError: the current workers cannot share the data equally.
        """

    def restored(self, candidate: Entry) -> None:
        """Sets a CheckpointManager to the state after the restored checkpoint."""

    def needs_peers(self) -> bool:
        """Whether `capture` needs every worker at the same time (a collective read)."""
        return False
