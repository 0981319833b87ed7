"""Defines `Fit`, the interface to a running `model.fit` of Keras 3 or tf_keras.

`fit/keras3.py` and `fit/tf_keras.py` implement `Fit`, so other modules need not know
which Keras runs. `fit/frame_lookup.py` finds the running fit.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import tensorflow as tf

log = logging.getLogger(__name__)


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


class Fit(Protocol):
    """A running `model.fit`. Use on the main thread only.

    A "Keras line" is Keras 3 or tf_keras. Methods that have a body here are optional
    for the implementations.

    Attributes:
        model: the model.
        optimizer: the model's optimizer at the start of the fit; None without an
            optimizer.
        frame: stack frame of the call of `fit`. None after the end of the fit; if an
            error ended the fit, the next fit sets None.
        line: Keras line, "keras" or "tf_keras".
        loop: the local variable of `fit` that holds the data.
        dataset_name: name of the attribute of `loop` that holds the dataset; `loop`
            makes its iterators from this dataset.
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
    loop: Any
    dataset_name: str
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
        self, batches: Callable[[], Iterator[Any]], ahead: int = tf.data.AUTOTUNE
    ) -> Any:
        """Returns a dataset of given batches, distributed in the same way as by `fit`.

        Args:
            batches: function returning an iterator over the batches.
            ahead: number of batches to prefetch.
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
        """Returns the `tf.function` inside a train function, if it can be traced.

        Args:
            train_function: train function made by Keras or by the program.
            trains: whether steps follow in this fit.

        Returns:
            The `tf.function`, which takes an iterator; tracing it makes the variables.
            None if `build` must make the variables, for example because steps run
            eagerly.
        """

    def build(self, iterator: Any, train_function: Any) -> None:
        """Makes every variable that training uses, without tracing the train function.

        Args:
            iterator: iterator over the training data; not read.
            train_function: train function made by Keras.
        """

    def trace(self, step: Any, iterator: Any) -> None:
        """Makes the variables of a step by tracing it for one batch; reads no data."""

        def traced(data: Any) -> Any:
            return self.model.distribute_strategy.run(step, args=(data,))

        tf.function(traced).get_concrete_function(iterator.element_spec)

    def build_test(self, iterator: Any) -> None:
        """Makes variables that only test steps use, as in metrics; reads no data."""
        try:
            self.trace(self.model.test_step, iterator)
        except Exception as error:  # noqa: BLE001 - the restore names missing variables
            log.debug("the test step cannot be traced: %s", error)


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
