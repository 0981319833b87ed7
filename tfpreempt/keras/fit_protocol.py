"""Defines `Fit`, a running `model.fit` of either Keras line.

Every difference between Keras 3 and tf_keras is behind `Fit`. `fit/keras3.py` and
`fit/tf_keras.py` implement the protocol. `fit/frame_lookup.py` finds the running fit.
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
        open: returns the iterator over the batches, once for each iterator of the fit;
            `states.loaders.accessor_of` supports the iterator.
        taken: returns the batches that Keras took from the loader before training.
        standardize: converts a batch in the same way as Keras.
    """

    open: Callable[[], Any]
    taken: Callable[[], Sequence[Any]]
    standardize: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData:
    """A PyDataset or Sequence, as the training data of a fit.

    Attributes:
        data: the PyDataset or Sequence.
        shuffles: whether Keras shuffles the batches in each epoch.
        workers: number of threads that read the data.
    """

    data: Any
    shuffles: bool
    workers: int


class Fit(Protocol):
    """A running fit. Main thread only.

    Methods with a body here are optional: a Keras line without a need for the method
    omits the method.

    Attributes:
        model: the model.
        optimizer: the model's optimizer at the start of the fit; None without an
            optimizer.
        frame: stack frame of the call of `fit`. None after the end of the fit; the next
            fit sets None for a fit that an error ended.
        line: Keras line, "keras" or "tf_keras".
        loop: the local variable of `fit` that holds the data.
        dataset_name: name of the attribute of `loop` with the dataset from which `loop`
            makes iterators.
        adapter: Keras' own data adapter.
        callbacks: the CallbackList of the fit.
        arguments: arguments of `fit` by name, with the values at the start of training:
            x and y exclude the part used for validation.
        steps_per_execution: number of batches that a full call of the train function
            trains in this epoch.
        cuts_last_step: whether the last step of an epoch trains on fewer batches if
            fewer remain.
        keeps_iterator: whether the same iterator serves several epochs.
        first_iterator: number, from 1, of the iterator used first for training by a fit
            that does not resume.
        sequence: the PyDataset or Sequence used for training; None for other data.
        loader: the loader used for training, if its position is readable; None for
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
        """Returns the number of batches in an epoch; None while unknown."""

    @property
    def array_batch(self) -> int | None:
        """Returns the number of samples in a global batch, if the data are arrays.

        Returns:
            The number; None for other data.
        """

    @property
    def array_way(self) -> str | None:
        """Returns how to resume in arrays, from which Keras itself makes a dataset.

        "iterator" restores the iterator's state, "index" calls `distribute_arrays`, and
        "replay" reads the batches again. None: other data than arrays.
        """

    @property
    def sequence_length(self) -> int | None:
        """Returns the current number of batches of the sequence; None if endless.

        The sequence may change the number.
        """

    def validation_calls(self) -> list[tuple[Any, str]]:
        """Returns owners and names of the functions that the next validation calls.

        The first is `evaluate` of the model. If the model has no iterator over the
        validation data yet, the function or class that makes the iterator follows.
        """

    def settle(self) -> None:
        """Waits until the callbacks that Keras runs in the background have returned."""
        return

    def shuffle_state(self) -> Any:
        """Returns the state from which Keras shuffles the next pass over the sequence.

        Returns:
            A state of Python's global generator, or an int that seeds a new generator.
        """
        return random.getstate()

    def note_order(self, note: Callable[[int], None]) -> None:
        """Calls a function with each index into the sequence requested by Keras.

        Args:
            note: called in the order of the batches, in a thread that reads ahead.
        """
        return

    def note_batches(self, note: Callable[[Any], None]) -> None:
        """Calls a function with each batch of a Python generator.

        Args:
            note: called in the order of the batches, in a thread that reads ahead.
        """
        return

    def distribute(
        self, batches: Callable[[], Iterator[Any]], ahead: int = tf.data.AUTOTUNE
    ) -> Any:
        """Returns a dataset of a sequence's or loader's batches, as `fit` makes it.

        Args:
            batches: function that returns an iterator over the batches.
            ahead: number of batches to prefetch.
        """

    def read_one_pass(self) -> Any:
        """Returns a dataset of one pass over the sequence, read by Keras' workers.

        Returns None if Keras reads without workers. The readers of Keras are bound to
        epochs. The readers draw an order when an epoch begins, before the state of a
        restart is restored (Keras 3), or begin another pass on their own (tf_keras).
        """
        return None

    def distribute_arrays(self, batches: int) -> Any:
        """Returns the dataset of the arrays without the first batches.

        The dataset is otherwise equal to the dataset made by `fit`.

        Args:
            batches: number of batches to skip.
        """
        return None  # reached only if `array_way` is "index"

    def loop_state(self) -> dict[str, Any]:
        """Returns the facts about the data collected by the loop, as JSON values."""

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        """Makes the fit begin at an epoch and a batch; called in `on_train_begin`.

        Args:
            epoch: number of the epoch, from 0.
            batch: number of batches of the epoch that are trained already.
            loop_state: result of `loop_state` in the commit; empty without a commit.
        """

    def epoch_begins(self) -> None:
        """Prepares an epoch, in `on_epoch_begin` after the hooks of other callbacks."""
        return

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        """Makes Keras end an epoch without another step, with earlier logs.

        Args:
            logs: logs of the steps of the epoch, returned before the restart.

        Returns:
            Whether Keras can end the epoch without a step; if False, a step must return
            the logs.
        """

    def ends_epoch_as(self, logs: Mapping[str, Any]) -> None:
        """Makes Keras end the epoch with given logs, without reading the metrics.

        Args:
            logs: logs of the epoch's last step, whose metrics are not restored yet.
        """

    def forget_answer(self) -> None:
        """Corrects the count of steps after a call past the end of the data."""
        return

    def ends(self) -> None:
        """Removes the changes made on the model by `start_at`; also after a failure."""

    def traceable(self, train_function: Any, *, trains: bool) -> Any | None:
        """Returns TensorFlow's function inside a train function, if it can be traced.

        Args:
            train_function: train function made by Keras or by the program.
            trains: whether steps follow in this fit.

        Returns:
            The function that is traced for an iterator; the trace makes the variables.
            None if `build` makes the variables instead, as for steps that run eagerly.
        """

    def build(self, iterator: Any, train_function: Any) -> None:
        """Makes every variable that training uses, without a trace for the steps.

        Args:
            iterator: iterator over the training data; not read.
            train_function: train function made by Keras.
        """

    def trace(self, step: Any, iterator: Any) -> None:
        """Traces a step of one batch to make the step's variables; reads no data."""

        def traced(data: Any) -> Any:
            return self.model.distribute_strategy.run(step, args=(data,))

        tf.function(traced).get_concrete_function(iterator.element_spec)

    def build_test(self, iterator: Any) -> None:
        """Makes the variables used only in test steps, as of metrics; reads no data."""
        try:
            self.trace(self.model.test_step, iterator)
        except Exception as error:  # noqa: BLE001 - what is missing will be named
            log.debug("the test step cannot be traced: %s", error)


def instead_once(
    owner: Any, name: str, instead: Callable[..., Any]
) -> Callable[[], None]:
    """Replaces a method or a module's function until the first call of the replacement.

    Args:
        owner: object or module with the function.
        name: name of the function.
        instead: called instead of the function, and may call the function.

    Returns:
        A function that removes the replacement; without effect after the first call.
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
            delattr(owner, name)  # uncovers the function of the class

    setattr(owner, name, called)
    return take_back


def after_each(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Calls a function after each call of a method, until `uncover`.

    Args:
        owner: object with the method.
        name: name of the method.
        then: called with the name, the result and the arguments; returns the result for
            the caller.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return then(name, method(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, called)


def uncover(owner: Any, name: str) -> None:
    """Removes the wrapper of `after_each`."""
    owner.__dict__.pop(name, None)
