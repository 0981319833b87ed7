"""How far a fit is, as a frozen value, and whether a checkpoint fits a fit."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.keras.fit_record import EncodedValue

if TYPE_CHECKING:  # the interface imports TensorFlow, and this is values only
    from tfpreempt.keras.fit_protocol import Fit

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
        histories: of the fits before this one; each has `epoch`, `history` and
            `made_of`.
        made_of: facts about the run that must not change over restarts: those of
            `made_of`; and "varies", whether the values differed between starts.
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


def read(saved: EncodedValue) -> Progress:
    """The place that a commit tells of.

    Args:
        saved: a `Progress` as a dict.

    Raises:
        CheckpointCorruptedError: it is none, or another version's.
    """
    value = saved.value()
    with readable("a fit"):
        found = Progress(**value)
        tables: Sequence[Any]
        made = [found.made_of, *(past.get("made_of", {}) for past in found.histories)]
        tables = found.loop, found.logs, *made, *found.histories
        are_tables = all(isinstance(each, Mapping) for each in tables)
        counts: list[Any] = [found.fit, found.epoch, found.batch, found.metrics]
        others = [each.get(name) for each in made for name in ("slots", "weights")]
        counts += [count for count in others if count is not None]
        is_told = all(isinstance(n, numbers.Integral) and int(n) >= 0 for n in counts)
        plain = str, numbers.Integral, type(None)
        is_plain = all(isinstance(v, plain) for each in made for v in each.values())
        is_known = found.phase in get_args(Stage)
        if not (is_known and are_tables and is_told and is_plain):
            raise ValueError(f"it is no place in a fit: {str(value)[:200]}")
    return found


def made_of(
    fit: Fit, *, is_built: bool, compares_values: bool = False
) -> dict[str, Any]:
    """Returns facts by which a restart recognizes a fit; unknown facts are None.

    Args:
        fit: the fit.
        is_built: whether the optimizer has made its variables.
        compares_values: whether values of the training arrays are among the facts.
    """
    slots = getattr(fit.optimizer, "variables", ())
    slots = slots() if callable(slots) else slots
    weights = fit.model.weights if fit.model.built else ()
    shapes = sorted(f"{each.dtype} {tuple(each.shape)}" for each in weights)
    return {
        "keras": fit.line,
        "optimizer": type(fit.optimizer).__name__,
        "data": type(fit.adapter).__name__,
        "samples": getattr(fit.adapter, "_num_samples", None),
        "steps": fit.steps,
        "steps_per_execution": fit.steps_per_execution,
        "slots": len(slots) if is_built else None,
        "model": type(fit.model).__name__,
        "weights": len(shapes),
        "shapes": zlib.crc32("\n".join(shapes).encode()),
        "values": _some_values(fit) if compares_values else None,
        "initial_epoch": fit.arguments["initial_epoch"],
        "epochs": fit.arguments["epochs"],
    }


_SHOWN_VALUES, _SHOWN_ARRAYS = 32, 4


def _some_values(fit: Fit) -> str | None:
    """Returns a few values from all over the training arrays; None for other data.

    Ten folds of one data set differ in a tenth of their rows, so there are 32 values.
    """
    found = []
    given = fit.arguments["x"], fit.arguments["y"]
    for each in given:  # arrays of numbers, and the first in lists and dicts of them
        parts = each.values() if isinstance(each, dict) else each
        parts = parts if isinstance(each, dict | list | tuple) else [each]
        for part in itertools.islice(parts, _SHOWN_ARRAYS):
            is_array = isinstance(part, np.ndarray) and part.dtype.kind in "biuf"
            if is_array and part.size:
                places = np.linspace(0, part.size - 1, _SHOWN_VALUES).astype(int)
                found += [f"{float(value):.6g}" for value in part.flat[places]]
    return " ".join(found) or None


def _are_close(values: Any, others: Any) -> bool:
    """Whether values of two starts are equal, but for their last digits."""
    try:
        pair = np.array([each.split() for each in (values, others)], dtype=float)
    except (AttributeError, ValueError):
        return False  # not as many, or of a damaged checkpoint
    return np.allclose(pair[0], pair[1], rtol=1e-3, atol=1e-6, equal_nan=True)


def may_be(saved: Mapping[str, Any], now: Mapping[str, Any], *, exactly: bool) -> bool:
    """Whether a fit may be the saved one; an unknown fact counts as equal.

    Args:
        saved: what the saved fit is made of.
        now: what the fit of this start is made of.
        exactly: whether its epochs and the values of its data count too, which a user
            may change between two starts.
    """
    facts = ["keras", "data", "samples", "steps", "model", "shapes"]
    facts += ["initial_epoch", "epochs"] if exactly else []
    if now["weights"] < saved.get("weights", 0):
        facts.remove("shapes")  # it makes more of them in its first step
    pairs = [(saved.get(fact), now[fact]) for fact in facts]
    values = saved.get("values"), now["values"]
    is_compared = exactly and None not in values and not saved.get("varies")
    return all(None in pair or pair[0] == pair[1] for pair in pairs) and (
        not is_compared or _are_close(*values)
    )


GIVE_EACH = "If the program has several fits, give each fit its own directory."
"""Ends the errors of a checkpoint that may be another fit's."""

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
                f"start anew, use another checkpoint directory. {GIVE_EACH}"
            )
    size = now.get("steps_per_execution", 1)
    if saved.batch % size:
        raise errors.CheckpointMismatchError(
            f"The checkpoint was made before batch {saved.batch} of epoch "
            f"{saved.epoch}, and steps_per_execution is {size} now, "
            "which does not divide it. Compile with the steps_per_execution of the "
            f"interrupted run ({saved.made_of.get('steps_per_execution')})."
        )


def check_values(
    saved: Progress,
    now: Mapping[str, Any],
    directory: str,
    refused: Sequence[str] = (),
) -> str | None:
    """Compares samples of the training data with those of the checkpoint.

    A complete fit on other arrays may be another fit of the program, such as a fold of
    a cross-validation, which has the same arrays in each start. Or the arrays are drawn
    without a seed, and differ in each start.

    Args:
        saved: of the checkpoint.
        now: what this run is made of.
        directory: for the message.
        refused: samples of the arrays with which earlier starts were refused.

    Returns:
        A warning, if the fit has other data than before.

    Raises:
        CheckpointMismatchError: the checkpoint is the end of a fit on other data.
    """
    values = saved.made_of.get("values"), now["values"]
    if None in values or _are_close(*values):
        return None
    is_known_to_vary = bool(saved.made_of.get("varies"))
    is_seen_to_vary = bool(refused) and not any(
        _are_close(each, now["values"]) for each in refused
    )
    fix = "seed the operations that shuffle, split or generate the data"
    if saved.phase != "complete":
        return (
            "samples of the training arrays differ from those of the interrupted fit, "
            f"so the fit resumes on other data. To resume exactly, {fix}"
        )
    if is_known_to_vary or is_seen_to_vary:
        return (
            "samples of the training arrays differ in each start, so they cannot be "
            "compared with those of the complete fit in the checkpoint. This fit is "
            f"taken for that fit. To be sure of that, {fix}. {GIVE_EACH}"
        )
    raise errors.CheckpointMismatchError(
        f"The checkpoint in {directory!r} is of a complete fit on other training data: "
        "samples of the arrays differ. If this is that fit, and its data are drawn in "
        "each start without a seed, start it again unchanged: the next start compares "
        "its data with those of this start too, and restores the end of the fit if "
        f"they differ again ({fix} to avoid this). If this is another fit, use another "
        f"checkpoint directory. {GIVE_EACH}"
    )
