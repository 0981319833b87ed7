"""One fit under the callback, from `on_train_begin` to `on_train_end`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.handler.step_errors import END_OF_DATA
from tfpreempt.keras.callbacks import state
from tfpreempt.keras.callbacks.others import OtherCallbacks
from tfpreempt.keras.callbacks.state import CallbackStates
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.data.position_choice import validation_problem
from tfpreempt.keras.data.training_data import TrainingData
from tfpreempt.keras.fit import earlier_fits, phases, progress, snapshot, variables
from tfpreempt.keras.fit.counter import BatchCounter
from tfpreempt.keras.fit.fit_handler import FitHandler
from tfpreempt.keras.fit.lookup import epoch_logs, find
from tfpreempt.keras.fit.options import Options
from tfpreempt.keras.fit.phases import Event, Phase
from tfpreempt.keras.fit.plan import Plan, make_plan
from tfpreempt.keras.fit.progress import Progress, Stage
from tfpreempt.keras.fit.schedule import Schedule
from tfpreempt.keras.fit.state import FitState
from tfpreempt.keras.fit.train_function import TrainFunction
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)


class Training:
    """The work of the callback in one fit. Main thread.

    Keras' hooks are the events of `phases.TABLE`; what is to be done for one depends on
    the phase alone.

    Args:
        options: the user's.
        model: the model that is fitted.
        epochs: what `fit` was asked for.
        callback: ours; is moved behind all others, so that it sees what they did.
        files: what callbacks had in files before the fit; for a fit that is skipped.
    """

    def __init__(
        self,
        options: Options,
        model: Any,
        epochs: int,
        callback: Any,
        files: CallbackStates | None,
    ) -> None:
        self.fit: Fit = find(model)
        self._directory = options.checkpoint_dir
        self._epochs = epochs
        self._others = OtherCallbacks(self.fit.callbacks, callback, self._directory)
        self._data = TrainingData(self.fit)
        self._schedule = Schedule(options.save_freq)
        self._before_validation: tuple[snapshot.Shared, snapshot.Own] | None = None
        self._state = FitState(
            self.fit,
            self._others,
            self._data,
            take_shared=self._take_shared,
            take_own=self._take_own,
        )
        self.fit.keep_generators()
        try:
            self.handler = FitHandler(options, self.fit, self._state.checkpoint)
        except BaseException:
            self._state.close()
            raise
        self.function = TrainFunction(self, model.train_function, self.handler)
        self._member = member = self.handler.member
        self._counter = BatchCounter(lambda: member.runs, self.fit.steps_per_execution)
        try:
            self._plan = self._make_plan()
            self._phase = self._plan.beginning
            self._begin(files)
        except BaseException:
            self.handler.abandon()
            self._state.close()
            raise

    # --- the beginning ---------------------------------------------------------------

    def _make_plan(self) -> Plan:
        shared = self._state.shared
        if self._member.commits.candidate and shared is None:
            raise errors.ConfigurationError(
                f"The newest checkpoint in checkpoint_dir {self._directory!r} was not "
                "written by a PreemptionCallback, so it belongs to another program. "
                "Use a directory of its own for each run."
            )
        saved = None if shared is None else shared.progress
        if saved is None or saved.is_untrained:
            saved = None
            earlier_fits.forget(self._directory)
        plan = make_plan(saved, earlier_fits.histories(self._directory), self._epochs)
        if plan.note:
            log.warning("tfpreempt: %s", plan.note)
        return plan

    def _begin(self, files: CallbackStates | None) -> None:
        if problem := validation_problem(self.fit.validation_data):
            log.warning("tfpreempt: %s.", problem)
        if self._phase is Phase.SKIP and files is not None:
            state.restore_files(self._others.callbacks, files)
        if self._phase is Phase.EXTEND:
            self._others.silence()  # until the end of the last epoch is restored
        if self._phase.restores:
            self._prepare(self._state.saved)
        else:
            self._member.adopt()
        if not self._phase.trains:
            self.fit.start_at(self._epochs, 0, {})
            # Keras looks at the variables at the end even where no step made them.
            self._state.build(self._data.any_iterator(), self.function.inner)

    def _prepare(self, saved: Progress) -> None:
        """Checks the checkpoint, and lets the fit begin where it was made."""
        progress.check_same(saved, progress.made_of(self.fit), self._directory)
        progress.check_divisible(saved, self._counter.steps_per_execution)
        self._counter.epoch = saved.epoch - (saved.phase == "complete")
        # The last step of a validated epoch was trained, and is only not run again.
        is_validated = saved.phase == "validation"
        step = self._counter.steps_per_execution if is_validated else 0
        own = self._state.own
        position = None if own is None else own.position
        self._data.prepare(position, saved.batch + step)
        if self._phase.trains:
            self.fit.start_at(saved.epoch, saved.batch, saved.loop)

    # --- steps -----------------------------------------------------------------------

    def epoch_begins(self, epoch: int) -> None:
        """`on_epoch_begin`, after all other callbacks."""
        fit, made = self.fit, self.fit.model.train_function
        if made is not self.function and made is not None:
            # A callback has called make_train_function(), after unfreezing layers, say.
            self.function.inner = made
            fit.model.train_function = self.function
        limit = fit.steps if fit.cuts_last_step else None
        self._counter.epoch_begins(epoch, fit.steps_per_execution, limit)
        fit.epoch_begins()
        self._data.epoch_begins()
        self.function.stop_at = 0  # the next step asks what is due

    def is_mine(self, iterator: Any) -> bool:
        """Whether this fit made the iterator."""
        return self._data.is_mine(iterator)

    def before_step(self, iterator: Any) -> Any:
        """Something is out of the ordinary before a step; see `Steps`."""
        if self._phase.repeats:  # Keras looks whether the data go on
            if self._phase is Phase.DATA_ENDED:
                self.fit.forget_answer()
            self._enter(Event.STEP)
            return self.function.inner(iterator)
        is_new = iterator is not self.function.iterator
        self.function.iterator = iterator
        if self._phase.is_beginning:
            logs = self._first_step(iterator)
            if logs is not None:
                self.function.stop_at = 0
                return logs
        else:
            if is_new:
                self._begin_iterator(iterator)
            self._enter(Event.STEP)
        self._save_if_due()
        self.function.stop_at = self._member.runs + self._schedule.steps_left(
            self._member.step, self._counter.steps_per_execution
        )
        return None

    def _begin_iterator(self, iterator: Any) -> None:
        self._data.begins(iterator)
        self._counter.iterator_stands_at(0)

    def _first_step(self, iterator: Any) -> Any:
        """Makes everything as it was; returns the logs of a step trained before."""
        beginning = self._phase
        if beginning is Phase.START:
            self._begin_iterator(iterator)
        state.capture(self._others.callbacks)  # raises now rather than in a save
        if beginning is not Phase.START or self._plan.number > 1:
            # Also a save before the first step must hold what the fits before left.
            self._state.build(iterator, self.function.inner)
        if not self.fit.model.run_eagerly:
            self.function.expect_trace(self._state.first_call)
        if beginning is Phase.REVALIDATE:
            self._repeat_last_step(iterator, self._state.saved)
        elif beginning is not Phase.START:
            self._resume(iterator, extends=beginning is Phase.EXTEND)
        self._enter(Event.STEP)
        if beginning is Phase.START:
            return None
        logs = dict(self._state.saved.logs)
        if beginning is Phase.REVALIDATE:
            return logs
        return self._try_first_step(iterator, logs) if logs else None

    def _save_if_due(self) -> None:
        is_due = self._schedule.is_due(
            self._counter.epoch,
            self._member.step,
            self._counter.steps_per_execution,
        )
        if is_due and self._member.has_moved:
            self.handler.save_periodically()

    def _enter(self, event: Event) -> None:
        self._phase = phases.after(self._phase, event)

    # --- the restart -----------------------------------------------------------------

    def _go_to(self, iterator: Any, batch: int, *, extends: bool = False) -> None:
        """Goes to a batch of the epoch, and to the position in the data."""
        self._counter.epoch_stands_at(batch)
        taken = self._data.restore(iterator, extends=extends)
        self._counter.iterator_stands_at(taken)
        self._schedule.goes_on_in(self._counter.epoch)

    def _restore(self, *, extends: bool = False) -> None:
        self._state.restore_variables(self._member, self._directory)
        self._state.restore_callbacks(extends=extends)

    def _resume(self, iterator: Any, *, extends: bool) -> None:
        """Inside an epoch, or at the beginning of one that is added."""
        self._go_to(iterator, self._state.saved.batch, extends=extends)
        self._restore(extends=extends)
        if extends:  # hooks that were undone by the restore, such as a schedule's
            self.fit.model.reset_metrics()
            self._others.wake("on_epoch_begin", self._counter.epoch)
            self._others.call("on_train_batch_begin", 0)

    def _repeat_last_step(self, iterator: Any, saved: Progress) -> None:
        """The epoch's last step was trained: Keras gets the logs of the epoch, and the
        rest follows where it was captured, in `validation_begins`."""
        # It is not run again, but counts.
        self._go_to(iterator, saved.batch + self._counter.steps_per_execution)
        self._others.silence()
        self.fit.model.stop_training = saved.stopped
        self.fit.ends_epoch_as(saved.logs)

    def _try_first_step(self, iterator: Any, logs: dict[str, Any]) -> Any:
        """The data may end right here, where Keras did not know their length.

        Args:
            iterator: of the data.
            logs: of the step before the commit.
        """
        try:
            return self.handler.run(self.function.inner, iterator)
        except END_OF_DATA:
            self.function.logs = logs
            if self.fit.ends_epoch_with(logs):
                raise
            self._enter(Event.NO_MORE_DATA)
            self._others.silence()
            return logs

    def _catch_up(self) -> None:
        """What a restart leaves until Keras is past the step that was trained."""
        self.handler.arm()
        self._restore()
        self._state.restore_random()
        if self._phase is Phase.DATA_ENDED:
            # Keras met the end of its data by a step, in which what needs no data was
            # done: the optimizer's iterations were counted up.
            with contextlib.suppress(*END_OF_DATA):
                self.function.inner(self.function.iterator)

    # --- validation, and the end of an epoch -----------------------------------------

    def validation_begins(self) -> None:
        """`on_test_begin` of the validation in this fit.

        Raises:
            ConfigurationError: there was nothing to train with.
        """
        self._check_trained(self._counter.epoch)
        if self._phase is Phase.VALIDATION_DUE:  # the commit is of one that had begun
            self._others.wake("on_test_begin")
            self._catch_up()
        elif self._phase is Phase.DATA_ENDED:
            self._catch_up()
            self._others.wake("on_test_begin")
        shared = self._state.take_shared(self._progress("validation"))
        self._before_validation = shared, self._state.take_own(None, is_validated=True)
        self._enter(Event.VALIDATION)
        self.handler.boundary()

    def validation_step(self) -> None:
        """`on_test_batch_begin`."""
        if self._phase is Phase.VALIDATING:
            self.handler.boundary()

    def validation_ends(self) -> None:
        """`on_test_end`."""
        if self._phase is Phase.VALIDATING:
            self._enter(Event.VALIDATED)
            self._before_validation = None  # can be as large as the model

    def epoch_ends(self, epoch: int, logs: Any) -> None:
        """`on_epoch_end`.

        Raises:
            ConfigurationError: there was nothing to train with.
        """
        self._check_trained(epoch)
        if self._phase.repeats:  # no validation, or not any more
            self._catch_up()
            self._others.wake("on_epoch_end", epoch, logs)
        self._enter(Event.EPOCH_END)

    def _check_trained(self, epoch: int) -> None:
        is_first = self._plan.beginning is Phase.START and self._member.runs == 0
        if is_first or self._phase.is_beginning:
            raise progress.no_data(epoch)

    # --- the end ---------------------------------------------------------------------

    def end(self) -> None:
        """`on_train_end`, after all other callbacks."""
        history = self.fit.model.history
        if self._phase is Phase.SKIP:
            past = self._plan.histories[self._plan.number - 1]
            history.epoch, history.history = list(past["epoch"]), dict(past["history"])
        elif self._phase.restores:
            self._restore()
        self._enter(Event.TRAIN_END)
        self._data.epoch_begins()
        try:
            self.handler.end()
        except Exception:
            self.abandon()
            raise
        # Not where it was broken off: the member is open, and saves the States yet.
        self.release()
        earlier_fits.add(self._directory, history)

    def release(self) -> None:
        """Gives back what Keras had before."""
        self.fit.ends()
        if self.fit.model.train_function is self.function:
            self.fit.model.train_function = self.function.inner
        self._state.close()

    def abandon(self) -> None:
        """The fit died."""
        self.handler.abandon()
        self.release()

    # --- what a save takes -----------------------------------------------------------

    def _take_shared(self) -> snapshot.Shared:
        match self._phase:
            case Phase.TRAINING:
                return self._state.take_shared(self._progress("train"))
            case Phase.VALIDATING if self._before_validation is not None:
                return self._before_validation[0]
            case Phase.TRAINED:
                return self._state.take_shared(self._progress("complete"))
            case Phase.RESTORED if self._state.shared is not None:
                return self._state.shared
        raise errors.SaveError(
            "nothing was trained in this fit yet; the commit before it stands"
        )

    def _take_own(self) -> snapshot.Own:
        own = self._state.own
        if self._plan.beginning is Phase.RESTORE and own is not None:
            return own
        if self._phase is not Phase.VALIDATING or self._before_validation is None:
            return self._state.take_own(self._position())
        files = state.capture_files(self._others.callbacks)
        held = self._before_validation[1]
        return dataclasses.replace(held, files=files, position=self._position())

    def _position(self) -> Position | None:
        taken, is_at_end = self._counter.iterator_batches, self._phase is Phase.TRAINED
        own = self._state.own
        before = None if own is None else own.position
        return self._data.position(taken, is_at_end=is_at_end) or before

    def _progress(self, stage: Stage) -> Progress:
        counter, model = self._counter, self.fit.model
        epoch, batch = counter.epoch, counter.epoch_batches
        stopped = bool(model.stop_training)
        logs: Mapping[str, Any] = (self.function.logs if batch else None) or {}
        if stage == "validation":
            batch, logs = counter.last_step, epoch_logs(model)
        elif stage == "complete":
            epoch, batch = epoch + 1, 0
            stopped = epoch < self._epochs
        slots = variables.count_slots(model)
        return Progress(
            fit=self._plan.number,
            phase=stage,
            epoch=epoch,
            batch=batch,
            is_untrained=self._member.step == 0,
            stopped=stopped,
            loop=self.fit.loop_state(),
            logs={name: earlier_fits.plain(each) for name, each in logs.items()},
            histories=self._plan.histories,
            made_of={**progress.made_of(self.fit), "slots": slots},
            metrics=len(self.fit.metrics_variables()),
        )
