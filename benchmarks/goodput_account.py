"""Computes the made and the kept steps of a training that is interrupted repeatedly.

A life is one start of the training, up to the strike that ends it. All times are
monotonic seconds of one machine. The wall time of each life consists of four parts,
without gaps:

    start_up  from the start of the processes to the first step, and the time of the
              first step beyond the median step of the life, which is tracing
    training  the steps themselves
    saves     between the end of a step and the begin of the next step: periodic saves,
              and other work of a way at a boundary
    way_out   from the end of the last step to the exit of the last process, including
              the save after a notice
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.row import side

PARTS = ("start_up", "training", "saves", "way_out")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An executed step.

    Attributes:
        number: step number of the state after the step; the first step is 1.
        began: start time of the step.
        ended: end time of the step.
    """

    number: int
    began: float
    ended: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of the training, from the start of the processes to their exit.

    Attributes:
        started: start time of the processes.
        gone: exit time of the last process.
        restored: step of the restored state; 0 without a restore.
        steps: the executed steps in order; at least one.
        saved: newest step that the program knows to be saved; `restored` if none.
        codes: exit code of each worker.
    """

    started: float
    gone: float
    restored: int
    steps: tuple[Step, ...]
    saved: int
    codes: tuple[int, ...] = ()

    def step_seconds(self) -> list[float]:
        """Returns the seconds of each step; the first step without its tracing."""
        first, *later = [step.ended - step.began for step in self.steps]
        return [min(first, statistics.median(later or [first])), *later]

    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part of the wall time of a life."""
        seconds = self.step_seconds()
        made = self.steps[-1].ended - self.steps[0].ended + seconds[0]
        return {
            "start_up": self.steps[0].ended - seconds[0] - self.started,
            "training": sum(seconds),
            "saves": made - sum(seconds),
            "way_out": self.gone - self.steps[-1].ended,
        }


def read_life(log: str, started: float, gone: float, codes: tuple[int, ...]) -> Life:
    """Reads a worker's log of its life.

    Args:
        log: lines of JSON; a kill may have left the last one incomplete.
        started: start time of the processes.
        gone: exit time of the last process.
        codes: exit code of each worker.

    Raises:
        ValueError: the worker did not complete its first step, or a step is missing.
    """
    records = [json.loads(line) for line in log.split("\n")[:-1]]
    restored = [record["restored"] for record in records if "restored" in record]
    steps = tuple(
        Step(number=record["step"], began=record["began"], ended=record["ended"])
        for record in records
        if "step" in record
    )
    if len(restored) != 1 or not steps:
        raise ValueError(f"no life: {len(restored)} restores, {len(steps)} steps")
    numbers = [step.number for step in steps]
    if numbers != list(range(restored[0] + 1, restored[0] + 1 + len(steps))):
        raise ValueError(f"restored {restored[0]}, then the steps {numbers}")
    saved = [record["saved"] for record in records if "saved" in record]
    return Life(
        started=started,
        gone=gone,
        restored=restored[0],
        steps=steps,
        saved=max(saved, default=restored[0]),
        codes=codes,
    )


def account(lives: Sequence[Life], final: int) -> dict[str, Any]:
    """Adds up the steps and times of the lives of a way.

    Args:
        lives: one after the other.
        final: step of the state after the last life; 0 without a state.

    Returns:
        Steps by their fate, seconds by part, and goodput: the time of the useful steps
        by wall time, with start-up and without it. Useful are the steps that the final
        state holds; a step that was lost and made again counts once, as made again.
        Lost seconds are those of steps that were not kept. Goodput and wasted steps are
        there for each life too.

    Raises:
        ValueError: the final state has a step that no life has made.
    """
    kept: dict[int, tuple[int, float]] = {}  # index of the start, and seconds
    for number, life in enumerate(lives):
        kept = {n: step for n, step in kept.items() if n <= life.restored}
        for step, seconds in zip(life.steps, life.step_seconds(), strict=True):
            kept[step.number] = (number, seconds)
    kept = {n: step for n, step in kept.items() if n <= final}
    if sorted(kept) != list(range(1, final + 1)):
        raise ValueError(f"the final state holds {final} steps, {len(kept)} were made")
    made = sum(len(life.steps) for life in lives)
    every_part = [life.parts() for life in lives]
    parts = {name: sum(part[name] for part in every_part) for name in PARTS}
    wall = sum(parts.values())
    useful = sum(seconds for _, seconds in kept.values())
    of_lives: list[list[float]] = [[] for _ in lives]
    for number, seconds in kept.values():
        of_lives[number].append(seconds)
    wasted = [
        len(life.steps) - len(steps)
        for life, steps in zip(lives, of_lives, strict=True)
    ]
    return {
        "goodput": round(useful / wall, 4),
        "goodput_without_start_up": round(useful / (wall - parts["start_up"]), 4),
        "useful_steps": final,
        "made_steps": made,
        "wasted_steps": made - final,
        "unit": "share of wall time",
        "goodput_all": [
            round(sum(steps) / sum(part.values()), 4)
            for steps, part in zip(of_lives, every_part, strict=True)
        ],
        **side("wasted_of_a_life", wasted, 1),
        "lives": len(lives),
        "wall_seconds": round(wall, 2),
        "useful_seconds": round(useful, 2),
        "lost_seconds": round(parts["training"] - useful, 2),
        **{f"{name}_seconds": round(seconds, 2) for name, seconds in parts.items()},
        "step_seconds": round(
            statistics.median(s for life in lives for s in life.step_seconds()), 4
        ),
    }


def disagreements(lives: Sequence[Life], final: int) -> Iterator[str]:
    """Yields a message for each start with a state other than the last reported save.

    A kill may come between a save and its record. So the state may also be that of the
    last step before the kill, but never an older state than the last reported save.

    Args:
        lives: the starts in order.
        final: step of the state after the last start; 0 without a state.
    """
    after = [*(life.restored for life in lives[1:]), final]
    for number, (life, held) in enumerate(zip(lives, after, strict=True)):
        last = life.steps[-1].number
        if held not in {life.saved, last}:
            yield f"life {number}: saved {life.saved}, made {last}, left behind {held}"
