"""Copies the tensors of an asynchronous save with many threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint.bundles.partitioning import DenseTensor
from tfpreempt.core.threads import map_in_threads

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Bytes that a thread copies in one job. A large tensor is divided into many jobs.
_COPIED_AT_ONCE = 1 << 24


class CopyMemory:
    """Copies the tensors of asynchronous saves, and may keep the memory of the copies.

    Args:
        is_kept: whether the next save uses the same memory for its copies, because new
            memory must first be cleared by the kernel, which takes longer than the
            copy. If True, the caller must begin a save only after the previous save has
            ended.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._spare: Bytes | None = None

    def copied(self, tensors: Sequence[DenseTensor], threads: int) -> list[DenseTensor]:
        """Copies tensors into separate memory, so that later training steps do not
        change the copies.

        A tensor read from a variable may use the variable's memory. A usual assignment
        of TensorFlow puts the new value into new memory, and does not change the
        tensor. But an operation that writes in place changes the tensor, and so does a
        write to the NumPy array from which the tensor was made. A step of JAX may write
        its results into the memory of its arguments. A tensor read from a GPU is
        already a copy.

        The copies are in a single block, because the kernel clears a large block in
        larger pages, which is faster.

        Args:
            tensors: tensors that do not change during the copy. Only tensors with
                `is_shared` are copied.
            threads: number of threads that copy.

        Returns:
            The tensors, with copies of their bytes.
        """
        size = sum(each.data.nbytes for each in tensors if each.is_shared)
        memory, self._spare = self._spare, None
        if memory is None or memory.nbytes != size:
            memory = np.empty(size, np.uint8)
        copies: list[DenseTensor] = []
        # Key: position in the memory, in units of _COPIED_AT_ONCE.
        jobs: dict[int, list[tuple[Bytes, Bytes]]] = {}
        start = 0
        for each in tensors:
            if not each.is_shared:
                copies.append(each)
                continue
            data = memory[start : start + each.data.nbytes]
            copies.append(each._replace(data=data, is_shared=False))
            for at in range(0, data.nbytes, _COPIED_AT_ONCE):
                piece = slice(at, at + _COPIED_AT_ONCE)
                job = jobs.setdefault((start + at) // _COPIED_AT_ONCE, [])
                job.append((data[piece], each.data[piece]))
            start += data.nbytes
        map_in_threads(_copy, jobs.values(), threads=threads, name="tfpreempt-copy")
        if self._is_kept:
            self._spare = memory
        return copies

    def free(self) -> None:
        """Frees the memory kept for the next save. May be called on any thread."""
        self._spare = None


def _copy(pieces: Sequence[tuple[Bytes, Bytes]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)
