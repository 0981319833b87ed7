"""One line of the benchmarks' output.

A side of a comparison has three fields: `ours` is its median, `ours_p95` its 95th
percentile, and `ours_all` the samples, if there are few. `theirs` is the side that
tfpreempt is compared with; `raw` is the time of the plainest form of the same work on
this machine, measured in the same minutes. `bar_of` names the field to which the bar
applies.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tfpreempt.cli.doctor.storage_check import mount_of

FEW = 100
PACKAGES = ("tfpreempt", "tensorflow", "keras", "tf_keras", "numpy")
MEMORY = Path("/dev/shm")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def compare(
    bench: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    unit: str,
    bar: float | None,
    digits: int = 3,
    raw: Sequence[float] = (),
    **more: Any,
) -> dict[str, Any]:
    """Returns a row of two sides; the bar is for the ratio of their medians.

    `ratio_of_pairs` is the median over neighboring rounds, on which the load of other
    programs has less influence.

    Args:
        bench: name of the bench.
        ours: measurements of tfpreempt.
        theirs: measurements of the other side, interleaved with `ours`.
        unit: unit of all measurements.
        bar: the largest accepted ratio; None: the row is a comparison without a target.
        digits: number of digits after the decimal point.
        raw: measurements of the plainest form of the same work, interleaved too.
        **more: further facts for the line.
    """
    mine, other = statistics.median(ours), statistics.median(theirs)
    ratio = mine / other if other > 0 else float("inf")
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return {
        "bench": bench,
        **side("ours", ours, digits),
        **side("theirs", theirs, digits),
        **side("raw", raw, digits),
        "ratio": round(ratio, 3),
        "ratio_of_pairs": round(statistics.median(pairs), 3) if pairs else None,
        "unit": unit,
        **judged(ratio, "ratio", bar),
        **more,
    }


def alone(
    bench: str,
    ours: Sequence[float],
    *,
    unit: str,
    bar: float,
    bar_of: str = "ours",
    digits: int = 3,
    raw: Sequence[float] = (),
    **more: Any,
) -> dict[str, Any]:
    """Returns a row of one side, for work that only tfpreempt does.

    Args:
        bench: name of the bench.
        ours: measurements of tfpreempt.
        unit: unit of all measurements.
        bar: the largest accepted value.
        bar_of: field to which the bar applies: "ours", the median, or "ours_p95".
        digits: number of digits after the decimal point.
        raw: measurements of the plainest form of the same work, interleaved.
        **more: further facts for the line.
    """
    exact = {"ours": statistics.median(ours), "ours_p95": percentile(ours, 95)}
    return {
        "bench": bench,
        **side("ours", ours, digits),
        **side("raw", raw, digits),
        "unit": unit,
        **judged(exact[bar_of], bar_of, bar),
        **more,
    }


def judged(value: float, name: str, bar: float | None) -> dict[str, Any]:
    """Returns the bar, the name of the field, and whether the bar is met.

    `ok` is only reported; no test asserts it.
    """
    if bar is None:
        return {}
    return {"bar": bar, "bar_of": name, "ok": value <= bar}


def side(name: str, samples: Sequence[float], digits: int) -> dict[str, Any]:
    """Returns the fields of one side; no fields without samples."""
    if not samples:
        return {}
    fields: dict[str, Any] = {
        name: round(statistics.median(samples), digits),
        f"{name}_p95": round(percentile(samples, 95), digits),
    }
    if len(samples) <= FEW:
        fields[f"{name}_all"] = [round(value, digits) for value in samples]
    else:
        fields[f"{name}_samples"] = len(samples)
    return fields


def percentile(samples: Sequence[float], percent: int) -> float:
    """Returns a percentile of samples.

    Between two samples the percentile is interpolated linearly.
    """
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def circumstances(command: str) -> dict[str, Any]:
    """Returns the fields of every row that are not measurements.

    Args:
        command: command that repeats the bench.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "command": command,
        "date": f"{now:%Y-%m-%d}",
        "load": round(os.getloadavg()[0], 1),
        "machine": machine(),
    }


@functools.cache
def machine() -> dict[str, Any]:
    """Returns the cores, the memory, the used file systems, and versions."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "huge_pages": _huge_pages(),
        "memory": file_system(MEMORY),
        "disk": file_system(Path(tempfile.gettempdir())),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
    }


def file_system(directory: Path) -> str:
    """Returns the file system of a path, such as "ext4"; empty if unknown."""
    mount = mount_of(directory)
    return mount.kind if mount else ""


def _huge_pages() -> str:
    """Returns when the kernel uses huge pages: always, on request (madvise), never."""
    try:
        text = HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def show(row: dict[str, Any]) -> None:
    """Prints a row as one line of JSON."""
    print(json.dumps(row), flush=True)
