"""How far a fit is, as a frozen value, and whether a checkpoint fits a fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tfpreempt import errors
from tfpreempt.keras.interface import Fit

Stage = Literal["train", "validation", "complete"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A place in the loop of `model.fit`.

    Attributes:
        fit: which fit with this directory in the program, from 1.
        phase: before a train step; in the validation after an epoch; at the end.
        epoch: the epoch that runs, or the number of epochs at the end.
        batch: batches of it that are trained; in "validation" the first batch of its
            last train step.
        is_untrained: whether the program has not trained a single step yet; then there
            may be no variables, and starting anew is going on.
        stopped: whether training was stopped before its last epoch.
        loop: what the loop has learned of its data; JSON.
        logs: what the last train step returned; in "validation" those of the epoch.
        histories: of the fits before this one; each has `epoch` and `history`.
        made_of: what the run is made of; must not change over restarts.
        metrics: variables that the model's metrics have; a validation may have made
            some of them.
    """

    fit: int
    phase: Stage
    epoch: int
    batch: int
    is_untrained: bool = False
    stopped: bool = False
    loop: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    histories: tuple[Any, ...] = ()
    made_of: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: int = 0


def made_of(fit: Fit) -> dict[str, Any]:
    """What a run must have in common with the run that it goes on from."""
    return {
        "keras": fit.line,
        "optimizer": type(fit.model.optimizer).__name__,
        "data": type(fit.adapter).__name__,
        "samples": getattr(fit.adapter, "_num_samples", None),
        "steps": fit.steps,
        "steps_per_execution": fit.steps_per_execution,
    }


FIXES = {
    "keras": "train with the same Keras",
    "optimizer": "compile with the same optimizer",
    "data": "pass the same kind of data to fit",
    "samples": "pass data of the same length",
    "steps": "pass data of the same length, in batches of the same size",
    "slots": "use the same layers, and the optimizer with the same settings",
}
_NAMES = {
    "samples": "the number of samples",
    "steps": "the number of batches in an epoch",
    "slots": "the number of the optimizer's variables",
}


def check_same(saved: Progress, made_of: Mapping[str, Any], directory: str) -> None:
    """Compares a run with the one that a checkpoint is of, before anything is loaded.

    Args:
        saved: of the checkpoint.
        made_of: of this fit; None for what it does not know.
        directory: for the message.

    Raises:
        CheckpointMismatchError: names what has changed.
    """
    for what, fix in FIXES.items():
        then, now = saved.made_of.get(what), made_of.get(what)
        if then is not None and now is not None and then != now:
            raise errors.CheckpointMismatchError(
                f"The checkpoint in {directory!r} is of another run: "
                f"{_NAMES.get(what, what)} was "
                f"{then!r} there and is {now!r} here. To go on with it, {fix}; to "
                "start anew, use another checkpoint directory."
            )


def no_data(epoch: int) -> errors.ConfigurationError:
    """The error for an epoch without a step."""
    return errors.ConfigurationError(
        f"The training data are empty: epoch {epoch} has ended without a batch. "
        "Nothing was trained or committed. Look at what the pipeline reads (patterns "
        "of files, filter, take, and a repeat that has ended)."
    )


def check_slots(saved: Progress, slots: int, directory: str) -> None:
    """Looks for variables of the optimizer that are missing now.

    Those that are new are named one by one when the checkpoint is restored.

    Args:
        saved: of the checkpoint.
        slots: how many the optimizer has.
        directory: for the message.

    Raises:
        CheckpointMismatchError: some are missing.
    """
    if slots < saved.made_of.get("slots", 0):
        check_same(saved, {"slots": slots}, directory)


def check_divisible(saved: Progress, steps_per_execution: int) -> None:
    """A step that trains several batches must begin where one began.

    Raises:
        CheckpointMismatchError: it cannot.
    """
    if saved.batch % steps_per_execution:
        raise errors.CheckpointMismatchError(
            f"The checkpoint was made before batch {saved.batch} of epoch "
            f"{saved.epoch}, and steps_per_execution is {steps_per_execution} now, "
            "which does not divide it. Compile with the steps_per_execution of the "
            f"interrupted run ({saved.made_of.get('steps_per_execution')})."
        )
