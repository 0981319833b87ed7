"""Writes and reads plain bytes in threads, to measure the machine itself."""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 1 << 20
Jobs = Sequence[Callable[[], None]]


def write(folder: Path, memory: Sequence[np.ndarray[Any, Any]], threads: int) -> float:
    """Returns the seconds to write and sync the bytes of arrays; removes the files.

    Args:
        folder: directory to create.
        memory: arrays to write.
        threads: number of threads; each writes an equal share into its own file.
    """
    arrays = [array.reshape(-1).view(np.uint8) for array in memory]
    folder.mkdir()

    def write_share(name: str, share: list[tuple[int, int, int]]) -> None:
        with (folder / name).open("wb", buffering=0) as file:
            for index, first, last in share:
                for start in range(first, last, PIECE):
                    file.write(arrays[index][start : min(start + PIECE, last)].data)
            os.fsync(file.fileno())

    shares = _shares([array.nbytes for array in arrays], threads)
    took = _together(
        [functools.partial(write_share, str(i), each) for i, each in enumerate(shares)]
    )
    shutil.rmtree(folder)
    return took


def read(files: Sequence[Path], threads: int, *, keep: bool = False) -> float:
    """Returns the seconds to read files.

    Args:
        files: files to read.
        threads: number of threads; each reads an equal share.
        keep: whether to keep the data in new memory; otherwise the data are dropped.
    """
    sizes = [path.stat().st_size for path in files]
    memory = [np.empty(size, np.uint8) for size in sizes] if keep else []

    def read_share(share: list[tuple[int, int, int]]) -> None:
        buffer = np.empty(PIECE, np.uint8)
        for index, start, last in share:
            with files[index].open("rb", buffering=0) as file:
                file.seek(start)
                while start < last:
                    room = memory[index][start:] if keep else buffer
                    start += file.readinto(room[: min(PIECE, last - start)].data)

    return _together(
        [functools.partial(read_share, each) for each in _shares(sizes, threads)]
    )


def _shares(sizes: list[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Returns equal shares of items of given sizes, as (item, begin, end)."""
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
    """Returns the seconds of functions that run in a thread each."""
    crew = [threading.Thread(target=job) for job in jobs]
    began = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return time.perf_counter() - began
