"""The phases of a fit under the callback, as a table. No I/O.

A fit begins in one of six ways, which `plan.py` chooses. docs/keras-phases.md draws the
table.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a fit is. The first six are the ways to begin."""

    START = "train from what is in memory"
    RESUME = "go on inside an epoch"
    REVALIDATE = "repeat the validation after an epoch"
    EXTEND = "train more epochs than last time"
    RESTORE = "restore the end, train nothing"
    SKIP = "train nothing: a later fit of the program is in the checkpoint"

    TRAINING = "train step by step"
    VALIDATION_DUE = "give the last step's logs again, up to the validation"
    DATA_ENDED = "give the last step's logs again: the data end at the commit"
    VALIDATING = "validate after an epoch"
    TRAINED = "commit the end"
    RESTORED = "keep the end that was restored"


BEGINNINGS = frozenset(list(Phase)[:6])
"""Keras has not asked for a step yet."""

RESTORING = BEGINNINGS - {Phase.START, Phase.SKIP}
"""The checkpoint is still to be loaded."""

REPEATING = frozenset({Phase.VALIDATION_DUE, Phase.DATA_ENDED})
"""The newest step was trained before the restart, and only its logs are given again.
The other callbacks have seen it, and are not called."""


class Event(enum.Enum):
    """What Keras does next."""

    STEP = "a train step"
    NO_MORE_DATA = "the first step finds no data"
    VALIDATION = "a validation begins"
    VALIDATED = "the validation ends"
    EPOCH_END = "an epoch ends"
    TRAIN_END = "the fit ends"


TABLE: dict[Phase, dict[Event, Phase]] = {
    Phase.START: {Event.STEP: Phase.TRAINING, Event.TRAIN_END: Phase.TRAINED},
    Phase.RESUME: {Event.STEP: Phase.TRAINING, Event.TRAIN_END: Phase.TRAINED},
    Phase.REVALIDATE: {
        Event.STEP: Phase.VALIDATION_DUE,
        Event.TRAIN_END: Phase.TRAINED,
    },
    Phase.EXTEND: {Event.STEP: Phase.TRAINING, Event.TRAIN_END: Phase.TRAINED},
    Phase.RESTORE: {Event.TRAIN_END: Phase.RESTORED},
    Phase.SKIP: {Event.TRAIN_END: Phase.SKIP},
    Phase.TRAINING: {
        Event.STEP: Phase.TRAINING,
        Event.NO_MORE_DATA: Phase.DATA_ENDED,
        Event.VALIDATION: Phase.VALIDATING,
        Event.EPOCH_END: Phase.TRAINING,
        Event.TRAIN_END: Phase.TRAINED,
    },
    Phase.VALIDATION_DUE: {
        Event.STEP: Phase.VALIDATION_DUE,  # Keras looks whether the data go on
        Event.VALIDATION: Phase.VALIDATING,
        Event.EPOCH_END: Phase.TRAINING,  # this start has no validation
    },
    Phase.DATA_ENDED: {
        Event.STEP: Phase.DATA_ENDED,
        Event.VALIDATION: Phase.VALIDATING,
        Event.EPOCH_END: Phase.TRAINING,
    },
    Phase.VALIDATING: {Event.VALIDATED: Phase.TRAINING},
}
"""What follows. An empty epoch ends the fit by an error, and has no row."""


def after(phase: Phase, event: Event) -> Phase:
    """The phase that an event leads to.

    Raises:
        RuntimeError: the table has no row for it: Keras' loop is not what it was.
    """
    try:
        return TABLE[phase][event]
    except KeyError:
        raise RuntimeError(
            f"model.fit: {event.value!r} came in the phase {phase.name} "
            f"({phase.value}), which the versions of Keras that tfpreempt was tested "
            "with never do"
        ) from None
