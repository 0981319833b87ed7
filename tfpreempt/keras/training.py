"""One fit under the callback, from `on_train_begin` to `on_train_end`.

Everything is captured and restored at the same points of the program, so that what
Keras and other callbacks did on the way there is undone by the restore:

- before a train step (`TrainFunction`), where a commit usually happens;
- at the beginning of a validation, which a restart repeats from there, because notices
  must be served while it runs;
- at the end, after every other callback's `on_train_end`.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.keras import callbacks_state, progress, rounds, snapshot, variables
from tfpreempt.keras.fit import Fit, find
from tfpreempt.keras.fit_handler import FitHandler
from tfpreempt.keras.plan import Task, make_plan
from tfpreempt.keras.position import (
    Feed,
    IteratorPosition,
    Place,
    Position,
    ReplayPosition,
    choose,
)
from tfpreempt.keras.progress import Progress
from tfpreempt.keras.sequence import SequencePosition

log = logging.getLogger(__name__)

NEVER = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user of the callback asked for; see `PreemptionCallback`."""

    checkpoint_dir: str
    save_freq: str | int | datetime.timedelta | None
    termination_config: Any
    restore: bool
    save_timeout: float
    max_to_keep: int | None


class TrainFunction:
    """Stands in for `model.train_function`; each call is one step of the handler.

    Args:
        training: asked whenever something is out of the ordinary.
        inner: Keras' own.
    """

    __slots__ = ("_training", "inner", "iterator", "logs", "run", "stop_at")

    def __init__(self, training: Training, inner: Any) -> None:
        self._training = training
        self.inner = inner
        self.run = training.handler.run
        self.iterator: Any = None
        self.logs: Any = None
        self.stop_at = 0

    def __call__(self, iterator: Any) -> Any:
        training = self._training
        if iterator is not self.iterator or training.handler.runs >= self.stop_at:
            if not training.is_mine(iterator):
                return self.inner(iterator)
            if (logs := training.before_step(iterator)) is not None:
                return logs
        self.logs = logs = self.run(self.inner, iterator)
        return logs


class Training:
    """The work of the callback in one fit. Main thread.

    Args:
        settings: the user's.
        model: the model that is fitted.
        epochs: what `fit` was asked for.
        callback: ours; is moved behind all others, so that it sees what they did.
    """

    def __init__(
        self, settings: Settings, model: Any, epochs: int, callback: Any
    ) -> None:
        self.model = model
        self.fit: Fit = find(model)
        self._settings = settings
        self._epochs = epochs
        self._check_callbacks(callback)
        self._made_of = self._identity()
        self._feed = Feed(self.fit)
        self._position: Position | None = None
        if self.fit.sequence is not None:
            self._position = SequencePosition(self.fit, self._feed)
        self._epoch = 0
        self._spe = self.fit.steps_per_execution
        self._epoch_mark = (0, 0)  # the handler's runs, batches of the epoch by then
        self._iterator_mark = (0, 0)  # likewise of the iterator
        self._read = 0  # iterators trained with, the current one included
        self._made = 0  # iterators made before the restart that this process did not
        self._saved_epoch: int | None = None
        self._held: tuple[snapshot.Shared, snapshot.Own] | None = None
        self._ends = False
        self._shared = snapshot.SharedState(self._take_shared)
        self._own = snapshot.OwnState(self._take_own)
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        try:
            self.handler = self._make_handler()
            self._start()
        except BaseException:
            self._unregister()
            raise
        self.function = TrainFunction(self, model.make_train_function())

    # --- the beginning ---------------------------------------------------------------

    def _check_callbacks(self, callback: Any) -> None:
        others = [one for one in self.fit.callbacks.callbacks if one is not callback]
        callbacks_state.conflicts(others, self._settings.checkpoint_dir)
        callbacks_state.warn_of_backup(others)
        if lost := callbacks_state.unsupported(others):
            log.warning(
                "tfpreempt: the state of these callbacks is not saved, so they begin "
                "anew after a restart: %s. Give them get_state() and set_state(state), "
                "or keep what they remember in a tfpreempt.State.",
                "; ".join(lost),
            )
        self._others = others
        self.fit.callbacks.callbacks = [*others, callback]

    def _identity(self) -> Mapping[str, Any]:
        return {
            "keras": self.fit.line,
            "optimizer": type(self.model.optimizer).__name__,
            "data": type(self.fit.adapter).__name__,
            "steps": self.fit.steps,
            "steps_per_execution": self.fit.steps_per_execution,
        }

    def _make_handler(self) -> FitHandler:
        settings = self._settings
        strategy = self.model.distribute_strategy
        every = settings.save_freq
        return FitHandler(
            getattr(strategy, "cluster_resolver", None),
            self._checkpoint,
            settings.checkpoint_dir,
            settings.termination_config,
            save_every=every if isinstance(every, datetime.timedelta) else None,
            restore=settings.restore,
            save_timeout=settings.save_timeout,
            max_to_keep=settings.max_to_keep,
        )

    def _start(self) -> None:
        directory = self._settings.checkpoint_dir
        shared = self._shared.loaded
        if self.handler.has_checkpoint and shared is None:
            raise errors.ConfigurationError(
                f"The newest checkpoint in checkpoint_dir {directory!r} was not "
                "written by a PreemptionCallback, so it belongs to another program. "
                "Use a directory of its own for each run."
            )
        saved = None if shared is None else shared.progress
        if saved is not None and saved.is_untrained:
            saved = None
        if saved is None:
            rounds.forget(directory)
        self.plan = make_plan(saved, rounds.ended(directory), self._epochs)
        if self.plan.note:
            log.warning("tfpreempt: %s", self.plan.note)
        self._pending = self.plan.task.restores
        if saved is None:
            return
        if not self.plan.task.restores:
            self.handler.adopt()
            if self.plan.task is Task.SKIP:
                self.fit.start_at(self._epochs, 0, {})
            return
        progress.check_same(saved, self._made_of, directory)
        progress.check_divisible(saved, self._spe)
        epoch = saved.epoch if self.plan.task.trains else self._epochs
        self._prepare_data(saved)
        batch = 0 if saved.phase == "complete" else saved.batch
        self.fit.start_at(epoch, batch, saved.loop)
        self._epoch_mark = (0, batch)

    def _prepare_data(self, saved: Progress) -> None:
        """Brings the data to the iterator that training goes on with."""
        place = None if self._own.loaded is None else self._own.loaded.place
        if place is None:
            if saved.batch and saved.phase == "train":
                log.warning(
                    "tfpreempt: this worker's position in the data is not in the "
                    "checkpoint (it was made by another number of workers), so the "
                    "%d batches of the epoch are read again",
                    saved.batch,
                )
            place = Place(kind="replay", made=0, read=0, batches=saved.batch)
        self._place = place
        if place.kind == "iterator":
            self._position = IteratorPosition(self._feed)
        elif place.kind == "replay":
            self._position = ReplayPosition(self._feed)
        assert self._position is not None
        self._position.prepare(place, self.fit.first_iterator)

    # --- steps -----------------------------------------------------------------------

    def epoch_begins(self, epoch: int) -> None:
        """`on_epoch_begin`, after all other callbacks."""
        self._epoch = epoch
        self._spe = self.fit.steps_per_execution
        batches = self._epoch_mark[1] if self._pending else 0
        self._epoch_mark = (self.handler.runs, batches)
        self.fit.epoch_begins()
        if self._position is not None:
            self._position.epoch_begins()
        self.function.stop_at = 0  # the next step asks what is due

    def is_mine(self, iterator: Any) -> bool:
        """Whether this fit made the iterator; a later one without us may not have."""
        return self._feed.number(iterator) is not None

    def before_step(self, iterator: Any) -> Any:
        """Something is out of the ordinary before a step.

        Returns:
            What the step returns if it was trained before the restart; otherwise None.
        """
        if iterator is not self.function.iterator:
            self._begin_iterator(iterator)
        logs = self._resume(iterator) if self._pending else None
        if self.plan.task is Task.TRAIN and self.plan.number > 1 and self.handler.runs == 0:
            # A save before the first step must hold the variables of fits before.
            self.fit.build(iterator, self.function.inner)
        if logs is None:
            self._save_if_due()
        self.function.stop_at = self._next_stop()
        return logs

    def _begin_iterator(self, iterator: Any) -> None:
        self.function.iterator = iterator
        self._iterator_mark = (self.handler.runs, 0)
        if self._pending:
            return  # `_resume` knows better
        self._read += 1
        if self._position is None:
            self._position, problem = choose(self.fit, self._feed, iterator)
            if problem is not None:
                log.warning("tfpreempt: %s.", problem)
        self._position.begins(iterator)

    def _resume(self, iterator: Any) -> Any:
        """Makes everything as it was; see `before_step`."""
        assert self._shared.loaded is not None and self._position is not None
        saved = self._shared.loaded.progress
        self._restore_variables(iterator)
        self._read = self._place.read + 1
        self._made = self._place.made + 1 - (self._feed.number(iterator) or 0)
        if self.plan.task is Task.EXTEND and not self.fit.keeps_iterator:
            self._position.begins(iterator)
        else:
            self._position.restore(self._place, iterator)
            self._iterator_mark = (self.handler.runs, self._place.batches)
        self._restore_callbacks()
        self._saved_epoch = self._epoch
        self._pending = False
        if self.plan.task is not Task.REVALIDATE:
            return None
        self._epoch_mark = (self.handler.runs, saved.batch + self._spe)
        self.function.logs = dict(saved.logs)
        return self.function.logs

    def _restore_variables(self, iterator: Any) -> None:
        self.fit.build(iterator, self.function.inner)
        self.handler.restore_variables()
        own = self._own.loaded
        if own is None:
            return
        kept = variables.uncovered(self.fit, self._checkpoint)
        variables.write(kept, own.variables, own.values)

    def _restore_callbacks(self) -> None:
        """What is not variables: callbacks, their files, the flag to stop."""
        assert self._shared.loaded is not None
        self.fit.settle()
        callbacks_state.restore(self._others, self._shared.loaded.callbacks)
        if self._own.loaded is not None:
            callbacks_state.restore_files(self._others, self._own.loaded.files)
        if self._shared.loaded.progress.phase != "train":
            self.model.stop_training = self._shared.loaded.progress.stopped

    def _next_stop(self) -> int:
        """The number of runs at which `before_step` is to be asked again."""
        every = self._settings.save_freq
        if not isinstance(every, int):
            return NEVER  # an epoch begins with a new iterator, or by `epoch_begins`
        steps = -(-every // self._spe)
        done = self.handler.total_run_calls // steps
        return (done + 1) * steps - (self.handler.total_run_calls - self.handler.runs)

    def _save_if_due(self) -> None:
        every = self._settings.save_freq
        if every == "epoch":
            is_due = self._saved_epoch not in (None, self._epoch)
            self._saved_epoch = self._epoch
        else:
            steps = -(-every // self._spe) if isinstance(every, int) else NEVER
            is_due = self.handler.total_run_calls % steps == 0
        if is_due and self.handler.has_moved:
            self.handler.save_periodically()

    # --- validation ------------------------------------------------------------------

    def validation_begins(self) -> None:
        """`on_test_begin` of the validation in this fit."""
        if self._pending:
            return
        if self.plan.task is Task.REVALIDATE and self._held is None:
            self._go_on_with_validation()
        self._held = self._take("validation")
        self.handler.boundary()

    def _go_on_with_validation(self) -> None:
        self.plan = dataclasses.replace(self.plan, task=Task.RESUME)
        self.handler.arm()
        self._restore_callbacks()
        if self._own.loaded is not None:
            snapshot.set_random(self._own.loaded.random)

    def validation_step(self) -> None:
        """`on_test_batch_begin`."""
        if self._held is not None:
            self.handler.boundary()

    def validation_ends(self) -> None:
        """`on_test_end`."""
        self._held = None

    # --- the end ---------------------------------------------------------------------

    def end(self) -> None:
        """`on_train_end`, after all other callbacks."""
        history = self.model.history
        if self.plan.task is Task.SKIP:
            past = self.plan.histories[self.plan.number - 1]
            history.epoch, history.history = list(past["epoch"]), dict(past["history"])
        elif self._pending and self.plan.task is Task.FINISHED:
            self._restore_variables(iter(self._feed))
            self._restore_callbacks()
            self._pending = False
        self._ends = True
        if self._position is not None:
            self._position.epoch_begins()
        self.handler.end()
        self.release()
        past = {"epoch": list(history.epoch), "history": dict(history.history)}
        rounds.ends(self._settings.checkpoint_dir, past)

    def release(self) -> None:
        """Gives back what Keras had before."""
        if self.model.train_function is self.function:
            self.model.train_function = self.function.inner
        self._unregister()

    def abandon(self) -> None:
        """The fit died."""
        self.handler.abandon()
        self.release()

    def _unregister(self) -> None:
        self._shared.unregister()
        self._own.unregister()

    # --- what a save takes -----------------------------------------------------------

    def _take_shared(self) -> snapshot.Shared:
        return self._held[0] if self._held else self._shared_now(self._phase())

    def _take_own(self) -> snapshot.Own:
        if self._held is None:
            return self._own_now()
        return dataclasses.replace(self._held[1], place=self._here())

    def _phase(self) -> progress.Phase:
        if self.plan.task is Task.SKIP:
            raise errors.SaveError(
                f"fit {self.plan.number} of the program was complete before the "
                "restart; there is nothing new to save"
            )
        return "complete" if self._ends else "train"

    @property
    def _is_new(self) -> bool:
        """Whether nothing was trained since the program began, restarts included."""
        return self.handler.total_run_calls == 0

    def _take(
        self, phase: progress.Phase
    ) -> tuple[snapshot.Shared, snapshot.Own]:
        own = dataclasses.replace(self._own_now(), place=None)
        return self._shared_now(phase), own

    def _shared_now(self, phase: progress.Phase) -> snapshot.Shared:
        self.fit.settle()
        return snapshot.Shared(
            progress=self._progress(phase),
            callbacks=callbacks_state.capture(self._others),
        )

    def _own_now(self) -> snapshot.Own:
        kept = variables.uncovered(self.fit, self._checkpoint)
        header, values = variables.read(kept)
        return snapshot.Own(
            variables=header,
            values=tuple(values),
            random=snapshot.random_bytes(),
            files=callbacks_state.capture_files(self._others),
            place=self._here(),
        )

    def _progress(self, phase: progress.Phase) -> Progress:
        runs, batches = self._epoch_mark
        batch = batches + (self.handler.runs - runs) * self._spe
        epoch, stopped = self._epoch, bool(self.model.stop_training)
        logs: Mapping[str, Any] = {}
        if phase == "validation":
            batch -= self._spe
            logs = {k: float(v) for k, v in dict(self.function.logs).items()}
        elif phase == "complete":
            epoch, batch = self._trained_epochs(), 0
            stopped = epoch < self._epochs
        return Progress(
            fit=self.plan.number,
            phase=phase,
            epoch=epoch,
            batch=batch,
            is_untrained=self._is_new,
            stopped=stopped,
            loop=self.fit.loop_state(),
            logs=logs,
            histories=self.plan.histories,
            made_of={**self._made_of, "steps": self.fit.steps},
        )

    def _trained_epochs(self) -> int:
        if self.plan.task is Task.FINISHED and self._shared.loaded is not None:
            return self._shared.loaded.progress.epoch
        return self._epoch + 1

    def _here(self) -> Place | None:
        iterator = self.function.iterator
        if iterator is None or self._position is None:
            return None
        runs, batches = self._iterator_mark
        batches += (self.handler.runs - runs) * self._spe
        made = self._made + (self._feed.number(iterator) or 0) - 1
        read = self._read - 1
        if self._ends and not self.fit.keeps_iterator:
            made, read, batches = self._made + self._feed.made, self._read, 0
        return self._position.save(iterator, made, read, batches)


def checkpoint_directory(given: Any) -> str:
    """Checks the argument `checkpoint_dir`.

    Raises:
        ConfigurationError: it is no path.
    """
    try:
        directory = os.fspath(given)
    except TypeError:
        directory = ""
    if not directory or not isinstance(directory, str):
        raise errors.ConfigurationError(
            f"checkpoint_dir is {given!r}; expected the path of a directory of its own "
            "for this run, on storage that all workers share"
        )
    return directory
