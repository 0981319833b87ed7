"""Large tensors that all workers hold: each worker writes a share of them.

Every worker deals the same tensors out to all, and writes its own share into data files
(`<attempt>.parts/<worker>/`), with a description beside them: which rows of which
tensor are in which file, with their sums. The chief makes all of these files one
checkpoint. It has the same tensors, so a share that is not there, or does not fit, it
writes itself.

Workers that have drifted apart must not be mixed in one checkpoint. So a description
has a sum over a sample of every tensor, from other places at every step, and the chief
compares it with its own. That finds workers that train apart, not a single bit.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint import bundle_writer, layout
from tfpreempt.checkpoint.bundle_writer import Part
from tfpreempt.checkpoint.payload import Staged
from tfpreempt.checkpoint.shares import DenseTensor, Stretch, deal
from tfpreempt.storage import checksum, reading
from tfpreempt.storage.files import Files

_log = logging.getLogger(__name__)

_DESCRIPTION = "part.json"
_SAMPLE_WORDS = 256  # of 8 bytes, of each tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """One worker's side of it.

    Args:
        worker: index of this worker; 0 is the chief.
        world: number of workers.
        files: the file operations.
    """

    worker: int
    world: int
    files: Files

    @property
    def worth_bytes(self) -> int:
        """Of all that could be dealt out; less is the chief's alone."""
        return bundle_writer.WORTH_BYTES * self.world

    def is_worth_it(self, tensors: Sequence[DenseTensor]) -> bool:
        """Whether each worker has enough of these tensors to write."""
        total = sum(each.data.nbytes for each in tensors if each.is_replicated)
        return total >= self.worth_bytes

    def write_own(self, save: Staged) -> list[Part]:
        """Writes this worker's share, and says what it is; any thread.

        Raises:
            OSError: as the file system says.
        """
        shared = _shared(save.tensors)
        share = self._deal(shared)[self.worker]
        if self.worker == 0:
            apart = [each for each in save.tensors if not each.is_replicated]
            share = [*share, *_whole(apart)]
        folder = layout.parts_directory(save.directory, self.worker)
        parts = self._write(folder, share, 0)
        if self.worker != 0:
            text = json.dumps(_description(save.step, self.world, shared, parts))
            path = os.path.join(folder, _DESCRIPTION)
            self.files.write(path, text.encode())
            self.files.sync_file(path)
        return parts

    def others(self, save: Staged, workers: Collection[int]) -> list[Part]:
        """The shares of all others; on the chief, which writes what does not fit.

        Args:
            save: is not changed since `write_own`.
            workers: those that say that they have written their share.

        Raises:
            OSError: as the file system says.
        """
        shared = _shared(save.tensors)
        expected = _description(save.step, self.world, shared, ())
        parts: list[Part] = []
        missing: list[Stretch] = []
        for worker, share in enumerate(self._deal(shared)[1:], 1):
            folder = layout.parts_directory(save.directory, worker)
            try:
                if worker in workers:
                    parts += _fitting(folder, share, expected, shared)
                    continue
            except _UnfitError as error:
                _log.warning(
                    "tfpreempt: worker %d's share of step %d cannot be used, so the "
                    "chief writes it: %s",
                    worker,
                    save.step,
                    error,
                )
            missing += share
        folder = layout.parts_directory(save.directory, self.worker)
        return parts + self._write(folder, missing, len(save.parts))

    def _deal(self, shared: Sequence[DenseTensor]) -> list[list[Stretch]]:
        return deal(_whole(shared), self.world)

    def _write(self, folder: str, share: Sequence[Stretch], first: int) -> list[Part]:
        """Writes data files by several threads; the first has this number.

        Of small shares there are fewer files: the chief has to move all of them.
        """
        self.files.make_dirs(folder)
        size = sum(each.data.nbytes for each in share)
        files = size // max(1, bundle_writer.WORTH_BYTES)
        threads = max(1, min(files, bundle_writer.THREADS))
        shares = bundle_writer.deal_to_threads(share, threads)
        names = range(first, first + len(shares))
        paths = [os.path.join(folder, str(name)) for name in names]
        return bundle_writer.write(self.files, dict(zip(paths, shares, strict=True)))


def _shared(tensors: Iterable[DenseTensor]) -> list[DenseTensor]:
    """What is dealt out, in the order of all workers."""
    return sorted(
        (each for each in tensors if each.is_replicated), key=lambda each: each.name
    )


def _whole(tensors: Iterable[DenseTensor]) -> list[Stretch]:
    return [Stretch(tensor=tensor) for tensor in tensors]


# --- descriptions --------------------------------------------------------------------


class _UnfitError(Exception):
    """A share cannot be used; says why."""


def _description(
    step: int, world: int, shared: Sequence[DenseTensor], parts: Iterable[Part]
) -> dict[str, Any]:
    """What a worker says of its share, JSON-able."""
    kinds = [(each.name, each.dtype, each.shape) for each in shared]
    return {
        "step": step,
        "world": world,
        "tensors": checksum.of_bytes(json.dumps(kinds).encode()),
        "samples": [_sample(each, step) for each in shared],
        "files": [
            {
                "name": os.path.basename(part.path),
                "crc32c": part.crc32c,
                "rows": [
                    (each.tensor.name, each.start, each.rows) for each in part.stretches
                ],
                "sums": list(part.sums),
            }
            for part in parts
        ],
    }


def _sample(tensor: DenseTensor, step: int) -> int:
    """The sum of some words of a tensor, or of all of a small one."""
    data = tensor.data
    if data.nbytes <= 8 * _SAMPLE_WORDS:
        return checksum.of_bytes(data.tobytes())
    words = data[: data.nbytes // 8 * 8].view(np.uint64)
    apart = len(words) // _SAMPLE_WORDS
    return checksum.of_bytes(words[step % apart :: apart].tobytes())


def _fitting(
    folder: str,
    share: Sequence[Stretch],
    expected: dict[str, Any],
    shared: Sequence[DenseTensor],
) -> list[Part]:
    """The data files of a worker's share.

    Args:
        folder: where they are.
        share: what is to be in them.
        expected: what the chief would say, but for the files.
        shared: what is dealt out.

    Raises:
        _UnfitError: they are not there, or they are of something else.
    """
    try:
        path = os.path.join(folder, _DESCRIPTION)
        with reading.open_file(path) as file:
            told = json.loads(file.read())
        for what in ("step", "world", "tensors"):
            if told[what] != expected[what]:
                raise _UnfitError(f"its {what}: {told[what]}, here {expected[what]}")
        sums = zip(shared, told["samples"], expected["samples"], strict=True)
        for tensor, there, here in sums:
            if there != here:
                raise _UnfitError(
                    f"{tensor.name!r} has another value there: the workers have "
                    "drifted apart, though their strategy is to keep them equal"
                )
        by_name = {each.name: each for each in shared}
        parts = [_part(folder, each, by_name) for each in told["files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnfitError(f"{type(error).__name__}: {error}") from error
    if _covered(each for part in parts for each in part.stretches) != _covered(share):
        raise _UnfitError("it has other rows")
    return parts


def _part(folder: str, told: dict[str, Any], by_name: dict[str, DenseTensor]) -> Part:
    """One data file, as it was described.

    Raises:
        _UnfitError: it has not the size that it is to have.
    """
    part = Part(
        path=os.path.join(folder, str(int(told["name"]))),
        crc32c=int(told["crc32c"]),
        stretches=[
            Stretch(tensor=by_name[name], start=start, rows=rows)
            for name, start, rows in told["rows"]
        ],
        sums=[int(each) for each in told["sums"]],
    )
    size = reading.stat(part.path).size
    if size != part.size or len(part.sums) != len(part.stretches):
        raise _UnfitError(f"{part.path!r} has {size} bytes, not {part.size}")
    return part


def _covered(stretches: Iterable[Stretch]) -> dict[str, list[tuple[int, int]]]:
    """From which row to which, by the name of the tensor; what adjoins is joined."""
    found: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for each in sorted(stretches, key=lambda each: each.start):
        name, start, shape = each.tensor.name, each.start, each.tensor.shape
        rows = each.rows if each.rows is not None else math.prod(shape[:1])
        end = start + rows
        if found[name] and found[name][-1][1] == start:
            start = found[name].pop()[0]
        found[name].append((start, end))
    return found
