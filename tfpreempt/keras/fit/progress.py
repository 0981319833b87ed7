"""How far a fit is, as a frozen value, and whether a checkpoint fits a fit."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from tfpreempt import errors
from tfpreempt.checkpoint.encoding import readable
from tfpreempt.keras.record import Encoded

if TYPE_CHECKING:  # the interface imports TensorFlow, and this is values only
    from tfpreempt.keras.interface import Fit

Stage = Literal["train", "validation", "complete"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A place in the loop of `model.fit`.

    Attributes:
        fit: which fit with this directory in the program, from 1; 0: no step is trained
            in any.
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

    fit: int = 0
    phase: Stage = "train"
    epoch: int = 0
    batch: int = 0
    is_untrained: bool = False
    stopped: bool = False
    loop: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    histories: tuple[Any, ...] = ()
    made_of: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: int = 0


def read(saved: Encoded) -> Progress:
    """The place that a commit tells of.

    Args:
        saved: a `Progress` as a dict.

    Raises:
        CheckpointDamagedError: it is none, or another version's.
    """
    value = saved.value()
    with readable("a fit"):
        found = Progress(**value)
        tables: Sequence[Any]
        tables = found.loop, found.logs, found.made_of, *found.histories
        are_tables = all(isinstance(each, Mapping) for each in tables)
        counts: list[Any] = [found.fit, found.epoch, found.batch, found.metrics]
        if (slots := found.made_of.get("slots")) is not None:
            counts.append(slots)
        is_told = all(isinstance(n, numbers.Integral) and int(n) >= 0 for n in counts)
        plain = str, numbers.Integral, type(None)
        is_plain = all(isinstance(each, plain) for each in found.made_of.values())
        is_known = found.phase in get_args(Stage)
        if not (is_known and are_tables and is_told and is_plain):
            raise ValueError(f"it is no place in a fit: {str(value)[:200]}")
    return found


def made_of(fit: Fit, *, is_built: bool) -> dict[str, Any]:
    """What a run must have in common with the run that it goes on from.

    Args:
        fit: of the run.
        is_built: whether the optimizer has made its variables.
    """
    slots = getattr(fit.model.optimizer, "variables", ())
    slots = slots() if callable(slots) else slots
    return {
        "keras": fit.line,
        "optimizer": type(fit.model.optimizer).__name__,
        "data": type(fit.adapter).__name__,
        "samples": getattr(fit.adapter, "_num_samples", None),
        "steps": fit.steps,
        "steps_per_execution": fit.steps_per_execution,
        "slots": len(slots) if is_built else None,
    }


_FIXES = {
    "keras": ("keras", "train with the same Keras"),
    "optimizer": ("optimizer", "compile with the same optimizer"),
    "data": ("data", "pass the same kind of data to fit"),
    "samples": ("the number of samples", "pass data of the same length"),
    "steps": (
        "the number of batches in an epoch",
        "pass data of the same length, in batches of the same size",
    ),
    "slots": (
        "the number of the optimizer's variables",
        "use the same layers, and the optimizer with the same settings",
    ),
}


def check_same(saved: Progress, now: Mapping[str, Any], directory: str) -> None:
    """Compares a run with the one that a checkpoint is of, before anything is loaded.

    Args:
        saved: of the checkpoint.
        now: what this run is made of; None for what it does not know. Of the slots only
            missing ones count: those that are new are named one by one when the
            checkpoint is restored.
        directory: for the message.

    Raises:
        CheckpointMismatchError: names what has changed, or a step that trains several
            batches would not begin where one began.
    """
    for what, (name, fix) in _FIXES.items():
        before, here = saved.made_of.get(what), now.get(what)
        if before is None or here is None:
            continue
        if here < before if what == "slots" else here != before:
            raise errors.CheckpointMismatchError(
                f"The checkpoint in {directory!r} is of another run: {name} was "
                f"{before!r} there and is {here!r} here. To go on with it, {fix}; to "
                "start anew, use another checkpoint directory."
            )
    size = now.get("steps_per_execution", 1)
    if saved.batch % size:
        raise errors.CheckpointMismatchError(
            f"The checkpoint was made before batch {saved.batch} of epoch "
            f"{saved.epoch}, and steps_per_execution is {size} now, "
            "which does not divide it. Compile with the steps_per_execution of the "
            f"interrupted run ({saved.made_of.get('steps_per_execution')})."
        )
