"""How long a commit takes, against writing and syncing the same bytes and no more.

A commit is all of it: gathered, staged, synced, summed up, with its manifest, its
marker and the state file. The plain side writes the same memory with as many threads,
each into a file of its own, and syncs each. Both write new files; what was written is
removed outside of the times. The states are those of `states.py`.
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

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plain, states
from benchmarks.row import MEMORY, compare, file_system, side

BAR = 1.15
RESTORE_BAR = 1.2


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """A row for the commit and one for the restore, by place and shape of the state.

    Args:
        rounds: commits of each, and restores.
        mebibytes: size of a state of tensors.
    """
    for place in (MEMORY, None):
        for name in (*states.TENSORS, *states.MODELS):
            root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=place))
            try:
                yield from _rows(root, name, rounds, mebibytes)
            finally:
                shutil.rmtree(root)


def _rows(
    root: Path, name: str, rounds: int, mebibytes: int
) -> Iterator[dict[str, Any]]:
    import tensorflow as tf

    from tfpreempt.checkpoint.restore import opening
    from tfpreempt.checkpoint.restore.save import Save
    from tfpreempt.checkpoint.tensors import bundle_writer

    if name in states.TENSORS:
        variables = states.tensors(name, mebibytes)
        checkpoint = tf.train.Checkpoint(variables=variables)
    else:
        model = states.MODELS[name]()
        variables = [*model.variables, *model.optimizer.variables]
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saver = opening.open_directory(checkpoint, root / "run", max_to_keep=None)
    saver.start()
    ours, theirs, stock, restored, read = [], [], [], [], []
    kept, stock_read, first = [], [], 0.0
    for number in range(rounds + 1):
        memory = [np.asarray(variable) for variable in variables]
        written = plain.write(root / "plain", memory, bundle_writer.THREADS)
        began = time.perf_counter()
        save = Save(saver, number, f"bench-{number}")
        save.capture()
        save.write()
        commit = save.publish("save", [0])
        took = time.perf_counter() - began
        assert commit is not None
        began = time.perf_counter()
        checkpoint.write(str(root / "stock" / "ckpt"))
        stock_written = time.perf_counter() - began
        shutil.rmtree(root / "stock")
        files = sorted(Path(commit.path).glob("ckpt*"))
        if not number:
            first = _restore(saver)
        looked = plain.read(files, bundle_writer.THREADS)
        looked_and_kept = plain.read(files, bundle_writer.THREADS, keep=True)
        began = time.perf_counter()
        checkpoint.read(os.path.join(commit.path, "ckpt"))
        stock_again = time.perf_counter() - began
        again = _restore(saver)
        shutil.rmtree(commit.path)
        if number:  # the first is a warm-up
            ours.append(took)
            theirs.append(written)
            stock.append(stock_written)
            restored.append(again)
            read.append(looked)
            kept.append(looked_and_kept)
            stock_read.append(stock_again)
    facts = {
        "place": file_system(root),
        "state": name,
        "tensors": len(variables),
        "mebibytes": round(sum(each.nbytes for each in memory) / 2**20),
        "threads": bundle_writer.THREADS,
    }
    yield compare(
        "commit_speed",
        ours,
        theirs,
        unit="s",
        bar=BAR,
        **side("checkpoint_write", stock, 3),
        **facts,
    )
    yield compare(
        "restore_speed",
        restored,
        read,
        unit="s",
        bar=RESTORE_BAR,
        first=round(first, 3),
        **side("read_and_kept", kept, 3),
        **side("checkpoint_read", stock_read, 3),
        **facts,
    )


def _restore(saver: Any) -> float:
    """Seconds that it takes to verify and restore the newest commit."""
    began = time.perf_counter()
    candidate = saver.newest()
    assert candidate is not None
    saver.restore(candidate)
    return time.perf_counter() - began
