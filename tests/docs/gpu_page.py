"""The contents of docs/performance/gpu.md, from the lines of gpu.jsonl beside it.

The file has the output of `make gpu` on each machine, one after the other. The text is
written by hand.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

TITLE = "Performance on a GPU"
TEXT = (
    "Whether a run on a GPU resumes exactly, and how long a save and an exit take "
    "with the state in the memory of the GPU."
)
NOTES = """\
- **Exact resume**: a fit with mixed precision, XLA and deterministic ops got SIGTERM in
  the middle of an epoch, and was started again. The table says whether the weights and
  the optimizer equal those of a fit without a preemption, byte for byte.
- **SIGTERM to exit**: a loop with 1 GiB of state; median of 3.
- **Periodic save**: the time for which a save of 4 GiB stops the loop, median of 3. The
  comparison is one copy of each array to NumPy. In the measurement on JAX, the loop
  waited for the transfer and for the write of the file. Now the copies are made and
  written while training continues; this was not measured on a GPU yet.
- **Added to a step**: median of 20 rounds, with the smallest and the largest. Steps on
  a GPU vary by more than the time that tfpreempt adds.
- **Demo**: `tfpreempt demo` trains on the CPU, also on a machine with a GPU. The demo
  on TensorFlow did not end within the time limit of the measurement.

JAX and its CUDA 13 libraries were those of the machine. TensorFlow was the package
`tensorflow`, which is built for CUDA 12. Instead of the extra `and-cuda`, the
measurement used CUDA's run-time library 12.9 with the machine's libraries of CUDA 13
(cuBLAS, cuDNN, cuFFT, cuSOLVER and others). No run with several GPUs was tried.

To measure on your machine, run:

```bash
make gpu
```
"""


def gpu_page(path: Path) -> str:
    """Returns the page.

    Args:
        path: file with the lines of `make gpu`.
    """
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    head = ["", *(_machine(each) for each in lines if each["line"] == "device")]
    columns = [dict[str, str]() for _ in head[1:]]
    number = -1
    for line in lines:
        if line["line"] == "device":
            number += 1
        else:
            name, value = _cell(line)
            columns[number][name] = value
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(each.get(name, "-") for each in columns)] for name in names]
    table = [head, ["---"] * len(head), *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"# {TITLE}\n\n{TEXT}\n\n{text}\n\n{NOTES}"


def _machine(line: dict[str, Any]) -> str:
    names = {"tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX"}
    is_jax = line["tensorflow"] is None
    shown = ("keras", "jax") if is_jax else ("tensorflow", "keras")
    return ", ".join([line["name"], *(f"{names[each]} {line[each]}" for each in shown)])


def _cell(line: dict[str, Any]) -> tuple[str, str]:
    match line["line"]:
        case "exactness":
            return "exact resume of a fit", "yes" if line["ok"] else "**no**"
        case "notice_to_exit":
            return "SIGTERM to exit", f"{line['seconds']:.2f} s"
        case "async_save":
            text = f"{line['stall']:.2f} s (copy to NumPy: {line['copy']:.2f} s)"
            return "stall of a periodic save", text
        case "step_overhead":
            added = line["added_all"]
            text = f"{statistics.median(added):.0f} µs ({min(added):.0f} to "
            text += f"{max(added):.0f}), of {line['step']:.0f} µs"
            return "added to a step", text
        case _:
            return "demo", "equal weights" if line["ok"] else "**failed**"
