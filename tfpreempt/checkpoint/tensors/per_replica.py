"""Saves variables that differ between replicas or workers, on every worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.state.array_contents import (
    REPLICA_VALUES,
    read_replica_values,
)
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.checkpoint.state.unsaved_state_check import shortened
from tfpreempt.checkpoint.tensors.program_values import sample
from tfpreempt.checkpoint.tensors.variables import (
    AttachedState,
    distributed,
    local_parts,
)

_log = logging.getLogger(__name__)

_LOCAL_BYTES = 1 << 20  # most bytes of a variable outside of a strategy
_COMPARED = 20  # variables that a restart compares; reading thousands delays each save
_ELEMENTS = 256  # that are compared of a variable
Arrays = list[np.ndarray[Any, Any]]


def dealt(variable: Any, values: Arrays, worker: int, num_workers: int) -> Arrays:
    """Computes the values for this worker's replicas from the values of the saved run.

    If the number of replicas is unchanged, every replica gets the value saved for the
    replica with the same number, even if a different worker saved the value. Otherwise
    a read of the variable returns the same value as in the saved run:

    - aggregated as a sum: every replica gets an equal part of the sum, as TensorFlow
      distributes a sum. A remainder of an integer sum is distributed over the first
      replicas.
    - aggregated as a mean: every replica gets the mean.
    - otherwise: every replica gets the value of the first saved replica.

    Args:
        variable: variable whose local replicas get values.
        values: values of all replicas of the saved run, in the order of the replicas.
        worker: index of this worker.
        num_workers: current number of workers, with equal numbers of replicas.
    """
    parts = local_parts(variable)
    first, last = worker * len(parts), (worker + 1) * len(parts)
    replicas = num_workers * len(parts)
    if len(values) == replicas:
        return values[first:last]
    kind = parts[0].aggregation
    if kind == tf.VariableAggregation.SUM:
        whole = np.sum(values, axis=0, dtype=values[0].dtype)
        if np.issubdtype(whole.dtype, np.integer):
            each, more = divmod(whole, replicas)
            return [np.asarray(each + (more > i)) for i in range(first, last)]
        return [np.asarray(whole / replicas, whole.dtype)] * len(parts)
    if kind == tf.VariableAggregation.MEAN:
        return [np.asarray(np.mean(values, axis=0), values[0].dtype)] * len(parts)
    return [values[0]] * len(parts)


class PerReplicaState(AttachedState):
    """Saves the values that variables of a Checkpoint have on this worker's replicas.

    For an ON_READ variable, TensorFlow saves the value reduced across all replicas, and
    restores an equal part on every replica. Totals that continue from equal parts
    differ in the last bits from an uninterrupted run. So this State saves the value of
    every replica, and assigns the values after TensorFlow's restore.

    The same applies to the batch statistics of Keras 3: every replica assigns a
    different value, but TensorFlow treats the statistics as mirrored, and saves only
    the value of the first replica. The State also saves metrics and seed generators,
    because TensorFlow does not save metrics and seed generators.
    """

    _name = REPLICA_VALUES

    def should_save(self) -> bool:
        return bool(self._attached.differing or self._attached.own)

    def save(self, fileobj: IO[bytes]) -> None:
        _write(fileobj, self._attached.differing + self._attached.own, _values)

    def load(self, fileobj: IO[bytes]) -> None:
        self.reshard([fileobj], 0, 1)

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Assigns the values saved by all earlier workers to the replicas of this
        worker, as `dealt` divides the values."""
        saved: dict[str, Arrays] = {}
        for file in (each for each in files if each is not None):
            for path, values in read_replica_values(file).items():
                saved.setdefault(path, []).extend(values)
        for path, variable in self._attached.differing + self._attached.own:
            if path not in saved:
                continue
            values = saved.pop(path)
            arrays = dealt(variable, values, worker, num_workers)
            if not _assign(variable, arrays):
                _log.warning(
                    "%s has the shapes %s on the replicas here, and %s in the "
                    "checkpoint, so its value is not restored. Use the number of "
                    "replicas of the checkpoint to restore the value.",
                    path,
                    [tuple(part.shape) for part in local_parts(variable)],
                    [array.shape for array in values],
                )
        if saved:
            _log.warning(
                "the checkpoint has metrics or seed generators that this program does "
                "not have under the same path, so they are not restored: %s. Build the "
                "model before the handler or the fit, in the same way as the run that "
                "made the checkpoint: with the same calls before, and with or without "
                "a strategy.",
                ", ".join(saved),
            )


class WorkerVariablesState(AttachedState):
    """Saves variables on workers other than the chief, because a program may set them
    to other values on each worker.

    TensorFlow's own files have the chief's values, with which the other workers would
    resume. This State saves the worker's own values of

    - variables of up to 1 MiB outside of a strategy: for example a count of the
      worker's own samples, or a `tf.random.Generator` that is seeded with the number of
      the worker. Larger variables are usually models, equal on all workers.
    - scalar variables of a strategy, such as a learning rate that each worker lowers by
      its own loss.

    Also saves elements of up to `_COMPARED` larger variables, which a restart only
    compares. A warning is logged if the elements differ: all larger variables have the
    chief's values.
    """

    _name = "tfpreempt.variables"

    def should_save(self) -> bool:
        return any(self._variables())

    def save(self, fileobj: IO[bytes]) -> None:
        _write(fileobj, self._variables(), _values_or_elements)

    def load(self, fileobj: IO[bytes]) -> None:
        saved, differing = read_replica_values(fileobj), []
        for path, variable in self._variables():
            if path not in saved:
                continue
            if _is_own(variable):
                _assign(variable, saved[path])
            elif _differs(_values_or_elements(variable), saved[path]):
                differing.append(path)
        if differing:
            _log.warning(
                "variables had other values on this worker than on worker 0 in the "
                "interrupted run: %s. These variables now have the values of worker 0 "
                "on all workers, so training may differ from an uninterrupted run. "
                "Weights differ if the program changes weights, or sets a learning "
                "rate, on some workers only. Keep large values of a worker in a State "
                "with per_worker=True.",
                shortened(differing),
            )

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores nothing: if the number of workers has changed, every worker keeps
        the chief's values."""

    def _variables(self) -> Iterator[tuple[str, Any]]:
        attached = self._attached
        other = {id(distributed(each)) for _, each in attached.differing + attached.own}
        compared = 0
        for path, variable in attached.tracked()[0]:
            inner, parts = distributed(variable), local_parts(variable)
            if not parts or not _has_numbers(parts[0]):
                continue
            if inner is not None and id(inner) in other:
                continue
            if _is_own(variable):
                yield path, variable
            elif compared < _COMPARED and (inner is None or variable.trainable):
                compared += 1
                yield path, variable


def _is_own(variable: Any) -> bool:
    """Returns whether each worker restores its own value of a variable."""
    if distributed(variable) is not None:
        return not variable.shape.rank
    # A variable of Keras 3 has a text as its dtype.
    size = variable.shape.num_elements() * tf.as_dtype(variable.dtype).size
    return bool(size <= _LOCAL_BYTES)


def _has_numbers(part: Any) -> bool:
    return bool(
        tf.as_dtype(part.dtype).name in bundle.DTYPES.values()
        and part.shape.is_fully_defined()
        and part.is_initialized()
    )


def _values(variable: Any) -> Arrays:
    """Returns the values of a variable on this worker's replicas."""
    return [part.numpy() for part in local_parts(variable)]


def _values_or_elements(variable: Any) -> Arrays:
    """Returns the values of a variable on this worker's replicas, or elements of the
    values if a restart only compares the variable."""
    if _is_own(variable):
        return _values(variable)
    found = (sample(part, _ELEMENTS) for part in local_parts(variable))
    return [elements for elements in found if elements is not None]


def _write(
    fileobj: IO[bytes],
    variables: Iterable[tuple[str, Any]],
    read: Callable[[Any], Arrays],
) -> None:
    """Writes the values of variables; `read_replica_values` reads this format.

    Args:
        fileobj: file to write to.
        variables: the variables, with their paths.
        read: function that returns the values of a variable.
    """
    header, parts = [], []
    for path, variable in variables:
        arrays = read(variable)
        header.append(
            {
                "path": path,
                "dtype": tf.as_dtype(variable.dtype).name,
                "shapes": [array.shape for array in arrays],
            }
        )
        parts += [array.tobytes() for array in arrays]
    write_parts(fileobj, header, parts)


def _differs(now: Arrays, saved: Arrays) -> bool:
    """Returns whether arrays have the same shapes, but not the same values."""
    if [each.shape for each in now] != [each.shape for each in saved]:
        return False
    return [each.tobytes() for each in now] != [each.tobytes() for each in saved]


def _assign(variable: Any, arrays: Arrays) -> bool:
    """Assigns values to the replicas of a variable on this worker; returns whether the
    shapes are the same. If not, assigns nothing."""
    local = local_parts(variable)
    if [tuple(part.shape) for part in local] != [array.shape for array in arrays]:
        return False
    for part, array in zip(local, arrays, strict=True):
        with tf.device(part.device):
            part.assign(tf.constant(array, dtype=part.dtype))
    return True
