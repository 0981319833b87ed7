"""Large tensors that all workers hold: each worker writes a share of them.

Every worker deals the same tensors out to all, and writes its own share into data files
(`<attempt>.parts/<worker>/`), with a description beside them: which rows of which
tensor are in which file, with their sums. The chief makes all of these files one
checkpoint. It has the same tensors, so a share that is not there, or does not fit, it
writes itself.

Workers that hold other values must not be mixed in one checkpoint: replicas may drift
apart, and a program may set a variable on each worker by itself. So the chief sums up
all that others have written once more, out of its own memory. What has another sum it
writes itself, then and in all later saves: a commit is the chief's, bit for bit.
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

from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.state.contents import Staged
from tfpreempt.checkpoint.state.partitioning import DenseTensor, Part, Stretch, deal
from tfpreempt.checkpoint.tensors import bundle_writer
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, reading
from tfpreempt.storage.files import Files

_log = logging.getLogger(__name__)

_DESCRIPTION = "part.json"
_MAX_BYTES = 64 << 20  # of a description


@dataclasses.dataclass(eq=False, kw_only=True)
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
    _unlike: frozenset[str] = dataclasses.field(default=frozenset(), init=False)
    """On the chief: tensors of which another worker had other values. The chief writes
    all of them, though others do not know it, and write their stretches."""

    @property
    def worth_bytes(self) -> int:
        """Of all that could be dealt out; less is the chief's alone."""
        return bundle_writer.WORTH_BYTES * self.world

    def is_worth_it(self, tensors: Sequence[DenseTensor]) -> bool:
        """Whether each worker has enough of these tensors to write."""
        total = sum(each.data.nbytes for each in tensors if each.is_replicated)
        return total >= self.worth_bytes

    def names_of_own(self, tensors: Sequence[DenseTensor]) -> set[str]:
        """The tensors of which this worker writes something; their bytes do not count.

        Args:
            tensors: all that are dealt out, if that is worth it.
        """
        if not self.is_worth_it(tensors):
            return set()
        return {each.tensor.name for each in self._deal(_shared(tensors))[self.worker]}

    def write_own(self, save: Staged) -> list[Part]:
        """Writes this worker's share, and says what it is; any thread.

        Raises:
            OSError: as the file system says.
        """
        shared = _shared(save.tensors)
        shares = self._deal(shared)
        share = shares[self.worker]
        if self.worker == 0:
            apart = [each for each in save.tensors if not each.is_replicated]
            unlike = [
                stretch
                for others in shares[1:]
                for stretch in others
                if stretch.tensor.name in self._unlike
            ]
            share = [*share, *_whole(apart), *unlike]
        folder = layout.parts_directory(save.staging, self.worker)
        parts = self._write(folder, share, 0)
        if self.worker != 0:
            text = json.dumps(_description(save.step, self.world, shared, parts))
            path = os.path.join(folder, _DESCRIPTION)
            self.files.write(path, [text.encode()])
            self.files.sync_file(path)
        return parts

    def others(self, save: Staged, workers: Collection[int]) -> list[Part]:
        """The shares of all others; on the chief, which writes what does not fit.

        After `write_own`, and once for each.

        Args:
            save: is not changed since `write_own`.
            workers: those that say that they have written their share.

        Raises:
            OSError: as the file system says.
        """
        shared = _shared(save.tensors)
        expected = _description(save.step, self.world, shared, ())
        found: list[tuple[int, Part]] = []
        missing: list[Stretch] = []
        for worker, share in enumerate(self._deal(shared)[1:], 1):
            folder = layout.parts_directory(save.staging, worker)
            try:
                if worker in workers:
                    parts = _fitting(folder, share, expected, shared)
                    found += [(worker, part) for part in parts]
                    continue
            except _UnfitError as error:
                _log.warning(
                    "tfpreempt: worker %d's share of step %d cannot be used, so "
                    "worker 0 writes it; nothing is lost: %s",
                    worker,
                    save.step,
                    error,
                )
            missing += [each for each in share if self._wants(each)]
        taken, unlike = self._compare(save.step, found)
        folder = layout.parts_directory(save.staging, self.worker)
        return taken + self._write(folder, [*missing, *unlike], len(save.parts))

    def _wants(self, stretch: Stretch) -> bool:
        """Whether it is not in the chief's own share already."""
        return stretch.tensor.name not in self._unlike

    def _compare(
        self, step: int, found: Sequence[tuple[int, Part]]
    ) -> tuple[list[Part], list[Stretch]]:
        """Compares what workers have written with the memory of the chief.

        Returns:
            The data files with what is the same in both; and what is not.
        """
        wanted = [
            (worker, part.only([self._wants(each) for each in part.stretches]))
            for worker, part in found
        ]
        sums = iter(
            map_in_threads(
                lambda stretch: checksum.extended(0, stretch.data),
                [each for _, part in wanted for each in part.stretches],
                threads=bundle_writer.THREADS,
                name="tfpreempt-compare",
            )
        )
        taken: list[Part] = []
        unlike: list[tuple[int, Stretch]] = []
        for worker, part in wanted:
            is_like = [there == next(sums) for there in part.sums]
            if any(is_like):
                taken.append(part.only(is_like))
            unlike += [
                (worker, stretch)
                for stretch, is_same in zip(part.stretches, is_like, strict=True)
                if not is_same
            ]
        self._remember(step, unlike)
        return taken, [stretch for _, stretch in unlike]

    def _remember(self, step: int, unlike: Sequence[tuple[int, Stretch]]) -> None:
        """The chief writes these tensors from now on; says so."""
        if not unlike:
            return
        names = sorted({stretch.tensor.name for _, stretch in unlike})
        self._unlike |= set(names)
        _log.warning(
            "tfpreempt: at step %d %r%s has another value on worker(s) %s than on "
            "worker 0. Either the program sets it on each worker by itself, or the "
            "replicas have drifted apart, though their strategy is to keep them equal: "
            "see which. Every commit has the value of worker 0, which writes it alone "
            "from now on",
            step,
            names[0],
            f" (and {len(names) - 1} more)" if names[1:] else "",
            sorted({worker for worker, _ in unlike}),
        )

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
        told = json.loads(reading.read(path, _MAX_BYTES))
        for what in ("step", "world", "tensors"):
            if told[what] != expected[what]:
                raise _UnfitError(f"its {what}: {told[what]}, here {expected[what]}")
        by_name = {each.name: each for each in shared}
        parts = [_part(folder, each, by_name) for each in told["files"]]
        covered = _covered(each for part in parts for each in part.stretches)
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise _UnfitError(f"{type(error).__name__}: {error}") from error
    if covered != _covered(share):
        raise _UnfitError("it has other rows")
    return parts


def _part(folder: str, told: dict[str, Any], by_name: dict[str, DenseTensor]) -> Part:
    """One data file, as it was described.

    Raises:
        _UnfitError: it has not the size that it is to have.
    """
    stretches = [
        Stretch(tensor=by_name[name], start=start, rows=rows)
        for name, start, rows in told["rows"]
    ]
    part = Part(
        path=os.path.join(folder, str(int(told["name"]))),
        size=sum(each.data.nbytes for each in stretches),
        crc32c=int(told["crc32c"]),
        stretches=stretches,
        offsets=bundle_writer.offsets_of(stretches),
        sums=[int(each) for each in told["sums"]],
    )
    size = os.stat(part.path).st_size
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
