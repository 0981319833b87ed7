"""One fit under the callback, from `on_train_begin` to `on_train_end`.

Everything is captured and restored at the same points of the program, so that what
Keras and other callbacks did on the way there is undone by the restore:

- before a train step (`TrainFunction`), where a commit usually happens;
- at the beginning of a validation, which a restart repeats from there, because notices
  must be served while it runs;
- at the end, after every other callback's `on_train_end`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

from tfpreempt import errors
from tfpreempt.handler.tensorflow_side import END_OF_DATA
from tfpreempt.keras.callbacks import state
from tfpreempt.keras.callbacks.crowd import Crowd
from tfpreempt.keras.data.position import Feed, Place, Position, place_or_replay
from tfpreempt.keras.data.position_choice import choose, position_of, validation_problem
from tfpreempt.keras.data.sequence import SequencePosition
from tfpreempt.keras.fit import progress, rounds, snapshot, variables
from tfpreempt.keras.fit.attributes import Attributes
from tfpreempt.keras.fit.capture import Capture, made_of
from tfpreempt.keras.fit.fit_handler import make_handler
from tfpreempt.keras.fit.lookup import find
from tfpreempt.keras.fit.plan import Task, make_plan
from tfpreempt.keras.fit.progress import Progress
from tfpreempt.keras.fit.schedule import Schedule
from tfpreempt.keras.fit.settings import Settings
from tfpreempt.keras.fit.tally import Tally
from tfpreempt.keras.fit.train_function import TrainFunction
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)


class Training:
    """The work of the callback in one fit. Main thread.

    Args:
        settings: the user's.
        model: the model that is fitted.
        epochs: what `fit` was asked for.
        callback: ours; is moved behind all others, so that it sees what they did.
        files: what callbacks had in files before the fit; for a fit that is skipped.
    """

    def __init__(
        self,
        settings: Settings,
        model: Any,
        epochs: int,
        callback: Any,
        files: state.CallbackStates | None,
    ) -> None:
        self.model = model
        self.fit: Fit = find(model)
        self._settings = settings
        self._epochs = epochs
        self._crowd = Crowd(self.fit.callbacks, callback, settings.checkpoint_dir)
        self._feed = Feed(self.fit)
        self._attributes = Attributes(model)
        self._position: Position | None = None
        if self.fit.sequence is not None:
            self._position = SequencePosition(self.fit, self._feed)
        self._schedule = Schedule(settings.save_freq)
        self._held: tuple[snapshot.Shared, snapshot.Own] | None = None
        self._ends = False
        self._answered = False  # whether a step that met the end of data was answered
        self._shared = snapshot.SharedState(self._take_shared)
        self._own = snapshot.OwnState(self._take_own)
        self._checkpoint = variables.checkpoint_of(model)
        self.fit.keep_generators()
        try:
            self.handler = make_handler(settings, self.fit, self._checkpoint)
        except BaseException:
            self._unregister()
            raise
        self.function = TrainFunction(self, model.train_function, self.handler)
        self._tally = Tally(lambda: self.handler.runs, self.fit.steps_per_execution)
        try:
            self._start(files)
        except BaseException:
            self.handler.abandon()
            self._unregister()
            raise

    # --- the beginning ---------------------------------------------------------------

    def _start(self, files: state.CallbackStates | None) -> None:
        directory = self._settings.checkpoint_dir
        shared = self._shared.loaded
        if self.handler.has_checkpoint and shared is None:
            raise errors.ConfigurationError(
                f"The newest checkpoint in checkpoint_dir {directory!r} was not "
                "written by a PreemptionCallback, so it belongs to another program. "
                "Use a directory of its own for each run."
            )
        saved = None if shared is None else shared.progress
        if saved is None or saved.is_untrained:
            saved = None
            rounds.forget(directory)
        self.plan = make_plan(saved, rounds.ended(directory), self._epochs)
        if self.plan.note:
            log.warning("tfpreempt: %s", self.plan.note)
        if problem := validation_problem(self.fit.validation_data):
            log.warning("tfpreempt: %s.", problem)
        self._pending = self.plan.task.restores
        self._capture = Capture(
            fit=self.fit,
            crowd=self._crowd,
            feed=self._feed,
            tally=self._tally,
            plan=self.plan,
            function=self.function,
            handler=self.handler,
            checkpoint=self._checkpoint,
            epochs=self._epochs,
            attributes=self._attributes,
        )
        if not self.plan.task.restores:
            self.handler.adopt()
        if saved is None:
            return
        if self.plan.task is Task.SKIP and files is not None:
            self._crowd.restore_files(files)
        if self.plan.task is Task.EXTEND:
            self._crowd.silence()  # until the end of the last epoch is restored
        if self.plan.task.restores:
            self._prepare(saved)
        if not self.plan.task.trains:
            self.fit.start_at(self._epochs, 0, {})
            # Keras looks at the variables at the end even where no step made them.
            self._build(self._feed.spare())

    def _prepare(self, saved: Progress) -> None:
        """Checks the checkpoint, and lets the fit begin where it was made."""
        progress.check_same(saved, made_of(self.fit), self._settings.checkpoint_dir)
        progress.check_divisible(saved, self._tally.steps_per_execution)
        self._tally.epoch = saved.epoch - (saved.phase == "complete")
        place = None if self._own.loaded is None else self._own.loaded.place
        is_amid = saved.phase == "train"
        self._place = place_or_replay(place, saved.batch, is_amid)
        if self._place.kind != "sequence":
            self._position = position_of(self._place.kind, self.fit, self._feed)
        assert self._position is not None
        self._position.prepare(self._place, self.fit.first_iterator)
        if self.plan.task.trains:
            self.fit.start_at(saved.epoch, saved.batch, saved.loop)

    # --- steps -----------------------------------------------------------------------

    def epoch_begins(self, epoch: int) -> None:
        """`on_epoch_begin`, after all other callbacks."""
        fit = self.fit
        made = self.model.train_function
        if made is not self.function and made is not None:
            # A callback has called make_train_function(), after unfreezing layers, say.
            self.function.inner = made
            self.model.train_function = self.function
        self._tally.epoch_begins(epoch, fit.steps_per_execution, fit.epoch_limit)
        self.fit.epoch_begins()
        if self._position is not None:
            self._position.epoch_begins()
        self.function.stop_at = 0  # the next step asks what is due

    def is_mine(self, iterator: Any) -> bool:
        """Whether this fit made the iterator."""
        return self._feed.number(iterator) is not None

    def before_step(self, iterator: Any) -> Any:
        """Something is out of the ordinary before a step; see `Steps`."""
        if self._crowd.is_silent and not self._pending:  # the data have ended
            self.fit.forget_answer(self._answered)
            return self.function.inner(iterator)
        logs = None
        is_new = iterator is not self.function.iterator
        self.function.iterator = iterator
        if self._pending:
            logs = self._resume(iterator)
        elif is_new:
            self._begin_iterator(iterator)
        if self.handler.runs == 0:
            self._crowd.check()
        is_first = self.plan.task is Task.TRAIN and self.handler.runs == 0
        if is_first and self.plan.number > 1:
            # A save before the first step must hold what the fits before left.
            self._build(iterator)
        if self.handler.runs == 0 and logs is None:
            self._expect_trace()
        if logs is None:
            self._save_if_due()
        left = self._schedule.steps_left(
            self.handler.total_run_calls, self._tally.steps_per_execution
        )
        self.function.stop_at = self.handler.runs + left if logs is None else 0
        return logs

    def _build(self, iterator: Any) -> None:
        """Makes all variables. What a trace does to Python values is done once."""
        inner = self.function.inner
        if hasattr(inner, "get_concrete_function"):  # it is traced for good
            self._attributes.traced_by(self.fit.build, iterator, inner)
            return
        with self._attributes.put_back():
            self.fit.build(iterator, inner)

    def _expect_trace(self) -> None:
        """The next call of the train function traces it, unless it runs eagerly."""
        inner = self.function.inner

        def first(iterator: Any) -> Any:
            self.function.inner = inner
            return self._attributes.traced_by(inner, iterator)

        if not self.model.run_eagerly:
            self.function.inner = first

    def _begin_iterator(self, iterator: Any) -> None:
        self._tally.read += 1
        self._tally.iterator_stands_at(0)
        if self._position is None:
            self._position = choose(self.fit, self._feed, iterator)
        self._position.begins(iterator)

    def _save_if_due(self) -> None:
        tally, steps = self._tally, self.handler.total_run_calls
        is_due = self._schedule.is_due(tally.epoch, steps, tally.steps_per_execution)
        if is_due and self.handler.has_moved:
            self.handler.save_periodically()

    # --- the restart -----------------------------------------------------------------

    def _resume(self, iterator: Any) -> Any:
        """Makes everything as it was; returns the logs of a step trained before."""
        assert self._shared.loaded is not None
        assert self._position is not None
        saved = self._shared.loaded.progress
        self._build(iterator)
        self._expect_trace()
        self._tally.read = self._place.read + 1
        self._tally.made_before = (
            self._place.made + 1 - (self._feed.number(iterator) or 0)
        )
        # A step that was trained before is not run again, but counts.
        again = self.plan.task is Task.REVALIDATE
        step = self._tally.steps_per_execution if again else 0
        self._tally.epoch_stands_at(saved.batch + step)
        if self.plan.task is Task.EXTEND and not self.fit.keeps_iterator:
            self._position.extend(self._place, iterator)
            self._tally.iterator_stands_at(0)
        else:
            self._position.restore(self._place, iterator)
            self._tally.iterator_stands_at(self._place.batches)
        self._schedule.goes_on_in(self._tally.epoch)
        self._pending = False
        if not again:
            self._restore_variables()
            self._restore_callbacks()
            if self.plan.task is Task.EXTEND:
                self._begin_epoch_anew()
            return self._try_first_step(iterator) if saved.logs else None
        # The epoch's last step was trained: Keras gets its result and the metrics, and
        # the rest follows where it was captured, in `validation_begins`.
        self._restore_own_variables(self._kept())
        self._crowd.silence()
        self.model.stop_training = saved.stopped
        return dict(saved.logs)

    def _begin_epoch_anew(self) -> None:
        """Hooks that would have been undone by the restore, such as a schedule's."""
        self.model.reset_metrics()
        self._crowd.wake("on_epoch_begin", self._tally.epoch)
        self._crowd.call("on_train_batch_begin", 0)

    def _try_first_step(self, iterator: Any) -> Any:
        """The data may end right here, where Keras did not know their length."""
        assert self._shared.loaded is not None
        try:
            return self.handler.run(self.function.inner, iterator)
        except END_OF_DATA:
            self.function.logs = logs = dict(self._shared.loaded.progress.logs)
            if self.fit.ends_epoch_with(logs):
                raise
            self._answered = True  # as in REVALIDATE
            self._crowd.silence()
            return logs

    def _restore_variables(self) -> None:
        """Everything was built, so that all of them exist."""
        assert self._shared.loaded is not None
        saved, directory = self._shared.loaded.progress, self._settings.checkpoint_dir
        progress.check_slots(saved, variables.count_slots(self.model), directory)
        kept = self._kept()  # raises before anything is assigned
        self.handler.restore_variables()
        self._restore_own_variables(kept)

    def _kept(self) -> list[Any]:
        """The variables that this worker's state is of."""
        if (own := self._own.loaded) is None:
            return []
        iterator = self.function.iterator or self._feed.spare()
        return variables.matching(self.fit, self._checkpoint, own.variables, iterator)

    def _restore_own_variables(self, kept: list[Any]) -> None:
        if (own := self._own.loaded) is not None:
            variables.write(kept, own.variables, own.values)
            self._attributes.restore(own.attributes)

    def _restore_callbacks(self) -> None:
        """What is not variables: callbacks and their files."""
        assert self._shared.loaded is not None
        self.fit.settle()
        extends = self.plan.task is Task.EXTEND
        self._crowd.restore(self._shared.loaded.callbacks, extends=extends)
        if self._own.loaded is not None:
            self._crowd.restore_files(self._own.loaded.files, extends=extends)

    def _catch_up(self) -> None:
        """What a restart leaves until Keras is past the step that was trained."""
        self.handler.arm()
        self._restore_variables()
        self._restore_callbacks()
        if self._own.loaded is not None:
            snapshot.set_random(self._own.loaded.random)
        if self._answered:
            # Keras met the end of its data by a step, in which what needs no data was
            # done: the optimizer's iterations were counted up.
            with contextlib.suppress(*END_OF_DATA):
                self.function.inner(self.function.iterator)

    # --- validation ------------------------------------------------------------------

    def validation_begins(self) -> None:
        """`on_test_begin` of the validation in this fit."""
        if self._crowd.is_silent:
            if self._answered:
                self._catch_up()
                self._crowd.wake("on_test_begin")
            else:  # the commit is of a validation that had begun
                self._crowd.wake("on_test_begin")
                self._catch_up()
        self._held = self._capture.shared("validation"), self._capture.own(None)
        self.handler.boundary()

    def validation_step(self) -> None:
        """`on_test_batch_begin`."""
        if self._held is not None:
            self.handler.boundary()

    def validation_ends(self) -> None:
        """`on_test_end`."""
        self._held = None

    def epoch_ends(self, epoch: int, logs: Any) -> None:
        """`on_epoch_end`.

        Raises:
            ConfigurationError: there was nothing to train with.
        """
        if self.plan.task is Task.TRAIN and self.handler.runs == 0:
            raise progress.no_data(epoch)
        if self._crowd.is_silent:  # no validation, or not any more
            self._catch_up()
            self._crowd.wake("on_epoch_end", epoch, logs)

    # --- the end ---------------------------------------------------------------------

    def end(self) -> None:
        """`on_train_end`, after all other callbacks."""
        history = self.model.history
        if self.plan.task is Task.SKIP:
            past = self.plan.histories[self.plan.number - 1]
            history.epoch, history.history = list(past["epoch"]), dict(past["history"])
        elif self._pending:
            self._restore_variables()
            self._restore_callbacks()
        self._pending = False
        self._ends = True
        if self._position is not None:
            self._position.epoch_begins()
        try:
            self.handler.end()
        except Exception:
            self.release()
            raise
        self.release()
        rounds.ends(self._settings.checkpoint_dir, history)

    def release(self) -> None:
        """Gives back what Keras had before."""
        self.fit.ends()
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
        loaded = self._shared.loaded
        if self.plan.task is Task.FINISHED and loaded is not None and self._ends:
            return loaded
        if not self.plan.task.trains or self._pending or self._crowd.is_silent:
            raise errors.SaveError(
                "nothing was trained in this fit yet; the commit before it stands"
            )
        if self._held is None:
            return self._capture.shared("complete" if self._ends else "train")
        return self._held[0]

    def _take_own(self) -> snapshot.Own:
        if self.plan.task is Task.FINISHED and self._own.loaded is not None:
            return self._own.loaded
        if self._held is None:
            return self._capture.own(self._here())
        files = self._crowd.capture_files()
        return dataclasses.replace(self._held[1], files=files, place=self._here())

    def _here(self) -> Place | None:
        loaded = self._own.loaded
        if self.function.iterator is None or self._position is None:
            return None if loaded is None else loaded.place
        return self._capture.place(self._position, is_at_end=self._ends)
