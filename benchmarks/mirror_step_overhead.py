"""Measures how much training steps are slowed down by uploads to a bucket.

One program trains the same model in turns, with a save every few steps: without a
mirror, and with a mirror in a loopback bucket, a separate process. The time of a turn
is the time of all its steps, including the steps that save. The end, at which a handler
waits for its mirror, is not included. Every round begins with the other side.

Unlike a real bucket, the server shares the same cores. `while_copying` is the median
step during an upload, divided by the median step of the turns without a mirror;
`share_copying` is the part of the steps during an upload. `cpu_ratio` compares the
processor time of the program, without the server; other programs on the machine disturb
this ratio less.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import bucket
from benchmarks.mirror_speed import workplace
from benchmarks.row import compare

BAR = 1.05
SIDES = ("with", "without")
STEPS, EVERY = 300, 100
WIDTH = 1024  # two such layers with momentum: 16 MiB
BATCH = 64


def rows(rounds: int = 5) -> Iterator[dict[str, Any]]:
    """Yields one row, from turns with and without a mirror.

    Args:
        rounds: number of turns of each kind.
    """
    with workplace() as root, bucket.serving():
        command = [sys.executable, "-m", __name__, str(root), str(rounds)]
        done = subprocess.run(
            command, cwd=bucket.ROOT, check=True, stdout=subprocess.PIPE, timeout=1800
        )
    found = json.loads(done.stdout)
    plain = statistics.median(statistics.median(one) for one in found["plain"])
    copying = [step for one in found["copying"] for step in one]
    yield compare(
        "mirror_step_overhead",
        found["with"],
        found["without"],
        unit="ms",
        bar=BAR,
        while_copying=round(statistics.median(copying) / plain, 3) if copying else None,
        share_copying=round(len(copying) / rounds / STEPS, 3),
        step=round(plain, 3),
        cpu_ratio=round(
            statistics.median(found["cpu_with"])
            / statistics.median(found["cpu_without"]),
            3,
        ),
        mebibytes=found["mebibytes"],
        save_freq=EVERY,
    )


# --- the program ---------------------------------------------------------------------


def program(root: Path, rounds: int) -> None:
    """Trains in turns, and prints the milliseconds of a step."""
    import tensorflow as tf

    layers = [tf.Variable(tf.random.normal([WIDTH, WIDTH], seed=i)) for i in range(2)]
    slots = [tf.Variable(tf.zeros([WIDTH, WIDTH])) for _ in range(2)]
    rows = tf.random.normal([BATCH, WIDTH], seed=2)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(rows @ layers[0]) @ layers[1])
        for layer, slot, gradient in zip(
            layers, slots, tape.gradient(loss, layers), strict=True
        ):
            slot.assign(0.9 * slot + gradient)
            layer.assign_sub(1e-3 * slot)
        return loss

    found: dict[str, list[Any]] = {
        name: [] for name in (*SIDES, "cpu_with", "cpu_without", "plain", "copying")
    }
    checkpoint = tf.train.Checkpoint(layers=layers, slots=slots)
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            seconds, cpu, steps = turn(
                checkpoint, step, root / f"{side}-{number}", side
            )
            if number:  # the first is a warm-up
                found[side].append(1e3 * seconds / STEPS)
                found[f"cpu_{side}"].append(cpu)
                kind = "copying" if side == "with" else "plain"
                found[kind].append([round(1e3 * each, 3) for each in steps])
    size = sum(4 * int(tf.size(one)) for one in (*layers, *slots))
    print(json.dumps({**found, "mebibytes": round(size / 2**20, 1)}))


def turn(
    checkpoint: Any, step: Any, directory: Path, side: str
) -> tuple[float, float, list[float]]:
    """Returns the seconds of all steps, of the processor, and of each step.

    If a copy was running, the list has only the steps during the copy.
    """
    import tfpreempt

    handler = tfpreempt.PreemptionCheckpointHandler(
        None,
        checkpoint,
        str(directory),
        save_freq=EVERY,
        mirror_dir=f"gs://bucket/{directory.name}" if side == "with" else None,
    )
    counted = []
    with handler:
        began, used = time.perf_counter(), time.process_time()
        for number in range(STEPS):
            entered = time.perf_counter()
            handler.run(step)
            status = handler.mirror_status
            saves = number % EVERY == EVERY - 1
            if not saves and (status is None or status.uploading is not None):
                counted.append(time.perf_counter() - entered)
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return seconds, cpu, counted


if __name__ == "__main__":
    program(Path(sys.argv[1]), int(sys.argv[2]))
