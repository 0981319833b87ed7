"""A running `model.fit` of either Keras line, as this room sees it.

Everything that differs between Keras 3 and tf_keras is behind `Fit`; `fit/keras3.py`
and `fit/tf_keras.py` implement it, and `fit/lookup.py` finds the one that runs.
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
    """A loader of other people that a fit trains on, and that knows its place.

    Attributes:
        open: gives the iterator that its batches are read from, for each iterator of
            the fit; `states.loaders.place_of` knows it.
        taken: gives the batches that Keras has taken of it before training.
        standardize: makes of a batch what Keras makes of it.
    """

    open: Callable[[], Any]
    taken: Callable[[], Sequence[Any]]
    standardize: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData:
    """A PyDataset or Sequence that a fit trains on.

    Attributes:
        data: the PyDataset or Sequence.
        shuffles: whether Keras shuffles its batches in each epoch.
        workers: threads that read it.
    """

    data: Any
    shuffles: bool
    workers: int


class Fit(Protocol):
    """One running fit. Main thread.

    What a line has nothing to do for it leaves out.

    Attributes:
        model: the model.
        optimizer: its optimizer when the fit begins; None without one.
        frame: of the call of `fit`; None when it came to its end, or was given up
            after an error: where the next fit begins.
        line: "keras" or "tf_keras".
        loop: the local variable of `fit` that holds its data.
        dataset_name: its attribute with the dataset that it makes its iterators of.
        adapter: Keras' own data adapter.
        callbacks: the CallbackList.
        arguments: the arguments of `fit` by name, as they are when training begins: x
            and y are without the part that validates.
        steps_per_execution: batches that a whole call of the train function trains in
            this epoch.
        cuts_last_step: whether the last step of an epoch trains on fewer batches, where
            fewer are left.
        keeps_iterator: whether one iterator serves several epochs.
        first_iterator: the number, from 1, of the iterator that a fresh fit trains with
            first.
        sequence: the PyDataset or Sequence that is trained on; None for other data.
        loader: that is trained on, if its place can be had; None for other data.
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
        """Batches in an epoch; None while unknown."""

    @property
    def array_batch(self) -> int | None:
        """Samples in a global batch of arrays; None: other data."""

    @property
    def array_way(self) -> str | None:
        """How to go on in arrays, which Keras itself makes a dataset of.

        "iterator": by the iterator's state; "index": by `distribute_arrays`; "replay":
        by reading again. None: other data.
        """

    @property
    def sequence_length(self) -> int | None:
        """Batches of the sequence, which may change it; None for ever."""

    def validation_calls(self) -> list[tuple[Any, str]]:
        """Returns owners and names of the functions that the next validation calls.

        They are `evaluate` of the model, and where the model has no iterator over the
        validation data yet, the function or class that makes the iterator.
        """

    def settle(self) -> None:
        """Waits until callbacks that Keras runs in the background are through."""
        return

    def shuffle_state(self) -> Any:
        """Returns the state from which Keras shuffles the next pass over the sequence.

        Returns:
            A state of Python's global generator, or an int that seeds a new one.
        """
        return random.getstate()

    def note_order(self, note: Callable[[int], None]) -> None:
        """Calls a function with each index into the sequence that Keras asks for.

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
        """A dataset of batches like those of a sequence or loader, as `fit` makes it.

        Args:
            batches: gives them.
            ahead: as many are read ahead.
        """

    def read_one_pass(self) -> Any:
        """Returns a dataset of one pass over the sequence, read by Keras' workers.

        None where Keras reads without workers. The readers of Keras are bound to
        epochs: they draw an order when an epoch begins, before the state of a restart
        is restored (Keras 3), or begin another pass on their own (tf_keras).
        """
        return None

    def distribute_arrays(self, batches: int) -> Any:
        """The dataset of arrays without its first batches, as `fit` would make it."""
        return None  # where `array_way` is "index" only

    def loop_state(self) -> dict[str, Any]:
        """What the loop has learned of its data; JSON."""

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        """Makes the fit begin there; called in `on_train_begin`."""

    def epoch_begins(self) -> None:
        """Called in `on_epoch_begin`, after all other callbacks."""
        return

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        """No step is left in an epoch whose steps returned these logs.

        Returns:
            Whether Keras can end the epoch so; otherwise a step must return them.
        """

    def ends_epoch_as(self, logs: Mapping[str, Any]) -> None:
        """The epoch's last step returns these logs, and its metrics are not known."""

    def forget_answer(self) -> None:
        """A step beyond the data was answered, and must not count as one of theirs."""
        return

    def ends(self) -> None:
        """Takes back what `start_at` left on the model; also after a failure."""

    def traceable(self, train_function: Any, *, trains: bool) -> Any | None:
        """Returns TensorFlow's function in a train function, to make the variables by.

        Args:
            train_function: made by Keras, or by the program.
            trains: whether steps follow in this fit.

        Returns:
            The function that is traced for an iterator; None where `build` makes the
            variables, such as for steps that run eagerly.
        """

    def build(self, iterator: Any, train_function: Any) -> None:
        """Makes every variable that training uses, without a trace for the steps.

        Args:
            iterator: of the training data; is not read.
            train_function: made by Keras.
        """

    def trace(self, step: Any, iterator: Any) -> None:
        """Makes what a step of one batch makes; reads no data."""

        def traced(data: Any) -> Any:
            return self.model.distribute_strategy.run(step, args=(data,))

        tf.function(traced).get_concrete_function(iterator.element_spec)

    def build_test(self, iterator: Any) -> None:
        """Makes what only a test step makes, such as metrics; reads no data."""
        try:
            self.trace(self.model.test_step, iterator)
        except Exception as error:  # noqa: BLE001 - what is missing will be named
            log.info("tfpreempt: the test step cannot be traced: %s", error)


def instead_once(
    owner: Any, name: str, instead: Callable[..., Any]
) -> Callable[[], None]:
    """Puts a function in place of a method or a module's function, until it is called.

    Args:
        owner: object or module that has the function.
        name: of the function.
        instead: is called in its place, when it may call the function again.

    Returns:
        A function that takes the replacement back; without effect after the call.
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
            delattr(owner, name)  # uncovers the class's own

    setattr(owner, name, called)
    return take_back


def after_each(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Calls a function after each call of a method, until `uncover`.

    Args:
        owner: whose method it is.
        name: of the method.
        then: is called with the name, the result and the arguments; returns the
            result.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return then(name, method(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, called)


def uncover(owner: Any, name: str) -> None:
    """Takes back `after_each`."""
    owner.__dict__.pop(name, None)
