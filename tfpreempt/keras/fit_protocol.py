"""Defines `Fit`, the interface to a running `model.fit` of Keras 3 or tf_keras.

The classes in `backends/` implement `Fit`, so other modules need not know which Keras
runs, on which backend. `fit/frame_lookup.py` finds the running fit.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

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
        standardize: function that converts a batch in the same way as Keras.
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
        workers: number of threads that read the data.
    """

    data: Any
    shuffles: bool
    workers: int


class Pipelines(Protocol):
    """Functions for the datasets and iterators of a fit; one module per framework.

    A "tracker" is a class of `data/position.py`.
    """

    def is_seeded(self) -> bool:
        """Returns whether the program has set a global random seed."""

    def make_iterator(self, dataset: Any) -> Any:
        """Returns an iterator over a dataset of the fit; attributes can be set."""

    def read(self, iterator: Any) -> None:
        """Reads a batch of an iterator and drops the batch.

        Raises:
            StopIteration: the data have ended.
        """

    def choose(self, fit: Fit, dataset: Any, iterator: Any) -> tuple[Any, str | None]:
        """Returns the best tracker for a dataset, and a warning or None.

        Args:
            fit: the fit.
            dataset: dataset of the fit.
            iterator: the first iterator used for training, before a read.
        """

    def way_of(self, kind: str) -> Any:
        """Returns the tracker for a kind of position; None for an unknown kind."""

    def order(self, fit: Fit, dataset: Any) -> dict[str, int]:
        """Returns fingerprints of a dataset's order that are equal in every epoch."""

    def draw_again(self, fit: Fit, data: Any, position: Any) -> None:
        """Draws again what earlier iterators drew, before batches are read again.

        Args:
            fit: the fit.
            data: the `CountedDataset` of the fit.
            position: the position to restore.
        """

    def has_global_batches(self, dataset: Any) -> bool:
        """Returns whether a count of global batches is a position in the dataset."""

    def check_shares(self, fit: Fit, dataset: Any) -> None:
        """Checks that the replicas can divide a batch equally.

        Raises:
            ConfigurationError: the replicas cannot.
        """

    def validation_problem(self, data: Any) -> str | None:
        """Returns a warning if a restart may validate with other results, or None."""

    def validation_caches(self, data: Any) -> list[str]:
        """Returns the paths of the cache files that validation data are read from."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerVariable:
    """A variable with a value per worker: a variable of a metric or a seed generator.

    Attributes:
        name: name of the variable.
        kind: dtype and shape; equal on every worker.
        variable: the variable, possibly distributed.
        parts: the variables on the single replicas of this worker, of which `variable`
            consists.
    """

    name: str
    kind: str
    variable: Any
    parts: tuple[Any, ...]


class HeldValues(Protocol):
    """The values of a fit's variables on this worker, at an earlier moment."""

    def assigned(self) -> AbstractContextManager[None]:
        """Context manager: gives the variables the values, until the body ends.

        Afterwards the variables have their previous values again.
        """


class FitVariables(Protocol):
    """The variables of a fit, as a checkpoint. Use on the main thread only.

    Attributes:
        checkpoint: the checkpoint, as `handler.registration.register` takes it.
    """

    checkpoint: Any

    def of_worker(self, *, is_attached: bool = False) -> list[WorkerVariable]:
        """Returns the variables whose number and kinds a restore compares first.

        Args:
            is_attached: whether `of_worker` was called before at this step.
        """

    def expect(self, names: Sequence[str]) -> None:
        """Tells under which names a commit has the variables of `of_worker`.

        Called before the checkpoint is restored.
        """

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
        steps_per_execution: number of batches that one full call of the train function
            trains on in this epoch.
        cuts_last_step: whether the last step of an epoch trains on fewer batches if
            fewer remain.
        keeps_iterator: whether the same iterator serves several epochs.
        first_iterator: number of the iterator used first for training if the fit does
            not resume; the first iterator made has the number 1.
        sequence: the PyDataset or Sequence used for training; None for other data.
        loader: the loader used for training, if its position can be read; None for
            other data.
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
        """How to resume in NumPy arrays or tensors, from which Keras makes a dataset.

        "iterator": restore the state of the iterator. "index": call
        `distribute_arrays`. "replay": read the batches again. None: the data are not
        arrays.
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

    def settle(self) -> None:
        """Waits until the callbacks that Keras runs in the background have returned."""
        return

    def shuffle_state(self) -> Any:
        """Returns the random state that Keras will use to shuffle the sequence next.

        Returns:
            A state of Python's global generator, or an int that seeds a new generator.
        """
        return random.getstate()

    def note_order(self, note: Callable[[int], None]) -> None:
        """Calls a function with every index into the sequence requested by Keras.

        Args:
            note: called in the order of the batches, in a thread that reads ahead.
        """
        return

    def note_batches(self, note: Callable[[Any], None]) -> None:
        """Calls a function with every batch of a Python generator.

        Args:
            note: called in the order of the batches, in a thread that reads ahead.
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

    def read_one_pass(self) -> Any:
        """Returns a dataset of one pass over the sequence, read by Keras' threads.

        Returns None if Keras reads without reader threads or processes. Keras' own
        readers cannot be used, because they do not stop after a pass: those of Keras 3
        draw an order when an epoch begins, before a restart has restored the state, and
        those of tf_keras begin another pass by themselves.
        """
        return None

    def distribute_arrays(self, batches: int) -> Any:
        """Returns the dataset that `fit` makes from arrays, without its first batches.

        The dataset is otherwise equal to the dataset made by `fit`.

        Args:
            batches: number of batches to skip.
        """
        return None  # reached only if `array_way` is "index"

    def loop_state(self) -> dict[str, Any]:
        """Returns what the loop knows about the data, such as the length, as JSON."""

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
        """Makes Keras end the epoch with the given logs, not with the metrics.

        Args:
            logs: logs of the epoch's last step, whose metrics are not restored yet.
        """

    def forget_answer(self) -> None:
        """Takes back the step that Keras counted for a call that found no data."""
        return

    def ends(self) -> None:
        """Removes the changes that `start_at` made on the model; also after errors."""

    def traceable(self, train_function: Any, *, trains: bool) -> Any | None:
        """Returns the traceable function inside a train function, if there is one.

        Args:
            train_function: train function made by Keras or by the program.
            trains: whether steps follow in this fit.

        Returns:
            The `tf.function`, which takes an iterator; tracing it makes the variables.
            None on JAX, where Keras makes all variables before training.
            None if `build` must make the variables, for example because steps run
            eagerly.
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
        """Returns the kinds of batches for which a function is traced separately.

        Args:
            name: "train" or "test".
            iterator: argument of the function.
        """
        del name
        # None for test_on_batch of Keras 3, which passes a plain generator.
        spec = getattr(iterator, "element_spec", None)
        return () if spec is None else (spec,)

    def as_step(self, name: str, function: Any) -> Callable[[Any], Any]:
        """Returns a train or test function of Keras as a function of an iterator.

        Args:
            name: "train" or "test".
            function: function made by Keras or by the program.
        """
        del name
        return function  # type: ignore[no-any-return]  # Keras is untyped

    def as_keras_calls(self, name: str, step: Callable[[Any], Any]) -> Any:
        """Returns a function of an iterator in the form in which Keras calls it.

        The inverse of `as_step`.

        Args:
            name: "train" or "test".
            step: function called with the iterator; returns the logs.
        """
        del name
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
    """Replaces a method or a module's function until the first call of the replacement.

    Args:
        owner: object or module with the function.
        name: name of the function.
        instead: function called instead; it may call the original function.

    Returns:
        A function that restores the original; without effect if `instead` was called.
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
    """Wraps a method, so that a function is called after every call, until `uncover`.

    Args:
        owner: object with the method.
        name: name of the method.
        then: function that gets the name, the method's result and the arguments, and
            returns the result for the caller.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return then(name, method(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, called)


def uncover(owner: Any, name: str) -> None:
    """Removes the wrapper of `after_each`."""
    owner.__dict__.pop(name, None)
