"""Writes large tensors that all workers hold in shares: each worker writes a share.

A share is a list of tensor slices. Every worker divides the same tensors into the same
shares, and writes the share with the worker's number into data files
(`<attempt>.parts/<worker>/`). A JSON file beside the data files, the description, has
the checksums of the files and of the slices in the files. The chief (worker 0) divides
the tensors in the same way, and merges the files into a single checkpoint. The chief
holds the same tensors, so the chief writes a share again if the share is missing or
does not fit.

Different values of two workers must not be mixed in one checkpoint: replicas may drift
apart, and a program may set a variable on each worker separately. So the chief computes
the checksums of the other workers' rows from its own memory. If a checksum differs, the
chief writes the rows itself, and writes the whole tensor in later saves. A commit is
therefore equal to the chief's values, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tfpreempt.checkpoint.bundles import bundle_writer
from tfpreempt.checkpoint.bundles.partitioning import (
    DenseTensor,
    Part,
    TensorSlice,
    partition,
)
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.state.contents import StagedSave
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, file_reading
from tfpreempt.storage.files import Files

_log = logging.getLogger(__name__)

_DESCRIPTION = "part.json"
_MAX_BYTES = 64 << 20  # largest size of a description file
_MAX_THREADS = 64  # largest number of threads in a description file


@dataclasses.dataclass(eq=False, kw_only=True)
class ReplicaParallelWriter:
    """Writes this worker's share of the replicated tensors, and on the chief merges all
    shares.

    Args:
        worker: index of the worker; 0 is the chief.
        num_workers: number of workers.
        files: the file operations.
    """

    worker: int
    num_workers: int
    files: Files
    _unlike: frozenset[str] = dataclasses.field(default=frozenset(), init=False)
    """On the chief: names of tensors whose values differ on another worker. The chief
    writes these tensors completely. The other workers do not know the names, and still
    write their slices, which the chief ignores."""

    @property
    def worth_bytes(self) -> int:
        """The minimum total size in bytes of the replicated tensors. If they are
        smaller, the chief writes every tensor."""
        return bundle_writer.WORTH_BYTES * self.num_workers

    def is_worth_it(self, tensors: Sequence[DenseTensor]) -> bool:
        """Returns whether the replicated tensors are large enough to be divided between
        the workers."""
        total = sum(each.data.nbytes for each in tensors if each.is_replicated)
        return total >= self.worth_bytes

    def names_of_own(self, tensors: Sequence[DenseTensor]) -> set[str]:
        """Returns the names of the tensors with rows in this worker's share. Reads no
        bytes of a tensor.

        Args:
            tensors: the tensors of a save. The result is empty if the replicated
                tensors are too small to be divided (`is_worth_it`).
        """
        if not self.is_worth_it(tensors):
            return set()
        return {each.tensor.name for each in self._deal(_shared(tensors))[self.worker]}

    def write_own(self, save: StagedSave) -> list[Part]:
        """Writes this worker's share and its description. Called on any thread.

        The chief also writes the tensors that are not replicated, and the tensors known
        to differ on another worker; its share has no description.

        Args:
            save: the save, with the tensors.

        Returns:
            The written data files.

        Raises:
            OSError: error of the file system.
        """
        shared = _shared(save.tensors)
        shares = self._deal(shared)
        share = shares[self.worker]
        if self.worker == 0:
            apart = [each for each in save.tensors if not each.is_replicated]
            unlike = [
                tensor_slice
                for others in shares[1:]
                for tensor_slice in others
                if tensor_slice.tensor.name in self._unlike
            ]
            share = [*share, *_whole(apart), *unlike]
        folder = layout.parts_directory(save.staging, self.worker)
        parts = self._write(folder, share, 0)
        if self.worker != 0:
            kind = _description(save.step, self.num_workers, shared)
            files = [_described(part) for part in parts]
            text = json.dumps({**kind, "threads": _thread_count(share), "files": files})
            path = os.path.join(folder, _DESCRIPTION)
            self.files.write(path, [text.encode()])
            self.files.sync_file(path)
        return parts

    def others(self, save: StagedSave, workers: Collection[int]) -> list[Part]:
        """Collects the other workers' shares, on the chief. If a share is missing or
        unusable, the chief writes the rows of the share.

        Called after `write_own`, once for each save.

        Args:
            save: the save, unchanged since `write_own`.
            workers: workers that reported a written share.

        Returns:
            The data files of the other workers, and the files written by this call.

        Raises:
            OSError: error of the file system.
        """
        shared = _shared(save.tensors)
        expected = _description(save.step, self.num_workers, shared)
        found: list[tuple[int, Part]] = []
        missing: list[TensorSlice] = []
        for worker, share in enumerate(self._deal(shared)[1:], 1):
            folder = layout.parts_directory(save.staging, worker)
            try:
                if worker in workers:
                    parts = _fitting(folder, share, expected)
                    found += [(worker, part) for part in parts]
                    continue
            except _InvalidShareError as error:
                _log.warning(
                    "cannot use the share (a part of the tensors) that worker %d wrote "
                    "for step %d, so worker 0 writes this share; nothing is lost: %s",
                    worker,
                    save.step,
                    error,
                )
            missing += [each for each in share if self._wants(each)]
        taken, unlike = self._compare(save.step, found)
        folder = layout.parts_directory(save.staging, self.worker)
        return taken + self._write(folder, [*missing, *unlike], len(save.parts))

    def _wants(self, tensor_slice: TensorSlice) -> bool:
        """Returns whether the chief needs a tensor slice from another worker. False if
        `write_own` has written the slice already, because the tensor differs between
        workers."""
        return tensor_slice.tensor.name not in self._unlike

    def _compare(
        self, step: int, found: Sequence[tuple[int, Part]]
    ) -> tuple[list[Part], list[TensorSlice]]:
        """Compares the files of other workers (`found`, each with the worker's index)
        with the memory of the chief, by checksums.

        Returns:
            The data files, reduced to the slices equal to the chief's; and the
            differing slices, for the chief to write.
        """
        wanted = [
            (worker, part.only([self._wants(each) for each in part.slices]))
            for worker, part in found
        ]
        sums = iter(
            map_in_threads(
                lambda tensor_slice: checksum.extended(0, tensor_slice.data),
                [each for _, part in wanted for each in part.slices],
                threads=bundle_writer.THREADS,
                name="tfpreempt-compare",
            )
        )
        taken: list[Part] = []
        unlike: list[tuple[int, TensorSlice]] = []
        for worker, part in wanted:
            is_like = [there == next(sums) for there in part.sums]
            if any(is_like):
                taken.append(part.only(is_like))
            unlike += [
                (worker, tensor_slice)
                for tensor_slice, is_same in zip(part.slices, is_like, strict=True)
                if not is_same
            ]
        self._remember(step, unlike)
        return taken, [tensor_slice for _, tensor_slice in unlike]

    def _remember(self, step: int, unlike: Sequence[tuple[int, TensorSlice]]) -> None:
        """Logs a warning about tensors with different values on a worker and on the
        chief. Remembers the names of the tensors: in later saves the chief writes these
        tensors completely.

        Args:
            step: the saved step.
            unlike: index of the worker, and the slice that differs.
        """
        if not unlike:
            return
        names = sorted({tensor_slice.tensor.name for _, tensor_slice in unlike})
        self._unlike |= set(names)
        _log.warning(
            "at step %d, %r%s has another value on worker(s) %s than on worker 0. "
            "Either the program sets a different value on each worker, or the replicas "
            "have diverged, although the strategy should keep them equal: find the "
            "cause. Every commit has the value of worker 0. From now on, worker 0 "
            "writes this value alone",
            step,
            names[0],
            f" (and {len(names) - 1} more)" if names[1:] else "",
            sorted({worker for worker, _ in unlike}),
        )

    def _deal(self, shared: Sequence[DenseTensor]) -> list[list[TensorSlice]]:
        return partition(_whole(shared), self.num_workers)

    def _write(
        self, folder: str, share: Sequence[TensorSlice], first: int
    ) -> list[Part]:
        """Writes tensor slices into data files, with several threads. The names of the
        files in `folder` are the numbers from `first` on."""
        self.files.make_dirs(folder)
        shares = bundle_writer.deal_to_threads(share, _thread_count(share))
        names = range(first, first + len(shares))
        paths = [os.path.join(folder, str(name)) for name in names]
        return bundle_writer.write(self.files, dict(zip(paths, shares, strict=True)))


def _shared(tensors: Iterable[DenseTensor]) -> list[DenseTensor]:
    """Returns the replicated tensors, in the same order on every worker."""
    return sorted(
        (each for each in tensors if each.is_replicated), key=lambda each: each.name
    )


def _whole(tensors: Iterable[DenseTensor]) -> list[TensorSlice]:
    return [TensorSlice(tensor=tensor) for tensor in tensors]


def _thread_count(share: Sequence[TensorSlice]) -> int:
    """Returns the number of threads that write a share, each into a separate file. A
    small share is written to fewer files, because the chief has to move every file."""
    size = sum(each.data.nbytes for each in share)
    files = size // max(1, bundle_writer.WORTH_BYTES)
    return max(1, min(files, bundle_writer.THREADS))


# --- descriptions --------------------------------------------------------------------


class _InvalidShareError(Exception):
    """The share of another worker cannot be used; the message gives the reason."""


def _description(
    step: int, num_workers: int, shared: Sequence[DenseTensor]
) -> dict[str, Any]:
    """Returns the beginning of a share's description, JSON-able: the save, and a
    checksum of names, types and shapes of the divided tensors (`shared`)."""
    kinds = [(each.name, each.dtype, each.shape) for each in shared]
    return {
        "step": step,
        "num_workers": num_workers,
        "tensors": checksum.of_bytes(json.dumps(kinds).encode()),
    }


def _described(part: Part) -> dict[str, Any]:
    """Returns the entry of a data file in a share's description."""
    name = os.path.basename(part.path)
    return {"name": name, "crc32c": part.crc32c, "sums": list(part.sums)}


def _fitting(
    folder: str, share: Sequence[TensorSlice], expected: dict[str, Any]
) -> list[Part]:
    """Returns the data files of a worker's share, checked against its description.
    Reads no bytes of the files.

    Args:
        folder: directory of the files.
        share: the tensor slices that the worker should have written.
        expected: the beginning of the chief's own description.

    Raises:
        _InvalidShareError: the files are missing, or belong to another save.
    """
    try:
        path = os.path.join(folder, _DESCRIPTION)
        described = json.loads(file_reading.read(path, _MAX_BYTES))
        for what, value in expected.items():
            if described[what] != value:
                raise _InvalidShareError(
                    f"its {what} is {described[what]}; expected {value}"
                )
        threads = int(described["threads"])
        if not 0 < threads <= _MAX_THREADS:
            raise _InvalidShareError(
                f"its threads are {threads}; expected 1 to {_MAX_THREADS}"
            )
        shares = bundle_writer.deal_to_threads(share, threads)
        files = enumerate(zip(shares, described["files"], strict=True))
        return [_part(folder, number, *each) for number, each in files]
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise _InvalidShareError(f"{type(error).__name__}: {error}") from error


def _part(
    folder: str, number: int, slices: Sequence[TensorSlice], file: dict[str, Any]
) -> Part:
    """Returns a data file of another worker.

    Args:
        folder: directory of the file.
        number: number of the file in the share.
        slices: the tensor slices that the file should have.
        file: entry of the file in the description.

    Raises:
        _InvalidShareError: the size of the file, or the number of checksums, does not
            fit the slices.
    """
    part = Part(
        path=os.path.join(folder, str(number)),
        size=sum(each.data.nbytes for each in slices),
        crc32c=int(file["crc32c"]),
        slices=slices,
        offsets=bundle_writer.offsets_of(slices),
        sums=[int(each) for each in file["sums"]],
    )
    size = os.stat(part.path).st_size
    if int(file["name"]) != number or len(part.sums) != len(slices):
        raise _InvalidShareError(f"the description of {part.path!r} does not fit")
    if size != part.size:
        raise _InvalidShareError(
            f"{part.path!r} has {size} bytes; expected {part.size}"
        )
    return part
