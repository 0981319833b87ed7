"""What a fit has to do, given the checkpoint and the fits before it. No I/O."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from tfpreempt.keras.fit.progress import Progress


class Task(enum.Enum):
    """What a fit has to do."""

    TRAIN = "train from what is in memory"
    RESUME = "go on inside an epoch"
    REVALIDATE = "go on with the validation after an epoch"
    EXTEND = "train more epochs than last time"
    FINISHED = "restore the end, train nothing"
    SKIP = "train nothing: a later fit of the program is in the checkpoint"

    @property
    def restores(self) -> bool:
        """Whether the checkpoint is to be loaded."""
        return self not in (Task.TRAIN, Task.SKIP)

    @property
    def trains(self) -> bool:
        """Whether there is anything left to train."""
        return self not in (Task.FINISHED, Task.SKIP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A fit's task.

    Attributes:
        number: which fit of the program this is, from 1.
        task: what it has to do.
        histories: of the fits before it.
        note: for the log; empty if there is nothing to say.
    """

    number: int
    task: Task
    histories: tuple[Any, ...] = ()
    note: str = ""


def make_plan(saved: Progress | None, before: list[Any], epochs: int) -> Plan:
    """Decides.

    Args:
        saved: of the checkpoint; None without one.
        before: histories of the fits that ended in this process.
        epochs: what `fit` was asked for.
    """
    if saved is None:
        return Plan(number=1, task=Task.TRAIN)
    number = len(before) + 1
    if number > saved.fit:
        return Plan(number=number, task=Task.TRAIN, histories=tuple(before))
    if number < saved.fit:
        note = (
            f"fit {number} of the program was complete before the restart; the "
            f"checkpoint is of fit {saved.fit}, so this one trains nothing and leaves "
            "the model as it is. Give each fit a checkpoint_dir of its own if the "
            "model is used between them"
        )
        return Plan(number=number, task=Task.SKIP, histories=saved.histories, note=note)
    histories = saved.histories
    if saved.phase != "complete" and epochs <= saved.epoch:
        note = (
            f"fit was asked for {epochs} epochs and the checkpoint is in epoch "
            f"{saved.epoch + 1}; the model is restored as it was there, and nothing "
            "is trained"
        )
        return Plan(number=number, task=Task.FINISHED, histories=histories, note=note)
    if saved.phase == "train":
        return Plan(number=number, task=Task.RESUME, histories=histories)
    if saved.phase == "validation":
        return Plan(number=number, task=Task.REVALIDATE, histories=histories)
    if epochs > saved.epoch and not saved.stopped:
        return Plan(number=number, task=Task.EXTEND, histories=histories)
    note = f"this fit was complete after {saved.epoch} epochs; nothing is left to train"
    if saved.stopped:
        note += (
            ". It had been stopped early (model.stop_training); use another "
            "checkpoint_dir to train again"
        )
    return Plan(number=number, task=Task.FINISHED, histories=histories, note=note)
