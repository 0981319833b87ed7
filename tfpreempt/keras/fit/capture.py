"""What a save takes of a running fit: its progress, its variables, its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfpreempt.keras.callbacks.crowd import Crowd
from tfpreempt.keras.data.position import Feed, Place, Position
from tfpreempt.keras.fit import rounds, snapshot, variables
from tfpreempt.keras.fit.attributes import Attributes
from tfpreempt.keras.fit.fit_handler import FitHandler
from tfpreempt.keras.fit.plan import Plan
from tfpreempt.keras.fit.progress import Phase, Progress
from tfpreempt.keras.fit.tally import Tally
from tfpreempt.keras.fit.train_function import TrainFunction
from tfpreempt.keras.interface import Fit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Reads the state of one fit and changes nothing. Main thread.

    Attributes:
        fit: the fit.
        crowd: its other callbacks.
        feed: its data.
        tally: its counts.
        plan: its task.
        function: knows the logs and the iterator of the newest step.
        handler: counts the steps.
        checkpoint: what a save writes besides.
        epochs: what `fit` was asked for.
        attributes: what the model keeps in Python.
    """

    fit: Fit
    crowd: Crowd
    feed: Feed
    tally: Tally
    plan: Plan
    function: TrainFunction
    handler: FitHandler
    checkpoint: tf.train.Checkpoint
    epochs: int
    attributes: Attributes

    def shared(self, phase: Phase) -> snapshot.Shared:
        """What all workers have in common."""
        self.fit.settle()
        return snapshot.Shared(
            progress=self._progress(phase), callbacks=self.crowd.capture()
        )

    def own(self, place: Place | None) -> snapshot.Own:
        """What is this worker's.

        Args:
            place: in its data.
        """
        kept = variables.uncovered(self.fit, self.checkpoint)
        header, values = variables.read(kept)
        return snapshot.Own(
            variables=header,
            values=tuple(values),
            random=snapshot.random_bytes(),
            files=self.crowd.capture_files(),
            attributes=self.attributes.capture(),
            place=place,
        )

    def place(self, position: Position, *, is_at_end: bool) -> Place:
        """The place in the data, of which at least one step was trained.

        Args:
            position: the way to save it.
            is_at_end: whether the fit has come to its end.
        """
        iterator, tally = self.function.iterator, self.tally
        made = tally.made_before + (self.feed.number(iterator) or 0) - 1
        read, batches = tally.read - 1, tally.iterator_batches
        if is_at_end and not self.fit.keeps_iterator:
            made, read, batches = tally.made_before + self.feed.made, tally.read, 0
        return position.save(iterator, made, read, batches)

    def _progress(self, phase: Phase) -> Progress:
        tally, model = self.tally, self.fit.model
        epoch, batch = tally.epoch, tally.epoch_batches
        stopped = bool(model.stop_training)
        logs: Mapping[str, Any] = {}
        if phase == "validation" or batch:
            logs = {k: rounds.plain(v) for k, v in (self.function.logs or {}).items()}
        if phase == "validation":
            batch = tally.last_step
        elif phase == "complete":
            epoch, batch = epoch + 1, 0
            stopped = epoch < self.epochs
        return Progress(
            fit=self.plan.number,
            phase=phase,
            epoch=epoch,
            batch=batch,
            is_untrained=self.handler.total_run_calls == 0,
            stopped=stopped,
            loop=self.fit.loop_state(),
            logs=logs,
            histories=self.plan.histories,
            made_of={**made_of(self.fit), "slots": variables.count_slots(model)},
        )


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
