"""`Contents`: interface for the files that TensorFlow or a save_fn writes to a commit.

tensor_contents.py has the subclasses for a Checkpoint and a CheckpointManager.
`StagedSave` has the attributes of a save that a subclass uses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from tfpreempt import errors
from tfpreempt.checkpoint.bundles.partitioning import DenseTensor, Part
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.commit import StagedFiles
from tfpreempt.checkpoint.state.state import State


@dataclasses.dataclass(eq=False, kw_only=True)
class StagedSave(StagedFiles):
    """A save on one worker: the tensors captured, and the files written so far.

    Used by one thread at a time: by the main thread until the capture ends, then by the
    thread that writes and publishes the save.

    Attributes:
        is_empty: whether a save_fn returned None, so that there is nothing to commit.
        tensors: captured tensors that are not written yet. If `is_dealt`, also the
            written tensors, until the commit.
        is_dealt: whether the tensors that every worker holds are divided among the
            workers, and every worker writes a share.
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
        return self.cancel_token is not None

    def create_staging(self, prefix: str | None = None) -> None:
        """Creates the staging directory; called before any file is written.

        Args:
            prefix: TensorFlow's prefix, on the chief, if a CheckpointManager or save_fn
                chooses the file names; otherwise None.

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
                f"save_fn returned {path!r}; expected the path of the checkpoint that "
                "save_fn wrote, or None."
            ) from None


class Contents:
    """Saves and restores what TensorFlow or a save_fn writes.

    The base class is for programs without a checkpoint: nothing is written.

    Attributes:
        states: States that belong to the contents, saved by every worker.
        can_be_async: whether saves can be written while training continues.
        needs_prefix: whether a restore needs TensorFlow's files. If so, a commit with
            named States only is skipped.
    """

    states: Sequence[State] = ()
    can_be_async: ClassVar[bool] = True
    needs_prefix: ClassVar[bool] = False

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        """Captures the state of this worker; on the chief, also writes small values.

        Called on the main thread. Work in which every worker takes part is done even if
        an error occurs, because the other workers wait. Large tensors may be kept for
        `write`: as copies if the save `is_async`; otherwise as references, because
        training waits for `write`.

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
        """Takes part in the collective reads of the other workers' `capture`.

        Called on the main thread of a worker that captures nothing itself.
        """

    def prepare(self) -> None:
        """Determines the objects to save and their keys, to make the first save faster.

        Called on the main thread after the first step, when every object exists. Reads
        no tensor, and needs no other worker. A save finds later changes by itself.
        """

    def held_bytes(self) -> int:
        """Returns the approximate size of a save in bytes; reads no tensor."""
        return 0

    def free_copies(self) -> None:
        """Frees the memory kept for the next asynchronous save; on any thread."""

    def write(self, save: StagedSave) -> None:
        """Writes the tensors kept by `capture`; called on any thread."""

    def complete(self, save: StagedSave, workers: Collection[int]) -> None:
        """Writes the index for a save whose tensors were divided among the workers.

        Called on the chief if the save `is_dealt`. The chief itself writes tensors that
        a worker has not written, so no tensor may have changed since `capture`.

        Args:
            save: save after a call of `write`.
            workers: indices of the workers known to have written their share of the
                tensors.
        """

    def committed(self) -> None:
        """Deletes checkpoints that the user's manager no longer keeps; on the chief."""

    def read_ahead(self, prefix: str) -> Mapping[str, tuple[int, int]]:
        """Reads the numeric tensors of a commit, and keeps them for `restore`.

        Args:
            prefix: prefix of TensorFlow's files, not verified yet.

        Returns:
            Size and crc32c, by path, of the files of which every byte was read.
        """
        return {}

    def free_read_ahead(self) -> None:
        """Frees the tensors kept by `read_ahead`; a save frees them too."""

    def check(self, prefix: str) -> None:
        """Checks that TensorFlow can read the files; assigns nothing.

        Args:
            prefix: prefix of TensorFlow's files.

        Raises:
            CheckpointCorruptedError: TensorFlow cannot read the files.
        """

    def restore(self, prefix: str, *, with_data: bool = True) -> None:
        """Compares the checkpoint with the user's objects, then restores the objects.

        Args:
            prefix: prefix of TensorFlow's files.
            with_data: whether to restore dataset iterators. The files have the
                positions of the chief's iterators; iterators with one position for
                every worker are always restored.
        """

    def unrestored_variables(self) -> Sequence[str]:
        """Returns names of variables in the restored commit that do not exist yet.

        A variable is restored when the program creates it. A save before that moment
        would lose the variable's value.
        """
        return ()

    def warn_of_unrestored(self) -> None:
        """Logs a warning with the unrestored variables, once."""

    def check_shares(self) -> None:
        """Checks that the batches can be divided equally among the current workers.

        Called before a restore with a different number of workers.

        Raises:
            ConfigurationError: the batches cannot be divided equally.
        """

    def restored(self, candidate: Entry) -> None:
        """Updates the user's CheckpointManager after a checkpoint was restored."""

    def needs_peers(self) -> bool:
        """Returns whether `capture` needs every worker at the same time.

        For example, a collective read of a variable needs every worker.
        """
        return False
