"""Defines `Fit`, the interface to a running `model.fit` of Keras 3 or tf_keras.

The classes in `backends/` implement `Fit`, so other modules need not know which Keras
runs, on which backend. `fit/frame_lookup.py` finds the running fit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, ClassVar, Protocol

from tfpreempt.checkpoint.state.state import State
from tfpreempt.core import private_api

AUTOTUNE = -1
"""Number of batches to prefetch: the framework decides."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A third-party data loader with a position, as the training data of a fit.

    Attributes:
        open: function returning an iterator over the batches; called once for each
            iterator of the fit. `states.loaders.accessor_of` can read and set the
            iterator's position.
        taken: function returning the batches that Keras read from the loader before
            training.
        standardize: function that converts a batch of the loader in the same way as
            Keras' data adapter.
    """

    open: Callable[[], Any]
    taken: Callable[[], Sequence[Any]]
    standardize: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData:
    """A PyDataset or Sequence, as the training data of a fit.

    Attributes:
        data: the PyDataset or Sequence.
        shuffles: whether Keras shuffles the batches in every epoch.
        workers: number of threads or processes that read the data; 0: the thread that
            needs a batch reads the batch.
        has_processes: whether processes read the data.
        ahead: number of batches that the workers read ahead.
        repeats: whether an epoch has several passes over the data. Keras' own workers
            read such epochs.
    """

    data: Any
    shuffles: bool
    workers: int
    has_processes: bool
    ahead: int
    repeats: bool = False


class Pipelines(Protocol):
    """Functions for the datasets and iterators of a fit. A module for each framework
    implements the functions.

    A tracker, a class in `data/position.py`, is a way to save and restore the position
    in the data.
    """

    def is_seeded(self) -> bool:
        """Returns whether the program has set a global random seed."""

    def make_iterator(self, dataset: Any) -> Any:
        """Returns an iterator over a dataset of the fit. tfpreempt can set attributes
        of the iterator."""

    def read(self, iterator: Any) -> None:
        """Reads a batch of an iterator and drops the batch.

        Raises:
            StopIteration: the data have ended.
        """

    def choose(self, fit: Fit, dataset: Any, iterator: Any) -> tuple[Any, str | None]:
        """Returns the best tracker for the data position, and a warning or None.

        Args:
            fit: the fit.
            dataset: dataset of the fit.
            iterator: the first iterator used for training, before a read.
        """

    def way_of(self, fit: Fit, position: Any) -> tuple[Any, Any]:
        """Returns the tracker that restores a position, and the position to restore.

        The returned position differs from the given position only for arrays, if the
        fit was interrupted on the other backend of Keras 3, which draws the order of
        the samples in another way.

        Args:
            fit: the fit.
            position: the saved position.

        Returns:
            The class of the tracker: None for an unknown kind of position; the base
            class `Tracker` if the epoch begins as without a restart. And the position.
        """

    def order(self, fit: Fit, dataset: Any) -> dict[str, int]:
        """Returns fingerprints of the order of a dataset. The values of these
        fingerprints are the same in every epoch."""

    def draw_again(self, fit: Fit, data: Any, position: Any) -> None:
        """Draws the random seeds that the iterators of earlier epochs have drawn, so
        that the current iterator reads the batches again in the same order.

        Args:
            fit: the fit.
            data: the `CountedDataset` of the fit.
            position: the position to restore.
        """

    def has_global_batches(self, dataset: Any) -> bool:
        """Returns whether a position in the dataset can be given as a number of global
        batches, which stays valid if the number of workers changes."""

    def check_shares(self, fit: Fit, dataset: Any) -> None:
        """Checks that the replicas can divide a batch equally.

        Raises:
            ConfigurationError: the replicas cannot.
        """

    def validation_problem(self, data: Any) -> str | None:
        """Returns a warning if validation results may differ after a restart; else
        None."""

    def validation_caches(self, data: Any) -> list[str]:
        """Returns the paths of the file caches in the pipeline of validation data."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerVariable:
    """A variable with a value per worker: a variable of a metric or a seed generator.

    Attributes:
        name: name of the variable.
        kind: dtype and shape as text; equal on every worker.
        variable: the variable, possibly distributed.
        parts: the variables of which `variable` consists: a variable for each replica
            of this worker.
    """

    name: str
    kind: str
    variable: Any
    parts: tuple[Any, ...]


class HeldValues(Protocol):
    """The values that a fit's variables had on this worker at a call of `hold`."""

    def assigned(self) -> AbstractContextManager[None]:
        """Context manager: gives the variables the values, until the body ends.

        Afterwards the variables have their previous values again.
        """


class FitVariables(Protocol):
    """The variables of a fit, as a checkpoint. Use on the main thread only.

    Attributes:
        checkpoint: the checkpoint, as `handler.registration.register` takes it.
        states: registered States with values that the checkpoint does not contain.
    """

    checkpoint: Any
    states: Sequence[State] = ()

    def of_worker(self, *, is_attached: bool = False) -> list[WorkerVariable]:
        """Returns the variables whose number and kinds a restore compares first.

        Args:
            is_attached: whether `of_worker` was called before at this step.
        """

    def keys(self) -> Mapping[str, str]:
        """Returns the key of each variable in a commit, by a name of the variable that
        is equal on every backend of Keras 3.

        The caller has called `of_worker`.

        Returns:
            The keys, the same object until a key changes. Empty if the names are the
            keys, and for tf_keras.
        """
        return {}

    def assign_named(self, names: Sequence[str], arrays: Mapping[str, Any]) -> None:
        """Assigns arrays of a commit to the variables of a fit of Keras 3.

        Args:
            names: names of all variables in the commit, in order, as in `keys`.
            arrays: NumPy arrays by name.

        Raises:
            CheckpointMismatchError: the model has other variables; nothing was
                assigned.
        """
        return  # not called for tf_keras, which has no second backend

    def expect(self, names: Sequence[str]) -> None:
        """Passes the names under which the commit has the variables of `of_worker`.

        Called before the checkpoint is restored.

        Args:
            names: the saved names, in the order of `of_worker`.
        """
        return

    def sums(self, variables: Sequence[Any]) -> Sequence[float]:
        """Returns the sum of the elements of each floating-point variable. Computes on
        the device of the variable, and copies only the sums to the host.

        Reads only the elements on this worker, and needs no other worker.
        """

    def elements(self, variable: Any) -> Any:
        """Returns the elements of a variable as a one-dimensional NumPy array; only the
        elements on this worker, as for `sums`."""

    def hold(self) -> HeldValues:
        """Returns a copy of all values of this worker."""


class Fit(Protocol):
    """A running `model.fit`. Use on the main thread only.

    A "Keras line" is Keras 3 on a backend, or tf_keras. Methods that have a body here
    are optional for the implementations.

    Attributes:
        model: the model.
        optimizer: the model's optimizer at the start of the fit; None without an
            optimizer.
        frame: stack frame of the call of `fit`. None after the end of the fit; if an
            error ended the fit, the next fit sets None.
        line: Keras line, "keras", "keras on JAX" or "tf_keras".
        pipelines: functions for the datasets of the fit.
        loop: the local variable of `fit` that holds the data.
        adapter: Keras' own data adapter.
        callbacks: the CallbackList of the fit.
        arguments: arguments of `fit` by name, with the values at the start of training:
            x and y exclude the part used for validation.
        steps_per_execution: number of batches on which a full call of the train
            function trains, in this epoch.
        cuts_last_step: whether the last call of the train function in an epoch trains
            on fewer batches, if fewer batches remain.
        keeps_iterator: whether Keras reads several epochs from the same iterator.
        first_iterator: number of the iterator used first for training if the fit does
            not resume; the first iterator made has the number 1.
        sequence: the PyDataset or Sequence used for training; None for other data.
        loader: the loader used for training, if its position can be read; None for
            other data.
        validation_data: attribute of the model for the iterator over the validation
            data.
        validation_maker: function or class of Keras that makes this iterator: its
            module in `core/private_api.py`, and its name.
    """

    model: Any
    optimizer: Any
    frame: FrameType | None
    line: str
    pipelines: Pipelines
    loop: Any
    adapter: Any
    callbacks: Any
    arguments: Mapping[str, Any]
    steps_per_execution: int
    cuts_last_step: bool
    keeps_iterator: bool
    first_iterator: int
    sequence: SequenceData | None
    loader: Loader | None
    validation_data: ClassVar[str]
    validation_maker: ClassVar[tuple[str, str]]

    @property
    def steps(self) -> int | None:
        """Number of batches in an epoch; None while unknown."""

    @property
    def array_batch(self) -> int | None:
        """Returns the number of samples in a global batch, if the data are arrays.

        Returns:
            The number; None for other data.
        """

    @property
    def array_way(self) -> str | None:
        """The way to resume at a position in NumPy arrays or tensors.

        "iterator": restore the state of the iterator over the dataset that Keras makes
        from the arrays. "index": call `distribute_arrays`. "replay": read the trained
        batches again. None: the data are not arrays.
        """

    @property
    def sequence_length(self) -> int | None:
        """Current number of batches of the sequence; None if endless.

        A sequence may change its length during the fit.
        """

    def validation_calls(self) -> list[tuple[Any, str]]:
        """Returns owners and names of the functions that the next validation calls.

        The list begins with `evaluate` of the model. If the model has no iterator over
        the validation data yet, the function or class that makes the iterator comes
        next.
        """
        calls = [(self.model, "evaluate")]
        if getattr(self.model, self.validation_data, None) is None:
            module, name = self.validation_maker
            calls.append((getattr(private_api, module), name))
        return calls

    def settle(self) -> None:
        """Waits until the callbacks that Keras runs in the background have returned."""
        return

    def note_batches(self, note: Callable[[Any], None]) -> None:
        """Makes Keras' reader call a function with every batch of a Python generator.

        Args:
            note: function called with the batch, in the order of the batches, on a
                thread that reads ahead.
        """
        return

    def distribute(
        self, batches: Callable[[], Iterator[Any]], ahead: int = AUTOTUNE
    ) -> Any:
        """Returns a dataset of given batches, distributed in the same way as by `fit`.

        Args:
            batches: function returning an iterator over the batches.
            ahead: number of batches to prefetch; -1: the framework decides.
        """

    def distribute_arrays(self, batches: int) -> Any:
        """Returns the dataset that `fit` makes from arrays, without its first batches.

        The dataset is otherwise equal to the dataset made by `fit`.

        Args:
            batches: number of batches to skip.
        """
        # Called only if `array_way` is "index"; subclasses then override the method.
        return None

    def tensorflow_arrays(self) -> Any:
        """Returns, on JAX, the dataset that Keras makes from arrays on TensorFlow."""
        return None  # called only on JAX

    def loop_state(self) -> dict[str, Any]:
        """Returns facts about the data that the loop has found out, such as the number
        of batches, JSON-able."""

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        """Makes the fit begin at an epoch and a batch; called in `on_train_begin`.

        Args:
            epoch: number of the epoch, from 0.
            batch: number of trained batches of the epoch.
            loop_state: result of `loop_state` in the commit; empty without a commit.
        """

    def epoch_begins(self) -> None:
        """Prepares an epoch; called in `on_epoch_begin`, after the user's callbacks."""
        return

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        """Makes Keras end the current epoch without another step, with the given logs.

        Args:
            logs: logs of the epoch's last step, trained before the restart.

        Returns:
            Whether Keras can end an epoch without a step. If False, nothing has
            changed, and a step must return the logs.
        """

    def ends_epoch_as(self, logs: Mapping[str, Any]) -> None:
        """Makes Keras end the epoch with the given logs, not with the values of the
        metrics, which are not restored yet.

        Args:
            logs: logs of the epoch's last step.
        """

    def forget_answer(self) -> None:
        """Undoes Keras' count of a step: a call of the train function found no data,
        but returned saved logs."""
        return

    def ends(self) -> None:
        """Removes the changes that `start_at` made on the model; also after errors."""

    def traceable(self, function: Any, *, trains: bool | None) -> Any | None:
        """Returns the traceable function inside a train or test function, if there is
        one.

        Args:
            function: train or test function made by Keras or by the program.
            trains: whether steps follow in this fit; None if the function is traced
                already, so that its trace is only read.

        Returns:
            The `tf.function`, which takes an iterator; its trace makes the variables.
            None on JAX, where Keras makes all variables before training. None also if
            `build` must make the variables, for example because steps run eagerly.
        """

    def build(self, iterator: Any, train_function: Any) -> None:
        """Makes every variable that training uses, without tracing the train function.

        Args:
            iterator: iterator over the training data; not read.
            train_function: train function made by Keras.
        """

    def build_test(self, iterator: Any) -> None:
        """Makes variables that only test steps use, as in metrics; reads no data."""
        return

    # --- the backend -------------------------------------------------------------

    def replace_dataset(self, instead: Any) -> Any:
        """Makes the fit take its iterators from another dataset.

        Args:
            instead: the other dataset, an iterable.

        Returns:
            The dataset from which the fit took its iterators before.
        """

    def make_variables(self) -> FitVariables:
        """Returns the variables of the fit."""

    def runs_eagerly(self) -> bool:
        """Returns whether the Python code of a step runs in every step."""

    def batch_kinds(self, name: str, iterator: Any) -> Sequence[Any]:
        """Returns the kinds of batches in an iterator. The framework traces a function
        separately for each kind.

        Args:
            name: name of the function, "train" or "test".
            iterator: argument of the function.
        """
        # None for test_on_batch of Keras 3, which passes a plain generator.
        spec = getattr(iterator, "element_spec", None)
        return () if spec is None else (spec,)

    def as_step(self, name: str, function: Any) -> Callable[[Any], Any]:
        """Returns a train or test function of Keras as a function of an iterator.

        Args:
            name: "train" or "test".
            function: function made by Keras or by the program.
        """
        return function  # type: ignore[no-any-return]  # Keras is untyped

    def as_keras_calls(self, name: str, step: Callable[[Any], Any]) -> Any:
        """Returns a function of an iterator in the form in which Keras calls it.

        The inverse of `as_step`.

        Args:
            name: "train" or "test".
            step: function called with the iterator; returns the logs.
        """
        return step

    def sync(self) -> None:
        """Gives the variables of the model the current values.

        During an epoch Keras on JAX keeps the values outside of the variables. Called
        before the variables are read or assigned.
        """
        return


def instead_once(
    owner: Any, name: str, instead: Callable[..., Any]
) -> Callable[[], None]:
    """Replaces a method of an object, or a function of a module, for a single call. The
    call restores the original first.

    Args:
        owner: object or module with the function.
        name: name of the function.
        instead: the replacement; may call the original function.

    Returns:
        A function that restores the original if `instead` was not called yet.
    """
    is_own, own = name in vars(owner), getattr(owner, name, None)

    def called(*args: Any, **kwargs: Any) -> Any:
        take_back()
        return instead(*args, **kwargs)

    def take_back() -> None:
        if vars(owner).get(name) is not called:
            return
        if is_own:
            setattr(owner, name, own)
        else:
            # Then the lookup finds the function of the class again.
            delattr(owner, name)

    setattr(owner, name, called)
    return take_back


def after_each(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Wraps a method, so that `then` is called after every call of the method, until
    `uncover`.

    Args:
        owner: object with the method.
        name: name of the method.
        then: function that gets the name, the result and the arguments of the method,
            and returns the result for the caller of the method.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return then(name, method(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, called)


def uncover(owner: Any, name: str) -> None:
    """Removes the wrapper of `after_each`."""
    owner.__dict__.pop(name, None)
