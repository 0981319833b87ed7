"""How long a commit takes, against writing and syncing the same bytes and no more.

A commit is all of it: gathered, staged, synced, summed up, with its manifest, its
marker and the state file. The plain side writes the same memory with as many threads,
each into a file of its own, and syncs each. Both write new files; what was written is
removed outside of the times. A state is of equal tensors, or nearly all one tensor.
`checkpoint_write` is `tf.train.Checkpoint.write`, which syncs nothing and has no sums.

Restoring is what a start does: the newest commit is verified, then restored. It is
compared with a plain read of its files by as many threads, from the same cache, which
drops what it has read. `read_and_kept` is such a read into memory of the size of the
state, which a restore cannot do without; `checkpoint_read` is what
`tf.train.Checkpoint.read` takes, and `first` what the first restore of the process
took: a start has only that one, and its memory is fresh.

Rounds are interleaved; each row is of a place: the memory, and the disk.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.row import compare

BAR = 1.15
RESTORE_BAR = 1.2
PIECE = 1 << 20
SHAPES = {"16 equal tensors": [1] * 16, "one large tensor": [60, 1, 1, 1, 1]}
Jobs = Sequence[Callable[[], None]]


def rows(rounds: int, mebibytes: int) -> Iterator[dict[str, Any]]:
    """A row for the commit and one for the restore, by place and shape of the state."""
    for place in ("/dev/shm", None):
        for shape, parts in SHAPES.items():
            root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=place))
            try:
                yield from _rows(root, shape, parts, rounds, mebibytes)
            finally:
                shutil.rmtree(root)


def _rows(
    root: Path, shape: str, parts: list[int], rounds: int, mebibytes: int
) -> Iterator[dict[str, Any]]:
    import tensorflow as tf

    from tfpreempt.checkpoint import bundle_writer, writer

    rng = np.random.default_rng(0)
    rows_of = [(mebibytes << 20) // 4096 * part // sum(parts) for part in parts]
    variables = [tf.Variable(rng.random((rows, 1024), np.float32)) for rows in rows_of]
    checkpoint = tf.train.Checkpoint(variables=variables)
    saver = writer.make_saver(checkpoint, root / "run", max_to_keep=None)
    saver.start()
    ours, theirs, stock, restored, read = [], [], [], [], []
    kept, stock_read, first = [], [], 0.0
    for number in range(rounds + 1):
        memory = [np.asarray(variable.read_value()) for variable in variables]
        plain = _plain_write(root / "plain", memory, bundle_writer.THREADS)
        began = time.perf_counter()
        staged = saver.stage(number, f"bench-{number}")
        commit = saver.commit(staged, "save", [0])
        took = time.perf_counter() - began
        assert commit is not None
        began = time.perf_counter()
        checkpoint.write(str(root / "stock" / "ckpt"))
        written = time.perf_counter() - began
        shutil.rmtree(root / "stock")
        files = sorted(Path(commit.path).glob("ckpt*"))
        if not number:
            first = _restore(saver)
        looked = _together(_readers(files, bundle_writer.THREADS))
        looked_and_kept = _together(_readers(files, bundle_writer.THREADS, keep=True))
        began = time.perf_counter()
        checkpoint.read(os.path.join(commit.path, "ckpt"))
        stock_again = time.perf_counter() - began
        again = _restore(saver)
        shutil.rmtree(commit.path)
        if number:  # the first is a warm-up
            ours.append(took)
            theirs.append(plain)
            stock.append(written)
            restored.append(again)
            read.append(looked)
            kept.append(looked_and_kept)
            stock_read.append(stock_again)
    facts = {
        "place": str(root.parent),
        "state": shape,
        "mebibytes": mebibytes,
        "threads": bundle_writer.THREADS,
    }
    yield compare(
        "commit_speed",
        ours,
        theirs,
        unit="s",
        bar=BAR,
        p95=_p95(ours),
        p95_theirs=_p95(theirs),
        checkpoint_write=round(statistics.median(stock), 3),
        **facts,
    )
    yield compare(
        "restore_speed",
        restored,
        read,
        unit="s",
        bar=RESTORE_BAR,
        first=round(first, 3),
        read_and_kept=round(statistics.median(kept), 3),
        checkpoint_read=round(statistics.median(stock_read), 3),
        **facts,
    )


def _restore(saver: Any) -> float:
    """Seconds that it takes to verify and restore the newest commit."""
    began = time.perf_counter()
    candidate = saver.loader.newest()
    assert candidate is not None
    saver.loader.restore(candidate)
    return time.perf_counter() - began


def _plain_write(folder: Path, memory: list[np.ndarray[Any, Any]], count: int) -> float:
    """Seconds to write and sync the bytes of all arrays, in equal stretches."""
    arrays = [array.reshape(-1).view(np.uint8) for array in memory]
    folder.mkdir()

    def write(name: str, stretch: list[tuple[int, int, int]]) -> None:
        with (folder / name).open("wb", buffering=0) as file:
            for index, first, last in stretch:
                for start in range(first, last, PIECE):
                    file.write(arrays[index][start : min(start + PIECE, last)].data)
            os.fsync(file.fileno())

    stretches = _stretches([array.nbytes for array in arrays], count)
    took = _together(
        [functools.partial(write, str(i), each) for i, each in enumerate(stretches)]
    )
    shutil.rmtree(folder)
    return took


def _readers(files: list[Path], count: int, *, keep: bool = False) -> Jobs:
    """Jobs that read the files and drop what they read, or keep it in fresh memory."""
    sizes = [path.stat().st_size for path in files]
    memory = [np.empty(size, np.uint8) for size in sizes] if keep else []

    def read(stretch: list[tuple[int, int, int]]) -> None:
        buffer = np.empty(PIECE, np.uint8)
        for index, start, last in stretch:
            with files[index].open("rb", buffering=0) as file:
                file.seek(start)
                while start < last:
                    room = memory[index][start:] if keep else buffer
                    start += file.readinto(room[: min(PIECE, last - start)].data)

    return [functools.partial(read, each) for each in _stretches(sizes, count)]


def _stretches(sizes: list[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Equal shares of things of these sizes: which one, from where, up to where."""
    share = -(-sum(sizes) // count)
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for number, stretch in enumerate(found):
        begins = 0
        for index, size in enumerate(sizes):
            first = max(number * share - begins, 0)
            last = min((number + 1) * share - begins, size)
            if first < last:
                stretch.append((index, first, last))
            begins += size
    return found


def _together(jobs: Jobs) -> float:
    """Seconds that they take in a thread each."""
    crew = [threading.Thread(target=job) for job in jobs]
    began = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return time.perf_counter() - began


def _p95(values: list[float]) -> float:
    return round(float(np.percentile(values, 95)), 3)
