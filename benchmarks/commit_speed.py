"""Measures how long a commit takes, beside TensorFlow's write of the same state.

A commit includes the capture, the staging, the checksums and the sync of the state, and
the manifest, the marker and the state file. `tf.train.Checkpoint.write` syncs nothing
and computes no checksums. `raw` writes the same memory with as many threads as a commit
has, each thread into a file of its own, and syncs each file. All sides write new files;
the removal of a file is not timed.

`capture` is the part of the commit that finds and reads the tensors, on the main
thread; `capture_us_each` is this time per tensor, in microseconds. An asynchronous save
also copies the tensors (`async_save.py`).

The states are those of `states.py`. The states take turns within each round, so that
the last row can compare the commits of many small tensors with those of few large
tensors.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plain, states
from benchmarks.row import MEMORY, compare, file_system, side

BAR = 0.5  # of TensorFlow's write
SMALL_BAR = 1.5  # of the commit of few large tensors


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields a row for each state in memory and on disk; the bars are for memory.

    Args:
        rounds: number of commits of each state.
        mebibytes: size of a state of tensors.
    """
    for place in (MEMORY, None):
        root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=place))
        try:
            yield from _rows(root, rounds, mebibytes, has_bar=place is MEMORY)
        finally:
            shutil.rmtree(root)


def _rows(
    root: Path, rounds: int, mebibytes: int, *, has_bar: bool
) -> Iterator[dict[str, Any]]:
    from tfpreempt.checkpoint.bundles.bundle_writer import THREADS

    every = [
        _State(name, mebibytes, root / str(number))
        for number, name in enumerate((*states.TENSORS, *states.MODELS))
    ]
    for number in range(rounds + 1):  # the first is a warm-up
        for state in every:
            state.measure(number)
    place = file_system(root)
    for state in every:
        found = state.seconds
        capture = statistics.median(found["capture"])
        yield compare(
            "commit_speed",
            found["ours"],
            found["theirs"],
            raw=found["raw"],
            unit="s",
            bar=BAR if has_bar else None,
            **side("capture", found["capture"], 3),
            capture_us_each=round(1e6 * capture / len(state.variables), 1),
            place=place,
            state=state.name,
            tensors=len(state.variables),
            mebibytes=state.mebibytes,
            threads=THREADS,
        )
    if has_bar:
        small, large = (
            next(state for state in every if state.name == name)
            for name in (states.MANY, states.FEW)
        )
        yield compare(
            "small_tensors",
            small.seconds["ours"],
            large.seconds["ours"],
            unit="s",
            bar=SMALL_BAR,
            place=place,
            mebibytes=mebibytes,
        )


class _State:
    def __init__(self, name: str, mebibytes: int, root: Path) -> None:
        from tfpreempt.checkpoint.directory.retention import RetentionPolicy
        from tfpreempt.checkpoint.restore import opening

        self.name, self._root = name, root
        self.checkpoint, self.variables = states.checkpoint(name, mebibytes)
        size = sum(np.asarray(variable).nbytes for variable in self.variables)
        self.mebibytes = round(size / 2**20)
        root.mkdir()
        self._directory = opening.open_directory(
            self.checkpoint, root / "run", policy=RetentionPolicy(max_to_keep=None)
        )
        self._directory.start()
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def measure(self, number: int) -> None:
        """Measures each side once; the first measurement is dropped."""
        from tfpreempt.checkpoint.bundles import bundle_writer

        memory = [np.asarray(variable) for variable in self.variables]
        found = {
            "raw": plain.write(self._root / "plain", memory, bundle_writer.THREADS),
            **self._commit(number),
            "theirs": _timed(
                functools.partial(
                    self.checkpoint.write, str(self._root / "stock" / "ckpt")
                )
            ),
        }
        shutil.rmtree(self._root / "stock")
        for name, seconds in found.items() if number else ():
            self.seconds[name].append(seconds)

    def _commit(self, number: int) -> dict[str, float]:
        from tfpreempt.checkpoint.restore.save import Save

        began = time.perf_counter()
        save = Save(self._directory, number, f"bench-{number}")
        save.capture()
        captured = time.perf_counter()
        save.write()
        commit = save.publish("save", [0])
        ended = time.perf_counter()
        assert commit is not None
        shutil.rmtree(commit.path)
        return {"capture": captured - began, "ours": ended - began}


def _timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
