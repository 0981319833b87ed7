"""Variables of which each worker saves what its own replicas hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.state.encoding import read_parts, write_parts
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.tensors.variables import (
    Attached,
    local_parts,
)

_log = logging.getLogger(__name__)

Arrays = list[np.ndarray[Any, Any]]


def dealt(variable: Any, values: Arrays, worker: int, world: int) -> Arrays:
    """What this worker's replicas hold of the values that other replicas had.

    As many replicas as before have the same values, in the same order, wherever they
    are now. More or fewer have what reads the same: of a variable that is read as a sum
    equal shares of it, as TensorFlow deals them (of whole numbers the first replicas
    have one more); of one that is read as a mean each the mean; of any other each what
    the first one had.

    Args:
        variable: whose local replicas are asked for.
        values: of all replicas that there were.
        worker: index of this worker.
        world: number of workers, each with as many replicas.
    """
    parts = local_parts(variable)
    first, last = worker * len(parts), (worker + 1) * len(parts)
    replicas = world * len(parts)
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


class PerReplicaState(State):
    """What a worker holds of its own of the variables behind a Checkpoint.

    TensorFlow saves the reduced value of an ON_READ variable and hands back equal
    shares of it; totals that go on from those differ in the last bits. So the parts
    themselves are kept, and are assigned after the ordinary restore. So are the batch
    statistics of Keras 3, which each replica assigns its own, while TensorFlow takes
    them for mirrored and saves the first replica's; and metrics and seed generators,
    which TensorFlow saves nowhere.
    """

    _is_reserved = True

    def __init__(self, attached: Attached) -> None:
        super().__init__("tfpreempt.per_replica", per_worker=True, registry=None)
        self._attached = attached

    def is_wanted(self) -> bool:
        return bool(self._attached.differing or self._attached.own)

    def save(self, fileobj: IO[bytes]) -> None:
        header, parts = [], []
        for path, variable in self._attached.differing + self._attached.own:
            arrays = [part.numpy() for part in local_parts(variable)]
            header.append(
                {
                    "path": path,
                    "dtype": tf.as_dtype(variable.dtype).name,
                    "shapes": [array.shape for array in arrays],
                }
            )
            parts += [array.tobytes() for array in arrays]
        write_parts(fileobj, header, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        self.fold([fileobj], 0, 1)

    def fold(self, files: Sequence[IO[bytes] | None], worker: int, world: int) -> None:
        """The replicas' values are dealt among the replicas that there are now."""
        saved: dict[str, Arrays] = {}
        for file in (each for each in files if each is not None):
            header, parts = read_parts(file)
            left = iter(parts)
            for entry in header:
                dtype = tf.as_dtype(entry["dtype"]).as_numpy_dtype
                saved.setdefault(entry["path"], []).extend(
                    np.frombuffer(next(left), dtype).reshape(shape)
                    for shape in entry["shapes"]
                )
        for path, variable in self._attached.differing + self._attached.own:
            if path not in saved:
                continue
            values = saved.pop(path)
            arrays = dealt(variable, values, worker, world)
            local = local_parts(variable)
            here = [tuple(part.shape) for part in local]
            if here == [array.shape for array in arrays]:
                for part, array in zip(local, arrays, strict=True):
                    with tf.device(part.device):
                        part.assign(tf.constant(array, dtype=part.dtype))
                continue
            _log.warning(
                "%s has the shapes %s on the replicas here, and %s in the checkpoint: "
                "it stays as it is.",
                path,
                here,
                [array.shape for array in values],
            )
        if saved:
            _log.warning(
                "tfpreempt: the checkpoint has metrics or seed generators that are not "
                "here, or not under the same path, so they are not restored: %s. Build "
                "the model before the handler, or the fit, as the run that saved them "
                "did: called once or not, with a strategy or without.",
                ", ".join(saved),
            )
