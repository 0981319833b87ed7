"""`Contents`: saves and restores the files of a commit that depend on a framework.

The subclasses for a tf.train.Checkpoint, a CheckpointManager and a save_fn are in
tensor_contents.py, the subclass for arrays is in array_contents.py. `StagedSave` has
the attributes of a running save that a subclass uses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle_writer
from tfpreempt.checkpoint.bundles.partitioning import DenseTensor, Part
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.commit import StagedFiles
from tfpreempt.checkpoint.state.state import State
from tfpreempt.storage.files import Files


@dataclasses.dataclass(eq=False, kw_only=True)
class StagedSave(StagedFiles):
    """A save on one worker: the tensors captured, and the files written so far.

    Used by a single thread at a time: by the main thread until the capture ends, then
    by the thread that writes and publishes the save.

    Attributes:
        is_empty: whether a save_fn returned None, so that there is nothing to commit.
        tensors: captured tensors that are not written yet. If `is_dealt`, the chief
            also keeps the written tensors until the commit.
        is_dealt: whether the tensors that are equal on all workers are divided among
            the workers, and every worker writes a share of the tensors.
        parts: data files already written, and not in an index yet.
        capture_seconds: seconds for which training waited for the capture.
        share_seconds: seconds that this worker took to write its share, if `is_dealt`.
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
        """Creates the staging directory, in which a save writes files before the
        commit; called before any file is written.

        Args:
            prefix: on the chief, if a CheckpointManager chooses the file names: the
                path prefix of TensorFlow's files. Otherwise None.

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


def write_tensors(files: Files, save: StagedSave, *, is_new: bool = False) -> None:
    """Writes the tensors that a save has captured, with several threads.

    Args:
        files: the file operations.
        save: the save; its tensors are freed after the write.
        is_new: whether the tensors are the whole checkpoint. If False, TensorFlow has
            written files of the checkpoint.

    Raises:
        OSError: error of the file system.
        SaveError: an asynchronous save was cancelled.
    """
    token = save.cancel_token
    save.sums = bundle_writer.add(
        files,
        os.path.join(save.staging, layout.PAYLOAD),
        save.tensors,
        bundle_writer.thread_count(is_async=save.is_async),
        check=None if token is None else token.check,
        is_new=is_new,
    )
    save.tensors = ()


class Contents:
    """Saves and restores the files that a framework or a save_fn writes.

    A subclass writes such files. `Contents` itself writes no such files, and is used by
    programs that have only named States.

    Attributes:
        states: tfpreempt's States for values that the files do not contain, such as
            values that differ between workers. Every worker saves these States.
        can_be_async: whether saves can be written while training continues.
        needs_prefix: whether a restore needs files in TensorFlow's format, which have a
            common prefix. If so, a restore skips a commit that contains only States.
        needs_every_worker: whether a commit is useless without the part of each worker,
            because the part confirms that the worker has found no bad step.
    """

    states: Sequence[State] = ()
    needs_every_worker: bool = False
    can_be_async: ClassVar[bool] = True
    needs_prefix: ClassVar[bool] = False
    # The tensors of the last `read_ahead`; None after a restore or a save.
    _ahead: Any = None

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        """Captures the state of this worker; on the chief, also writes small values.

        Called on the main thread. After an error, a subclass still takes part in the
        collective operations of the save, because the other workers wait for this
        worker. Large tensors may be kept in `save` for the method `write`: copies if
        the save `is_async`; otherwise references, because training waits for `write`.

        Args:
            save: receives the captured state. The method calls `save.create_staging`,
                which may fail, before any file is written.
            *args: the user's positional arguments for the save.
            **kwargs: the user's keyword arguments for the save.
        """
        save.create_staging()
        if (number := kwargs.get("checkpoint_number")) is not None:
            save.number = int(number)

    def take_part(self) -> None:
        """Takes part in the collective reads that other workers make in `capture`.

        Called on the main thread of a worker that captures nothing in this save; the
        other workers would wait forever without this worker.
        """

    def prepare(self) -> None:
        """Determines the objects to save and their keys, to make the first save faster.

        Called on the main thread after the first step, when every object exists. Reads
        no tensor, and needs no other worker. Objects may still change later: every save
        checks for changes.
        """

    def held_bytes(self) -> int:
        """Returns the approximate size of a save in bytes; reads no tensor."""
        return 0

    def free_copies(self) -> None:
        """Frees the memory kept for the copies of the next asynchronous save. May be
        called on any thread."""

    def write(self, save: StagedSave) -> None:
        """Writes the tensors kept by `capture`; called on any thread."""

    def complete(self, save: StagedSave, workers: Collection[int]) -> None:
        """Writes the index for a save whose tensors were divided among the workers.

        Called on the chief, if the save `is_dealt`. If a worker has not written its
        share of the tensors, the chief writes the share now; so no tensor may have
        changed since `capture`.

        Args:
            save: the save; `write` was called before.
            workers: indices of the workers that reported a written share.
        """

    def committed(self) -> None:
        """Called on the chief after a commit: deletes the checkpoints that the user's
        CheckpointManager no longer keeps."""

    def read_ahead(self, prefix: str) -> Mapping[str, tuple[int, int]]:
        """Reads the numeric tensors of a commit, and keeps the tensors for `restore`,
        so that the verification and the restore read the files only once.

        Args:
            prefix: path prefix of the commit's files, which are not verified yet.

        Returns:
            Size and crc32c, by path, of each file that was read completely.
        """
        return {}

    def free_read_ahead(self) -> None:
        """Frees the tensors kept by `read_ahead`; a save frees them too."""
        self._ahead = None

    def check(self, prefix: str) -> None:
        """Checks that `restore` can read the files of a commit; assigns no value.

        Args:
            prefix: path prefix of the commit's files.

        Raises:
            CheckpointCorruptedError: the files cannot be read.
        """

    def restore(
        self, prefix: str, *, with_data: bool = True, is_partial: bool = False
    ) -> None:
        """Compares the checkpoint with the user's objects, then restores the objects.

        Args:
            prefix: path prefix of the commit's files.
            with_data: whether to restore dataset iterators. The files have the
                positions of the chief's iterators, so the value is False on other
                workers. Iterators with the same position on every worker are restored
                in both cases.
            is_partial: whether variables that do not fit keep their values; without
                effect on arrays of JAX.
        """

    def created_later(self) -> Sequence[str]:
        """Returns the names of variables that are in the restored commit, and that an
        object of the program creates at its first use, such as an optimizer.

        Such a variable is restored when the object creates the variable. A save before
        the creation would lose the restored value. The result is equal on every worker,
        unless the workers have other optimizers.
        """
        return ()

    def warn_of_unrestored(self) -> None:
        """Logs a warning with the names of variables that are in the restored commit,
        but do not exist in the program, once for each restore."""

    def check_shares(self) -> None:
        """Checks that the batches of the program's iterators can be divided equally
        among the current workers.

        Called before a restore if the number of workers has changed.

        Raises:
            ConfigurationError: the batches cannot be divided equally.
        """

    def restored(self, candidate: Entry) -> None:
        """Updates the user's CheckpointManager after a restore.

        Args:
            candidate: the restored checkpoint.
        """

    def needs_peers(self) -> bool:
        """Returns whether `capture` on a worker needs all other workers at the same
        time, for example because the read of a variable is a collective operation.
        """
        return False
