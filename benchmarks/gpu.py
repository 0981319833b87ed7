"""Runs tfpreempt on one NVIDIA GPU, in at most eight minutes; prints JSON lines.

Usage: python -m benchmarks.gpu [--device CPU]

Without a GPU the command says so, and ends with 2. `--device CPU` runs the same
programs with small states on the CPU, to try the command itself. A line is of

    device          the name of the GPU, and the versions of the packages
    demo            `tfpreempt demo`: whether the weights are equal
    exactness       a fit of TensorFlow, and one of JAX: mixed precision, XLA and
                    deterministic ops; preempted in the middle of an epoch, started
                    again, and compared with a fit without a preemption, byte for byte
    notice_to_exit  seconds from SIGTERM to the end of the process, with the state on
                    the GPU, and the size of the state
    async_save      seconds for which a save of 4 GiB stops training (`stall`), in
                    copies of the state from the GPU to memory
    step_overhead   microseconds that `run()` adds to a step (see `step_overhead`)

The command ends with 1 if a line has `"ok": false`: a result differs, or a program has
failed. Seconds are figures, and decide nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 480.0  # seconds for all programs together
FRAMEWORKS = ("tensorflow", "jax")
PACKAGES = ("tfpreempt", "tensorflow", "keras", "jax", "numpy")
NO_GPU = 2
GIBIBYTES = 4
ROUNDS = 3

Line = dict[str, Any]


def main() -> int:
    """Runs all programs; returns the exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", choices=("GPU", "CPU"), default="GPU")
    device = parser.parse_args().device
    name = gpu_name() if device == "GPU" else "CPU"
    if name is None:
        print("no NVIDIA GPU: nvidia-smi is missing or names no GPU", file=sys.stderr)
        return NO_GPU
    end, is_good = time.monotonic() + LIMIT, True
    versions = {each: version(each) for each in PACKAGES}
    print(json.dumps({"line": "device", "name": name, **versions}), flush=True)
    for line in (demo, exactness, notice_to_exit, async_save, step_overhead):
        try:
            for found in line(Programs(device, end)):
                is_good &= found.get("ok", True)
                print(json.dumps({"line": line.__name__, **found}), flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            is_good = False
            failed = {"line": line.__name__, "ok": False, "error": str(error)[-2000:]}
            print(json.dumps(failed), flush=True)
    return 0 if is_good else 1


def gpu_name() -> str | None:
    """Returns the name of the first GPU from the driver; None without a GPU."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None) if not done.returncode else None


def version(package: str) -> str | None:
    """The installed version; None without the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Programs:
    """Starts Python programs on the device, within the time that is left.

    Args:
        device: "GPU" or "CPU".
        end: of the time, on the monotonic clock.
    """

    def __init__(self, device: str, end: float) -> None:
        self.is_gpu = device == "GPU"
        self._end = end

    def run(self, *words: object, code: int = 0, **variables: str) -> str:
        """Runs a module of Python; returns its output.

        Raises:
            RuntimeError: the program ended with another exit code.
            subprocess.TimeoutExpired: the time is over.
        """
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
        env |= {"TFPREEMPT_PLATFORM": "generic", "XLA_PYTHON_CLIENT_PREALLOCATE": "0"}
        if not self.is_gpu:
            env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-m", *map(str, words)],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=max(1.0, self._end - time.monotonic()),
        )
        if done.returncode != code:
            raise RuntimeError(
                f"{words} ended with {done.returncode}; expected {code}: "
                f"{done.stdout[-500:]}{done.stderr[-1500:]}"
            )
        return done.stdout


# --- the lines -----------------------------------------------------------------------


def demo(programs: Programs) -> Iterator[Line]:
    """The demo, whose two workers share the GPU."""
    with tempfile.TemporaryDirectory() as out:
        words = ("tfpreempt", "demo", "--json", "--out", f"{out}/demo")
        text = programs.run(*words, TF_FORCE_GPU_ALLOW_GROWTH="true")
    found = json.loads(text)
    kept = ("bit_identical", "preemptions", "seconds")
    yield {"ok": found["bit_identical"], **{name: found[name] for name in kept}}


def exactness(programs: Programs) -> Iterator[Line]:
    """A fit of each framework, with and without a preemption."""
    for framework in FRAMEWORKS:
        if version(framework) is None:
            yield {"framework": framework, "ok": False, "error": "not installed"}
            continue
        fit = ("benchmarks.gpu_programs", "fit", framework)
        with tempfile.TemporaryDirectory() as root:
            alone = programs.run(*fit, f"{root}/alone", 0)
            programs.run(*fit, f"{root}/run", 7, code=128 + signal.SIGTERM)
            again = programs.run(*fit, f"{root}/run", 0)
        expected, found = (json.loads(each.splitlines()[-1]) for each in (alone, again))
        yield {
            "framework": framework,
            "ok": found["digest"] == expected["digest"] and found["resumed_at"] == 7,
            "devices": found["devices"],
            "resumed_at": found["resumed_at"],
            "digests": [expected["digest"], found["digest"]],
        }


def notice_to_exit(programs: Programs) -> Iterator[Line]:
    """A loop of TensorFlow that sends SIGTERM to itself in a step."""
    mebibytes = 1024 if programs.is_gpu else 64
    seconds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=memory()) as directory:
            words = ("benchmarks.gpu_programs", "notice", directory, mebibytes)
            sent = float(programs.run(*words, code=128 + signal.SIGTERM))
            seconds.append(time.monotonic() - sent)
    yield {**figures("seconds", seconds), "mebibytes": mebibytes}


def async_save(programs: Programs) -> Iterator[Line]:
    """A loop of TensorFlow with a periodic save."""
    mebibytes = GIBIBYTES * 1024 if programs.is_gpu else 256
    with tempfile.TemporaryDirectory(dir=memory()) as directory:
        words = ("benchmarks.gpu_programs", "save", directory, mebibytes)
        found = json.loads(programs.run(*words).splitlines()[-1])
    stalls, copies = found["stalls"], found["copies"]
    yield {
        **figures("stall", stalls),
        **figures("copy", copies),
        "copies": round(statistics.median(stalls) / statistics.median(copies), 2),
        "mebibytes": mebibytes,
    }


def step_overhead(programs: Programs) -> Iterator[Line]:
    """Runs `python -m benchmarks step_overhead`, with fewer rounds."""
    text = programs.run("benchmarks", "step_overhead", "--rounds", 11)
    for line in text.splitlines():
        row = json.loads(line)
        kept = ("call", "ours", "theirs", "unit")
        yield {name: row[name] for name in kept if name in row}


def figures(name: str, samples: list[float]) -> Line:
    """The median and the samples."""
    return {
        name: round(statistics.median(samples), 4),
        f"{name}_all": [round(each, 4) for each in samples],
    }


def memory() -> str | None:
    """A directory in memory, if the machine has one: the disk is not measured."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
