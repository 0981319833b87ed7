"""Runs tfpreempt on one NVIDIA GPU, in at most eight minutes; prints JSON lines.

Usage: python -m benchmarks.gpu [--device CPU] [--frameworks tensorflow jax]

Without a GPU the command says so, and ends with 2. `--device CPU` runs the same
programs, except the demo, with small states on the CPU, to try the command itself. A
line is one of

    device          the name of the GPU, and the versions of the packages
    demo            `tfpreempt demo`, which trains on the CPU: whether the weights are
                    equal
    exactness       a fit with mixed precision, XLA and deterministic ops: preempted in
                    the middle of an epoch, started again, and compared with a fit
                    without a preemption, byte for byte
    notice_to_exit  seconds from SIGTERM to the end of the process, with the state on
                    the GPU, and the size of the state
    async_save      seconds for which a save of 4 GiB stops training (`stall`), in
                    copies of the state from the GPU to memory
    step_overhead   microseconds that `run()` adds to a step on the GPU that is computed
                    before the next step begins

All lines but the first have a framework: "tensorflow" or "jax".

The command ends with 1 if a line has `"ok": false`: a result differs, a program has
failed, or a framework does not find the GPU. Seconds are figures, and decide nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Seconds for all programs together. The tests run them on a busy CPU.
LIMITS = {"GPU": 480.0, "CPU": 800.0}
FRAMEWORKS = ("tensorflow", "jax")
PACKAGES = ("tfpreempt", "tensorflow", "keras", "jax", "numpy")
PROGRAMS = "benchmarks.gpu_programs"
NO_GPU = 2
GIBIBYTES = 4
ROUNDS = 3

Line = dict[str, Any]


def main() -> int:
    """Runs all programs; returns the exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", choices=("GPU", "CPU"), default="GPU")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS)
    arguments = parser.parse_args()
    device, frameworks = arguments.device, arguments.frameworks or FRAMEWORKS
    name = gpu_name() if device == "GPU" else "CPU"
    if name is None:
        print("no NVIDIA GPU: nvidia-smi is missing or names no GPU", file=sys.stderr)
        return NO_GPU
    end, is_good = time.monotonic() + LIMITS[device], True
    versions = {each: version(each) for each in PACKAGES}
    print(json.dumps({"line": "device", "name": name, **versions}), flush=True)
    programs = Programs(device, end)
    lines = [exactness, notice_to_exit, async_save, step_overhead]
    lines += [demo] if programs.is_gpu else []  # its workers train on the CPU
    for line, framework in itertools.product(lines, frameworks):
        try:
            found = line(programs, framework)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"ok": False, "error": str(error)[-2000:]}
        is_good &= found.get("ok", True)
        about = {"line": line.__name__, "framework": framework}
        print(json.dumps({**about, **found}), flush=True)
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
    """Returns the installed version of a package; None without the package."""
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


def demo(programs: Programs, framework: str) -> Line:
    """Runs the demo, whose workers train on the CPU."""
    with tempfile.TemporaryDirectory() as out:
        words = ("tfpreempt", "demo", "--json", "--out", f"{out}/demo")
        found = json.loads(programs.run(*words, "--backend", framework))
    kept = ("bit_identical", "preemptions", "seconds")
    return {"ok": found["bit_identical"], **{name: found[name] for name in kept}}


def exactness(programs: Programs, framework: str) -> Line:
    """Runs a fit with and without a preemption."""
    fit = ("fit", framework)
    with tempfile.TemporaryDirectory() as root:
        alone = programs.run(PROGRAMS, *fit, f"{root}/alone", 0)
        programs.run(PROGRAMS, *fit, f"{root}/run", 7, code=128 + signal.SIGTERM)
        again = programs.run(PROGRAMS, *fit, f"{root}/run", 0)
    expected, found = (json.loads(each.splitlines()[-1]) for each in (alone, again))
    is_equal = found["digest"] == expected["digest"] and found["resumed_at"] == 7
    return {
        "ok": is_equal and found["on_gpu"] == programs.is_gpu,
        "on_gpu": found["on_gpu"],
        "resumed_at": found["resumed_at"],
        "digests": [expected["digest"], found["digest"]],
    }


def notice_to_exit(programs: Programs, framework: str) -> Line:
    """Runs a loop that sends SIGTERM to its own process in a step."""
    mebibytes = 1024 if programs.is_gpu else 64
    seconds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=memory()) as directory:
            words = (PROGRAMS, "notice", framework, directory, mebibytes)
            sent = float(programs.run(*words, code=128 + signal.SIGTERM))
            seconds.append(time.monotonic() - sent)
    return {**figures("seconds", seconds), "mebibytes": mebibytes}


def async_save(programs: Programs, framework: str) -> Line:
    """Runs a loop with a periodic save."""
    mebibytes = GIBIBYTES * 1024 if programs.is_gpu else 256
    with tempfile.TemporaryDirectory(dir=memory()) as directory:
        text = programs.run(PROGRAMS, "save", framework, directory, mebibytes)
    found = json.loads(text.splitlines()[-1])
    stalls, copies = found["stalls"], found["copies"]
    return {
        **figures("stall", stalls),
        **figures("copy", copies),
        "copies": round(statistics.median(stalls) / statistics.median(copies), 2),
        "mebibytes": mebibytes,
    }


def step_overhead(programs: Programs, framework: str) -> Line:
    """Runs a short step alternately with and without `run()`."""
    with tempfile.TemporaryDirectory() as directory:
        text = programs.run(PROGRAMS, "overhead", framework, directory)
    found = json.loads(text.splitlines()[-1])
    return {**figures("step", found["steps"]), **figures("added", found["added"])}


def figures(name: str, samples: list[float]) -> Line:
    """Returns the median and all samples."""
    return {
        name: round(statistics.median(samples), 4),
        f"{name}_all": [round(each, 4) for each in samples],
    }


def memory() -> str | None:
    """Returns a directory in memory if the machine has such a directory, so that the
    disk is not measured."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
