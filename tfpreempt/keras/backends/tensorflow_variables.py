"""The variables of a fit on TensorFlow, and earlier values of them for a later save.

Keeping a value copies nothing: a read returns the variable's own buffer. If the
variable changes while the buffer is in use, TensorFlow writes the new value into a new
buffer (`PrepareToUpdateVariable`). So only changed variables need memory twice.

Variables with sparse updates, such as embeddings, are an exception: TensorFlow changes
the buffer in place, so a read copies the buffer (copy-on-read mode).
`DisableCopyOnRead` turns this mode off, as TensorFlow's own saves do. Only large
variables (`is_large`) leave the mode, because for small variables a copy takes less
time than the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.tensors.gather import read_parts, sums
from tfpreempt.checkpoint.tensors.variables import (
    Attached,
    attach,
    attached,
    local_parts,
    unequal_parts,
)
from tfpreempt.keras.fit_protocol import FitVariables, WorkerVariable


class TensorFlowVariables(FitVariables):
    """Implements `fit_protocol.FitVariables` for a fit on TensorFlow.

    The tf.train.Checkpoint has the weights and the optimizer. Every worker saves its
    own metrics and seed generators, see `checkpoint/tensors/per_replica.py`.

    Args:
        model: the model.
        optimizer: the model's optimizer; None without an optimizer.

    Attributes:
        checkpoint: the tf.train.Checkpoint; TensorFlow can restore it without
            tfpreempt.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model = model
        tracked = {"model": model, "optimizer": optimizer}
        self.checkpoint = tf.train.Checkpoint(
            **{name: each for name, each in tracked.items() if each is not None}
        )

    def of_worker(self, *, is_attached: bool = False) -> list[WorkerVariable]:
        """Returns the metrics and seed generators of this worker, in a fixed order.

        All metrics of the model exist already.

        Args:
            is_attached: whether `of_worker` was called before at this step.
        """
        untracked = (attached if is_attached else attach)(self.checkpoint)
        metrics = [
            # Do not use getattr with a default: to look up a missing attribute, an
            # ON_READ variable reads the value, a reduction over the workers.
            (each.path if "path" in dir(type(each)) else each.name, each)
            for metric in self._model.metrics
            for each in metric.variables
        ]
        seen: set[int] = set()
        found = []
        for name, variable in [*metrics, *untracked.own]:
            parts = local_parts(variable)
            here = set(map(id, parts))
            if here and not here & seen:
                seen |= here
                shape = parts[0].shape.as_list()
                kind = f"{tf.as_dtype(variable.dtype).name}{shape or ''}"
                found.append(
                    WorkerVariable(name=name, kind=kind, variable=variable, parts=parts)
                )
        return found

    def sums(self, variables: Sequence[Any]) -> Sequence[float]:
        parts = [unequal_parts(each) for each in variables]
        totals = iter(sums([part for each in parts for part in each]))
        return [sum(next(totals) for _ in each) for each in parts]

    def elements(self, variable: Any) -> Any:
        parts = unequal_parts(variable)
        return np.concatenate([part.numpy().ravel() for part in parts])

    def hold(self) -> HeldValues:
        return HeldValues(attach(self.checkpoint))


class HeldValues:
    """The values of a fit's variables on this worker, at the time of construction.

    Use on the main thread only.

    Args:
        untracked: result of `attach` for the tf.train.Checkpoint of the fit, called
            just before. The values of the metrics and seed generators in this result
            are kept, too. The value of the save counter is not kept.
    """

    def __init__(self, untracked: Attached) -> None:
        found, edges = untracked.tracked()
        # Exclude the tf.train.Checkpoint and its direct children: the save counter is a
        # variable among them. All other variables belong to objects below the children.
        children = {0, *(number for _, number in edges[0])}
        objects = [obj for n, (_, obj) in enumerate(found) if n not in children]
        objects += [variable for _, variable in untracked.own]
        parts = {id(part): part for obj in objects for part in local_parts(obj)}
        self._parts = list(parts.values())
        self._values = read_parts(self._parts)

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Context manager: gives the variables the kept values, until the body ends.

        Afterwards the variables have their previous values again.
        """
        now = read_parts(self._parts)
        self._assign(self._values)
        try:
            yield
        finally:
            self._assign(now)

    def _assign(self, values: list[tf.Tensor]) -> None:
        for part, value in zip(self._parts, values, strict=True):
            with tf.device(part.device):
                part.assign(value)
