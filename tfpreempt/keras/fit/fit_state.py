"""Captures and restores the state of a running fit.

A state is restored at the point of the loop where it was captured. So the restore also
overwrites what Keras and the user's callbacks have changed since the start of the fit.
The points are:

- before a train step (`TrainFunctionWrapper`), the usual point of a commit;
- at the beginning of a validation: a notice may arrive while the validation runs, and a
  restart then repeats the validation;
- at the end, after `on_train_end` of the user's callbacks.

The variables are in a checkpoint of the framework (`FitVariables`). On TensorFlow every
worker saves its own metrics and seed generators beside the tf.train.Checkpoint, as in
custom loops (`checkpoint/tensors/per_replica.py`). This module compares dtypes and
shapes before any variable is assigned. A validation may change any variable, so
`Moment` keeps the values from the beginning of the validation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Sequence
from typing import IO, Any

from tfpreempt import errors
from tfpreempt.checkpoint.state.random_state import GlobalRngState
from tfpreempt.checkpoint.state.unsaved_state_check import UnsavedStateCheck
from tfpreempt.handler.run import Run
from tfpreempt.keras.callbacks import callback_state
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.data.training_data import TrainingData
from tfpreempt.keras.fit import unsaved_state
from tfpreempt.keras.fit.fit_progress import (
    Progress,
    check_same,
    learning_rate,
    made_of,
)
from tfpreempt.keras.fit.other_backend import KEYS, OtherBackend
from tfpreempt.keras.fit.python_attributes import Attributes
from tfpreempt.keras.fit_protocol import Fit, HeldValues, WorkerVariable
from tfpreempt.keras.fit_record import EncodedValue, FitRecord

Taken = dict[str, EncodedValue]
_CALLBACKS = "callbacks"
_SOME_WEIGHTS = (
    "The optimizer had {} variables in the interrupted run, and has {} now. The eager "
    "train step may train only some weights of the model: a restart makes the "
    "optimizer's variables before the first step, for all trainable weights. Call "
    "model.optimizer.build(weights) before fit, with the list of weights that the step "
    "passes to apply_gradients, or set trainable = False on the layers that are not "
    "trained. The differences in detail: {}"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of a fit at an earlier moment, kept for a later save.

    Attributes:
        shared: result of `FitState.take_shared`.
        own: result of `FitState.take_own`.
        variables: the values of the variables on this worker.
        files: text of the log files, captured before a callback writes to the files;
            None if not captured yet.
    """

    shared: Taken
    own: Taken
    variables: HeldValues
    files: EncodedValue | None = None


class WorkerRecord(FitRecord):
    """Saves the values that are separate on every worker.

    If the number of workers has changed, `reshard` adapts the values of the commit.

    Attributes:
        part: (index of this worker, number of workers), if the commit is from another
            number of workers; else None.
        randoms: saved random generators of every worker in the commit; set together
            with `part`.
    """

    part: tuple[int, int] | None = None
    randoms: Sequence[bytes | None] = ()

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Computes this worker's values if the number of workers has changed.

        A new worker gets the values of the chief, but no log files. If the chief's
        position in the data is a number of global batches, every worker gets this
        position; otherwise the workers get no position. `GlobalRngState` distributes
        the random generators over the workers.
        """
        each_own = [None if file is None else self.read(file) for file in files]
        saved = [own for own in each_own if own is not None]
        self.part = worker, num_workers
        self.randoms = [
            None if own is None else own["random"].value().encode() for own in each_own
        ]
        mine = each_own[worker] if worker < len(each_own) else None
        is_new, own = mine is None, mine or saved[0]
        position = Position.parse(saved[0]["position"].value())
        is_shared = position is not None and position.is_shared
        self.loaded = {
            **own,
            "files": EncodedValue(header={}) if is_new else own["files"],
            "position": saved[0]["position"] if is_shared else EncodedValue.of(None),
        }


class FitState:
    """Captures and restores the state of a running fit. Use on the main thread only.

    Args:
        fit: the fit.
        callbacks: the callbacks of the fit without the PreemptionCallback.
        data: training data of the fit.
        take_shared: function returning the values that a save writes once, for all
            workers.
        take_own: function returning the values that a save writes for this worker.

    Attributes:
        attributes: the plain Python values of the model.
        variables: the variables of the fit.
        shared: values equal on every worker; the chief saves them.
        own: values of this worker; `own.loaded` is None if the commit has no values of
            this worker.
        has_own_arrays: whether there is only a single worker, so that the worker's
            training arrays are the arrays of the whole run, and a restart can compare
            the arrays.
        varies: whether the training arrays had other values in an earlier run of the
            program.
        learning_rate: result of `fit_progress.learning_rate` when the fit began.
        is_chief: whether this is worker 0, whose callbacks are in `shared`.
        other: the commit to restore, if the other backend of Keras 3 has written it.
    """

    def __init__(
        self,
        fit: Fit,
        callbacks: Sequence[Any],
        data: TrainingData,
        *,
        take_shared: Callable[[], Taken],
        take_own: Callable[[], Taken],
    ) -> None:
        self._fit = fit
        self._callbacks = callbacks
        self._data = data
        self._random = GlobalRngState()
        # The keys of the variables, as given and in the form of a save.
        self._keys: tuple[Any, EncodedValue] = (None, EncodedValue(header={}))
        self.other: OtherBackend | None = None
        self.has_own_arrays = False
        self.varies = False
        self.learning_rate = learning_rate(fit.optimizer)
        self.is_chief = True
        self.attributes = Attributes(fit.model)
        self.variables = fit.make_variables()
        saved = self.variables.checkpoint
        # On JAX, the checkpoint is no object of the framework.
        self._check = UnsavedStateCheck(None if saved is self.variables else saved)
        self._is_watching = False
        self.shared = FitRecord("tfpreempt.keras", take_shared)
        self.own = WorkerRecord("tfpreempt.keras.worker", take_own, per_worker=True)

    def close(self) -> None:
        """Unregisters the States, to exclude the fit from later saves."""
        self._check.forget()
        for each in (self.shared, self.own, *self.variables.states):
            each.unregister()

    def watch_unsaved(self) -> None:
        """Records values of this process that later saves compare, after the first step
        or, if earlier, at the first save."""
        if self._is_watching:
            return
        self._is_watching = True
        sequence = self._fit.sequence
        data = None if sequence is None else sequence.data
        unsaved_state.watch(
            self._check,
            self._fit.model,
            self._callbacks,
            data,
            self._fit.arguments["validation_data"],
        )

    def made_of(self, *, is_built: bool) -> dict[str, Any]:
        """Returns the facts that a save stores in `Progress.made_of`.

        The values of the arrays are read again for every save, because a program may
        change its arrays in place during training.

        Args:
            is_built: whether the optimizer has made its variables.
        """
        found = made_of(
            self._fit, is_built=is_built, compares_values=self.has_own_arrays
        )
        found["learning_rate"] = self.learning_rate
        return found | ({"varies": True} if self.varies else {})

    # --- what a save takes -----------------------------------------------------------

    def take_shared(self, reached: Progress) -> Taken:
        """Returns the values of the fit that only the chief saves: values that are
        equal on every worker, and the state of the chief's callbacks.

        The caller has called `variables.of_worker()` or saves the checkpoint.

        Args:
            reached: progress of the fit.
        """
        self._fit.settle()
        now = self.variables.of_worker(is_attached=True)
        taken = {
            "progress": EncodedValue.of(dataclasses.asdict(reached)),
            "variables": EncodedValue.of([(own.name, own.kind) for own in now]),
            _CALLBACKS: callback_state.capture(self._callbacks, leaves_out=True),
        }
        self.prepare()
        return taken | ({KEYS: self._keys[1]} if self._keys[0] else {})

    def prepare(self) -> None:
        """Computes values of a save in advance; called after a search of the variables,
        as in `Contents.prepare`."""
        # A fit of several workers cannot resume on the other backend.
        keys = self.variables.keys() if self.has_own_arrays else {}
        if keys is not self._keys[0]:
            self._keys = keys, EncodedValue.of(dict(keys))

    def take_own(self) -> Taken:
        """Returns this worker's values, without its log files and its data position.

        The callbacks of the workers may have different states: callbacks of the program
        that count the worker's own samples, best weights with the worker's own batch
        statistics, callbacks that only the chief has. The caller has called
        `variables.of_worker()` or saves the checkpoint.
        """
        random = io.BytesIO()
        self._random.save(random)
        if self._is_watching:
            self._check.compare()
        else:
            self.watch_unsaved()
        now = self.variables.of_worker(is_attached=True)
        own = {
            "random": EncodedValue.of(random.getvalue().decode()),
            "attributes": self.attributes.capture(),
            "replicas": EncodedValue.of([len(own.parts) for own in now]),
        }
        if not self.is_chief:
            own[_CALLBACKS] = callback_state.capture(self._callbacks, leaves_out=True)
        return own

    def hold(self, reached: Progress) -> Moment:
        """Returns a copy of the current state, for a later save.

        Args:
            reached: progress of the fit.
        """
        self._fit.settle()
        variables = self.variables.hold()
        return Moment(
            shared=self.take_shared(reached),
            own=self.take_own(),
            variables=variables,
        )

    # --- before the first step -------------------------------------------------------

    def build(
        self, iterator: Any, train_function: Any, *, restores: bool, trains: bool = True
    ) -> None:
        """Makes the variables, if possible by tracing the train function.

        The first step then uses the same trace, so a restart traces the function only
        once.

        Args:
            iterator: iterator over the training data; not read.
            train_function: Keras' own train function.
            restores: whether the variables will be restored from the commit.
            trains: whether steps follow in this fit.
        """
        traceable = self._fit.traceable(train_function, trains=trains)
        is_kept = traceable is not None
        build = functools.partial(self._fit.build, iterator, train_function)
        if traceable is not None:
            build = functools.partial(traceable.get_concrete_function, iterator)
        with contextlib.ExitStack() as undo:
            if restores and self.own.loaded is not None:
                first = self.attributes.as_first(self.own.loaded["attributes"])
                undo.enter_context(first)
            self.attributes.traced_by(build, is_kept=is_kept)
            if is_kept:
                self.attributes.traces["train"].function = train_function

    # --- the restart -----------------------------------------------------------------

    def restore(self, run: Run, progress: Progress, *, extends: bool = False) -> None:
        """Restores the variables, this worker's values and the callbacks.

        Args:
            run: run of the fit; its `restore` restores the variables.
            progress: progress in the commit.
            extends: whether epochs are added to a complete fit.

        Raises:
            CheckpointMismatchError: the commit is of another model; no variable was
                assigned.
        """
        shared, own = self.shared.loaded, self.own.loaded
        assert shared is not None
        directory = run.directory.path
        here = made_of(self._fit, is_built=True)
        check_same(progress, here, directory)
        saved = [] if self.other is not None else shared["variables"].value()
        now = self.variables.of_worker()
        metrics = sum(len(metric.variables) for metric in self._fit.model.metrics)
        if metrics < progress.metrics or len(now) < len(saved):
            # A validation has made the missing variables. Making variables here does
            # not hang: the same variables are missing on every worker, so every worker
            # reaches this call.
            self._fit.build_test(self._data.any_iterator())
            now = self.variables.of_worker()
        # If the position counts global batches, the number of replicas may have
        # changed.
        replicas = None
        if own is not None:
            position = Position.parse(own["position"].value())
            if position is None or not position.is_shared:
                replicas = own["replicas"].value()
        if self.other is None:
            check(saved, now, replicas)
            self.variables.expect([name for name, _ in saved])
            try:
                run.restore(named_states=False)
            except errors.CheckpointMismatchError as error:
                slots = progress.made_of.get("slots") or 0
                if self._fit.runs_eagerly() and 0 < slots < here["slots"]:
                    text = _SOME_WEIGHTS.format(slots, here["slots"], error)
                    raise errors.CheckpointMismatchError(text) from error
                raise
        else:
            assign = functools.partial(self.other.assign, variables=self.variables)
            run.restore(named_states=False, assign=assign)
            self._random.ignores_tensorflow = self.other.ignores_tensorflow
        if own is not None:
            self.attributes.restore(own["attributes"])
        self._fit.settle()
        state = (own or {}).get(_CALLBACKS, shared[_CALLBACKS])
        callback_state.restore(self._callbacks, state, extends=extends)
        if own is not None:
            callback_state.restore_files(self._callbacks, own["files"], extends=extends)

    def restore_random(self) -> None:
        """Restores the random generators of this process."""
        if self.own.loaded is None:
            return
        if self.own.part is not None:
            files = [
                None if each is None else io.BytesIO(each) for each in self.own.randoms
            ]
            self._random.reshard(files, *self.own.part)
        else:
            text = self.own.loaded["random"].value()
            self._random.load(io.BytesIO(text.encode()))


# --- metrics and seed generators -----------------------------------------------------


def check(
    saved: Sequence[tuple[str, str]],
    now: Sequence[WorkerVariable],
    replicas: Sequence[int] | None,
) -> None:
    """Checks that the metrics and seed generators match those of a checkpoint.

    Args:
        saved: (name, kind) of every variable in the checkpoint. Only the kinds are
            compared, because names may differ while a model is not fully built.
        now: variables of the model.
        replicas: for every variable, the number of this worker's replicas with a value
            in the checkpoint; None if unknown.

    Raises:
        CheckpointMismatchError: the checkpoint has other variables, or this worker
            trained on another number of devices.
    """
    if [kind for _, kind in saved] != [own.kind for own in now]:
        here = [f"{own.name} {own.kind}" for own in now]
        there = [f"{name} {kind}" for name, kind in saved]
        if len(here) == len(there):
            pairs = zip(saved, now, strict=True)
            differs = [kind != own.kind for (_, kind), own in pairs]
            here = list(itertools.compress(here, differs))
            there = list(itertools.compress(there, differs))
        raise errors.CheckpointMismatchError(
            "The variables of the model, its metrics, seed generators or optimizer "
            f"differ from the checkpoint. In the model: {', '.join(here)}. In the "
            f"checkpoint: {', '.join(there)}. Use the model of the interrupted run, "
            "with the same metrics, loss and optimizer, or another checkpoint directory"
        )
    for own, before in zip(now, replicas or (), strict=replicas is not None):
        if (count := len(own.parts)) != before:
            raise errors.CheckpointMismatchError(
                f"{own.name} has values of {count} replica(s) on this worker, but this "
                f"worker's part of the checkpoint has values of {before} replica(s). "
                "Use the strategy and the number of devices of the interrupted run, or "
                "another checkpoint directory."
            )
