"""Measures tfpreempt, mostly beside TensorFlow and Keras; prints JSON lines.

Usage: python -m benchmarks [--rounds N] [--mebibytes N] [...] [BENCH ...]

Without a name, all benches except the long ones run, in about half an hour. An option
applies to each bench whose function `rows` has a parameter of this name; the default of
an option is the default of the parameter. With --record DIR the rows of each completed
bench replace DIR/BENCH.jsonl.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import (
    agreement_scale,
    async_save,
    callback_overhead,
    commit_speed,
    distributed_input,
    goodput,
    many_workers,
    mirror_memory,
    mirror_speed,
    mirror_step_overhead,
    notice_latency,
    notice_quiet,
    notice_to_commit,
    notice_to_exit,
    parallel_save,
    path,
    position_in_files,
    position_restore,
    quiet_memory,
    restore_speed,
    resume_latency,
    snapshot,
    step_overhead,
    verify_speed,
)
from benchmarks.row import circumstances, show

Rows = Callable[..., Iterator[dict[str, Any]]]

BENCHES: dict[str, Rows] = {
    "step_overhead": step_overhead.rows,
    "notice_to_exit": notice_to_exit.rows,
    "position_restore": position_restore.rows,
    "position_in_files": position_in_files.rows,
    "distributed_input": distributed_input.rows,
    "callback_overhead": callback_overhead.rows,
    "resume_latency": resume_latency.rows,
    "resume_jax": resume_latency.rows_of_jax,
    "commit_speed": commit_speed.rows,
    "restore_speed": restore_speed.rows,
    "async_save": async_save.rows,
    "parallel_save": parallel_save.rows,
    "notice_latency": notice_latency.rows,
    "notice_quiet": notice_quiet.rows,
    "quiet_memory": quiet_memory.rows,
    "agreement_scale": agreement_scale.rows,
    "path": path.rows,
    "verify_speed": verify_speed.rows,
    "mirror_speed": mirror_speed.rows,
    "mirror_memory": mirror_memory.rows,
    "mirror_step_overhead": mirror_step_overhead.rows,
}
LONG: dict[str, Rows] = {
    "agreement_10000": agreement_scale.rows_of_large,
    "many_workers": many_workers.rows,
    "notice_to_commit": notice_to_commit.rows,
    "goodput": goodput.rows,
    "snapshot": snapshot.rows,
}
ALL = BENCHES | LONG
NOT_OPTIONS = ("benches", "record")


def main() -> None:
    """Runs the named benches; without a name, all benches except the long ones."""
    parser = make_parser()
    asked = vars(parser.parse_args())
    names = list(dict.fromkeys(asked["benches"])) or list(BENCHES)
    if unknown := set(names) - set(ALL):
        parser.error(f"no bench {sorted(unknown)}; there are {', '.join(ALL)}")
    given = {
        name: value
        for name, value in asked.items()
        if name not in NOT_OPTIONS and value is not None
    }
    for name in names:
        options = {
            option: value
            for option, value in given.items()
            if option in inspect.signature(ALL[name]).parameters
        }
        made = []
        for of_size in each_size(options):
            for row in ALL[name](**of_size):
                made.append({**row, **circumstances(command(name, options))})
                show(made[-1])
        if asked["record"]:
            record(made, asked["record"])


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=", ".join(ALL))
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="keep the rows in this directory"
    )
    parser.add_argument(
        "--mebibytes",
        type=lambda text: [int(each) for each in text.split(",")],
        metavar="N[,N...]",
        help="size of the state; each size is measured by itself",
    )
    for name, kind, text in (
        ("rounds", int, "measurements of each kind"),
        ("workers", int, "of many_workers: processes"),
        ("large-mebibytes", int, "of mirror_speed: size of the larger single file"),
        ("seed", int, "of notice_latency's moments; by default a new one"),
        ("package", Path, "of path: where tfpreempt/ lies"),
        ("route", Path, "of path: the file for the rows with routes"),
        (
            "seconds",
            float,
            "of goodput, snapshot: training; of notice_quiet: rest",
        ),
        ("every", float, "of goodput: seconds between strikes"),
        ("grace", float, "of goodput: seconds from SIGTERM to SIGKILL"),
        ("save-steps", int, "of goodput: steps between periodic saves"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=text)
    return parser


def each_size(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the options of each run of a bench: one run for each given size."""
    if "mebibytes" not in options:
        return [options]
    return [{**options, "mebibytes": size} for size in options["mebibytes"]]


def command(name: str, options: dict[str, Any]) -> str:
    """Returns the command that repeats one bench."""
    words = ["python", "-m", "benchmarks", name]
    for option, value in options.items():
        text = f"{value:g}" if isinstance(value, float) else f"{value}"
        if isinstance(value, list):
            text = ",".join(map(str, value))
        words += [f"--{option.replace('_', '-')}", text]
    return shlex.join(words)


def record(rows: list[dict[str, Any]], directory: Path) -> None:
    """Replaces the files of rows; one bench may have rows of two names."""
    directory.mkdir(parents=True, exist_ok=True)
    by_name: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_name[row["bench"]].append(json.dumps(row))
    for name, lines in by_name.items():
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
