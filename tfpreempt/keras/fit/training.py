"""Controls a fit with the callback, from `on_train_begin` to `on_train_end`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from tfpreempt import errors
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.state.unfinished_caches import expect_caches
from tfpreempt.core.events import DataRefused, Metrics
from tfpreempt.handler import training_end
from tfpreempt.handler.bad_steps import BadSteps
from tfpreempt.handler.current_session import find_session, take_over
from tfpreempt.handler.registration import CheckpointOptions, register
from tfpreempt.handler.run import NEVER
from tfpreempt.keras.bad_steps import BadStepGuard
from tfpreempt.keras.callbacks import callback_state
from tfpreempt.keras.callbacks.callback_list import UserCallbacks
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.data.training_data import TrainingData
from tfpreempt.keras.fit import fit_progress, phases, resume_plan
from tfpreempt.keras.fit.epoch_end import EpochEnd
from tfpreempt.keras.fit.fit_progress import Progress, Stage
from tfpreempt.keras.fit.fit_state import FitState, Moment, Taken
from tfpreempt.keras.fit.frame_lookup import epoch_logs, find, is_running
from tfpreempt.keras.fit.other_backend import OtherBackend, crosses
from tfpreempt.keras.fit.phases import FitEvent, FitPhase
from tfpreempt.keras.fit.traced_functions import TracedFunctions
from tfpreempt.keras.fit.train_function import TrainFunctionWrapper
from tfpreempt.keras.fit_protocol import Fit
from tfpreempt.keras.fit_record import EncodedValue
from tfpreempt.platforms.detected import resolve_config
from tfpreempt.storage import checksum, paths

if TYPE_CHECKING:
    import tensorflow as tf

    from tfpreempt.platforms.config import TerminationConfig

log = logging.getLogger(__name__)

_STOPS_WITHIN = 0.25
"""Seconds that a stop of training waits for the notice that may have caused the stop.

A signal's notice takes milliseconds, and longer on an overloaded machine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions(CheckpointOptions):
    """The checked arguments of `PreemptionCallback`, which documents them."""

    checkpoint_dir: str
    save_freq: Literal["epoch"] | int | datetime.timedelta | None
    termination_config: (
        TerminationConfig | tf.distribute.experimental.TerminationConfig | None
    )
    peer_timeout: float
    on_bad_step: BadSteps | None


class Training:
    """Controls one fit for the PreemptionCallback. Use on the main thread only.

    Keras' hooks are the events of the state machine `phases.TABLE`; the reaction to a
    hook depends on the phase.

    Args:
        options: arguments of the callback.
        model: the model that is fitted.
        callback: the PreemptionCallback. It is moved to the end of the list of
            callbacks, so that its hooks run last.
        files: text of the CSVLoggers' log files before the fit; None without a
            CSVLogger. If the fit is skipped, the text is written back.
    """

    def __init__(
        self,
        options: FitOptions,
        model: Any,
        callback: Any,
        files: EncodedValue | None,
    ) -> None:
        self.fit: Fit = find(model)
        self._options = options
        self._directory = paths.absolute(options.checkpoint_dir)
        self._others = UserCallbacks(self.fit.callbacks, callback, self._directory)
        self._data = TrainingData(self.fit)
        self._is_stop_held = False
        self._saved = Progress()  # progress stored in the newest commit
        # Epoch at the newest check for save_freq="epoch", or epoch of the restored
        # commit. A save is due once the epoch has changed.
        self._committed: int | None = None
        self._state = FitState(
            self.fit,
            self._others.callbacks,
            self._data,
            take_shared=self._take_shared,
            take_own=self._take_own,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._state.close)
            # Join the session, and load the named States. Variables are restored later,
            # just before the first step. Some do not exist yet, and hooks that run
            # until then may change variables (a schedule sets the learning rate).
            strategy = getattr(self.fit.model, "distribute_strategy", None)
            resolver = getattr(strategy, "cluster_resolver", None)
            self.session = find_session(resolver, options.peer_timeout)
            with register(
                self.session,
                self._state.variables.checkpoint,
                resolve_config(options.termination_config),
                options,
                # Between the hooks of the callback the state of the fit is incomplete.
                amid="model.fit",
                is_alive=functools.partial(is_running, self.fit),
            ) as self.run:
                # With several workers, every worker may have different arrays.
                self._state.has_own_arrays = self.session.cluster.num_workers == 1
                self._state.is_chief = self.session.cluster.is_chief
                if self.run.candidate and self.run.candidate.manifest is not None:
                    self.run.source.load_named_states(self.run.candidate)
                every = options.save_freq
                period = every if isinstance(every, datetime.timedelta) else None
                self.session.open(self.run, period)
            undo.callback(training_end.close_unfinished, self.session, self.run)

            # Replace functions of Keras.
            self._steps = TrainFunctionWrapper(
                self.fit,
                self.session,
                self.run,
                self._slow_step,
                prepare=self._state.prepare,
                guard=BadStepGuard(
                    options.on_bad_step,
                    self.fit,
                    self._state.variables,
                    self.session,
                    self.run,
                ),
            )
            self._functions = TracedFunctions(
                self.fit, self._steps, self._state.attributes
            )
            undo.callback(self._functions.close)
            self._epoch_end = EpochEnd(
                self.fit,
                self.session,
                self.run,
                self._take_moment,
                self._steps.guard.check,
            )
            undo.callback(self._epoch_end.close)

            # Plan the fit.
            self._begin(files)
            self._others.wrap(
                on_train_batch_end=self._batch_ends,
                on_test_begin=self._test_begins,
                on_epoch_end=self._epoch_ends,
            )
            if self._steps.guard.positions:
                self._others.wrap(on_train_batch_begin=self._batch_begins)
            undo.pop_all()

    # --- the beginning ---------------------------------------------------------------

    def _begin(self, files: EncodedValue | None) -> None:
        """Decides how the fit begins, checks the commit, and sets Keras' first epoch.

        Args:
            files: text of the CSVLoggers' log files before the fit, or None.
        """
        now = self._state.made_of(is_built=False)

        # Make the plan: the commit may be of this fit, or of another fit of the
        # program.
        shared, past = self._state.shared.loaded, resume_plan.past_of(self._directory)
        if self.run.candidate and shared is None:
            raise errors.ConfigurationError(
                f"The newest checkpoint in checkpoint_dir {self._directory!r} was not "
                "written by a PreemptionCallback, so the checkpoint belongs to another "
                "program. Use a separate directory for each run."
            )
        if shared is not None:
            self._saved = fit_progress.read(shared["progress"])
        if self._saved.fit == 0 or self._saved.is_untrained:
            self._saved = Progress()
            past.histories, past.is_refused = [], False
        arguments = self.fit.arguments
        self._plan = resume_plan.make_plan(
            self._saved, past.histories, arguments["epochs"], now
        )
        self._phase = self._plan.beginning
        if self._phase is FitPhase.SKIP:
            self._log_note()
        if self._saved.fit == self._plan.number and self._saved.made_of.get("varies"):
            self._state.varies = True

        trains = self._phase not in (FitPhase.RESTORE, FitPhase.SKIP)
        resumes = trains and self._phase is not FitPhase.START
        self._steps.guard.begin(
            self._plan.number,
            self._saved.epoch,
            self._saved.logs if resumes else {},
            self._steps.size,
        )

        # Prepare the callbacks and the data for the phase.
        held_out = arguments["validation_data"]
        if problem := self.fit.pipelines.validation_problem(held_out):
            log.warning("%s.", problem)
        if self._phase is FitPhase.SKIP and files is not None:
            callback_state.restore_files(self._others.callbacks, files)
        if self._phase is FitPhase.EXTEND:
            # Keras does not call the user's callbacks before the restore of the last
            # epoch's end, just before the first step.
            self._others.silence()
        if self._phase in phases.RESTORING:
            saved = self._saved
            fit_progress.check_same(saved, now, self._directory)
            if crosses(saved, self.fit):
                self._state.other = OtherBackend(
                    self.fit, self.run, shared or {}, self._state.own.loaded
                )
            if now["values"] is not None:
                self._check_values(now)
            if trains:
                self._check_learning_rate(now)
            self._steps.epoch = saved.epoch - (saved.phase == "complete")
            if self._state.own.part is not None and trains:
                dataset = self._data.dataset.dataset
                self.fit.pipelines.check_shares(self.fit, dataset)
            # If the commit has no values of this worker, there is no saved position.
            own = self._state.own.loaded
            value = own["position"].value() if own is not None else None
            position = Position.parse(value)
            # In a commit of a validation, `batch` is the first batch of the last step.
            # This step was trained, and is not run again.
            is_validated = saved.phase == "validation"
            trained = saved.batch + (self._steps.size if is_validated else 0)
            self._data.prepare(position, trained)
        else:
            self.run.adopt()
        expect_caches(self.fit.pipelines.validation_caches(held_out))
        self.run.clear_caches(is_all_restored=True)

        # Set the epoch and the batch at which Keras' loop begins.
        if not trains:
            self.fit.start_at(arguments["epochs"], 0, {})
            # Make the variables: Keras reads them at the end even without a step.
            iterator = self._data.any_iterator()
            self._state.build(iterator, self._steps.inner, restores=True, trains=False)
        elif self._phase is not FitPhase.START:
            self.fit.start_at(self._saved.epoch, self._saved.batch, self._saved.loop)

    def _check_values(self, now: Mapping[str, Any]) -> None:
        """Compares the training arrays with the arrays of the commit.

        See `fit_progress.check_values`.

        Args:
            now: facts about this fit.

        Raises:
            CheckpointMismatchError: the commit is of a complete fit on other data.
        """
        saved, complete = self._saved, self._saved.made_of.get("values")
        # With different arguments, such as --fold 2, the program may train a different
        # fit.
        command = "\0".join(sys.argv).encode(errors="surrogateescape")
        arguments, refused = f"{checksum.of_bytes(command):08x}", list[str]()
        start, past = (complete, arguments), resume_plan.past_of(self._directory)
        if saved.phase == "complete" and not past.is_refused:
            refused = [
                str(each.get("refused"))
                for each in self.run.journal.read_earlier(DataRefused)
                if (each.get("complete"), each.get("arguments")) == start
            ]
        try:
            problem = fit_progress.check_values(saved, now, self._directory, refused)
        except errors.CheckpointMismatchError:
            past.is_refused = True
            self.run.record(
                DataRefused(
                    complete=complete or "", refused=now["values"], arguments=arguments
                )
            )
            raise
        if problem:
            self._state.varies = True
            log.warning("%s.", problem)

    def _check_learning_rate(self, now: Mapping[str, Any]) -> None:
        """Logs a warning if the program was changed to set another learning rate.

        The rate of the commit is restored, because callbacks may have changed the rate.

        Args:
            now: facts about this fit.
        """
        before, here = self._saved.made_of.get("learning_rate"), now["learning_rate"]
        if None not in (before, here) and before != here:
            log.warning(
                "this program sets the learning rate %s; %s was set when this fit "
                "began. The fit continues with the learning rate of the checkpoint. "
                "To train with another rate, pass a LearningRateScheduler to fit.",
                here,
                before,
            )
        self._state.learning_rate = before or here

    # --- steps -----------------------------------------------------------------------

    def epoch_begins(self, epoch: int) -> None:
        """Handles `on_epoch_begin`, after the user's callbacks."""
        self.fit.epoch_begins()
        self._functions.take_over("train")
        self._steps.epoch_begins(epoch)
        self._data.tracker.epoch_begins()

    def _batch_begins(
        self, hook: Callable[..., None], batch: int, logs: Any = None
    ) -> None:
        """Replaces the CallbackList's `on_train_batch_begin`: calls the original hook,
        unless the step is left out."""
        if not self._steps.guard.leaves_out(batch):
            hook(batch, logs)

    def _batch_ends(self, hook: Callable[..., None], batch: int, logs: Any) -> None:
        """Replaces the CallbackList's `on_train_batch_end`.

        Calls the original hook, and then handles a `model.stop_training` that a
        callback has set, before Keras reads it.
        """
        guard = self._steps.guard
        if guard.is_left_out:
            guard.is_left_out = False
            return
        if guard.is_active and self._phase is FitPhase.TRAINING:
            guard.add(self._steps.last, logs)
        try:
            hook(batch, logs)
        except Exception as error:
            guard.followed_bad_step(error)
            raise
        if self.fit.model.stop_training or self._is_stop_held:
            self._hold_stop()

    def _hold_stop(self) -> None:
        """Delays the effect of `model.stop_training` while a notice is pending.

        The program's own signal handler may have set `stop_training` because of the
        notice's signal; then the restarted fit must continue. So the method clears
        `stop_training`, and this process saves and exits at the next step. If the
        process does not exit, the method sets `stop_training` again.
        """
        model = self.fit.model
        if self._phase is not FitPhase.TRAINING:
            return
        if not self.session.is_noticed(_STOPS_WITHIN if model.stop_training else 0.0):
            model.stop_training |= self._is_stop_held
            self._is_stop_held = False
        elif model.stop_training:
            model.stop_training, self._is_stop_held = False, True
            log.warning(
                "model.stop_training was set while a preemption notice is pending. The "
                "notice ends this fit, and stop_training is ignored: the next start "
                "continues after batch %d of epoch %d. A callback that set "
                "stop_training for another reason can set stop_training again after "
                "its next batch or epoch.",
                self._steps.batches,
                self._steps.epoch,
            )

    def _slow_step(self, iterator: Any) -> Any:
        """Handles a step that needs more than a call of the train function."""
        steps = self._steps
        if not self._data.dataset.number(iterator):
            # A step of a fit without the PreemptionCallback, or of train_on_batch.
            return steps.inner(iterator)
        # The steps of the epoch are trained: Keras calls only to find the data's end.
        if self._phase in phases.REPEATING:
            if self._phase is FitPhase.DATA_ENDED:
                self.fit.forget_answer()
            self._phase = phases.after(self._phase, FitEvent.STEP)
            steps.logs = self._functions.train(iterator)
            return steps.logs
        is_new = iterator is not steps.iterator
        steps.iterator = iterator
        if self._phase in phases.BEGINNINGS:
            return self._first_step(iterator)
        if is_new:
            self._data.begins(iterator)
            steps.stands_at(taken=0)
        self._phase = phases.after(self._phase, FitEvent.STEP)
        self._save_if_due()
        return self._step(iterator)

    def _step(self, iterator: Any) -> Any:
        """Runs the next step, or leaves the step out."""
        if self._steps.guard.leaves_out(self._steps.batches):
            return self._steps.leave_out(iterator)
        return self._steps.run(self._functions.train, iterator)

    def _first_step(self, iterator: Any) -> Any:
        """Restores the state, and runs the first step of this process, unless the step
        was trained before the restart."""
        beginning, steps = self._phase, self._steps
        extends = beginning is FitPhase.EXTEND
        if beginning is FitPhase.START:
            self._data.begins(iterator)
            steps.stands_at(taken=0)
        # Capture the callbacks already now, so that an unsupported callback raises its
        # error at once, not in a later save.
        callback_state.capture(self._others.callbacks)
        if beginning is not FitPhase.START or self._plan.number > 1:
            # Make the variables: a save before the first step must contain those of
            # earlier fits.
            restores = beginning is not FitPhase.START
            self._state.build(iterator, steps.inner, restores=restores)
        if beginning is not FitPhase.START:
            taken = self._data.restore(iterator, extends=extends)
            # A step of a validated epoch counts as trained, and is not run again.
            is_validated = beginning is FitPhase.REVALIDATE
            trained = self._saved.batch + (steps.size if is_validated else 0)
            steps.stands_at(taken, trained)
            self._committed = steps.epoch
            if is_validated:
                return self._repeat_last_step()
            self._restore(extends=extends)
        # Call hooks again whose effect the restore has overwritten, such as a schedule.
        if extends:
            self.fit.model.reset_metrics()
            self._others.wake("on_epoch_begin", steps.epoch)
            if not steps.guard.leaves_out(0):
                self._others.call("on_train_batch_begin", 0)
        self._phase = phases.after(self._phase, FitEvent.STEP)
        self._save_if_due()
        logs = {} if beginning is FitPhase.START else dict(self._saved.logs)
        if logs:
            steps.logs = logs  # a save at the boundary before this step needs the logs
        try:
            trained = self._step(iterator)
            self._state.watch_unsaved()
            self._state.attributes.stepped()
            return trained
        except Exception as error:
            # If the length of the data is unknown, Keras finds the end of the data only
            # now.
            is_end = training_end.is_end_of_data(error)
            if not is_end or not logs or self.fit.ends_epoch_with(logs):
                raise
            self._phase = phases.after(self._phase, FitEvent.NO_MORE_DATA)
            self._others.silence()
            steps.stop_at = 0
            return logs

    def _save_if_due(self) -> None:
        """Commits if a save of `save_freq` is due, and sets the step of the next check.

        If `save_freq` is a timedelta, the session makes the saves, because the workers
        must agree on a step.
        """
        steps, run, every = self._steps, self.run, self._options.save_freq
        left = NEVER
        if isinstance(every, int):
            # The smallest number of steps with at least `save_freq` batches.
            each = -(-every // steps.size)
            left = each - run.step % each
            is_due = left == each
        else:
            is_due = every == "epoch" and self._committed not in (None, steps.epoch)
            self._committed = steps.epoch
        if is_due and run.has_moved:
            steps.guard.check()
            self.session.start_listening(run)
            self.session.saves.try_save(run)
        left = min(left, steps.guard.steps_until(steps.batches))
        steps.stop_at = run.steps_made + left

    # --- the restart -----------------------------------------------------------------

    def _restore(self, *, extends: bool = False) -> None:
        """Restores the commit, and replaces functions traced with other settings."""
        self._state.restore(self.run, self._saved, extends=extends)
        if self._steps.guard.is_active:
            self._steps.guard.check_variables()
        is_one_of_many = self.session.cluster.num_workers > 1
        self._functions.trace_again(only_for_settings=is_one_of_many)
        self._log_note()

    def _log_note(self) -> None:
        if self._plan.note:
            log.log(self._plan.note_level, "%s", self._plan.note)

    def _repeat_last_step(self) -> Any:
        """Returns the saved logs of an epoch to Keras, and does not run the epoch's
        last step.

        The step was trained before the restart. `validation_begins` restores the state,
        because the state was captured at the beginning of the validation.
        """
        self._others.silence()
        self.fit.model.stop_training = self._saved.stopped
        self.fit.ends_epoch_as(self._saved.logs)
        self._phase = phases.after(self._phase, FitEvent.STEP)
        self._steps.logs = dict(self._saved.logs)
        return self._steps.logs

    def _catch_up(self) -> None:
        """Restores the commit, after the epoch's last step was replaced by the return
        of saved logs."""
        self.session.start_listening(self.run)
        self._restore()
        self._state.restore_random()
        if self._phase is FitPhase.DATA_ENDED:
            # Repeat the call that finds the end of the data: in the original run, the
            # call also incremented the optimizer's iterations, which does not need
            # data.
            try:
                self._functions.train(self._steps.iterator)
            except Exception as error:
                if not training_end.is_end_of_data(error):
                    raise

    # --- validation, and the end of an epoch -----------------------------------------

    def _test_begins(self, hook: Callable[..., None], *args: Any, **kw: Any) -> None:
        """Replaces the CallbackList's `on_test_begin`.

        The state of a commit in the validation is captured before the hooks: a callback
        may replace the weights in `on_test_begin`, and set them back in `on_test_end`.
        """
        if self._phase is FitPhase.TRAINING:
            self._check_trained(self._steps.epoch)
            self._epoch_end.hold()
        hook(*args, **kw)

    def validation_begins(self) -> None:
        """Handles `on_test_begin` of the validation in this fit.

        Raises:
            ConfigurationError: the training data are empty.
        """
        self._check_trained(self._steps.epoch)
        # In these phases, the restored commit was made during this validation.
        if self._phase in (FitPhase.VALIDATION_DUE, FitPhase.DATA_ENDED):
            self._catch_up()
            self._others.wake("on_test_begin")
        self._epoch_end.hold()
        self._phase = phases.after(self._phase, FitEvent.VALIDATION)
        self.validation_step()

    def validation_step(self) -> None:
        """Handles `on_test_batch_begin`: the process may save and exit here."""
        if self._phase is FitPhase.VALIDATING:
            self.session.ready(self.run, "a callback")
            self.session.boundary(self._epoch_end.assigned)

    def validation_ends(self) -> None:
        """Handles `on_test_end`."""
        if self._phase is FitPhase.VALIDATING:
            self._phase = phases.after(self._phase, FitEvent.VALIDATED)

    def _epoch_ends(self, hook: Callable[..., None], epoch: int, logs: Any) -> None:
        """Replaces the CallbackList's `on_epoch_end`.

        First handles a pending notice: the process may save and exit. Then calls the
        original hook. A commit made here, or because of an error in the hook, contains
        the state from before the validation. So the restart repeats the validation and
        the hook, and a callback that stops training for its own reason stops again.

        Raises:
            ConfigurationError: no batch was trained.
        """
        self._check_trained(epoch)
        self._steps.guard.check()
        # Restore now, if no validation did: only `validation_begins` calls `_catch_up`
        # earlier.
        if self._phase in phases.REPEATING:
            self._catch_up()
            self._others.wake()
        was_stopped = bool(self.fit.model.stop_training)
        if was_stopped:  # the program's signal handler may have stopped at a notice
            self.session.is_noticed(_STOPS_WITHIN)
        self.session.ready(self.run, "a callback")
        self.session.boundary(self._epoch_end.assigned)
        try:
            is_held = self._epoch_end.hold_files(self._others.callbacks)
            is_held = is_held and self.session.cluster.num_workers == 1
            with self._epoch_end.committed_on_error():
                hook(epoch, logs)
            if was_stopped or not self.fit.model.stop_training:
                return
            if is_held and self.session.is_noticed(_STOPS_WITHIN):
                self.session.boundary(self._epoch_end.assigned)
            elif not self._others.have_ended_at(epoch):
                self._hold_stop()
        finally:
            # Free the kept state, which may be as large as the model.
            self._epoch_end.moment = None

    def epoch_ends(self, logs: Any) -> None:
        """Handles `on_epoch_end`, after the user's callbacks."""
        self._phase = phases.after(self._phase, FitEvent.EPOCH_END)
        self._data.tracker.epoch_ends()
        # Save again even if the step is committed already: that commit lacks the result
        # of the validation.
        self.run.saved_at = None
        if self.session.cluster.is_chief:
            # A callback may have added other names and values to the logs.
            numbers = {
                name: float(value)
                for name, each in (logs or {}).items()
                if isinstance(name, str)
                if type(value := resume_plan.plain(each)) in (int, float)
            }
            self.run.record(Metrics(step=self.run.step, values=numbers))
            if self._options.policy.best_by is not None:
                self.run.directory.set_metrics(self.run.step, numbers)

    def _check_trained(self, epoch: int) -> None:
        is_first = self._plan.beginning is FitPhase.START and self.run.steps_made == 0
        if is_first or self._phase in phases.BEGINNINGS:
            raise errors.ConfigurationError(
                f"The training data are empty: epoch {epoch} has ended without a "
                "batch. Nothing was trained or committed. Check the pipeline "
                "(patterns of files, filter, take, and a repeat that has ended)."
            )

    # --- the end ---------------------------------------------------------------------

    def end(self) -> None:
        """Handles `on_train_end`, after the user's callbacks: commits the final state.

        Every worker takes part in the commit.
        """
        history = self.fit.model.history
        if self._phase is FitPhase.SKIP:
            past = self._plan.histories[self._plan.number - 1]
            history.epoch, history.history = list(past["epoch"]), dict(past["history"])
        elif self._phase in phases.RESTORING:
            self._restore()
            self.fit.model.stop_training |= self._saved.stopped
            self._data.complete()
            self._state.attributes.name_due_trace()
        self._phase = phases.after(self._phase, FitEvent.TRAIN_END)
        try:
            if self.run.steps_made:  # a callback may have changed the state
                self._steps.guard.check()
            self.fit.epoch_begins()
            self._data.tracker.epoch_begins()
            self.run.is_at_end = True
            epoch = self._steps.epoch
            if any(_has_restored_weights(one, epoch) for one in self._others.callbacks):
                # Record no metrics: the weights of the commit are not the weights for
                # which the last epoch's metrics were computed.
                self.run.directory.set_metrics(self.run.step, {})
            training_end.close(self.session, self.run)
        except Exception:
            self.abandon()
            take_over()
            raise
        # A KeyboardInterrupt does not reach this line: the run stays open, and may
        # still save.
        self._release()
        made_of = self._state.made_of(is_built=True)
        fits = resume_plan.past_of(self._directory)
        resume_plan.add(fits, history, self._plan, made_of)
        take_over()
        # Now a notice costs nothing: the fit is committed.
        for each in self._others.callbacks:
            if isinstance(each, State):
                each._fit_is_committed()

    def abandon(self) -> None:
        """Closes a fit that an error has ended, without a save."""
        training_end.close_unfinished(self.session, self.run)
        self._release()

    def _release(self) -> None:
        """Restores Keras' original functions and attributes."""
        self.fit.ends()
        self.fit.frame = None
        self._others.unwrap()
        self._epoch_end.close()
        self._functions.close()
        self._state.attributes.end()
        self._state.close()

    # --- what a save takes -----------------------------------------------------------

    def _take_moment(self) -> Moment:
        self._steps.guard.check_before_save()
        self._data.tracker.steps_end()
        return self._state.hold(self._progress("validation"))

    def _take_shared(self) -> Taken:
        if (moment := self._epoch_end.moment) is not None:
            return moment.shared
        match self._phase:
            case FitPhase.TRAINING:
                self._steps.guard.check_before_save()
                return self._state.take_shared(self._progress("train"))
            case FitPhase.TRAINED:
                return self._state.take_shared(self._progress("complete"))
            case FitPhase.RESTORED if self._state.shared.loaded is not None:
                return self._state.shared.loaded
        raise errors.SaveError(
            "this fit has not trained a step yet, so there is nothing to save; the "
            "commit made before the fit is still valid"
        )

    def _take_own(self) -> Taken:
        own = self._state.own.loaded
        if self._plan.beginning is FitPhase.RESTORE and own is not None:
            return own
        self._others.name_unsaved()  # each worker may have callbacks of its own
        is_at_end = self._phase is FitPhase.TRAINED
        taken = self._steps.before_epoch + self._steps.batches
        position = self._data.position(taken, is_at_end=is_at_end)
        value = None if position is None else dataclasses.asdict(position)
        moment = self._epoch_end.moment
        held = self._state.take_own() if moment is None else moment.own
        files = None if moment is None else moment.files
        if files is None:
            files = callback_state.capture_files(self._others.callbacks)
        return {
            **held,
            "files": files,
            "position": EncodedValue.of(value),
        }

    def _progress(self, stage: Stage) -> Progress:
        steps, model = self._steps, self.fit.model
        epoch, batch = steps.epoch, steps.batches
        stopped = bool(model.stop_training)
        logs: Mapping[str, Any] = (steps.logs if batch else None) or {}
        if stage == "validation":
            batch, logs = steps.last, epoch_logs(model)
        elif stage == "complete":
            epoch, batch = epoch + 1, 0
            stopped = bool(epoch < self.fit.arguments["epochs"])
        kept = {name: resume_plan.plain(each) for name, each in logs.items()}
        steps.guard.warn_of_loss(kept)
        return Progress(
            fit=self._plan.number,
            phase=stage,
            epoch=epoch,
            batch=batch,
            is_untrained=self.run.step == 0,
            stopped=stopped,
            loop=self.fit.loop_state(),
            logs=kept,
            histories=self._plan.histories,
            made_of=self._state.made_of(is_built=True),
            metrics=sum(len(metric.variables) for metric in model.metrics),
        )


def _has_restored_weights(callback: Any, epoch: int) -> bool:
    """Returns whether a callback is an EarlyStopping that has set the weights of an
    epoch before `epoch`."""
    return (
        getattr(callback, "restore_best_weights", False)
        and getattr(callback, "best_weights", None) is not None
        and getattr(callback, "best_epoch", epoch) != epoch
    )
