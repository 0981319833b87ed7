"""Measures the time from the start of a restarted program to its first resumed batch.

A program trains a model, is preempted, and is restarted, each time from the same
commit. The model has two layers whose weights and momentum have a given size in MiB, or
is a model of `states.py` with Adam. The same program without tfpreempt, which begins
with the first batch, takes turns with the restarted program. The program itself times
the phases of a start:

    start     from the process's start to its first line
    import    tensorflow, keras, and tfpreempt.keras if used
    build     the model, compile, the data
    begin     from the call of `fit` to `on_train_batch_begin` of the first batch
    step      the first batch: mostly tracing the step, and also the restore

`ours` and `theirs` are the sums of the five phases, from the process's start to the end
of the first step, with and without tfpreempt. The bar is 1.1 times `theirs`, plus a
plain read of the commit's files (`raw`, from the same memory). `phases` has each phase
of both programs, and of a program with tfpreempt but without a commit (`fresh`).

`rows_of_jax` measures Keras on JAX, on arrays: a restart without and with
`compile_cache`, in turns. The program without tfpreempt has no cache of compiled
functions. The bar is 1.3 times `theirs`, plus a plain read. `processor` has the
processor time of each program, which other programs on the machine disturb less.
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
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import alone, side
from benchmarks.states import MODELS, model_batch

RATIO, RATIO_OF_JAX = 1.1, 1.3
PHASES = ("start", "import", "build", "begin", "step")
ROOT = Path(__file__).parents[1]
PREEMPTED_AT = 3
CACHED = "-cached"  # end of the name of a task with compile_cache=True
CHUNK = 2**20


def rows(rounds: int = 5, mebibytes: int = 256) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, of starts of Keras 3.

    Args:
        rounds: number of starts of each kind.
        mebibytes: size of the state of the model with two layers.
    """
    yield _row("two layers", rounds, mebibytes)
    for model in MODELS:
        yield _row(model, rounds, mebibytes)


def rows_of_jax(rounds: int = 5) -> Iterator[dict[str, Any]]:
    """Yields two rows for each model of Keras on JAX: without and with `compile_cache`.

    Args:
        rounds: number of starts of each kind.
    """
    for model in MODELS:
        yield from _rows_of_jax(model, rounds)


def _rows_of_jax(model: str, rounds: int) -> Iterator[dict[str, Any]]:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    tasks = ("measure", "measure" + CACHED, "plain")
    found: dict[str, list[dict[str, float]]] = {task: [] for task in tasks}
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        runs = {task: f"{directory}/{task}" for task in tasks}
        for end in ("", CACHED):
            start("preempt" + end, runs["measure" + end], model, 0, backend="jax")
        reads = []
        for number in range(rounds + 1):
            for task in tasks[number % 3 :] + tasks[: number % 3]:
                begun = start(task, runs[task], model, 0, backend="jax")
                assert task == "plain" or begun["step_number"] == PREEMPTED_AT, begun
                if number:  # the first is a warm-up
                    found[task].append(begun)
            read, size = raw_read(Path(runs["measure"]))
            reads.append(read)
    plain = found["plain"]
    theirs = [total(one) for one in plain]
    bar = RATIO_OF_JAX * statistics.median(theirs) + statistics.median(reads)
    for task in tasks[:2]:
        ours = [total(one) for one in found[task]]
        pairs = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        yield alone(
            "resume_jax",
            ours,
            raw=reads,
            unit="s",
            bar=round(bar, 3),
            **side("theirs", theirs, 3),
            ratio_of_pairs=round(statistics.median(pairs), 3),
            processor={
                name: round(statistics.median(one["processor"] for one in some), 3)
                for name, some in (("ours", found[task]), ("theirs", plain))
            },
            phases=medians(found[task]),
            plain=medians(plain),
            model=model,
            cache="with the cache" if task.endswith(CACHED) else "without a cache",
            mebibytes_read=round(size / 2**20, 1),
        )


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
    """Returns the seconds from the process's start to the end of the first step."""
    return sum(found[phase] for phase in PHASES)


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each phase."""
    return {
        phase: round(statistics.median(one[phase] for one in found), 3)
        for phase in PHASES
    }


def start(
    task: str, directory: str, model: str, mebibytes: int, backend: str = "tensorflow"
) -> dict[str, float]:
    """Runs the program below, until it is preempted or has trained a step."""
    program = [sys.executable, "-m", __name__]
    command = [*program, task, directory, model, str(mebibytes)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(began)],
        cwd=ROOT,
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": backend,
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    expected = 143 if task.startswith("preempt") else 0
    if done.returncode != expected:
        raise RuntimeError(f"{command} left with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout) if done.stdout else {}


def raw_read(directory: Path) -> tuple[float, int]:
    """Returns the seconds to read the newest commit's files once, and their bytes."""
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

    is_of_jax = keras.backend.backend() == "jax"
    if is_of_jax:
        import jax.numpy as numpy
    else:
        import tensorflow as numpy
    if task != "plain":
        import tfpreempt.keras

    times.append(time.monotonic())
    callbacks = []
    if task != "plain":  # before the model, whose functions are cached then
        ours = tfpreempt.keras.PreemptionCallback(
            directory, save_freq=None, compile_cache=task.endswith(CACHED)
        )
        callbacks.append(ours)
    if name in MODELS:
        model, batch = MODELS[name](), model_batch(name, samples=64)
    else:
        width = int((mebibytes * 2**20 / 4 / 2 / 2) ** 0.5)  # two layers, two slots
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(optimizer=keras.optimizers.SGD(1e-3, momentum=0.9), loss="mse")
        batch = numpy.ones([64, width]), numpy.ones([64, width])
    data: dict[str, Any] = {"x": batch[0], "y": batch[1], "batch_size": 2}
    if not is_of_jax:
        data = {"x": numpy.data.Dataset.from_tensor_slices(batch).batch(2)}
    times.append(time.monotonic())
    begun: list[float] = []

    def begins(batch: int, logs: Any) -> None:
        begun.append(time.monotonic())
        if task.startswith("preempt") and batch == PREEMPTED_AT:
            while task.endswith(CACHED) and not is_kept(Path(directory)):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)  # a thread receives the notice

    def ends(batch: int, logs: Any) -> None:
        if not task.startswith("preempt"):
            float(logs["loss"])  # JAX computes asynchronously
            times.extend([begun[0], time.monotonic()])
            lasted = [b - a for a, b in itertools.pairwise(times)]
            found = dict(zip(PHASES, lasted, strict=True))
            found |= {"step_number": batch, "processor": time.process_time()}
            print(json.dumps(found), flush=True)
            for each in Path(directory or ".").glob(".tfpreempt-compiled/loading-*"):
                each.unlink()  # otherwise the next start compiles again
            os._exit(0)  # leaves the checkpoint as it is

    callbacks.append(
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=begins, on_train_batch_end=ends
        )
    )
    model.fit(**data, verbose=0, callbacks=callbacks)


def is_kept(directory: Path) -> bool:
    """Returns whether a run has stored the compiled train step."""
    archives = directory.glob(".tfpreempt-compiled/*.zip")
    names = [name for each in archives for name in zipfile.ZipFile(each).namelist()]
    return any("train_step" in name for name in names)


if __name__ == "__main__":
    program(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]))
