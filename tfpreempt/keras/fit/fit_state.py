"""What a commit holds of a running fit besides the Checkpoint: taken, and put back.

Everything is taken and put back at the same points of the program, so that what Keras
and other callbacks did on the way there is undone:

- before a train step (`TrainFunctionWrapper`), where a commit usually happens;
- at the beginning of a validation, which a restart repeats from there, because notices
  must be served while it runs;
- at the end, after every other callback's `on_train_end`.

Weights and the optimizer are in the tf.train.Checkpoint; metrics and seed generators
are in each worker's part of the commit, as for every loop (`per_replica.py` of
checkpoint/). Their kinds are compared here, before any variable is assigned. A
validation may change any variable, and is repeated: `Moment` holds their values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from typing import IO, Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.random_state import GlobalRngState
from tfpreempt.checkpoint.tensors.variables import (
    Attached,
    attach,
    attached,
    local_parts,
)
from tfpreempt.handler.run import Run
from tfpreempt.keras.callbacks import callback_state
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.data.training_data import TrainingData
from tfpreempt.keras.fit.fit_progress import Progress, check_same, made_of
from tfpreempt.keras.fit.held_values import HeldValues
from tfpreempt.keras.fit.python_attributes import Attributes
from tfpreempt.keras.fit_protocol import Fit
from tfpreempt.keras.fit_record import EncodedValue, FitRecord

Taken = dict[str, EncodedValue]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerVariable:
    """A variable that is each worker's own: a metric's, or a seed generator's.

    Attributes:
        name: its name.
        kind: dtype and shape; equal on all workers.
        variable: which may be distributed.
        parts: its values on this worker's replicas.
    """

    name: str
    kind: str
    variable: Any
    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a fit, held for a save that is made later.

    Attributes:
        shared: see `FitState.take_shared`.
        own: see `FitState.take_own`.
        variables: the values of all variables on this worker.
        files: texts of log files, once a callback may write to them; None before.
    """

    shared: Taken
    own: Taken
    variables: HeldValues
    files: EncodedValue | None = None


class WorkerRecord(FitRecord):
    """What is each worker's own; or what it goes on with of another number of workers.

    Attributes:
        part: index and number of workers, if those that saved were more or fewer.
        randoms: random generators of all that saved, then.
    """

    part: tuple[int, int] | None = None
    randoms: Sequence[bytes | None] = ()

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """A new worker has what the chief had, but no files. The place in the data is
        the chief's if it is that in global batches, else there is none. Random
        generators are dealt (see `GlobalRngState`).
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
    """See above. Main thread.

    Args:
        fit: the fit.
        callbacks: the other ones.
        data: its data.
        take_shared: what a save writes for all workers.
        take_own: what it writes for this one.

    Attributes:
        attributes: what the model keeps in Python.
        checkpoint: what a save writes besides, and stock TensorFlow restores: weights
            and optimizer.
        shared: what all workers have in common; the chief's is saved.
        own: what is this worker's; nothing is loaded where the commit has no part of
            it.
        has_own_arrays: whether the training arrays of this worker are those of the run.
        varies: whether the training arrays differed between starts.
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
        self.has_own_arrays = False
        self.varies = False
        self.attributes = Attributes(fit.model)
        self.shared = FitRecord("tfpreempt.keras", take_shared)
        self.own = WorkerRecord("tfpreempt.keras.worker", take_own, per_worker=True)
        tracked = {"model": fit.model, "optimizer": fit.optimizer}
        self.checkpoint = tf.train.Checkpoint(
            **{name: each for name, each in tracked.items() if each is not None}
        )

    def close(self) -> None:
        """Nothing is saved any more."""
        self.shared.unregister()
        self.own.unregister()

    def made_of(self, *, is_built: bool) -> dict[str, Any]:
        """Returns `Progress.made_of` as it is now.

        A program may change its arrays in place while it trains, so that a restart from
        this state needs the changed values.

        Args:
            is_built: whether the optimizer has made its variables.
        """
        found = made_of(
            self._fit, is_built=is_built, compares_values=self.has_own_arrays
        )
        return found | ({"varies": True} if self.varies else {})

    # --- what a save takes -----------------------------------------------------------

    def take_shared(self, reached: Progress) -> Taken:
        """What all workers have in common; after `attach`, which a save calls first."""
        self._fit.settle()
        now = of_worker(self._fit.model, attached(self.checkpoint))
        return {
            "progress": EncodedValue.of(dataclasses.asdict(reached)),
            "variables": EncodedValue.of([(own.name, own.kind) for own in now]),
            "callbacks": callback_state.capture(self._callbacks, leaves_out=True),
        }

    def take_own(self) -> Taken:
        """What is this worker's, besides its files and its place in the data.

        After `attach`, which a save calls first.
        """
        random = io.BytesIO()
        self._random.save(random)
        now = of_worker(self._fit.model, attached(self.checkpoint))
        return {
            "random": EncodedValue.of(random.getvalue().decode()),
            "attributes": self.attributes.capture(),
            "replicas": EncodedValue.of([len(own.parts) for own in now]),
        }

    def hold(self, reached: Progress) -> Moment:
        """Holds this moment for a save that is made later."""
        self._fit.settle()
        untracked = attach(self.checkpoint)
        return Moment(
            shared=self.take_shared(reached),
            own=self.take_own(),
            variables=HeldValues(self.checkpoint, untracked),
        )

    # --- before the first step -------------------------------------------------------

    def build(
        self, iterator: Any, train_function: Any, *, restores: bool, trains: bool = True
    ) -> None:
        """Makes all variables, by the trace of the train function if that is possible.

        So a restart traces the train function once, as a new run does.

        Args:
            iterator: of the training data; is not read.
            train_function: Keras' own.
            restores: whether the variables are those of the commit.
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
        """The Checkpoint, this worker's own, and what the other callbacks remember.

        Args:
            run: restores the Checkpoint.
            progress: how far the fit was.
            extends: epochs are added to a fit that was complete.

        Raises:
            CheckpointMismatchError: another model's; nothing was assigned.
        """
        shared, own = self.shared.loaded, self.own.loaded
        assert shared is not None
        directory = run.directory.path
        check_same(progress, made_of(self._fit, is_built=True), directory)
        saved = shared["variables"].value()
        now = of_worker(self._fit.model, attach(self.checkpoint))
        metrics = sum(len(metric.variables) for metric in self._fit.model.metrics)
        if metrics < progress.metrics or len(now) < len(saved):
            # The others were made by a validation.
            # A variable is made by all workers at once: all see what they share.
            self._fit.build_test(self._data.any_iterator())
            now = of_worker(self._fit.model, attach(self.checkpoint))
        replicas = None  # any number resumes from a position in global batches
        if own is not None:
            position = Position.parse(own["position"].value())
            if position is None or not position.is_shared:
                replicas = own["replicas"].value()
        check(saved, now, replicas)
        run.restore(named_states=False)
        if own is not None:
            self.attributes.restore(own["attributes"])
        self._fit.settle()
        callback_state.restore(self._callbacks, shared["callbacks"], extends=extends)
        if own is not None:
            callback_state.restore_files(self._callbacks, own["files"], extends=extends)

    def restore_random(self) -> None:
        """The random generators of this process."""
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


def of_worker(model: Any, untracked: Attached) -> list[WorkerVariable]:
    """Metrics and seed generators, in a fixed order.

    Args:
        model: all of its metrics are made.
        untracked: the objects that the fit's Checkpoint does not track.
    """
    metrics = [
        # Not by getattr with a default: a variable that is synchronized when it is
        # read reduces itself over all workers to look for an attribute it lacks.
        (variable.path if "path" in dir(type(variable)) else variable.name, variable)
        for metric in model.metrics
        for variable in metric.variables
    ]
    seen: set[int] = set()
    found = []
    for name, variable in [*metrics, *untracked.own]:
        parts = local_parts(variable)
        here = set(map(id, parts))
        if here and not here & seen:
            seen |= here
            shape = parts[0].shape.as_list()
            kind = f"{tf.as_dtype(variable.dtype).name}{shape or ''}"
            found.append(
                WorkerVariable(name=name, kind=kind, variable=variable, parts=parts)
            )
    return found


def check(
    saved: Sequence[tuple[str, str]],
    now: Sequence[WorkerVariable],
    replicas: Sequence[int] | None,
) -> None:
    """Compares variables with those of a checkpoint.

    Args:
        saved: name and kind; a name may change until all variables are made.
        now: those of the model.
        replicas: how many of this worker had a value of each; None: not known.

    Raises:
        CheckpointMismatchError: it is of others, or this worker trained on more
            devices, or fewer.
    """
    if [kind for _, kind in saved] != [own.kind for own in now]:
        here = ", ".join(f"{own.name} {own.kind}" for own in now)
        raise errors.CheckpointMismatchError(
            "The metrics, seed generators or optimizer variables are others than in "
            f"the checkpoint. In the model: {here}. In the "
            f"checkpoint: {', '.join(map(' '.join, saved))}. Compile the model as the "
            "interrupted run did (metrics, loss, optimizer), or use another "
            "checkpoint directory."
        )
    for own, before in zip(now, replicas or (), strict=replicas is not None):
        if (count := len(own.parts)) != before:
            raise errors.CheckpointMismatchError(
                f"{own.name} has values of {count} replica(s) on this worker, and of "
                f"{before} in its part of the checkpoint. Train under the same "
                "strategy, on as many devices as the interrupted run, or use another "
                "checkpoint directory."
            )
