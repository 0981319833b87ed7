"""`model.fit` of tf_keras 2.x.

`fit` makes a `DataHandler`, which begins an epoch at `_initial_step`. To get the first
epoch and the first step, `fit` calls the model's method
`_maybe_load_initial_counters_from_ckpt`. To resume, tfpreempt replaces this method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.tensors.program_values import is_seeded
from tfpreempt.core import private_api
from tfpreempt.keras.backends.tensorflow_fit import TensorFlowFit
from tfpreempt.keras.data.tensorflow_data import dataset_like
from tfpreempt.keras.fit_protocol import (
    AUTOTUNE,
    Loader,
    SequenceData,
    instead_once,
)
from tfpreempt.states.loaders import accessor_of

log = logging.getLogger(__name__)

_COUNTERS = "_maybe_load_initial_counters_from_ckpt"
_ARRAYS = (
    "TensorLikeDataAdapter",
    "GenericArrayLikeDataAdapter",
    "ListsOfScalarsDataAdapter",
    "CompositeTensorDataAdapter",
)


class TfKerasFit(TensorFlowFit):
    """Implements `fit_protocol.Fit` for tf_keras.

    Args:
        model: the model.
        frame: stack frame of the model's `fit`.
    """

    line = "tf_keras"
    dataset_name = "_dataset"
    cuts_last_step = True
    validation_data = "_eval_data_handler"
    validation_maker = ("tf_keras_data", "get_data_handler")

    def __init__(self, model: Any, frame: FrameType) -> None:
        self.arguments = names = dict(frame.f_locals)
        self.model, self.optimizer = model, model.optimizer
        self.frame: FrameType | None = frame
        self.callbacks = names["callbacks"]
        self.loop = names["data_handler"]
        self.adapter = self.loop._adapter
        self.keeps_iterator = not self.adapter.should_recreate_iterator()
        # Without a common iterator for all epochs, the second iterator is the first one
        # used for training: tf_keras makes an unused iterator before the first epoch.
        self.first_iterator = 1 if self.keeps_iterator else 2
        self.sequence: SequenceData | None = None
        if (sequence := getattr(self.adapter, "_keras_sequence", None)) is not None:
            self.sequence = SequenceData(
                data=sequence,
                shuffles=bool(self.adapter._shuffle_sequence),
                workers=int(names["workers"]),
                has_processes=bool(names["use_multiprocessing"]),
                ahead=int(names["max_queue_size"]),
                repeats=(self.steps or 0) > len(sequence),
            )
        self.loader = self._own_loader(names["x"])
        self._read_steps_per_execution()
        self._keep_generators()

    def _read_steps_per_execution(self) -> None:
        """Reads `_steps_per_execution`, the number of batches of a full step.

        Called before the first step of an epoch, because tf_keras sets a smaller value
        for a shorter last step.
        """
        self.steps_per_execution = int(self.loop._steps_per_execution.numpy())

    def epoch_begins(self) -> None:
        self._read_steps_per_execution()

    @property
    def steps(self) -> int | None:
        steps = self.loop.inferred_steps
        return None if steps is None else int(steps)

    @property
    def array_batch(self) -> int | None:
        is_of_arrays = self.array_way is not None
        return int(self.adapter.batch_size()) if is_of_arrays else None

    @property
    def array_way(self) -> str | None:
        if type(self.adapter).__name__ not in _ARRAYS:
            return None
        # The same iterator serves every epoch, and draws the order of an epoch by an
        # op; the state of the op cannot be saved. But with a seed, a new iterator draws
        # the same orders again.
        shuffle = getattr(self.adapter, "_shuffle", False)
        if not shuffle or not is_seeded():
            return "iterator"
        return "replay" if shuffle == "batch" else "index"

    def _own_loader(self, given: Any) -> Loader | None:
        """Returns a Loader if the data are a single iterator for all epochs, and the
        position of the iterator can be read and set.

        Args:
            given: the training data passed to `fit`.

        Returns:
            The Loader; None if the position of the data cannot be tracked.
        """
        is_iterator = type(self.adapter).__name__ == "GeneratorDataAdapter"
        is_known = is_iterator and accessor_of(given) is not None
        if not is_known or not self.has_positions():
            return None
        # `iter(given)` may return a new iterator for each epoch.
        if iter(given) is not given:
            return None
        if self.arguments["workers"] > 1 or self.arguments["use_multiprocessing"]:
            return None  # tf_keras' readers read ahead, so the position is unknown
        return Loader(
            open=lambda: given,
            taken=self._peeked,
            standardize=self.adapter._standardize_batch,
        )

    def _peeked(self) -> list[Any]:
        """Returns the batch that tf_keras has read to find the structure of batches."""
        dataset = self.adapter.get_dataset()
        # Remove prefetching, which would read more batches than one.
        while type(dataset).__name__ == "_PrefetchDataset":
            (dataset,) = dataset._inputs()
        options = tf.data.Options()
        options.autotune.enabled = False  # autotuning would add prefetching again
        options.experimental_optimization.inject_prefetch = False
        return [next(iter(dataset.with_options(options)))]

    def distribute_arrays(self, batches: int) -> Any:
        class Rest(type(self.adapter)):  # type: ignore[misc]  # found at run time
            def slice_inputs(self, indices: Any, inputs: Any) -> Any:
                return super().slice_inputs(indices.skip(batches), inputs)

        names = self.arguments
        rest = Rest(
            names["x"],
            names["y"],
            sample_weights=names["sample_weight"],
            batch_size=names["batch_size"],
            steps=names["steps_per_epoch"],
            epochs=names["epochs"] - names["initial_epoch"],
            shuffle=names["shuffle"],
        )
        return self._distribute(rest.get_dataset())

    @property
    def sequence_length(self) -> int | None:
        return len(self.adapter._keras_sequence)

    def note_batches(self, note: Callable[[Any], None]) -> None:
        if type(self.adapter).__name__ != "GeneratorDataAdapter":
            return
        standardize = self.adapter._standardize_batch

        def noted(batch: Any) -> Any:
            note(batch)
            return standardize(batch)

        self.adapter._standardize_batch = noted

    def distribute(
        self, batches: Callable[[], Iterator[Any]], ahead: int = AUTOTUNE
    ) -> Any:
        dataset = dataset_like(self.adapter.get_dataset(), batches, ahead)
        return self._distribute(dataset)

    def _distribute(self, dataset: Any) -> Any:
        """Distributes the adapter's dataset in the same way as `DataHandler`."""
        if self.arguments["class_weight"]:
            weigh = private_api.tf_keras_data._make_class_weight_map_fn(
                self.arguments["class_weight"]
            )
            dataset = dataset.map(weigh)
        strategy = self.model.distribute_strategy
        return strategy.experimental_distribute_dataset(dataset)

    def _keep_generators(self) -> None:
        """Makes random layers draw from generators whose state can be saved.

        By default dropout uses ops with a hidden state, which cannot be saved. If the
        train function is already traced, the method changes no layer, and
        `program_values.warn_of_kernels` logs a warning with the layers.
        """
        layers = [
            layer
            for layer in self.model._flatten_layers()
            if getattr(_generator(layer), "_rng_type", None) == "legacy_stateful"
        ]
        function = self.model.train_function
        count = getattr(function, "experimental_get_tracing_count", None)
        if not layers or (count is not None and count() > 0):
            return
        with self.model.distribute_strategy.scope():
            for layer in layers:
                generator = _generator(layer)
                generator._rng_type, generator._built = "stateful", False
                generator._maybe_init()
        names = ", ".join(layer.name for layer in layers)
        log.debug("%s draw from tf.random.Generator, which is saved", names)

    def loop_state(self) -> dict[str, Any]:
        return {
            "inferred_steps": self.steps,
            "insufficient_data": self.loop._insufficient_data,
        }

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        instead_once(self.model, _COUNTERS, lambda *_: (epoch, batch))
        if loop_state:
            self.loop._inferred_steps = loop_state["inferred_steps"]
            self.loop._insufficient_data = loop_state["insufficient_data"]

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        # Not possible: tf_keras raises an error for an epoch without a step.
        return False

    def ends_epoch_as(self, logs: Mapping[str, Any]) -> None:
        name = "_validate_and_get_metrics_result"
        instead_once(self.model, name, lambda _: dict(logs))

    def forget_answer(self) -> None:
        self.loop._current_step -= self.steps_per_execution

    def ends(self) -> None:
        self.model.__dict__.pop(_COUNTERS, None)

    def traceable(self, function: Any, *, trains: bool | None) -> Any | None:
        return function if hasattr(function, "get_concrete_function") else None

    def build(self, iterator: Any, train_function: Any) -> None:
        try:  # with run_eagerly, the train function is not a tf.function yet
            tf.function(train_function).get_concrete_function(iterator)
        except Exception as error:  # noqa: BLE001 - Python in the step needs values
            log.debug("the train step cannot be traced: %s", error)
            with self.model.distribute_strategy.scope():
                if not self.model.built:
                    self._call_once(iterator)
                if self.model.built:
                    self.model.optimizer.build(self.model.trainable_variables)

    def _call_once(self, iterator: Any) -> None:
        """Makes the variables of the layers by a trace of the model's `call`."""
        model = self.model

        def forward(batch: Any) -> None:
            x, _, _ = private_api.tf_keras_data.unpack_x_y_sample_weight(batch)
            model(x, training=True)

        def of_replicas(iterator: Any) -> None:
            model.distribute_strategy.run(forward, (next(iterator),))

        try:
            tf.function(of_replicas).get_concrete_function(iterator)
        except Exception as error:  # noqa: BLE001 - a model may have no `call`
            log.debug("the model cannot be called: %s", error)


def _generator(layer: Any) -> Any:
    """Returns tf_keras' RandomGenerator of a layer; None if the layer has none."""
    return getattr(layer, "_random_generator", None)
