"""`model.fit` of Keras 3 with the JAX backend.

`fit` makes a `JAXEpochIterator`. The train function takes the state (the values of all
variables) and an iterator, and returns the logs and the new state. JAX reuses the
memory of the given state for the new state, so the variables of the model have no
values during an epoch. `model._jax_state_synced` is True while the variables have the
values; then Keras' loop takes the state out of the variables before the next step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import jax

from tfpreempt import errors
from tfpreempt.core import private_api
from tfpreempt.keras.backends.jax_variables import JaxVariables
from tfpreempt.keras.backends.keras3 import Keras3Fit
from tfpreempt.keras.data import jax_data
from tfpreempt.keras.data.jax_data import Batches, PipelineBatches
from tfpreempt.keras.fit_protocol import AUTOTUNE, FitVariables, Loader

_PARTS = {
    "train": (
        "trainable_variables",
        "non_trainable_variables",
        "optimizer_variables",
        "metrics_variables",
    ),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
}
"""For the train and the test function, the attributes of the model with the variables
whose values form the state, in order."""


class Keras3JaxFit(Keras3Fit):
    """Implements `fit_protocol.Fit` for Keras 3 on JAX.

    Raises:
        ConfigurationError: the fit uses a feature that is not supported on JAX.
    """

    line = "keras on JAX"
    pipelines = jax_data
    validation_maker = ("keras_jax_trainer", "JAXEpochIterator")

    def __init__(self, model: Any, frame: FrameType) -> None:
        super().__init__(model, frame)
        # State passed to the running function of Keras, and its parts by name.
        self._state: Any = None
        self._distribution = private_api.keras_distribution.distribution()
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        trainer = private_api.keras_jax_trainer
        if getattr(trainer, "is_nnx_enabled", bool)():
            raise errors.ConfigurationError(
                "PreemptionCallback does not support KERAS_NNX_ENABLED on JAX yet: an "
                "exact resume was not tested. Train without it, or without the "
                "callback."
            )
        reads = inspect.signature(self.adapter.get_jax_iterator).parameters
        if self.steps_per_execution > 1 and "super_batch" in reads:  # since Keras 3.16
            raise errors.ConfigurationError(
                f"steps_per_execution is {self.steps_per_execution}, and this version "
                "of Keras on JAX reads the batches of a step as one array; a position "
                "in such arrays cannot be restored yet. Compile with "
                "steps_per_execution=1, or install Keras 3.15."
            )
        if self._distribution is not None:
            private_api.check_available("keras_fit_distribution")
        if jax.process_count() > 1:
            self._refuse_separate_processes()

    def _refuse_separate_processes(self) -> None:
        """Raises an error for a fit in several processes that do not train together, or
        that cannot save at every step."""
        everyone, uses = set(range(jax.process_count())), set()
        if self._distribution is not None:
            devices = self._distribution.device_mesh.backend_mesh.devices
            uses = {device.process_index for device in devices.flat}
        problem = ""
        if uses != everyone:
            problem = (
                "the keras.distribution of this fit uses the devices of the processes "
                f"{sorted(uses)}; expected every process, because the other processes "
                "would train models of their own. Call "
                "keras.distribution.set_distribution(keras.distribution.DataParallel())"
                " before the model is made"
            )
        elif self.runs_eagerly():
            problem = (
                "the model was compiled with run_eagerly=True or jit_compile=False; "
                "expected a compiled step, because a save of one process must not need "
                "a computation of all processes. Compile with jit_compile=True"
            )
        if problem:
            raise errors.ConfigurationError(
                f"jax.distributed connects {len(everyone)} processes, and {problem}."
            )

    def grain_loader(self, given: Any) -> Loader | None:
        return Loader(
            open=lambda: iter(given), taken=list, standardize=lambda batch: batch
        )

    @property
    def array_way(self) -> str | None:
        is_of_arrays = type(self.adapter).__name__ == "ArrayDataAdapter"
        return "index" if is_of_arrays else None

    # --- data ------------------------------------------------------------------------

    def replace_dataset(self, instead: Any) -> Any:
        if type(self.adapter).__name__ == "TFDatasetAdapter":
            dataset: Batches = PipelineBatches(self.adapter, self._placed)
        else:
            dataset = Batches(self.loop._get_iterator)
        if self.array_way is not None and self.adapter._shuffle == "batch":
            # Keras would draw the order of the next batch ahead of training.
            dataset = Batches(lambda: self._placed(self.adapter.get_jax_iterator()))
        self.loop._get_iterator = lambda: instead
        return dataset

    def new_iterator(self) -> Any:
        return iter(self.loop._get_iterator())

    def distribute(
        self, batches: Callable[[], Iterator[Any]], ahead: int = AUTOTUNE
    ) -> Any:
        convert = private_api.keras_data.get_jax_iterator
        return Batches(lambda: self._placed(convert(batches())))

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns batches of this process, put on the devices of the distribution as by
        Keras' loop."""
        if self._distribution is None:
            return batches
        return map(private_api.keras_jax_trainer._distribute_data, batches)

    def distribute_arrays(self, batches: int) -> Any:
        iterate = self.adapter.get_jax_iterator
        return Batches(lambda: self._placed(self.rest_of_arrays(batches, iterate)))

    def tensorflow_arrays(self) -> Any:
        dataset = self.adapter.get_tf_dataset()
        adapter = private_api.keras_tf_dataset.TFDatasetAdapter(dataset)
        return PipelineBatches(adapter, self._placed)

    def forget_answer(self) -> None:
        self.loop._steps_seen -= self.steps_per_execution

    def ends_epoch_with(self, logs: Mapping[str, Any]) -> bool:
        # Not possible: Keras on JAX raises an error for an epoch without a step.
        return False

    # --- the backend -----------------------------------------------------------------

    def traceable(self, function: Any, *, trains: bool | None) -> Any | None:
        return None

    def build(self, iterator: Any, train_function: Any) -> None:
        """Does nothing: Keras makes all variables before training."""

    def make_variables(self) -> FitVariables:
        return JaxVariables(self)

    def runs_eagerly(self) -> bool:
        return bool(self.model.run_eagerly or not self.model.jit_compile)

    def batch_kinds(self, name: str, iterator: Any) -> Sequence[Any]:
        loop = getattr(self.model, "_eval_epoch_iterator", None)
        adapter = self.adapter if name == "train" or loop is None else loop.data_adapter
        try:
            has_smaller = adapter.has_partial_batch is not False
        except NotImplementedError:  # the attribute is unknown for a PyDataset
            has_smaller = True
        # JAX traces a function again for each shape.
        return ("whole", "smaller") if has_smaller else ("whole",)

    def as_step(self, name: str, function: Any) -> Callable[[Any], Any]:
        model = self.model

        def step(iterator: Any) -> Any:
            # Take new values, which a callback may have assigned.
            if model._jax_state_synced:
                self._state = self._take(name)
            logs, self._state = function(self._state, iterator)
            return logs

        return step

    def as_keras_calls(self, name: str, step: Callable[[Any], Any]) -> Any:
        def called(state: Any, iterator: Any) -> Any:
            self._state = state
            try:
                logs = step(iterator)
                return logs, self._state
            finally:
                self._state = None

        return called

    def sync(self) -> None:
        model = self.model
        if self._state is not None and not model._jax_state_synced:
            name = "train" if len(self._state) == len(_PARTS["train"]) else "test"
            model._jax_state = dict(zip(_PARTS[name], self._state, strict=True))
        model.jax_state_sync()

    def _take(self, name: str) -> Any:
        """Takes the state for the function `name` out of the variables, as Keras' loop
        does; afterwards the variables have no values."""
        model = self.model
        parts = dict.fromkeys(_PARTS[name], True)
        state = model._get_jax_state(**parts, purge_model_variables=True)
        model._jax_state = dict(zip(_PARTS[name], state, strict=True))
        model._jax_state_synced = False
        return state
