"""Decides how a fit begins, from the checkpoint and earlier fits of the process.

A program may call `fit` twice. If the program is interrupted in the second fit, the
restarted program begins at its first line. The first call of `fit` must then train
nothing, and the second call must resume. So the module counts the completed fits of
this process for each checkpoint directory. But a restarted program may skip the call of
`fit` for a fit that the program knows to be complete. Then the count is too low. In
this case the module finds the number of the current fit by its facts, such as the model
(`fit_progress.made_of`), which are compared with those of the fits in the checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.keras.fit.fit_progress import GIVE_EACH, Progress, may_be
from tfpreempt.keras.fit.phases import FitPhase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Describes how a fit begins, and the histories of the fits before this fit.

    Attributes:
        number: number of the fit, from 1, among the fits with this checkpoint
            directory.
        beginning: first phase of the fit.
        histories: histories of the fits before this fit.
        note: line for the log; "" for no line.
        note_level: level of the line in the log.
    """

    number: int
    beginning: FitPhase
    histories: tuple[Any, ...]
    note: str
    note_level: int


def make_plan(
    saved: Progress, before: list[Any], epochs: int, now: Mapping[str, Any]
) -> ResumePlan:
    """Decides how a fit begins.

    Args:
        saved: progress in the checkpoint.
        before: histories of the fits completed in this process.
        epochs: number of epochs passed to `fit`.
        now: facts about the current fit: result of `made_of`.

    Raises:
        CheckpointMismatchError: the checkpoint is of a later fit of the program, and
            the facts about the current fit match none of the fits up to that fit.
    """
    number, note, level = len(before) + 1, "", logging.WARNING
    if number < saved.fit:
        number = _find(saved, number, now)
    beginning, histories = FitPhase.RESTORE, saved.histories
    if number > saved.fit:
        beginning, histories = FitPhase.START, tuple(before)
    elif number < saved.fit:
        beginning = FitPhase.SKIP
        note = (
            f"fit {number} of the program was complete before the restart; the "
            f"checkpoint is of fit {saved.fit}, so fit {number} trains nothing and "
            "leaves the model unchanged. If the model is used between the fits, give "
            "each fit a separate checkpoint_dir"
        )
    elif saved.phase != "complete" and epochs <= saved.epoch:
        note = (
            f"fit was called with {epochs} epochs and the checkpoint is in epoch "
            f"{saved.epoch + 1}; the model of the checkpoint is restored, and "
            "nothing is trained"
        )
    elif saved.phase == "train":
        beginning = FitPhase.RESUME
    elif saved.phase == "validation":
        beginning = FitPhase.REVALIDATE
    elif epochs > saved.epoch and not saved.stopped:
        beginning = FitPhase.EXTEND
    else:
        level = logging.INFO
        note = (
            f"this fit was complete after {saved.epoch} epochs; nothing is left to "
            "train"
        )
        if saved.stopped:
            note += ". The fit was stopped early (model.stop_training)"
        note += (
            ". To train from the start, use another checkpoint_dir, or restore=False"
        )
    return ResumePlan(
        number=number,
        beginning=beginning,
        histories=histories,
        note=note,
        note_level=level,
    )


def _find(saved: Progress, number: int, now: Mapping[str, Any]) -> int:
    """Finds the number of the current fit, when the checkpoint is of a later fit.

    Args:
        saved: progress in the checkpoint.
        number: number of the current fit, if the program has called `fit` for every
            earlier fit.
        now: facts about the current fit, from `fit_progress.made_of`.
    """
    each = [*(past.get("made_of", {}) for past in saved.histories), saved.made_of]
    found = [
        (n, may_be(made, now, exactly=True))
        for n, made in enumerate(each[number - 1 :], number)
        if may_be(made, now, exactly=False)
    ]
    if not found:
        raise errors.CheckpointMismatchError(
            f"The checkpoint belongs to fit {saved.fit} of a program. Expected that "
            f"this fit is fit {number} or a later fit, but this fit has another model, "
            f"or another kind or length of the data. {GIVE_EACH} To start from "
            "scratch, use another checkpoint directory."
        )
    return next((n for n, is_exact in found if is_exact), found[0][0])


# --- the fits before -----------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Past:
    """The fits of this process that have used a checkpoint directory so far.

    Attributes:
        histories: histories of the completed fits, oldest first.
        is_refused: whether a fit raised an error, because its data differ from those of
            the checkpoint.
    """

    histories: list[Any] = dataclasses.field(default_factory=list)
    is_refused: bool = False


PASTS: dict[str, Past] = {}
"""Earlier fits of this process, by the real path of the checkpoint directory."""


def past_of(directory: str) -> Past:
    """Returns the fits of this process so far that have used a checkpoint directory."""
    return PASTS.setdefault(os.path.realpath(directory), Past())


def add(past: Past, history: Any, made: ResumePlan, made_of: Mapping[str, Any]) -> None:
    """Records a completed fit.

    Args:
        past: earlier fits with the checkpoint directory.
        history: Keras' History callback.
        made: plan of the fit.
        made_of: facts that identify the fit.
    """
    values = {name: list(map(plain, each)) for name, each in history.history.items()}
    epochs = [int(epoch) for epoch in history.epoch]
    ended = {"epoch": epochs, "history": values, "made_of": dict(made_of)}
    past.histories = [*made.histories[: made.number - 1], ended]


def plain(value: Any) -> Any:
    """Converts a log value to a number, array, text, or a dict or list of such values.

    A value of any other type becomes None: it must not make a commit fail.
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
            array = array.astype("float64")  # for types such as bfloat16
    except (TypeError, ValueError):
        return None
    return array if array.ndim else array.item()
