"""`model.fit` of Keras 3: the part that does not depend on the backend.

`fit` makes an `EpochIterator`. The method `_enumerate_iterator` of the EpochIterator
yields the steps of an epoch, and makes the data iterators. To resume, tfpreempt sets
`model._initial_epoch` to the first epoch. `fit` never clears the attribute, so
tfpreempt clears the attribute for the next fit.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from tfpreempt.keras.data.sequence import generators, set_generators
from tfpreempt.keras.fit_protocol import Fit, Loader, SequenceData, instead_once


class Keras3Fit(Fit):
    """Implements `fit_protocol.Fit` for Keras 3, with a subclass for each backend.

    Args:
        model: the model.
        frame: stack frame of the model's `fit`.
    """

    line = "keras"
    cuts_last_step = False
    first_iterator = 1
    validation_data = "_eval_epoch_iterator"

    def __init__(self, model: Any, frame: FrameType) -> None:
        self.arguments = dict(frame.f_locals)
        self.model, self.optimizer = model, model.optimizer
        self.frame: FrameType | None = frame
        self.callbacks = self.arguments["callbacks"]
        self.loop = self.arguments["epoch_iterator"]
        self.adapter = self.loop.data_adapter
        self.steps_per_execution = int(self.loop.steps_per_execution)
        self.keeps_iterator = self.loop.steps_per_epoch is not None
        self.sequence: SequenceData | None = None
        if (sequence := getattr(self.adapter, "py_dataset", None)) is not None:
            self.sequence = SequenceData(
                data=sequence,
                shuffles=bool(self.adapter.shuffle),
                workers=int(sequence.workers),
                has_processes=bool(sequence.use_multiprocessing),
                ahead=int(sequence.max_queue_size),
            )
            # Remove Keras' own workers, which `SequenceTracker` replaces. They would
            # draw an order when an epoch begins.
            self.adapter.enqueuer = None
        self.loader: Loader | None = None
        if type(self.adapter).__name__ == "GrainDatasetAdapter":
            self.loader = self.grain_loader(self.arguments["x"])
        self._skip = 0
        self._steps_seen_before_epoch = 0
        # Value of `adapter._epoch` before the current epoch.
        self._adapter_epoch: int | None = None

    def grain_loader(self, given: Any) -> Loader | None:
        """Returns the Grain loader of the data, if its position can be tracked.

        Args:
            given: the training data passed to `fit`.
        """
        return None

    @property
    def steps(self) -> int | None:
        steps = self.loop.num_batches
        return None if steps is None else int(steps)

    @property
    def array_batch(self) -> int | None:
        is_of_arrays = self.array_way is not None
        return int(self.adapter.batch_size) if is_of_arrays else None

    @property
    def sequence_length(self) -> int | None:
        length = self.adapter.py_dataset.num_batches
        return None if length is None else int(length)

    def settle(self) -> None:
        flush = getattr(self.callbacks, "_flush_futures", None)  # since Keras 3.12
        (flush or self.callbacks._clear_futures)()

    def note_batches(self, note: Callable[[Any], None]) -> None:
        if type(self.adapter).__name__ != "GeneratorDataAdapter":
            return
        batches = self.adapter.generator

        def noted() -> Iterator[Any]:
            for batch in batches():
                note(batch)
                yield batch

        self.adapter.generator = noted

    def rest_of_arrays(self, batches: int, open: Callable[[], Iterator[Any]]) -> Any:
        """Returns the iterator over batches of arrays that Keras uses without tf.data,
        after the skipped batches, which are not read.

        Args:
            batches: number of batches to skip.
            open: method of Keras' adapter that returns an iterator over all batches.
        """
        adapter = self.adapter
        iterate = adapter._get_iterator

        def rest(get: Callable[..., Any], inputs: Any) -> Iterator[Any]:
            is_skipping = True

            def get_lazily(sliceable: Any, indices: Any = None) -> Any:
                return None if is_skipping else get(sliceable, indices)

            every = iterate(get_lazily, inputs)
            before = generators()
            for _ in range(batches):
                next(every, None)
            if adapter._shuffle == "batch":
                # Keras draws the order at each batch. The draws for the skipped batches
                # were made before the restart, so undo the draws made here.
                set_generators(before)
            is_skipping = False
            yield from every

        adapter._get_iterator = rest
        try:
            return open()
        finally:
            del adapter._get_iterator

    def loop_state(self) -> dict[str, Any]:
        return {
            "num_batches": self.loop._num_batches,
            "steps_seen": self._steps_seen_before_epoch,
            "adapter_epoch": self._adapter_epoch,
        }

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        self.model._initial_epoch = epoch
        self._skip = batch // self.steps_per_execution
        if loop_state:
            self.loop._num_batches = loop_state["num_batches"]
            if (epochs := loop_state.get("adapter_epoch")) is not None:
                # Otherwise Keras would count epochs from 0 again.
                self.adapter._epoch = epochs
            if self.keeps_iterator:
                self.loop._current_iterator = self.new_iterator()
                self.loop._steps_seen = loop_state["steps_seen"]

    def epoch_begins(self) -> None:
        # Clear the value, which would apply to the next fit, too.
        self.model._initial_epoch = None
        self._steps_seen_before_epoch = 0
        self._adapter_epoch = getattr(self.adapter, "_epoch", None)
        if self.loop._current_iterator is not None and self.keeps_iterator:
            self._steps_seen_before_epoch = self.loop._steps_seen
        if self._skip:
            self.loop._enumerate_iterator = self._rest_of_epoch

    def _rest_of_epoch(self) -> Iterator[Any]:
        """Yields the steps of the resumed epoch that are not trained yet."""
        # Remove the replaced method: later epochs use the method of the class.
        del self.loop._enumerate_iterator
        steps = self.loop._enumerate_iterator()
        skipped, self._skip = self._skip, 0
        # Skipping the first steps is enough: Keras' generator updates the counters of
        # the loop.
        collections.deque(itertools.islice(steps, skipped), maxlen=0)
        yield from steps

    def new_iterator(self) -> Any:
        """Returns a new data iterator, made in the same way as by Keras' loop."""
        raise NotImplementedError

    def ends_epoch_as(self, logs: Mapping[str, Any]) -> None:
        instead_once(self.model, "_get_metrics_result_or_logs", lambda _: dict(logs))

    def ends(self) -> None:
        self.model._initial_epoch = None
