"""`model.fit` of tf_keras 2.x.

Tested with 2.21. `fit` makes a `DataHandler`, which begins an epoch at `_initial_step`,
and asks the model by `_maybe_load_initial_counters_from_ckpt` where to begin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpreempt.keras.sequence import dataset_like

log = logging.getLogger(__name__)

_ARRAYS = (
    "TensorLikeDataAdapter",
    "GenericArrayLikeDataAdapter",
    "ListsOfScalarsDataAdapter",
    "CompositeTensorDataAdapter",
)


class LegacyFit:
    """See `fit.Fit`.

    Args:
        model: the model.
        names: the local variables of its fit.
    """

    line = "tf_keras"

    def __init__(self, model: Any, names: Mapping[str, Any]) -> None:
        self.model = model
        self.callbacks = names["callbacks"]
        self._loop = names["data_handler"]
        self.adapter = self._loop._adapter
        self._class_weight = names["class_weight"]
        self._workers = names["workers"]

    @property
    def dataset(self) -> Any:
        return self._loop._dataset

    @dataset.setter
    def dataset(self, value: Any) -> None:
        self._loop._dataset = value

    @property
    def steps_per_execution(self) -> int:
        return int(self._loop._steps_per_execution.numpy())

    @property
    def steps(self) -> int | None:
        steps = self._loop.inferred_steps
        return None if steps is None else int(steps)

    @property
    def keeps_iterator(self) -> bool:
        return not self.adapter.should_recreate_iterator()

    @property
    def first_iterator(self) -> int:
        return 1 if self.keeps_iterator else 2  # one is made and thrown away

    @property
    def is_array_data(self) -> bool:
        return type(self.adapter).__name__ in _ARRAYS

    @property
    def sequence(self) -> Any:
        return getattr(self.adapter, "_keras_sequence", None)

    @property
    def sequence_length(self) -> int | None:
        return len(self.sequence)

    @property
    def shuffles_sequence(self) -> bool:
        return bool(self.adapter._shuffle_sequence)

    @property
    def workers(self) -> int:
        return int(self._workers)

    def distribute_sequence(self, rest: Callable[[], Iterator[Any]]) -> Any:
        dataset = dataset_like(self.adapter.get_dataset(), rest)
        if self._class_weight:
            from tf_keras.src.engine import data_adapter

            weigh = data_adapter._make_class_weight_map_fn(self._class_weight)
            dataset = dataset.map(weigh)
        strategy = self.model.distribute_strategy
        return strategy.experimental_distribute_dataset(dataset)

    def loop_state(self) -> dict[str, Any]:
        return {
            "inferred_steps": self.steps,
            "insufficient_data": self._loop._insufficient_data,
        }

    def start_at(self, epoch: int, batch: int, loop_state: Mapping[str, Any]) -> None:
        def counters(steps_per_epoch: Any, initial_epoch: Any) -> tuple[int, int]:
            del self.model._maybe_load_initial_counters_from_ckpt  # asked once
            return epoch, batch

        self.model._maybe_load_initial_counters_from_ckpt = counters
        if loop_state:
            self._loop._inferred_steps = loop_state["inferred_steps"]
            self._loop._insufficient_data = loop_state["insufficient_data"]

    def epoch_begins(self) -> None:
        pass

    def build(self, iterator: Any, train_function: Any) -> None:
        if not hasattr(train_function, "get_concrete_function"):  # run_eagerly
            train_function = tf.function(train_function)
        train_function.get_concrete_function(iterator)

    def per_replica(self) -> list[Any]:
        return [v for metric in self.model.metrics for v in metric.variables]

    def other_variables(self) -> list[Any]:
        model = self.model
        generators = [
            getattr(getattr(layer, "_random_generator", None), "_generator", None)
            for layer in model._flatten_layers()
        ]
        optimizer = model.optimizer
        slots = getattr(optimizer, "variables", [])
        return [
            model._train_counter,
            model._test_counter,
            *(generator.state for generator in generators if generator is not None),
            *self._model_variables(),
            *(slots() if callable(slots) else slots),
        ]

    def _model_variables(self) -> list[Any]:
        try:
            return list(self.model.variables)
        except ValueError:  # nothing is built yet
            return []

    def settle(self) -> None:
        pass  # tf_keras runs every callback on the main thread
