"""Partitions large tensors evenly, between workers or between threads of a worker.

A partition depends only on the tensors and on the number of shares: workers with the
same tensors know each other's shares without communication.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_UNEVEN = 0.08  # of a share: a smaller difference is not worth a cut


class DenseTensor(NamedTuple):
    """A tensor stored as plain memory: any dtype but strings, resources and variants.

    The class is a tuple, because a save creates thousands of objects.

    Attributes:
        name: key of the tensor in the checkpoint.
        dtype: number in TensorFlow's DataType.
        shape: dimensions of the tensor.
        data: contiguous bytes of the tensor; never modified.
        can_be_cut: whether TensorFlow reassembles the tensor from slices.
        is_shared: whether other objects may use the same memory.
        is_replicated: whether every worker holds the same tensor.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    can_be_cut: bool
    is_shared: bool = True
    is_replicated: bool = False


class TensorSlice(NamedTuple):
    """Rows of a tensor along the first axis, usually every row. Also a tuple.

    Attributes:
        tensor: the tensor.
        start: index of the first row.
        rows: number of rows; None for a tensor that is not cut.
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
        """Splits off about `nbytes` bytes at the front.

        Returns:
            Two stretches; or the stretch alone, if a split is impossible.
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
    """A data file on the disk.

    Attributes:
        path: current path of the file.
        size: size of the file in bytes.
        crc32c: checksum of the whole file.
        stretches: wanted stretches of the file, usually every stretch.
        offsets: offset of each stretch in the file.
        sums: crc32c of each stretch.
    """

    path: str
    size: int
    crc32c: int
    stretches: Sequence[TensorSlice]
    offsets: Sequence[int]
    sums: Sequence[int]

    def only(self, should_save: Sequence[bool]) -> Part:
        """Returns the same file with only the stretches that are wanted."""
        return dataclasses.replace(
            self,
            stretches=list(itertools.compress(self.stretches, should_save)),
            offsets=list(itertools.compress(self.offsets, should_save)),
            sums=list(itertools.compress(self.sums, should_save)),
        )


def partition(stretches: Sequence[TensorSlice], count: int) -> list[list[TensorSlice]]:
    """Partitions stretches into shares of about equal size in bytes.

    The largest stretches come first, and each goes to the smallest share. One tensor
    may be larger than the rest together, so the largest share may still be much larger
    than the smallest. A piece of the largest share then moves to the smallest share.
    TensorFlow reads a cut tensor more slowly than an uncut tensor, so as few as
    possible are cut. A share without a divisible stretch stays unchanged, and the
    remaining shares are evened out.

    Args:
        stretches: stretches to be partitioned.
        count: number of shares.

    Returns:
        A list of `count` shares; a share may be empty.
    """
    shares: list[list[TensorSlice]] = [[] for _ in range(count)]
    sizes = [0] * count
    for stretch in sorted(stretches, key=lambda each: each.data.nbytes, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(stretch)
        sizes[least] += stretch.data.nbytes
    uneven = list(range(count))
    while len(uneven) > 1:  # every cut brings one share to the mean
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
    """Cuts about `nbytes` bytes off the largest divisible stretch of a share.

    Returns:
        The piece, and the rest of the share; None if no stretch is divisible.
    """
    largest_first = sorted(share, key=lambda each: each.data.nbytes, reverse=True)
    for number, stretch in enumerate(largest_first):
        given, *kept = stretch.cut(nbytes)
        if kept:
            rest = largest_first[:number] + largest_first[number + 1 :]
            return given, [*rest, *kept]
    return None
