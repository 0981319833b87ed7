"""How a fit begins, given the checkpoint and the fits before it.

A program that calls `fit` twice and is interrupted in the second is started from its
top again. Its first call must then train nothing, and its second go on. So the fits of
this process that came to their end are counted, for each checkpoint directory. A
program may also leave out the fits that it knows to be finished: then the fit is found
among those of the checkpoint by the facts that it is made of.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.keras.fit.fit_progress import GIVE_EACH, Progress, may_be
from tfpreempt.keras.fit.phases import FitPhase


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
    beginning: FitPhase
    histories: tuple[Any, ...]
    note: str


def make_plan(
    saved: Progress, before: list[Any], epochs: int, now: Mapping[str, Any]
) -> Plan:
    """Decides.

    Args:
        saved: of the checkpoint.
        before: histories of the fits that ended in this process.
        epochs: what `fit` was asked for.
        now: what the fit is made of.

    Raises:
        CheckpointMismatchError: later fits of the program are in the checkpoint, and
            this fit is none of those that it can be.
    """
    number, note = len(before) + 1, ""
    if number < saved.fit:
        number = _find(saved, number, now)
    beginning, histories = FitPhase.RESTORE, saved.histories
    if number > saved.fit:
        beginning, histories = FitPhase.START, tuple(before)
    elif number < saved.fit:
        beginning = FitPhase.SKIP
        note = (
            f"fit {number} of the program was complete before the restart; the "
            f"checkpoint is of fit {saved.fit}, so this one trains nothing and leaves "
            "the model as it is. Give each fit a checkpoint_dir of its own if the "
            "model is used between them"
        )
    elif saved.phase != "complete" and epochs <= saved.epoch:
        note = (
            f"fit was asked for {epochs} epochs and the checkpoint is in epoch "
            f"{saved.epoch + 1}; the model is restored as it was there, and nothing "
            "is trained"
        )
    elif saved.phase == "train":
        beginning = FitPhase.RESUME
    elif saved.phase == "validation":
        beginning = FitPhase.REVALIDATE
    elif epochs > saved.epoch and not saved.stopped:
        beginning = FitPhase.EXTEND
    else:
        note = (
            f"this fit was complete after {saved.epoch} epochs; nothing is left to "
            "train"
        )
        if saved.stopped:
            note += ". It had been stopped early (model.stop_training)"
        note += (
            ". To train from the start, use another checkpoint_dir, or restore=False"
        )
    return Plan(number=number, beginning=beginning, histories=histories, note=note)


def _find(saved: Progress, number: int, now: Mapping[str, Any]) -> int:
    """Returns the number of a fit where later fits are in the checkpoint.

    Args:
        saved: of the checkpoint.
        number: the fit's, if the program has left out none before it.
        now: what the fit is made of.
    """
    each = [*(past.get("made_of", {}) for past in saved.histories), saved.made_of]
    found = [
        (n, may_be(made, now, exactly=True))
        for n, made in enumerate(each[number - 1 :], number)
        if may_be(made, now, exactly=False)
    ]
    if not found:
        raise errors.CheckpointMismatchError(
            f"The checkpoint is of fit {saved.fit} of a program. This fit was expected "
            f"to be fit {number}, or a later one, and is none of them: its model, or "
            f"the kind or the length of its data, is another. {GIVE_EACH} To start "
            "from scratch, use another checkpoint directory."
        )
    return next((n for n, is_exact in found if is_exact), found[0][0])


# --- the fits before -----------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Past:
    """What this process knows of the earlier fits with one checkpoint directory.

    Attributes:
        histories: of the fits that ended, oldest first.
        is_refused: whether this process was refused a fit because of its data.
    """

    histories: list[Any] = dataclasses.field(default_factory=list)
    is_refused: bool = False


PASTS: dict[str, Past] = {}
"""By the real path of the checkpoint directory."""


def past_of(directory: str) -> Past:
    """Returns what this process knows of the fits with a checkpoint directory."""
    return PASTS.setdefault(os.path.realpath(directory), Past())


def add(past: Past, history: Any, made: Plan, made_of: Mapping[str, Any]) -> None:
    """Notes that a fit came to its end.

    Args:
        past: of the checkpoint directory.
        history: Keras' History callback.
        made: the fit's plan.
        made_of: the facts by which it is recognized.
    """
    values = {name: list(map(plain, each)) for name, each in history.history.items()}
    epochs = [int(epoch) for epoch in history.epoch]
    ended = {"epoch": epochs, "history": values, "made_of": dict(made_of)}
    past.histories = [*made.histories[: made.number - 1], ended]


def plain(value: Any) -> Any:
    """A log value that can be kept: a number, array, text, or a dict or list of them.

    What is none of these becomes None: a commit is worth more than a log.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return value
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            array = array.astype("float64")  # a bfloat16, say
    except (TypeError, ValueError):
        return None
    return array if array.ndim else array.item()
