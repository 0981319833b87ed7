"""`model.fit` of Keras 3 with the TensorFlow backend.

`fit` makes a `TFEpochIterator`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from keras.tree import lists_to_tuples

from tfpreempt import errors
from tfpreempt.checkpoint.state.array_contents import Arrays
from tfpreempt.checkpoint.tensors.program_values import is_seeded
from tfpreempt.checkpoint.tensors.reader import VALUE
from tfpreempt.checkpoint.tensors.variables import attached
from tfpreempt.keras.backends.keras3 import Keras3Fit
from tfpreempt.keras.backends.named_variables import NamedVariables, assign
from tfpreempt.keras.backends.tensorflow_fit import TensorFlowFit
from tfpreempt.keras.backends.tensorflow_variables import TensorFlowVariables
from tfpreempt.keras.data.tensorflow_data import dataset_like
from tfpreempt.keras.fit_protocol import (
    AUTOTUNE,
    Fit,
    FitVariables,
    Loader,
    instead_once,
)
from tfpreempt.keras.multi_worker import of_one_replica

log = logging.getLogger(__name__)

_TRACED = "multi_step_on_iterator"
"""Name of TensorFlow's function in a train function that Keras makes."""


class Keras3TensorFlowFit(TensorFlowFit, Keras3Fit):
    """Implements `fit_protocol.Fit` for Keras 3 on TensorFlow."""

    dataset_name = "_distributed_dataset"
    validation_maker = ("keras_trainer", "TFEpochIterator")

    def grain_loader(self, given: Any) -> Loader | None:
        if not self.has_positions():
            return None
        # Unless batches consist of plain tensors, the position is unknown.
        if not self._has_plain_arrays():
            return None
        return Loader(open=lambda: iter(given), taken=list, standardize=lists_to_tuples)

    def _has_plain_arrays(self) -> bool:
        spec = tf.nest.flatten(self.adapter.get_tf_dataset().element_spec)
        return all(isinstance(each, tf.TensorSpec) for each in spec)

    @property
    def array_way(self) -> str | None:
        if type(self.adapter).__name__ != "ArrayDataAdapter":
            return None
        # shuffle="batch" uses a random op, and the state of the op cannot be saved.
        is_random = self.adapter._shuffle == "batch" and is_seeded()
        return "replay" if is_random else "iterator"

    def distribute(
        self, batches: Callable[[], Iterator[Any]], ahead: int = AUTOTUNE
    ) -> Any:
        dataset = dataset_like(self.adapter.get_tf_dataset(), batches, ahead)
        strategy = self.model.distribute_strategy
        return strategy.experimental_distribute_dataset(dataset)

    def distribute_arrays(self, batches: int) -> Any:
        """Returns a dataset of the batches in the order that Keras on JAX draws; draws
        the order now.

        Raises:
            CheckpointMismatchError: the arrays are sparse.
        """
        if not self._has_plain_arrays():
            raise errors.CheckpointMismatchError(
                "The epoch was interrupted on JAX, and TensorFlow cannot read sparse "
                "arrays in the order of JAX. Set KERAS_BACKEND=jax until the end of "
                "the epoch, or use another checkpoint directory."
            )
        rest = self.rest_of_arrays(batches, self.adapter.get_numpy_iterator)
        first = [*itertools.islice(rest, 1)]
        every = itertools.chain(first, rest)
        return self.distribute(lambda: map(lists_to_tuples, every))

    def new_iterator(self) -> Any:
        return iter(self.loop._distributed_dataset)

    def make_variables(self) -> FitVariables:
        return Keras3TensorFlowVariables(self)

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        def result(found: Any) -> Any:
            return self.model._get_metrics_result_or_logs(found or dict(logs))

        instead_once(self.model, "_get_metrics_result_or_logs", result)
        return True

    def traceable(self, function: Any, *, trains: bool | None) -> Any | None:
        # None under a strategy, because Keras has made the variables already. None also
        # if no step follows, because `build` takes less time than a trace, and the
        # trace would never be used.
        is_built = self.model._distribute_strategy is not None or not trains
        if trains is not None and is_built:
            return None
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if _TRACED not in names or tf.config.functions_run_eagerly():
            return None
        found = function.__closure__[names.index(_TRACED)].cell_contents
        return found if hasattr(found, "get_concrete_function") else None

    def build(self, iterator: Any, train_function: Any) -> None:
        del train_function
        model, strategy = self.model, self.model.distribute_strategy
        # Call the model symbolically if this makes the same variables as training: if
        # every layer is Keras' own and trainable. (The new variables of a frozen layer
        # would get no gradients even after the layer is unfrozen.) Under a strategy,
        # Keras itself builds models by a symbolic call.
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
        # A trace of the train step also makes variables that only training uses.
        try:
            self.trace(model.train_step, iterator)
        except Exception as error:
            if not model.run_eagerly:
                raise
            # The Python code of the step needs values. If variables are missing, the
            # restore names them.
            log.debug("the train step cannot be traced: %s", error)


class Keras3TensorFlowVariables(TensorFlowVariables):
    """Implements `fit_protocol.FitVariables`; the fit may resume on JAX.

    Args:
        fit: the fit.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit.model, fit.optimizer)
        self._named = NamedVariables(fit)
        self._keys: dict[str, str] = {}
        # The objects for which the keys were found.
        self._found: tuple[Any, list[int]] = (None, [])

    def keys(self) -> Mapping[str, str]:
        untracked = attached(self.checkpoint)
        found = untracked.graph, [id(variable) for _, variable in untracked.own]
        if found != self._found:
            keys = {id(variable): path for path, variable in untracked.own}
            for path, each in untracked.tracked()[0]:
                keys[id(each)] = f"{path}/.ATTRIBUTES/{VALUE}"
            named = self._named.find().items()
            self._keys = {name: keys[id(v)] for name, v in named if id(v) in keys}
            self._found = found
        return self._keys

    def assign_named(self, names: Sequence[str], arrays: Arrays) -> None:
        assign(self._named.find(), names, arrays)
