"""The phases of a fit with the callback, as a table of transitions. No I/O.

`resume_plan.py` chooses the first phase of a fit. docs/keras-phases.md has a drawing of
the table.
"""

from __future__ import annotations

import enum


class FitPhase(enum.Enum):
    """A phase of a fit. The first six phases are the ways in which a fit can begin."""

    START = "train from the state in memory"
    RESUME = "resume inside an epoch"
    REVALIDATE = "repeat the validation after an epoch"
    EXTEND = "train more epochs than before"
    RESTORE = "restore the end, train nothing"
    SKIP = "train nothing: a later fit of the program is in the checkpoint"

    TRAINING = "train step by step"
    VALIDATION_DUE = "repeat the last step's logs, up to the validation"
    DATA_ENDED = "repeat the last step's logs: the data end at the commit"
    VALIDATING = "validate after an epoch"
    TRAINED = "commit the end"
    RESTORED = "keep the end that was restored"


BEGINNINGS = frozenset(list(FitPhase)[:6])
"""Phases before the first step."""

RESTORING = BEGINNINGS - {FitPhase.START, FitPhase.SKIP}
"""Phases before the load of the checkpoint."""

REPEATING = frozenset({FitPhase.VALIDATION_DUE, FitPhase.DATA_ENDED})
"""Phases in which Keras gets the saved logs of a step that was trained before the
restart. The user's callbacks were already called for the step, so Keras does not call
the callbacks again."""


class FitEvent(enum.Enum):
    """An action of Keras that changes the phase."""

    STEP = "a train step"
    NO_MORE_DATA = "the first step finds no data"
    VALIDATION = "a validation begins"
    VALIDATED = "the validation ends"
    EPOCH_END = "an epoch ends"
    TRAIN_END = "the fit ends"


TABLE: dict[FitPhase, dict[FitEvent, FitPhase]] = {
    FitPhase.START: {
        FitEvent.STEP: FitPhase.TRAINING,
        FitEvent.TRAIN_END: FitPhase.TRAINED,
    },
    FitPhase.RESUME: {
        FitEvent.STEP: FitPhase.TRAINING,
        FitEvent.TRAIN_END: FitPhase.TRAINED,
    },
    FitPhase.REVALIDATE: {
        FitEvent.STEP: FitPhase.VALIDATION_DUE,
        FitEvent.TRAIN_END: FitPhase.TRAINED,
    },
    FitPhase.EXTEND: {
        FitEvent.STEP: FitPhase.TRAINING,
        FitEvent.TRAIN_END: FitPhase.TRAINED,
    },
    FitPhase.RESTORE: {FitEvent.TRAIN_END: FitPhase.RESTORED},
    FitPhase.SKIP: {FitEvent.TRAIN_END: FitPhase.SKIP},
    FitPhase.TRAINING: {
        FitEvent.STEP: FitPhase.TRAINING,
        FitEvent.NO_MORE_DATA: FitPhase.DATA_ENDED,
        FitEvent.VALIDATION: FitPhase.VALIDATING,
        FitEvent.EPOCH_END: FitPhase.TRAINING,
        FitEvent.TRAIN_END: FitPhase.TRAINED,
    },
    FitPhase.VALIDATION_DUE: {
        # Keras requests another step, to check whether the data have ended.
        FitEvent.STEP: FitPhase.VALIDATION_DUE,
        FitEvent.VALIDATION: FitPhase.VALIDATING,
        # No validation follows, because this process called `fit` without validation
        # data.
        FitEvent.EPOCH_END: FitPhase.TRAINING,
    },
    FitPhase.DATA_ENDED: {
        FitEvent.STEP: FitPhase.DATA_ENDED,
        FitEvent.VALIDATION: FitPhase.VALIDATING,
        FitEvent.EPOCH_END: FitPhase.TRAINING,
    },
    FitPhase.VALIDATING: {FitEvent.VALIDATED: FitPhase.TRAINING},
}
"""The next phase by phase and event. An empty epoch ends the fit with an error, and has
no row."""


def after(phase: FitPhase, event: FitEvent) -> FitPhase:
    """Returns the phase after an event.

    Args:
        phase: the phase before the event.
        event: the event.

    Raises:
        RuntimeError: the table has no entry, because the loop of this Keras version
            differs from the tested versions.
    """
    try:
        return TABLE[phase][event]
    except KeyError:
        raise RuntimeError(
            f"model.fit: {event.value!r} happened in the phase {phase.name} "
            f"({phase.value}); the tested versions of Keras never do this. Use a "
            "tested version of Keras, or report the error to tfpreempt"
        ) from None
