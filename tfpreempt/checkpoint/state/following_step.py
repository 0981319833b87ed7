"""Warns if the first step after a restart gets other arguments than without a restart.

A commit of a loop is made at the beginning of a `run()`. The step that follows has then
its arguments already: a batch from `for batch in dataset`, a learning rate, a random
key. After a restart from this commit, the first step must get the same values. If the
values differ, the data start again from the beginning or in another order, or the loop
has a value that no commit holds. So each commit records a fingerprint of the values,
and the first step after a restart is compared with the record.

A worker other than the chief also records its values of the States that only the chief
saves. A restart gives the chief's values to every worker, so a worker that had another
value, such as the position in its own data, would not continue with this value.
"""

from __future__ import annotations

import dis
import functools
import logging
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint.state.state import State, StateRegistry
from tfpreempt.checkpoint.state.unsaved_state_check import (
    mark_of_contents,
    raw_bytes,
    sample_of,
    sample_of_array,
    shortened,
)
from tfpreempt.core import frameworks, object_graph
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Event, FollowingStep
from tfpreempt.core.reachable_values import reachable

_log = logging.getLogger(__name__)

_FUNCTION = "the function"
_MANY = 5_000
_RECORDED = 50  # arrays of a function that a commit records
_STORES = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")
_OTHER = (
    "the first step after this restart does not get the values that the step would "
    "have got without the restart: %s. The data start from the beginning or in another "
    "order, or the loop has other values. Put the iterator into the "
    "tf.train.Checkpoint and fetch batches inside of the step, put a loader into a "
    "tfpreempt.states.LoaderState, or select each batch by the number of the step "
    "(handler.total_run_calls). Put other values, such as parameters and random keys, "
    "into a State, and read the State after the restore."
)
_CALLS = (
    "the first step after this restart calls %s; without the restart the step would "
    "have called %s. Select the function by the number of the step "
    "(handler.total_run_calls), or by a value in a State."
)
_SHARED = (
    "this worker had another value of %s than the chief when the restored commit was "
    "made, and continues with the chief's value: a commit contains only the chief's "
    "value of a State with per_worker=False. Create the State with per_worker=True."
)
_RATES = (
    "this program sets other learning rates than the interrupted program: %s. The "
    "rates of the checkpoint were restored. To train with another rate, assign the "
    "rate after the handler is created."
)
_SAVED_OUTSIDE = ("preemption", "periodic", "save")
_SKIPPED = (
    "the restored commit was made after step %d, outside of run(): by save() or "
    "check_preemption(), at the end of a watch scope, or after the loop. This process "
    "continues with the next step, so the program's code between that call and the "
    "next run() is not executed again. Make changes before save(), evaluate at the "
    "beginning of the loop body, and test there whether training is over "
    "(docs/loops.md)."
)


class FollowingStepCheck:
    """Compares the first step after a restart with the step that followed the commit.

    Use on the main thread only. The methods log errors, and raise none.

    Args:
        trained: number of steps trained before this process.
        cluster: the workers, and the index of this worker. With another number of
            workers, each worker may get other batches.
        registry: the named States, already restored.
        record: function that appends an event to the journal of the run.
        earlier: function that returns the `FollowingStep` records of earlier processes
            of this worker.
        rates: result of `learning_rates` before the restore.
        because: reason of the restored commit, see `Manifest`; None without a commit of
            tfpreempt.
    """

    def __init__(
        self,
        trained: int,
        cluster: Cluster,
        registry: StateRegistry,
        record: Callable[[Event], None],
        earlier: Callable[[], Sequence[Mapping[str, Any]]],
        rates: Mapping[str, str],
        because: str | None = None,
    ) -> None:
        self._trained = trained
        self._cluster = cluster
        self._registry = registry
        self._at_start = self._shared_values()
        self._record = record
        self._earlier = earlier
        self._rates = rates
        self._because = because
        self._is_compared = False

    @functools.cached_property
    def _records(self) -> Sequence[Mapping[str, Any]]:
        return self._earlier() if self._trained else ()

    @functools.cached_property
    def _recorded(self) -> Mapping[str, Any] | None:
        """The newest record of the boundary at which the restored commit was made;
        empty if another number of workers trained, or if the record is corrupt."""
        for each in reversed(self._records):
            if each.get("trained") == self._trained:
                values = (
                    each.get("values"),
                    each.get("shared", {}),
                    each.get("rates", {}),
                )
                is_intact = all(isinstance(one, Mapping) for one in values)
                is_same = each.get("workers") == self._cluster.num_workers
                return each if is_intact and is_same else {}
        return None

    @property
    def is_at_run(self) -> bool:
        """Whether the restored commit was made in front of a `run()`, as far as the
        journal shows; not at the end of a program, or in an evaluation."""
        return self._recorded is not None

    def before_commit(
        self,
        trained: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Records the values of a step, because a commit may be made before the step.

        Args:
            trained: number of steps trained before the step.
            function: the step function.
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.
        """
        self._record(
            FollowingStep(
                trained=trained,
                workers=self._cluster.num_workers,
                values=_values_of_call(function, args, kwargs),
                shared=self._other_values(self._shared_values()),
                rates=self._rates,
            )
        )

    def compare(
        self,
        trained: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_again: bool = False,
    ) -> None:
        """Logs a warning if the first step of this process gets other values than the
        step that followed the restored commit, or if the code between the commit and
        that step is not executed.

        Args:
            trained: number of steps trained before the step.
            function: the step function.
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.
            is_again: whether this process executes the code that followed the commit:
                the process has called `save()` or `check_preemption()`, or has entered
                a watch scope, before its first step.
        """
        if self._is_compared or trained != self._trained:
            return
        self._is_compared = True
        is_skipped = self._recorded is None and self._records and not is_again
        if is_skipped and self._because in _SAVED_OUTSIDE and self._cluster.is_chief:
            _log.warning(_SKIPPED, trained)
        recorded = self._recorded or {}
        if others := self._other_values(recorded.get("shared") or {}):
            _log.warning(_SHARED, shortened(sorted(others)))
        rates = recorded.get("rates", {})
        if other := [
            f"{path} is {rate}, was {rates[path]}"
            for path, rate in self._rates.items()
            if rates.get(path, rate) != rate
        ]:
            _log.warning(_RATES, shortened(other))
        if before := recorded.get("values"):
            now = _values_of_call(function, args, kwargs)
            # The paths of a function's values may be different in a new process.
            changed = [
                name for name, was in before.items() if now.get(name, was) != was
            ]
            if _FUNCTION in changed:
                _log.warning(_CALLS, now[_FUNCTION], before[_FUNCTION])
            elif changed:
                _log.warning(_OTHER, shortened(changed))

    def _shared_values(self) -> dict[str, int]:
        """Returns a fingerprint of this worker's value of each ready-made State that
        only the chief saves, by the name of the State. Empty on the chief."""
        if self._cluster.is_chief:
            return {}
        try:
            states = self._registry.in_order()
            marks = {
                each.name: mark_of_contents(each)
                for each in states
                if not each.per_worker
            }
        except Exception as error:  # noqa: BLE001 - from an object of the user
            _log.debug("the values of the States cannot be compared", exc_info=error)
            return {}
        return {name: mark for name, mark in marks.items() if mark is not None}

    def _other_values(self, values: Mapping[str, int]) -> dict[str, int]:
        """Returns the values that differ from those after the restore.

        A commit thus records the values that this worker has changed: often only the
        chief changes a value, such as a list of losses. Leaves out States that did not
        exist at the restore.
        """
        before = self._at_start
        return {
            name: mark
            for name, mark in values.items()
            if name in before and before[name] != mark
        }


def learning_rates(checkpoint: Any) -> dict[str, str]:
    """Returns the constant learning rates of the optimizers in a checkpoint, as text,
    by path.

    Args:
        checkpoint: checkpoint object of the program, before the restore; None for no
            optimizers.
    """
    try:
        return {
            path: f"{float(rate[0]):.6g}"
            for each in frameworks.adapters("values")
            for path, variable in each.named_variables(checkpoint, with_states=False)
            if path.endswith("learning_rate")
            and (rate := each.sample(variable, 1)) is not None
        }
    except Exception as error:  # noqa: BLE001 - from a variable of the program
        _log.debug("the learning rates cannot be compared", exc_info=error)
        return {}


def _values_of_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Returns a fingerprint of each argument of a call that contains an array or a
    number, by name, and the name of the function. If no argument contains an array or
    an iterator, adds the arrays that the function uses, by path.

    Empty if the values cannot be read.
    """
    try:
        found = {_FUNCTION: str(getattr(function, "__name__", type(function).__name__))}
        arguments = {f"args[{i}]": each for i, each in enumerate(args)} | dict(kwargs)
        has_batch = False
        for name, argument in arguments.items():
            marks = []
            for path, value, *_ in object_graph.walk(
                {name: argument}, lambda kind: False
            ):
                is_number = isinstance(value, int | float | complex | np.generic)
                has_batch |= hasattr(value, "__next__")
                if mark := _number(value) if is_number else _mark(value):
                    marks.append(f"{path} {mark}")
                    has_batch |= not is_number
            if marks:  # sorted: the order of a dict may differ after a restart
                found[name] = _checksum("\n".join(sorted(marks)).encode())
        return found if has_batch else found | _arrays_of(function)
    except Exception as error:  # noqa: BLE001 - from an object of the user
        _log.debug("the values of the step cannot be compared", exc_info=error)
        return {}


def _arrays_of(function: Callable[..., Any]) -> dict[str, str]:
    """Returns a fingerprint of each array that a function uses, by path.

    Leaves out variables, because other checks compare variables; names that the
    function sets, such as its newest result; and attributes of objects other than the
    object of a method: a loader may restore its attributes only when the step reads the
    first batch. Empty if the function can reach more than `_MANY` values, because their
    fingerprints would delay each commit.
    """
    method: Any = function
    while isinstance(method, functools.partial):
        method = method.func
    owner = type(getattr(method, "__self__", None))
    locations = reachable({"": function}, lambda kind: kind is owner)
    if len(locations) > _MANY:
        return {}
    adapters = frameworks.adapters("values")
    is_set = {
        each.argval
        for location in locations
        if isinstance(location.value, types.FunctionType)
        for each in dis.get_instructions(location.value)
        if each.opname in _STORES
    }
    found: dict[str, str] = {}
    for path, value, _, key in locations:
        is_array = isinstance(value, np.ndarray)
        if not is_array and any(each.variables(value) for each in adapters):
            continue
        is_result = isinstance(key, str) and key in is_set
        if not is_result and len(found) < _RECORDED and (mark := _mark(value)):
            found[path] = mark
    return found


def _number(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)


def _mark(value: Any) -> str:
    """Returns a fingerprint of an array, tensor or variable; "" for other objects, and
    for an array of objects other than numbers and texts.

    Other checks compare the States.
    """
    if object_graph.is_container(value) or isinstance(value, State):
        return ""
    is_numpy = isinstance(value, np.ndarray)
    adapters = frameworks.adapters("values")
    sample = sample_of_array(value) if is_numpy else sample_of(adapters, value)
    if sample is None or not all(
        isinstance(each, int | float | complex | str | bytes)
        for each in (sample.tolist() if sample.dtype.hasobject else ())
    ):
        return ""
    return _checksum(raw_bytes(sample))


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
