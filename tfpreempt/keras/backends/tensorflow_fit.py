"""A fit on TensorFlow: the part that Keras 3 and tf_keras share."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from tfpreempt.keras.backends.tensorflow_variables import TensorFlowVariables
from tfpreempt.keras.data import tensorflow_data
from tfpreempt.keras.fit_protocol import Fit, FitVariables

log = logging.getLogger(__name__)


class TensorFlowFit(Fit):
    """Implements a part of `fit_protocol.Fit` for fits on TensorFlow.

    Attributes:
        dataset_name: name of the attribute of `loop` that holds the dataset; `loop`
            makes its iterators from this dataset.
    """

    dataset_name: str
    pipelines = tensorflow_data

    def replace_dataset(self, instead: Any) -> Any:
        dataset = getattr(self.loop, self.dataset_name)
        setattr(self.loop, self.dataset_name, instead)
        return dataset

    def has_positions(self) -> bool:
        """Returns whether the position of a loader can be tracked.

        False under a TPUStrategy: TensorFlow reads iterators before the first step, and
        only the first step shows which iterator is used for training.
        """
        strategy = self.model.distribute_strategy
        return not isinstance(strategy, tf.distribute.TPUStrategy)

    def make_variables(self) -> FitVariables:
        return TensorFlowVariables(self.model, self.optimizer)

    def runs_eagerly(self) -> bool:
        return bool(self.model.run_eagerly or tf.config.functions_run_eagerly())

    def trace(self, step: Any, iterator: Any) -> None:
        """Traces a step for a batch, to make the variables that the step uses. Reads no
        data, because the trace needs only the element spec."""

        def traced(data: Any) -> Any:
            return self.model.distribute_strategy.run(step, args=(data,))

        tf.function(traced).get_concrete_function(iterator.element_spec)

    def build_test(self, iterator: Any) -> None:
        try:
            self.trace(self.model.test_step, iterator)
        except Exception as error:  # noqa: BLE001 - the restore names missing variables
            log.debug("the test step cannot be traced: %s", error)
