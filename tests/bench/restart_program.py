"""The demo's program, which says when it came where; for `restart`.

Usage: restart_program.py OUT STEPS SEED

Each line of OUT/marks.jsonl is one incarnation that has trained a step: the wall times
of its first line, of its imports' end, and so on, in the order of `restart.PHASES`.
"""

from __future__ import annotations

import time

FIRST_LINE = time.time()

import json  # noqa: E402  # the first line is timed
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tfpreempt.cli.demo import worker  # noqa: E402
from tfpreempt.cli.demo.job import print_step  # noqa: E402

STEP_SECONDS = 0.02  # stands for a step of ordinary length


def main(out: Path, steps: int, seed: int) -> None:
    """Trains by the demo's loop, from the last commit to the last step."""
    marks = [FIRST_LINE, time.time()]
    worker.make_repeatable(seed)
    strategy = worker.tf.distribute.MultiWorkerMirroredStrategy()
    marks.append(time.time())
    make = worker.tfpreempt.PreemptionCheckpointHandler

    def made(*arguments: Any) -> Any:
        marks.append(time.time())
        handler = make(*arguments)
        marks.append(time.time())
        return handler

    def tell(step: int) -> None:
        if len(marks) == 5:  # the first step
            marks.append(time.time())
            with (out / "marks.jsonl").open("a") as file:
                print(json.dumps(marks), file=file)
        print_step(step, worker.tfpreempt.num_restarts())
        time.sleep(STEP_SECONDS)

    worker.tfpreempt.PreemptionCheckpointHandler = made  # type: ignore[misc,assignment]
    worker.train_by_loop(strategy, steps, seed, tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
