"""Adapter: saves and restores named arrays, in files that TensorFlow can read.

The arrays belong to a program that does not use TensorFlow: for example, the arrays are
the variables of Keras on JAX. The chief (worker 0) writes all arrays in the format of a
tf.train.Checkpoint, without TensorFlow (`checkpoint/bundles/`), so
`tf.train.load_checkpoint` can read each array by its name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import (
    bundle,
    bundle_writer,
    tensor_copies,
    tensor_reader,
)
from tfpreempt.checkpoint.bundles.partitioning import DenseTensor
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.state.contents import Contents, StagedSave, write_tensors
from tfpreempt.checkpoint.state.encoding import read_parts, readable
from tfpreempt.core.cluster import Cluster
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files

_NUMBERS = {name: number for number, name in bundle.DTYPES.items()}
Arrays = Mapping[str, np.ndarray[Any, Any]]
REPLICA_VALUES = "tfpreempt.per_replica"
"""Name of the State with the values that `read_replica_values` reads."""


class ArrayCheckpoint:
    """Named arrays of a program without TensorFlow. The callback passes a subclass
    where a program with TensorFlow passes a tf.train.Checkpoint."""

    def arrays(self) -> Mapping[str, Any]:
        """Returns the current arrays by name: objects that NumPy can convert to arrays
        without a copy."""
        raise NotImplementedError

    def start_copies(self, arrays: Mapping[str, Any]) -> None:
        """Starts to copy the arrays from devices to the host, before a save reads the
        arrays one after the other."""

    def assign(self, arrays: Arrays) -> None:
        """Assigns the arrays of a commit to the variables of the program.

        Args:
            arrays: the arrays by name. No other object uses the memory of the arrays,
                so the variables may keep the memory.

        Raises:
            CheckpointMismatchError: an array is missing or has another shape than the
                program's variable; nothing was assigned.
        """
        raise NotImplementedError


def is_checkpoint(given: Any) -> bool:
    """Returns whether an object is an `ArrayCheckpoint`."""
    return isinstance(given, ArrayCheckpoint)


def check_directory(given: Any, checkpoint_dir: str | os.PathLike[str] | None) -> None:
    """Does nothing: the callback has already checked that it has a directory."""


def attach_counter(given: Any) -> None:
    """Returns None: an `ArrayCheckpoint` has no variable that counts the calls of
    `run`, because the manifest of a commit has the number of steps."""


def file_location(given: Any) -> tuple[str | None, str]:
    """Returns None, because an `ArrayCheckpoint` names no directory, and the prefix of
    the file names in a commit."""
    return None, layout.PAYLOAD


def make_contents(
    given: ArrayCheckpoint,
    *,
    save_fn: Callable[..., Any] | None,
    cluster: Cluster,
    io_device: str | None,
    files: Files,
    is_shared: bool,
    is_second: bool,
) -> Contents:
    """Returns the object that saves and restores an `ArrayCheckpoint`. The arguments
    are described in `open_directory`.

    Raises:
        ConfigurationError: a save_fn was given.
    """
    if save_fn is not None:
        raise errors.ConfigurationError(
            "TerminationConfig has a save_fn, and Keras runs on JAX, where the "
            "callback writes the variables itself. Remove save_fn."
        )
    return ArrayContents(given, cluster, files, keeps_copies=is_second)


def saving() -> contextlib.AbstractContextManager[None]:
    """Returns a context without effect, because no save_fn is called."""
    return contextlib.nullcontext()


class ArrayContents(Contents):
    """Writes and restores the arrays of an `ArrayCheckpoint`.

    Args:
        checkpoint: the arrays.
        cluster: the workers; only the chief writes.
        files: the file operations.
        keeps_copies: whether the next asynchronous save uses the same memory for its
            copies of the arrays as the previous asynchronous save.
    """

    needs_prefix = True

    def __init__(
        self,
        checkpoint: ArrayCheckpoint,
        cluster: Cluster,
        files: Files,
        *,
        keeps_copies: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._cluster = cluster
        self._files = files
        self._copies = tensor_copies.CopyMemory(is_kept=keeps_copies)

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        self.free_read_ahead()
        super().capture(save, *args, **kwargs)
        if not self._cluster.is_chief:
            return
        arrays = self._checkpoint.arrays()
        self._checkpoint.start_copies(arrays)
        tensors = [_dense(*each) for each in arrays.items()]
        if save.is_async:
            tensors = self._copies.copied(tensors, bundle_writer.THREADS)
        save.tensors = tensors

    def write(self, save: StagedSave) -> None:
        if self._cluster.is_chief:
            write_tensors(self._files, save, is_new=True)

    def held_bytes(self) -> int:
        return sum(int(each.nbytes) for each in self._checkpoint.arrays().values())

    def free_copies(self) -> None:
        self._copies.free()

    def read_ahead(self, prefix: str) -> Mapping[str, tuple[int, int]]:
        self._ahead = None
        try:
            arrays, sums = read(prefix)
        except errors.CheckpointError:
            return {}  # the verification of the files reports the reason
        self._ahead = prefix, arrays
        return sums

    def check(self, prefix: str) -> None:
        bundle.check(prefix)

    def restore(
        self, prefix: str, *, with_data: bool = True, is_partial: bool = False
    ) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == prefix:
            self._checkpoint.assign(ahead[1])
            return
        self._checkpoint.assign(read(prefix)[0])


def read_replica_values(
    file: IO[bytes],
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Reads variables that a worker saves itself in a commit of TensorFlow; see
    `checkpoint/tensors/per_replica.py`.

    Args:
        file: the worker's file of the State `REPLICA_VALUES`.

    Returns:
        For each variable, by path, the values of the worker's replicas.
    """
    header, parts = read_parts(file)
    found = {}
    with readable(REPLICA_VALUES):
        for entry in header:
            dtype = bundle.numpy_dtype(_NUMBERS[entry["dtype"]])
            found[entry["path"]] = [
                np.frombuffer(parts.pop(0), dtype).reshape(shape)
                for shape in entry["shapes"]
            ]
    return found


def read_worker_values(commit: Entry) -> Arrays:
    """Reads the variables that worker 0 saves itself in a commit of TensorFlow.

    Args:
        commit: the commit, whose files were verified.

    Returns:
        The value of the first replica, by path. Empty if the manifest names no file of
        the variables.
    """
    name = REPLICA_VALUES + layout.STATE_SUFFIX
    path = os.path.join(commit.shards, layout.worker_name(0), name)
    if all(commit.file(file.name) != path for file in commit.files):
        return {}
    with file_reading.open_file(path) as file:
        found = read_replica_values(file)
    return {path: values[0] for path, values in found.items() if values}


def _dense(name: str, given: Any) -> DenseTensor:
    """Returns an array as a DenseTensor, without a copy if possible.

    Raises:
        SaveError: TensorFlow's format has no number for the dtype of the array.
    """
    array = np.asarray(given)
    if (number := _NUMBERS.get(array.dtype.name)) is None:
        raise errors.SaveError(
            f"{name!r} has the dtype {array.dtype.name}, which cannot be saved. "
            f"Supported are {', '.join(sorted(_NUMBERS))}."
        )
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return DenseTensor(name, number, array.shape, data, can_be_cut=True)


def read(prefix: str) -> tuple[Arrays, Mapping[str, tuple[int, int]]]:
    """Reads all arrays of a commit, and compares the checksums with the index.

    Also reads the arrays in TensorFlow's own files. Skips strings and other tensors
    that are not plain memory.

    Args:
        prefix: path prefix of the commit's files.

    Returns:
        The arrays by name; and size and crc32c, by path, of each file that was read
        completely.

    Raises:
        CheckpointCorruptedError: the files cannot be read, or the bytes do not match
            the index.
    """
    try:
        _, tensors, sums = tensor_reader.read_all(prefix)
    except tensor_reader.UNREADABLE as error:
        raise errors.CheckpointCorruptedError(
            f"{prefix!r} could not be read: {error}"
        ) from error
    arrays = {
        name: data.view(bundle.numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        for name, (tensor, data) in tensors.items()
    }
    return arrays, sums
