"""Measures tfpreempt, mostly against what TensorFlow and Keras have; JSON lines.

Usage: python -m tests.bench [--rounds N] [--mebibytes N] [--large-mebibytes N]
                             [--seed N] [--package DIR] [--route FILE]
                             [--seconds S] [--every S] [--grace S] [--save-steps N]
                             [BENCH ...]

Without a name all run but goodput, which takes an hour and more.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tests.bench import (
    agreement_scale,
    callback_overhead,
    commit_speed,
    goodput,
    mirror_memory,
    mirror_speed,
    mirror_step_overhead,
    non_chief_bytes,
    notice_latency,
    notice_quiet,
    notice_to_exit,
    path,
    position_restore,
    quiet_memory,
    restart,
    resume_latency,
    step_overhead,
    verify_speed,
)
from tests.bench.row import show

BENCHES = (
    "step_overhead",
    "notice_to_exit",
    "non_chief_bytes",
    "position_restore",
    "callback_overhead",
    "resume_latency",
    "restart",
    "commit_speed",
    "notice_latency",
    "notice_quiet",
    "quiet_memory",
    "agreement_scale",
    "path",
    "verify",
    "mirror_upload",
    "mirror_download",
    "mirror_memory",
    "mirror_step_overhead",
)
LONG = ("goodput",)


def main() -> None:
    """Runs the benches that were asked for, or all but the long ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    names = (*BENCHES, *LONG)
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=", ".join(names))
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="preemptions of each kind; of agreement_scale 20 times as many, and twice "
        "as many with 10,000 workers",
    )
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the state")
    parser.add_argument(
        "--large-mebibytes",
        type=int,
        default=2048,
        help="of mirror_upload: size of the larger single file",
    )
    parser.add_argument(
        "--seed", type=int, help="of notice_latency's moments; by default a new one"
    )
    parser.add_argument(
        "--package", type=Path, default=path.ROOT, help="of path: where tfpreempt/ lies"
    )
    parser.add_argument(
        "--route", type=Path, metavar="FILE", help="of path: for the rows with routes"
    )
    parser.add_argument(
        "--seconds", type=float, default=300, help="of goodput: training of each way"
    )
    parser.add_argument(
        "--every", type=float, default=30, help="of goodput: seconds between strikes"
    )
    parser.add_argument(
        "--grace", type=float, default=10, help="of goodput: from SIGTERM to SIGKILL"
    )
    parser.add_argument(
        "--save-steps", type=int, default=50, help="of goodput: between periodic saves"
    )
    asked = parser.parse_args()
    wanted = set(asked.benches or BENCHES)
    if unknown := wanted - set(names):
        parser.error(f"no bench {sorted(unknown)}; there are {', '.join(names)}")
    if "step_overhead" in wanted:
        for row in step_overhead.measure():
            show(row)
    if wanted & {"notice_to_exit", "non_chief_bytes"}:
        found = notice_to_exit.run(asked.rounds, asked.mebibytes)
        if "notice_to_exit" in wanted:
            for row in notice_to_exit.rows(found, asked.mebibytes):
                show(row)
        if "non_chief_bytes" in wanted:
            sides = found["worker 1"]
            show(non_chief_bytes.row(sides["ours"], sides["theirs"]))
    if "position_restore" in wanted:
        for row in position_restore.rows():
            show(row)
    if "callback_overhead" in wanted:
        for row in callback_overhead.rows():
            show(row)
    if "resume_latency" in wanted:
        show(resume_latency.row())
    if "restart" in wanted:
        show(restart.row(asked.rounds))
    if "commit_speed" in wanted:
        for row in commit_speed.rows(asked.rounds, asked.mebibytes):
            show(row)
    if "notice_latency" in wanted:
        seed = random.randrange(2**32) if asked.seed is None else asked.seed
        for row in notice_latency.rows(seed):
            show(row)
    if "notice_quiet" in wanted:
        for row in notice_quiet.rows():
            show(row)
    if "quiet_memory" in wanted:
        for row in quiet_memory.rows():
            show(row)
    if "agreement_scale" in wanted:
        for row in agreement_scale.rows(20 * asked.rounds, 2 * asked.rounds):
            show(row)
    if "path" in wanted:
        routes = []
        for row in path.rows(asked.rounds, asked.package):
            routes.append(row)
            show({name: value for name, value in row.items() if name != "route"})
        if asked.route:
            asked.route.write_text(json.dumps(routes, indent=1) + "\n")
    if "verify" in wanted:
        for row in verify_speed.rows(asked.rounds, asked.mebibytes):
            show(row)
    if moves := wanted & {"mirror_upload", "mirror_download"}:
        for row in mirror_speed.rows(
            moves, asked.rounds, asked.mebibytes, asked.large_mebibytes
        ):
            show(row)
    if "mirror_memory" in wanted:
        for row in mirror_memory.rows(2 * asked.mebibytes):
            show(row)
    if "mirror_step_overhead" in wanted:
        show(mirror_step_overhead.row(asked.rounds))
    if "goodput" in wanted:
        for row in goodput.rows(
            asked.seconds, asked.every, asked.grace, asked.save_steps
        ):
            show(row)


if __name__ == "__main__":
    main()
