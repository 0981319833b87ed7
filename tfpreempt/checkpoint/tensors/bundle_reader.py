"""Lets TensorFlow restore a checkpoint with many threads.

TensorFlow's RestoreV2 reads the tensors in sequence, in a single thread. Here many
threads read the large tensors (`bundles/tensor_reader.py`), and a variable uses the
memory of the tensor read, without a copy. TensorFlow still reads the small tensors, and
tensors that are not plain memory, such as strings.

No value of a corrupt file is assigned, because tensors are returned only after all
checksums matched. The chief (worker 0) reads the tensors when it verifies a commit, and
keeps the tensors until the restore (`read_ahead`), so it reads the files only once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle_writer, tensor_reader
from tfpreempt.checkpoint.bundles.tensor_reader import Bytes, Index, Stored
from tfpreempt.core import private_api

_INTEGERS = (tf.int8, tf.int16, tf.int32, tf.int64)
_NATURAL = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_KINDS = (*_INTEGERS, *_NATURAL, *_FLOATS, tf.complex64, tf.complex128)
_NUMBERS = frozenset(kind.as_datatype_enum for kind in _KINDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """The numeric tensors of a checkpoint, read before the restore.

    Attributes:
        prefix: path prefix of the checkpoint's files.
        index: the checkpoint's index: where each tensor is stored.
        tensors: for the name of each tensor, its location in the files, and its bytes
            in memory. A restore removes the tensors that it uses.
        sums: size and crc32c, by path, of each data file that was read completely.
    """

    prefix: str
    index: Index
    tensors: dict[str, tuple[Stored, Bytes]]
    sums: Mapping[str, tuple[int, int]]


def read_ahead(prefix: str) -> ReadAhead | None:
    """Reads the numeric tensors of a checkpoint ahead of its restore. Also reads the
    bytes between the tensors, so that the checksums of whole files are known.

    Returns:
        The tensors, and the checksums of the files. None if several threads would save
        no time, because the tensors have few bytes or TensorFlow puts tensors into
        another process. None also if a file cannot be read; the verification of the
        files reports the reason.
    """
    try:
        is_small = tensor_reader.data_size(prefix) < bundle_writer.WORTH_BYTES
        if is_small or not _is_here():
            return None
        index, found, sums = tensor_reader.read_all(prefix)
    except (*tensor_reader.UNREADABLE, errors.CheckpointError):
        return None
    tensors = {
        name: each
        for name, each in found.items()
        if each[0].dtype in _NUMBERS and each[0].size
    }
    return ReadAhead(prefix=prefix, index=index, tensors=tensors, sums=sums)


@contextlib.contextmanager
def reading_in_threads(path: str, ahead: ReadAhead | None = None) -> Iterator[None]:
    """Returns a context in which TensorFlow restores from the given files with many
    threads.

    The context patches TensorFlow's `restore_v2`; use it on the main thread. Three
    kinds of reads use TensorFlow's own single thread: from other files (which another
    thread may restore at the same time), in a graph, and into another machine's memory.

    Args:
        path: path prefix of the checkpoint's files.
        ahead: result of `read_ahead` for the same files; None if the tensors were not
            read before. The restore removes the tensors that it uses.

    Raises:
        CheckpointCorruptedError: raised by a restore in the body: a file cannot be
            read, or its bytes have another checksum than the index. The failed read
            has returned no tensor, so no value of this read was assigned.
    """
    if tensor_reader.data_size(path) < bundle_writer.WORTH_BYTES:
        yield
        return
    restore_v2 = private_api.io_ops.restore_v2

    # Read the index only once, even if TensorFlow restores tensor by tensor.
    @functools.cache
    def index() -> Index:
        return Index(path) if ahead is None else ahead.index

    def restore(
        prefix: Any,
        tensor_names: Sequence[str],
        shape_and_slices: Sequence[str],
        dtypes: Sequence[Any],
        name: str | None = None,
    ) -> Any:
        def by_tensorflow(which: Sequence[int]) -> Any:
            asked = (tensor_names, shape_and_slices, dtypes)
            parts = ([each[i] for i in which] for each in asked)
            return restore_v2(prefix, *parts, name=name)

        everything = range(len(tensor_names))
        if not _is_here() or tf.get_static_value(prefix) != path.encode():
            return by_tensorflow(everything)
        with _damage_told(path):
            where = index()
        ready: dict[int, tuple[Stored, Bytes]] = {}
        large: dict[int, Stored] = {}
        for i in everything:
            if shape_and_slices[i]:
                continue
            if ahead is not None and (found := ahead.tensors.get(tensor_names[i])):
                # Remove the entry from `ahead`: the eager tensor will own the memory.
                if found[0].dtype == tf.as_dtype(dtypes[i]).as_datatype_enum:
                    ready[i] = ahead.tensors.pop(tensor_names[i])
            elif (
                (stored := _numeric(where, tensor_names[i])) is not None
                and stored.dtype == tf.as_dtype(dtypes[i]).as_datatype_enum
                and stored.size >= bundle_writer.SMALL_BYTES
            ):
                large[i] = stored
        if sum(each.size for each in large.values()) < bundle_writer.WORTH_BYTES:
            large = {}
        rest = [i for i in everything if i not in large and i not in ready]
        tensors = dict(zip(rest, by_tensorflow(rest), strict=True)) if rest else {}
        if large:
            with _damage_told(path):
                found_large, _ = tensor_reader.read(large)
            ready.update(found_large)
        tensors.update((i, _tensor(*each)) for i, each in ready.items())
        return [tensors[i] for i in everything]

    private_api.io_ops.restore_v2 = restore
    try:
        yield
    finally:
        private_api.io_ops.restore_v2 = restore_v2


@contextlib.contextmanager
def _damage_told(path: str) -> Iterator[None]:
    """Returns a context that turns an OSError of its body into a
    CheckpointCorruptedError that names `path`."""
    try:
        yield
    except OSError as error:
        raise errors.CheckpointCorruptedError(
            f"{path!r} could not be read: {error}"
        ) from error


def _numeric(index: Index, name: str) -> Stored | None:
    """Returns the location of the tensor `name`. None if the index has no such tensor,
    or the elements are not numbers."""
    found = index.find(name)
    return found if found is not None and found.dtype in _NUMBERS else None


def _is_here() -> bool:
    """Returns whether TensorFlow executes eagerly, and puts new tensors into the memory
    of this process."""
    if not tf.executing_eagerly():
        return False
    host = private_api.eager_context.context().host_address_space()
    device: str = tf.constant(0).device
    return device.startswith(f"{host}/device:CPU:")


def _tensor(stored: Stored, data: Bytes) -> tf.Tensor:
    """Returns an eager tensor with the type and shape in `stored`; the tensor uses the
    memory of `data` without a copy."""
    dtype = tf.as_dtype(stored.dtype)
    is_bfloat16 = dtype == tf.bfloat16  # NumPy does not have this type: use uint16
    kind = np.uint16 if is_bfloat16 else dtype.as_numpy_dtype
    array = data.view(kind).reshape(stored.shape)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if is_bfloat16 else tensor
