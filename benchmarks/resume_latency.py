"""How long a program that is started again takes to train its first resumed batch.

A program trains a model, is preempted, and is started again, each time from the same
commit. The model has two layers whose weights and momentum have so many MiB, or is a
model of `states.py` with Adam. The same program without tfpreempt, which begins with
the first batch, takes turns with it. The phases of a start, as the program itself
times them:

    start     from the process's start to its first line
    import    tensorflow, keras, and tfpreempt.keras where it is used
    build     the model, compile, the data
    begin     from the call of `fit` to `on_train_batch_begin` of the first batch
    step      that batch: tracing the step is most of it, and the restore is in it

`ours` and `theirs` are all five, from the process's start to the end of the first step,
with and without tfpreempt. The bar is 1.1 times `theirs`, and a plain read of the
commit's files (`raw`, from the same memory). `phases` has each phase of both, and of a
program with tfpreempt that has no commit (`fresh`).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import alone, side
from benchmarks.states import MODELS, model_batch

RATIO = 1.1
PHASES = ("start", "import", "build", "begin", "step")
ROOT = Path(__file__).parents[1]
PREEMPTED_AT = 3
CHUNK = 2**20


def rows(rounds: int = 5, mebibytes: int = 256) -> Iterator[dict[str, Any]]:
    """A row for each model, of starts of Keras 3.

    Args:
        rounds: starts of each kind.
        mebibytes: size of the state of the model with two layers.
    """
    yield _row("two layers", rounds, mebibytes)
    for model in MODELS:
        yield _row(model, rounds, mebibytes)


def _row(model: str, rounds: int, mebibytes: int) -> dict[str, Any]:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        start("preempt", f"{directory}/run", model, mebibytes)
        resumed, plain, fresh, reads = [], [], [], []
        for number in range(rounds + 1):
            again = start("measure", f"{directory}/run", model, mebibytes)
            without = start("plain", "", model, mebibytes)
            anew = start("measure", f"{directory}/new-{number}", model, mebibytes)
            read, size = raw_read(Path(directory, "run"))
            assert again["step_number"] == PREEMPTED_AT, again
            if number:  # the first is a warm-up
                resumed.append(again)
                plain.append(without)
                fresh.append(anew)
                reads.append(read)
    theirs = [total(one) for one in plain]
    bar = RATIO * statistics.median(theirs) + statistics.median(reads)
    return alone(
        "resume_latency",
        [total(one) for one in resumed],
        raw=reads,
        unit="s",
        bar=round(bar, 3),
        **side("theirs", theirs, 3),
        phases=medians(resumed),
        plain=medians(plain),
        fresh=medians(fresh),
        model=model,
        mebibytes_read=round(size / 2**20, 1),
    )


def total(found: dict[str, float]) -> float:
    """From the start of the process to the end of the first step."""
    return sum(found[phase] for phase in PHASES)


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Of each phase."""
    return {
        phase: round(statistics.median(one[phase] for one in found), 3)
        for phase in PHASES
    }


def start(task: str, directory: str, model: str, mebibytes: int) -> dict[str, float]:
    """Runs the program below, until it is preempted or has trained a step."""
    program = [sys.executable, "-m", __name__]
    command = [*program, task, directory, model, str(mebibytes)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(began)],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    expected = 143 if task == "preempt" else 0
    if done.returncode != expected:
        raise RuntimeError(f"{command} left with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout) if done.stdout else {}


def raw_read(directory: Path) -> tuple[float, int]:
    """Seconds to read the files of the newest commit once, and their bytes."""
    commit = max(path.parent for path in directory.glob("*/COMMITTED"))
    buffer = bytearray(CHUNK)
    size = 0
    began = time.perf_counter()
    for path in sorted(path for path in commit.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    return time.perf_counter() - began, size


# --- the program ---------------------------------------------------------------------


def program(task: str, directory: str, name: str, mebibytes: int, began: float) -> None:
    """Trains; prints its phases after the first step, or is preempted later."""
    times = [began, time.monotonic()]
    import keras
    import tensorflow as tf

    if task != "plain":
        import tfpreempt.keras

    times.append(time.monotonic())
    if name in MODELS:
        model, batch = MODELS[name](), model_batch(name, samples=64)
    else:
        width = int((mebibytes * 2**20 / 4 / 2 / 2) ** 0.5)  # two layers, two slots
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(optimizer=keras.optimizers.SGD(1e-3, momentum=0.9), loss="mse")
        batch = tf.ones([64, width]), tf.ones([64, width])
    data = tf.data.Dataset.from_tensor_slices(batch).batch(2)
    times.append(time.monotonic())
    begun: list[float] = []

    def begins(batch: int, logs: Any) -> None:
        begun.append(time.monotonic())
        if task == "preempt" and batch == PREEMPTED_AT:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)  # the notice is taken by a thread

    def ends(batch: int, logs: Any) -> None:
        if task != "preempt":
            times.extend([begun[0], time.monotonic()])
            lasted = [b - a for a, b in itertools.pairwise(times)]
            found = dict(zip(PHASES, lasted, strict=True))
            print(json.dumps({**found, "step_number": batch}), flush=True)
            os._exit(0)  # leaves the checkpoint as it is

    callbacks = [
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=begins, on_train_batch_end=ends
        )
    ]
    if task != "plain":
        ours = tfpreempt.keras.PreemptionCallback(directory, save_freq=None)
        callbacks.insert(0, ours)
    model.fit(data, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    program(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]))
