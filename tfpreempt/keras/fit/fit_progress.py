"""Describes the progress of a fit, and checks that a checkpoint belongs to a fit."""

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

if TYPE_CHECKING:  # `fit_protocol` is needed for types only
    from tfpreempt.keras.fit_protocol import Fit

Stage = Literal["train", "validation", "complete"]
BACKENDS = {"keras": "TensorFlow", "keras on JAX": "JAX"}
"""Name of the backend, by `Fit.line` of Keras 3. A fit on one backend can resume from a
commit of the other backend."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A position in the loop of `model.fit`.

    Attributes:
        fit: number of the fit, from 1, among the fits of the program with this
            checkpoint directory; 0 before the first trained step.
        phase: "train" before a train step; "validation" in the validation after an
            epoch; "complete" at the end.
        epoch: number of the current epoch; at the end the number of epochs.
        batch: number of trained batches of the epoch. In "validation": number of the
            first batch of the epoch's last train step.
        is_untrained: whether the program has not trained a step yet. Then the variables
            may not exist, and a restart begins from scratch.
        stopped: whether training was stopped before its last epoch.
        loop: result of `Fit.loop_state`: facts about the data, such as the length.
        logs: logs returned by the last train step; in "validation" the logs of the
            epoch.
        histories: histories of the fits before this fit, with `epoch`, `history` and
            `made_of`.
        made_of: result of `made_of`: facts about the fit that a restart must not
            change. Also "varies": whether the training arrays had other values after an
            earlier restart, and "learning_rate": result of `learning_rate` when the fit
            began from scratch.
        metrics: number of variables of the model's metrics. A restart needs the number,
            because some variables are made by a validation only.
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
    """Returns the progress in a commit.

    Args:
        saved: a `Progress` as a dict.

    Raises:
        CheckpointCorruptedError: the value is not a `Progress` of this version.
    """
    value = saved.value()
    with readable("model.fit"):
        found = Progress(**value)
        tables: Sequence[Any]
        made = [found.made_of, *(past.get("made_of", {}) for past in found.histories)]
        tables = found.loop, found.logs, *made, *found.histories
        are_tables = all(isinstance(each, Mapping) for each in tables)
        counts: list[Any] = [found.fit, found.epoch, found.batch, found.metrics]
        others = [each.get(name) for each in made for name in ("slots", "weights")]
        counts += [count for count in others if count is not None]
        are_counts = all(
            isinstance(n, numbers.Integral) and int(n) >= 0 for n in counts
        )
        plain = str, numbers.Integral, type(None)
        is_plain = all(isinstance(v, plain) for each in made for v in each.values())
        is_known = found.phase in get_args(Stage)
        if not (is_known and are_tables and are_counts and is_plain):
            raise ValueError(f"expected progress of a fit, got {str(value)[:200]}")
    return found


def made_of(
    fit: Fit, *, is_built: bool, compares_values: bool = False
) -> dict[str, Any]:
    """Returns the facts by which a restart recognizes a fit; None for unknown facts.

    Args:
        fit: the fit.
        is_built: whether the optimizer has made its variables.
        compares_values: whether to include values of the training arrays.
    """
    slots = getattr(fit.optimizer, "variables", ())
    slots = slots() if callable(slots) else slots
    weights = fit.model.weights if fit.model.built else ()
    # tf_keras has the vocabularies of layers among the weights, without a shape.
    variables = [each for each in weights if hasattr(each, "shape")]
    shapes = sorted(f"{each.dtype} {tuple(each.shape)}" for each in variables)
    return {
        "keras": fit.line,  # `_comparable` compares the lines
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


def learning_rate(optimizer: Any) -> str | None:
    """Returns the constant learning rate that the program has set, as text.

    Returns None for a schedule, for an optimizer whose `get_config` fails, and after
    the first step of the optimizer, because a callback may have changed the rate.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # loss scaling
    try:
        is_new = int(optimizer.iterations) == 0
        rate = optimizer.get_config().get("learning_rate")
    except Exception:  # noqa: BLE001 - a method of the program, which may not exist
        return None
    return f"{float(rate):.6g}" if is_new and isinstance(rate, numbers.Real) else None


_SHOWN_VALUES, _SHOWN_ARRAYS = 32, 4


def _some_values(fit: Fit) -> str | None:
    """Returns 32 evenly spaced values of every training array, as text; None if the
    data are not arrays.

    Only the first 4 arrays of x and of y are read. 32 values are enough to distinguish
    two folds of a cross-validation. With fewer values all values could be equal: with
    ten folds, the training data of two folds share most rows.
    """
    found = []
    given = fit.arguments["x"], fit.arguments["y"]
    for each in given:  # an array, or a list or dict of arrays
        parts = each.values() if isinstance(each, dict) else each
        parts = parts if isinstance(each, dict | list | tuple) else [each]
        for part in itertools.islice(parts, _SHOWN_ARRAYS):
            is_array = isinstance(part, np.ndarray) and part.dtype.kind in "biuf"
            if is_array and part.size:
                indices = np.linspace(0, part.size - 1, _SHOWN_VALUES).astype(int)
                found += [f"{float(value):.6g}" for value in part.flat[indices]]
    return " ".join(found) or None


def _are_close(values: Any, others: Any) -> bool:
    """Returns whether the values of two runs of the program are equal, except for
    rounding."""
    try:
        pair = np.array([each.split() for each in (values, others)], dtype=float)
    except (AttributeError, ValueError):
        return False  # the number of values differs, or the checkpoint is corrupt
    return np.allclose(pair[0], pair[1], rtol=1e-3, atol=1e-6, equal_nan=True)


def _comparable(
    fact: str, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns a fact about the saved fit and about the current fit; None if unknown.

    The backends of Keras 3 count as equal.
    """
    pair = saved.get(fact), now.get(fact)
    return ("keras", "keras") if BACKENDS.keys() >= set(pair) else pair


def may_be(saved: Mapping[str, Any], now: Mapping[str, Any], *, exactly: bool) -> bool:
    """Returns whether the current fit may be the saved fit. Unknown facts count as
    equal.

    Args:
        saved: facts about the saved fit.
        now: facts about the current fit.
        exactly: whether the number of epochs and the values of the data must be equal
            too, although a user may change both before a restart.
    """
    facts = ["keras", "data", "samples", "steps", "model", "shapes"]
    facts += ["initial_epoch", "epochs"] if exactly else []
    if now["weights"] < saved.get("weights", 0):
        # Ignore the shapes: the model is not fully built, and its first step makes more
        # weights.
        facts.remove("shapes")
    pairs = [_comparable(fact, saved, now) for fact in facts]
    values = saved.get("values"), now["values"]
    is_compared = exactly and None not in values and not saved.get("varies")
    return all(None in pair or pair[0] == pair[1] for pair in pairs) and (
        not is_compared or _are_close(*values)
    )


GIVE_EACH = "If the program has several fits, give each fit its own directory."
"""Last sentence of errors about a checkpoint that may belong to another fit."""

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
    """Checks that a fit is the fit of a checkpoint, before the restore.

    Args:
        saved: progress in the checkpoint.
        now: facts about this fit; unknown facts are None. More optimizer variables
            ("slots") than before are no error here, because the restore names the new
            variables.
        directory: checkpoint directory, for the message.

    Raises:
        CheckpointMismatchError: a fact has changed; the message names the fact. Or the
            saved batch is not a multiple of `steps_per_execution`, so no step begins
            there.
    """
    for what, (name, fix) in _FIXES.items():
        before, here = _comparable(what, saved.made_of, now)
        if before is None or here is None:
            continue
        if here < before if what == "slots" else here != before:
            raise errors.CheckpointMismatchError(
                f"The checkpoint in {directory!r} belongs to another run: {name} was "
                f"{before!r} in that run, and is {here!r} in this run. To resume that "
                f"run, {fix}; to start from scratch, use another checkpoint directory. "
                f"{GIVE_EACH}"
            )
    size = now.get("steps_per_execution", 1)
    if saved.batch % size:
        raise errors.CheckpointMismatchError(
            f"The checkpoint was made before batch {saved.batch} of epoch "
            f"{saved.epoch}, and steps_per_execution is {size} now; expected a divisor "
            f"of {saved.batch}. Compile with the steps_per_execution of the "
            f"interrupted run ({saved.made_of.get('steps_per_execution')})."
        )


def check_values(
    saved: Progress,
    now: Mapping[str, Any],
    directory: str,
    refused: Sequence[str] = (),
) -> str | None:
    """Compares some values of the training arrays with those in the checkpoint.

    If the values differ from those of a complete fit, there are two possibilities. This
    may be another fit of the program, such as a fold of a cross-validation; then the
    values are equal each time the program runs. Or the program draws its arrays without
    a seed; then the values differ each time.

    Args:
        saved: progress in the checkpoint.
        now: facts about this run.
        directory: checkpoint directory, for the message.
        refused: values of the arrays in earlier runs of the program in which this check
            raised an error.

    Returns:
        A warning if the values differ, but the fit may resume; None for equal or
        unknown values.

    Raises:
        CheckpointMismatchError: the checkpoint is the end of a fit on other data, and
            the data are not known to differ in every run.
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
            "compared with the arrays of the complete fit in the checkpoint. tfpreempt "
            "assumes that this fit is the complete fit. To avoid the assumption, "
            f"{fix}. {GIVE_EACH}"
        )
    raise errors.CheckpointMismatchError(
        f"The checkpoint in {directory!r} belongs to a complete fit on other training "
        "data: samples of the arrays differ. If this is another fit, use another "
        "checkpoint directory. If this is the complete fit, and the program creates "
        "other random data in each start, start the program again unchanged: the next "
        "start also compares its data with the data of this start, and restores the "
        f"end of the fit if the data differ again ({fix} to avoid this). {GIVE_EACH}"
    )
