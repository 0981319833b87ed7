"""Measures the first restore of a process, beside TensorFlow's read.

A restore is the restore of a start: the newest commit is found, verified and restored.
The other side is `tf.train.Checkpoint.read` of the same files, which verifies only the
checksums of the tensors. Each restore has a separate process, because a start has only
one restore, and new memory; imports and the creation of the state are not timed. The
sides take turns. `raw` is a plain read of the same files, from the same cache, by as
many threads as a restore has; the data are dropped.

The states are those of `states.py`, in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import plain, states
from benchmarks.row import MEMORY, compare, file_system

BAR = 0.5  # of TensorFlow's read
ROOT = Path(__file__).parents[1]


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields a row for each state.

    Args:
        rounds: number of processes of each side, for each state.
        mebibytes: size of a state of tensors.
    """
    from tfpreempt.checkpoint.bundles.bundle_writer import THREADS

    for name in (*states.TENSORS, *states.MODELS):
        root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=MEMORY))
        try:
            facts = start("save", root, name, mebibytes)
            files = sorted(Path(facts.pop("commit")).glob("ckpt*"))
            total = facts.pop("sum")
            seconds: dict[str, list[float]] = {"ours": [], "theirs": [], "raw": []}
            for number in range(rounds + 1):
                for side in ("ours", "theirs"):
                    found = start(side, root, name, mebibytes)
                    assert found["sum"] == total, "this is not the saved state"
                    seconds[side] += [found["seconds"]] * bool(number)
                raw = plain.read(files, THREADS)
                seconds["raw"] += [raw] * bool(number)  # the first is a warm-up
            yield compare(
                "restore_speed",
                seconds["ours"],
                seconds["theirs"],
                raw=seconds["raw"],
                unit="s",
                bar=BAR,
                place=file_system(root),
                state=name,
                threads=THREADS,
                **facts,
            )
        finally:
            shutil.rmtree(root)


def start(task: str, root: Path, name: str, mebibytes: int) -> dict[str, Any]:
    """Runs the program below."""
    command = [sys.executable, "-m", __name__, task, str(root), name, str(mebibytes)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{command} exited with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- the program ---------------------------------------------------------------------


def program(task: str, root: str, name: str, mebibytes: int) -> dict[str, Any]:
    """Saves the state, or restores it by one of the sides."""
    import numpy as np

    from tfpreempt.checkpoint.directory.retention import RetentionPolicy
    from tfpreempt.checkpoint.restore import opening
    from tfpreempt.checkpoint.restore.save import Save

    checkpoint, variables = states.checkpoint(name, mebibytes)
    directory = opening.open_directory(
        checkpoint, f"{root}/run", policy=RetentionPolicy(max_to_keep=None)
    )
    if task == "save":
        directory.start()
        save = Save(directory, 1, "bench")
        save.capture()
        save.write()
        commit = save.publish("save", [0])
        assert commit is not None
        size = sum(np.asarray(variable).nbytes for variable in variables)
        return {
            "commit": commit.path,
            "tensors": len(variables),
            "mebibytes": round(size / 2**20),
            "sum": float(np.sum(np.asarray(variables[0]))),
        }
    first = variables[0]
    first.assign(np.zeros_like(np.asarray(first)))
    (newest,) = Path(root, "run").glob("*/COMMITTED")
    began = time.perf_counter()
    if task == "theirs":
        checkpoint.read(str(newest.parent / "ckpt"))
    else:
        directory.start()
        candidate = directory.newest()
        assert candidate is not None
        directory.restore(candidate)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "sum": float(np.sum(np.asarray(first)))}


if __name__ == "__main__":
    print(json.dumps(program(*sys.argv[1:4], int(sys.argv[4]))), flush=True)
