"""How a fit begins, given the checkpoint and the fits before it. No I/O."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpreempt.keras.fit.phases import Phase
from tfpreempt.keras.fit.progress import Progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fit has to do.

    Attributes:
        number: which fit of the program this is, from 1.
        beginning: its first phase.
        histories: of the fits before it.
        note: for the log; empty if there is nothing to say.
    """

    number: int
    beginning: Phase
    histories: tuple[Any, ...] = ()
    note: str = ""


def make_plan(saved: Progress | None, before: list[Any], epochs: int) -> Plan:
    """Decides.

    Args:
        saved: of the checkpoint; None without one.
        before: histories of the fits that ended in this process.
        epochs: what `fit` was asked for.
    """
    number = len(before) + 1
    if saved is None or number > saved.fit:
        return Plan(number=number, beginning=Phase.START, histories=tuple(before))
    beginning, note = _beginning(saved, number, epochs)
    return Plan(
        number=number, beginning=beginning, histories=saved.histories, note=note
    )


def _beginning(saved: Progress, number: int, epochs: int) -> tuple[Phase, str]:
    """The first phase, and what to say of it."""
    if number < saved.fit:
        return Phase.SKIP, (
            f"fit {number} of the program was complete before the restart; the "
            f"checkpoint is of fit {saved.fit}, so this one trains nothing and leaves "
            "the model as it is. Give each fit a checkpoint_dir of its own if the "
            "model is used between them"
        )
    if saved.phase != "complete" and epochs <= saved.epoch:
        return Phase.RESTORE, (
            f"fit was asked for {epochs} epochs and the checkpoint is in epoch "
            f"{saved.epoch + 1}; the model is restored as it was there, and nothing "
            "is trained"
        )
    if saved.phase == "train":
        return Phase.RESUME, ""
    if saved.phase == "validation":
        return Phase.REVALIDATE, ""
    if epochs > saved.epoch and not saved.stopped:
        return Phase.EXTEND, ""
    note = f"this fit was complete after {saved.epoch} epochs; nothing is left to train"
    if saved.stopped:
        note += (
            ". It had been stopped early (model.stop_training); use another "
            "checkpoint_dir to train again"
        )
    return Phase.RESTORE, note
