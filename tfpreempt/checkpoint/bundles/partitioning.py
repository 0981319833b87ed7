"""Divides large tensors evenly among workers, or among threads of a worker.

A share is the list of tensor slices that a single worker or thread writes. The division
depends only on the tensors and the number of shares. So workers with equal tensors
compute the same division, and know every share without communication.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_UNEVEN = 0.08  # shares whose sizes differ by a smaller fraction are not changed


class DenseTensor(NamedTuple):
    """A tensor stored as plain memory: any dtype but strings, resources and variants.

    A NamedTuple, because a save creates thousands of objects.

    Attributes:
        name: key of the tensor in the checkpoint.
        dtype: number in TensorFlow's DataType.
        shape: dimensions of the tensor.
        data: contiguous bytes of the tensor; never modified.
        can_be_cut: whether TensorFlow can read the tensor if it is stored in slices.
        is_shared: whether objects outside of the save may use the memory of `data`, so
            that an asynchronous save must copy the bytes.
        is_replicated: whether every worker holds the same tensor, so that any worker
            can write the tensor.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    can_be_cut: bool
    is_shared: bool = True
    is_replicated: bool = False


class TensorSlice(NamedTuple):
    """Consecutive rows of a tensor along the first axis; usually the whole tensor.

    Attributes:
        tensor: the tensor.
        start: index of the first row.
        rows: number of rows; None if the slice is the whole tensor.
    """

    tensor: DenseTensor
    start: int = 0
    rows: int | None = None

    @property
    def data(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of the rows."""
        if self.rows is None:
            return self.tensor.data
        row_bytes = self.tensor.data.nbytes // self.tensor.shape[0]
        return self.tensor.data[self.start * row_bytes :][: self.rows * row_bytes]

    def cut(self, nbytes: float) -> list[TensorSlice]:
        """Divides the slice after about `nbytes` bytes.

        Returns:
            Two slices; or the slice itself, if it cannot be divided.
        """
        if not self.tensor.can_be_cut or not self.tensor.shape or not self.data.nbytes:
            return [self]
        have = self.tensor.shape[0] if self.rows is None else self.rows
        rows = round(nbytes * have / self.data.nbytes)
        if not 0 < rows < have:
            return [self]
        return [
            self._replace(rows=rows),
            self._replace(start=self.start + rows, rows=have - rows),
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A data file with the bytes of tensors, on the disk but not in an index yet.

    Attributes:
        path: current path of the file.
        size: size of the file in bytes.
        crc32c: checksum of the whole file.
        slices: the tensor slices in the file that belong to the checkpoint, usually
            every slice. Only these slices get an entry in the index.
        offsets: for each of `slices`, the offset of its first byte in the file.
        sums: for each of `slices`, the crc32c of its bytes.
    """

    path: str
    size: int
    crc32c: int
    slices: Sequence[TensorSlice]
    offsets: Sequence[int]
    sums: Sequence[int]

    def only(self, should_save: Sequence[bool]) -> Part:
        """Returns a Part for the same file with only some of the `slices`.

        Args:
            should_save: for each of `slices`, whether the new Part has the slice.
        """
        return dataclasses.replace(
            self,
            slices=list(itertools.compress(self.slices, should_save)),
            offsets=list(itertools.compress(self.offsets, should_save)),
            sums=list(itertools.compress(self.sums, should_save)),
        )


def partition(slices: Sequence[TensorSlice], count: int) -> list[list[TensorSlice]]:
    """Divides tensor slices into shares of about equal size in bytes.

    First, the slices are assigned in order of size, the largest first, always to the
    share that is the smallest so far. If the sizes of the shares still differ much, for
    example because of a very large tensor, a slice of the largest share is cut, and a
    piece moves to the smallest share. A share without a slice that can be cut is left
    unchanged. Few tensors are cut, because TensorFlow reads a cut tensor more slowly.

    Args:
        slices: tensor slices to be divided.
        count: number of shares.

    Returns:
        A list of `count` shares; a share may be empty.
    """
    shares: list[list[TensorSlice]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor_slice in sorted(slices, key=lambda each: each.data.nbytes, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(tensor_slice)
        sizes[least] += tensor_slice.data.nbytes
    uneven = list(range(count))
    while len(uneven) > 1:  # every cut makes one share as large as the mean
        mean = sum(sizes[each] for each in uneven) / len(uneven)
        most = max(uneven, key=lambda each: sizes[each])
        least = min(uneven, key=lambda each: sizes[each])
        if sizes[most] - sizes[least] <= mean * _UNEVEN:
            break
        above, below = sizes[most] - mean, mean - sizes[least]
        pieces = _cut_one(shares[most], min(above, below))
        if pieces is None:
            uneven.remove(most)
            continue
        given, shares[most] = pieces
        shares[least].append(given)
        sizes[most] -= given.data.nbytes
        sizes[least] += given.data.nbytes
        uneven.remove(most if above < below else least)
    return shares


def _cut_one(
    share: Sequence[TensorSlice], nbytes: float
) -> tuple[TensorSlice, list[TensorSlice]] | None:
    """Cuts about `nbytes` bytes off the largest tensor slice of a share.

    If the largest slice cannot be cut, the next smaller slice is cut.

    Returns:
        The piece, and the share without the piece; None if no slice can be cut.
    """
    largest_first = sorted(share, key=lambda each: each.data.nbytes, reverse=True)
    for number, tensor_slice in enumerate(largest_first):
        given, *kept = tensor_slice.cut(nbytes)
        if kept:
            rest = largest_first[:number] + largest_first[number + 1 :]
            return given, [*rest, *kept]
    return None
