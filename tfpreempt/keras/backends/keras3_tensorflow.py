"""`model.fit` of Keras 3 with the TensorFlow backend.

`fit` makes a `TFEpochIterator`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.tensors.program_values import is_seeded
from tfpreempt.core import private_api
from tfpreempt.keras.backends.keras3 import Keras3Fit
from tfpreempt.keras.backends.tensorflow_fit import TensorFlowFit
from tfpreempt.keras.data.tensorflow_data import dataset_like
from tfpreempt.keras.fit_protocol import AUTOTUNE, Loader, instead_once
from tfpreempt.keras.multi_worker import of_one_replica

log = logging.getLogger(__name__)

_TRACED = "multi_step_on_iterator"
"""Name of TensorFlow's function in a train function that Keras makes."""


class Keras3TensorFlowFit(TensorFlowFit, Keras3Fit):
    """Implements `fit_protocol.Fit` for Keras 3 on TensorFlow."""

    dataset_name = "_distributed_dataset"

    def grain_loader(self, given: Any) -> Loader | None:
        if not self.has_positions():
            return None
        # The position is known if batches consist of plain arrays.
        spec = tf.nest.flatten(self.adapter.get_tf_dataset().element_spec)
        if not all(isinstance(each, tf.TensorSpec) for each in spec):
            return None
        from keras.tree import lists_to_tuples

        return Loader(open=lambda: iter(given), taken=list, standardize=lists_to_tuples)

    @property
    def array_way(self) -> str | None:
        if type(self.adapter).__name__ != "ArrayDataAdapter":
            return None
        # shuffle="batch" uses a random op, and the state of the op cannot be saved.
        is_random = self.adapter._shuffle == "batch" and is_seeded()
        return "replay" if is_random else "iterator"

    def validation_calls(self) -> list[tuple[Any, str]]:
        calls = [
            (self.model, "evaluate"),
            (private_api.keras_trainer, "TFEpochIterator"),
        ]
        has_data = getattr(self.model, "_eval_epoch_iterator", None) is not None
        return calls[:1] if has_data else calls

    def distribute(
        self, batches: Callable[[], Iterator[Any]], ahead: int = AUTOTUNE
    ) -> Any:
        dataset = dataset_like(self.adapter.get_tf_dataset(), batches, ahead)
        strategy = self.model.distribute_strategy
        return strategy.experimental_distribute_dataset(dataset)

    def new_iterator(self) -> Any:
        return iter(self.loop._distributed_dataset)

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        def result(found: Any) -> Any:
            return self.model._get_metrics_result_or_logs(found or dict(logs))

        instead_once(self.model, "_get_metrics_result_or_logs", result)
        return True

    def traceable(self, train_function: Any, *, trains: bool) -> Any | None:
        # None, if Keras has made the variables already (under a strategy), or if no
        # step follows: then `build` takes less time than a trace that is never used.
        if self.model._distribute_strategy is not None or not trains:
            return None
        names = getattr(getattr(train_function, "__code__", None), "co_freevars", ())
        if _TRACED not in names or tf.config.functions_run_eagerly():
            return None
        found = train_function.__closure__[names.index(_TRACED)].cell_contents
        return found if hasattr(found, "get_concrete_function") else None

    def build(self, iterator: Any, train_function: Any) -> None:
        del train_function
        model, strategy = self.model, self.model.distribute_strategy
        # Call the model symbolically if this makes the same variables as training. That
        # holds for Keras' own layers, unless a layer is frozen: then gradients would
        # not reach the new variables even after the layer is unfrozen. Under a
        # strategy, Keras builds models by a symbolic call, too.
        is_plain = all(
            type(layer).__module__.startswith("keras.") and layer.trainable
            for layer in model._flatten_layers()
        )
        if is_plain or model.run_eagerly or model._distribute_strategy is not None:
            spec = tf.nest.map_structure(of_one_replica, iterator.element_spec)
            is_own = type(model).train_step.__module__.startswith("keras.")
            try:
                with strategy.scope():
                    model._symbolic_build(data_batch=spec)
                if model.run_eagerly or is_own:
                    return
            except Exception as error:  # noqa: BLE001 - a model may have no `call`
                log.debug("the train step is to be traced: %s", error)
                if model.run_eagerly:
                    # The step cannot be traced, because its Python code needs values.
                    # If variables are missing, the restore names them.
                    return
        # A trace of the train step also makes variables that only training uses.
        self.trace(model.train_step, iterator)
