"""Large tensors dealt out evenly, to workers and to the threads of one worker.

A deal depends on what is dealt out and to how many, and on nothing else: workers that
hold the same tensors know each other's shares without a word.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_UNEVEN = 0.08  # of a share: two that differ by less are worth no cut


class DenseTensor(NamedTuple):
    """A tensor that is its memory: all but strings, resources and variants.

    A tuple, as a save makes thousands.

    Attributes:
        name: its key in the checkpoint.
        dtype: a number of TensorFlow's DataType.
        shape: its dimensions.
        data: its bytes, one after the other; nobody changes them.
        can_be_cut: whether TensorFlow puts it together again if it lies in slices.
        is_shared: whether something else may have the same memory.
        is_replicated: whether all workers hold the same.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    can_be_cut: bool
    is_shared: bool = True
    is_replicated: bool = False


class Stretch(NamedTuple):
    """Some rows of a tensor, along its first axis; mostly all of it. A tuple, too.

    Attributes:
        tensor: the tensor.
        start: its first row.
        rows: how many; None for all of a tensor that is not cut.
    """

    tensor: DenseTensor
    start: int = 0
    rows: int | None = None

    @property
    def data(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of these rows."""
        if self.rows is None:
            return self.tensor.data
        row_bytes = self.tensor.data.nbytes // self.tensor.shape[0]
        return self.tensor.data[self.start * row_bytes :][: self.rows * row_bytes]

    def cut(self, nbytes: float) -> list[Stretch]:
        """In two, the first of which has so many bytes, about; or as it is."""
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
    """A data file that is on the disk.

    Attributes:
        path: where it is now.
        size: its bytes.
        crc32c: of all of it.
        stretches: what is wanted of it; mostly all.
        offsets: where each begins.
        sums: crc32c of each.
    """

    path: str
    size: int
    crc32c: int
    stretches: Sequence[Stretch]
    offsets: Sequence[int]
    sums: Sequence[int]

    def only(self, is_wanted: Sequence[bool]) -> Part:
        """The same file, of which only some of these stretches are wanted."""
        return dataclasses.replace(
            self,
            stretches=list(itertools.compress(self.stretches, is_wanted)),
            offsets=list(itertools.compress(self.offsets, is_wanted)),
            sums=list(itertools.compress(self.sums, is_wanted)),
        )


def deal(stretches: Sequence[Stretch], count: int) -> list[list[Stretch]]:
    """Deals stretches out so that each share has about as many bytes.

    The largest come first, each to who has least. Where the largest share still has
    much more than the smallest, as one tensor may be larger than all others, a part of
    it goes there. TensorFlow reads a cut tensor slower than a whole one, so as few as
    need be are cut. A share of which nothing can be cut stays as it is, and the others
    are evened out.

    Args:
        stretches: what is dealt out.
        count: to how many.

    Returns:
        So many shares, of which some may be empty.
    """
    shares: list[list[Stretch]] = [[] for _ in range(count)]
    sizes = [0] * count
    for stretch in sorted(stretches, key=lambda each: each.data.nbytes, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(stretch)
        sizes[least] += stretch.data.nbytes
    uneven = list(range(count))
    while len(uneven) > 1:  # each cut brings one share to the mean of those
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
    share: Sequence[Stretch], nbytes: float
) -> tuple[Stretch, list[Stretch]] | None:
    """Cuts so many bytes, about, off the largest stretch that allows it.

    Returns:
        What was cut off, and the rest of the share; None where nothing can be cut.
    """
    largest_first = sorted(share, key=lambda each: each.data.nbytes, reverse=True)
    for number, stretch in enumerate(largest_first):
        given, *kept = stretch.cut(nbytes)
        if kept:
            rest = largest_first[:number] + largest_first[number + 1 :]
            return given, [*rest, *kept]
    return None
