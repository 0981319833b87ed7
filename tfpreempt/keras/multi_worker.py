"""Makes `fit`, `evaluate` and `predict` of Keras 3 work with two workers or more.

Keras 3 fails under a MultiWorkerMirroredStrategy (keras#20585) in three functions of
`keras.src.backend.tensorflow.trainer`:

- `TensorFlowTrainer._maybe_symbolic_build` reduces a batch over the replicas to find
  shapes and dtypes, but TensorFlow cannot reduce a distributed batch outside of a
  `tf.function`. The replacement takes shapes and dtypes from the data's `element_spec`,
  without a read.
- `reduce_per_replica` computes the mean of the replicas' results along axis 0, but
  scalars have no axis 0. The replacement passes `axis=None`, the mean over replicas.
- `TensorFlowTrainer._make_function` calls a `tf.function` inside of a loop if
  `steps_per_execution` is above 1. TensorFlow does not pass the keys of collectives
  into such a function: "You must feed a value for placeholder tensor". The replacement
  has the loop without the inner `tf.function`. (MirroredStrategy has the same problem,
  but is not changed here.)

The replacements call the original functions unless the strategy is a
MultiWorkerMirroredStrategy with several workers.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

from tfpreempt import errors
from tfpreempt.core import private_api
from tfpreempt.core.log_output import show_log_lines

_logger = logging.getLogger(__name__)

_Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """A replaced function of Keras, with the data needed to restore it.

    Attributes:
        owner: class or module that has the function.
        name: name of the function.
        previous: the function before the replacement.
        ours: tfpreempt's replacement.
    """

    owner: Any
    name: str
    previous: _Function
    ours: _Function


# The replacements in effect. The list is global, because the patch of Keras applies to
# the whole process.
_in_force: list[_Replacement] = []


class MultiWorkerPatch:
    """Handle that removes the patch of Keras; returned by `enable_multi_worker`.

    As a context manager, the handle removes the patch at the end of the block, unless
    an earlier call of `enable_multi_worker` had patched Keras already.

    Args:
        is_first: whether the call that returns this handle has patched Keras.
    """

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first

    def __enter__(self) -> MultiWorkerPatch:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_first:
            self.remove()

    @property
    def is_active(self) -> bool:
        """Whether Keras is patched now, by any call of `enable_multi_worker`."""
        return bool(_in_force)

    def remove(self) -> None:
        """Restores the functions of Keras from before the first `enable_multi_worker`.

        A second call has no effect. Steps that a model has already compiled do not
        change. If other code has replaced a function after `enable_multi_worker`, the
        later replacement remains, tfpreempt's function inside of it only calls the
        original, and a warning is logged.
        """
        while _in_force:
            was = _in_force.pop()
            if getattr(was.owner, was.name) is was.ours:
                setattr(was.owner, was.name, was.previous)
                continue
            _logger.warning(
                "another library replaced %s.%s after enable_multi_worker(). The "
                "replacement stays, and tfpreempt's function inside of the replacement "
                "does nothing from now on. To restore the function of Keras, undo the "
                "later patch and assign the __wrapped__ of tfpreempt's function",
                was.owner.__name__,
                was.name,
            )


def enable_multi_worker() -> MultiWorkerPatch:
    """Patches Keras 3 to train under MultiWorkerMirroredStrategy on several workers.

    Call `enable_multi_worker()` on every worker before `fit`, `evaluate`, `predict`, or
    methods such as `train_on_batch`. A second call changes nothing. tf_keras
    (`TF_USE_LEGACY_KERAS=1`) needs no patch and is not changed. Set the same seed on
    every worker if `fit` shuffles arrays: every worker draws a permutation of all
    samples, and trains on its part of them.

    The model, its metrics, loss and optimizer are built before the first step. Shapes
    and dtypes come from the data's `element_spec`. If a dimension besides the first is
    unknown in the spec, a batch is read and discarded, as Keras does.

    `predict` returns the outputs for the data of every worker, on every worker. Data
    sharded by batches (arrays, and datasets with `AutoShardPolicy.DATA`) keep their
    order. For data sharded by files, the outputs of every step are in the order of the
    workers. Without sharding (`OFF`), every worker reads all data, so the result has
    every row once per worker.

    Settings that Keras does not support under a MirroredStrategy fail here too:
    `jit_compile=True`, and optimizers with `use_ema` or `gradient_accumulation_steps`.

    Returns:
        A handle with a method `remove()`. The handle is also a context manager: `with
        enable_multi_worker():` removes the patch at the end of the block. If the handle
        is not used, the patch stays until the program ends.

    Raises:
        UnsupportedVersionError: this version of Keras lacks a function to replace.
        ConfigurationError: Keras does not run on TensorFlow. `fit` and `evaluate` also
            raise it if a metric was made outside of `strategy.scope()`, because the
            metric would count only the rows of one worker.
    """
    import keras

    show_log_lines()
    if (backend := keras.backend.backend()) != "tensorflow":
        raise errors.ConfigurationError(
            f"Keras runs on the backend {backend!r}; enable_multi_worker() is for "
            "tf.distribute.MultiWorkerMirroredStrategy and expects the backend "
            "'tensorflow'. Set KERAS_BACKEND=tensorflow before Keras is imported, or "
            "remove the call"
        )
    private_api.check_available("keras_workers")
    if not private_api.was_seen("keras"):
        _logger.warning(
            "enable_multi_worker() replaces private functions of Keras, and was "
            "tested with %s, not yet with %s. Check whether this version needs "
            "enable_multi_worker() (keras#20585), and compare a run of two workers "
            "with one",
            ", ".join(private_api.SEEN["keras"]),
            keras.__version__,
        )
    is_first = not _in_force
    if is_first:
        trainer = private_api.keras_trainer_class()
        _replace(trainer, "_maybe_symbolic_build", _building)
        _replace(trainer, "_make_function", _stepping)
        _replace(private_api.keras_trainer, "reduce_per_replica", _reducing)
    return MultiWorkerPatch(is_first=is_first)


def _replace(owner: Any, name: str, make: Callable[[_Function], _Function]) -> None:
    """Replaces a function of Keras by a wrapper, and records the replacement.

    Args:
        owner: class or module with the function.
        name: name of the function.
        make: function returning a wrapper for the original function.
    """
    previous = getattr(owner, name)
    ours = functools.wraps(previous)(make(previous))
    setattr(owner, name, ours)
    _in_force.append(_Replacement(owner=owner, name=name, previous=previous, ours=ours))


def _has_workers(strategy: Any) -> bool:
    """Returns whether the patch is active and a strategy has several workers. False for
    the strategy None."""
    return bool(_in_force) and bool(
        private_api.keras_trainer._collective_all_reduce_multi_worker(strategy)
    )


# --- the mean over replicas ----------------------------------------------------------


def _reducing(previous: _Function) -> _Function:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not _has_workers(strategy):
            return previous(values, strategy, reduction)
        import keras

        return keras.tree.map_structure(
            lambda value: strategy.reduce("MEAN", value, axis=None), values
        )

    return reduce_per_replica


# --- building from the data's description --------------------------------------------


def _building(previous: _Function) -> _Function:
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        if not _has_workers(strategy):
            previous(self, iterator=iterator, data_batch=data_batch)
            return
        if iterator is None:
            previous(self, data_batch=data_batch)
        else:
            # With a single worker, Keras reads a batch here, which draws random numbers
            # for the order of the data. Draw the same numbers without the read, so that
            # the order of the data does not depend on the number of workers.
            from tfpreempt.keras.data import pipeline

            adapter = iterator.data_adapter
            sequence = getattr(adapter, "py_dataset", None)
            if sequence is None:
                for root in pipeline.roots(iterator._distributed_dataset):
                    iter(root)
                    pipeline.draw(root, 1)
            elif adapter.shuffle and sequence.num_batches is not None:
                random.shuffle([*range(sequence.num_batches)])
            with strategy.scope():
                self._symbolic_build(iterator=_example(iterator, strategy))
        for variable in self.metrics_variables:
            # Refuse metrics with different values per worker: an EarlyStopping could
            # stop a single worker, and the remaining workers would wait forever.
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise errors.ConfigurationError(
                    f"the metric variable {variable.path!r} was created outside of "
                    "strategy.scope(), so each worker would count only its own rows; "
                    "expected a variable created inside the scope. Create metrics, and "
                    "call compile(), inside strategy.scope()"
                )

    return build


def _example(iterator: Any, strategy: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Yields an example batch of a replica, in the form in which Keras' iterators yield
    steps. The batch consists of specs if the specs have all dimensions.

    `Trainer._symbolic_build` iterates over the result only if the model is not fully
    built. A read of a batch here does not hang: the specs are equal on all workers, so
    either every worker reads or no worker.

    Args:
        iterator: Keras' `TFEpochIterator` over the data.
        strategy: strategy that distributes the data.
    """
    import keras

    specs = iterator._distributed_dataset.element_spec
    batch = keras.tree.map_structure(of_one_replica, specs)
    # Read a batch if a dimension besides the rows is unknown: a layer may need the size
    # to build weights, and the dimension may distinguish sparse labels from one-hot
    # labels. An unknown number of rows is fine, because the steps are traced with an
    # unknown number.
    shapes = [getattr(spec, "shape", None) for spec in keras.tree.flatten(batch)]
    if any(s is None or s.rank is None or None in s.as_list()[1:] for s in shapes):
        _, _, batches = next(iter(iterator))
        batch = keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], next(batches)
        )
    yield 0, 0, [batch]


def of_one_replica(spec: Any) -> Any:
    """Returns one replica's spec from a `PerReplicaSpec`; other specs unchanged."""
    return getattr(spec, "_value_specs", (spec,))[0]


# --- steps_per_execution -------------------------------------------------------------


def _stepping(previous: _Function) -> _Function:
    def make_function(self: Any, step_function: _Function) -> _Function:
        keras_function: _Function = previous(self, step_function)
        is_single = self.steps_per_execution == 1 or self.run_eagerly
        if is_single or not _has_workers(self.distribute_strategy):
            return keras_function
        import tensorflow as tf

        steps = tf.function(
            tf.autograph.experimental.do_not_convert(
                _several_steps(self, step_function)
            ),
            reduce_retracing=True,
        )

        def function(iterator: Any) -> Any:
            is_of_data = isinstance(iterator, tf.distribute.DistributedIterator)
            return (steps if is_of_data else keras_function)(iterator)

        return function

    return make_function


def _several_steps(model: Any, step_function: _Function) -> _Function:
    """Returns a function of `steps_per_execution` steps, or fewer if the data end."""
    import tensorflow as tf

    def one_step(data: Any) -> Any:
        strategy = model.distribute_strategy
        outputs = strategy.run(step_function, args=(data,))
        return private_api.keras_trainer.reduce_per_replica(outputs, strategy, "auto")

    if hasattr(model, "_autoconvert_optionals"):
        one_step = model._autoconvert_optionals(one_step)

    def goes_on(done: Any, batch: Any, _: Any) -> Any:
        return tf.logical_and(done < model.steps_per_execution, batch.has_value())

    def steps(iterator: Any) -> Any:
        def body(done: Any, batch: Any, _: Any) -> Any:
            outputs = one_step(batch.get_value())
            is_last = done + 1 >= model.steps_per_execution
            following = tf.cond(is_last, lambda: batch, iterator.get_next_as_optional)
            return done + 1, following, outputs

        # The first step is before the loop, because the outputs define the structure of
        # the loop variables, and because the read raises the OutOfRangeError at the end
        # of an epoch.
        outputs = one_step(iterator.get_next())
        start = (tf.constant(1), iterator.get_next_as_optional(), outputs)
        return tf.while_loop(goes_on, body, start, parallel_iterations=1)[-1]

    return steps
