"""How a fit begins, given the checkpoint and the fits before it.

A program that calls `fit` twice and is interrupted in the second is started from its
top again. Its first call must then train nothing, and its second go on. So the fits of
this process that came to their end are counted, for each checkpoint directory.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    histories: tuple[Any, ...]
    note: str


def make_plan(saved: Progress, before: list[Any], epochs: int) -> Plan:
    """Decides.

    Args:
        saved: of the checkpoint.
        before: histories of the fits that ended in this process.
        epochs: what `fit` was asked for.
    """
    number, note = len(before) + 1, ""
    beginning, histories = Phase.RESTORE, saved.histories
    if number > saved.fit:
        beginning, histories = Phase.START, tuple(before)
    elif number < saved.fit:
        beginning = Phase.SKIP
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
        beginning = Phase.RESUME
    elif saved.phase == "validation":
        beginning = Phase.REVALIDATE
    elif epochs > saved.epoch and not saved.stopped:
        beginning = Phase.EXTEND
    else:
        note = (
            f"this fit was complete after {saved.epoch} epochs; nothing is left to "
            "train"
        )
        if saved.stopped:
            note += (
                ". It had been stopped early (model.stop_training); use another "
                "checkpoint_dir to train again"
            )
    return Plan(number=number, beginning=beginning, histories=histories, note=note)


# --- the fits before -----------------------------------------------------------------

_histories: dict[str, list[Any]] = {}


def histories(directory: str) -> list[Any]:
    """Those of the fits, oldest first."""
    return list(_histories.get(os.path.realpath(directory), []))


def add(directory: str, history: Any) -> None:
    """A fit came to its end.

    Args:
        directory: the checkpoint directory.
        history: Keras' History callback.
    """
    values = {name: list(map(plain, each)) for name, each in history.history.items()}
    past = {"epoch": [int(epoch) for epoch in history.epoch], "history": values}
    _histories.setdefault(os.path.realpath(directory), []).append(past)


def forget(directory: str | None = None) -> None:
    """The directory, or any for None, holds no commit any more: counts anew."""
    if directory is None:
        _histories.clear()
    else:
        _histories.pop(os.path.realpath(directory), None)


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
