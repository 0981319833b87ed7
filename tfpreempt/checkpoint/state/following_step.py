"""Warns if a loop does not continue with the step that was next before a restart.

A commit of a loop is made at the beginning of a `run()`. The step that follows has then
its arguments already: a batch from `for batch in dataset`, a learning rate, a random
key. After a restart from this commit, the first step must get the same values. If the
values differ, the data start again from the beginning or in another order, or the loop
has a value that no commit holds. So each commit records a fingerprint of the values,
and the first step after a restart is compared with the record.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.state.unsaved_state_check import (
    raw_bytes,
    sample_of,
    sample_of_array,
)
from tfpreempt.core import frameworks, object_graph
from tfpreempt.core.events import Event, FollowingStep
from tfpreempt.core.reachable_values import reachable

_log = logging.getLogger(__name__)

_SCALARS = (int, float, complex, str, bytes, np.generic)
_MANY = 5_000
_FUNCTION = "the function"
_SHOWN = 5  # values named in a message
_RECORDED = 50  # arrays of a function that a commit records
_OTHER = (
    "the first step after this restart does not get the values that the step would "
    "have got without the restart: %s. The data start from the beginning or in another "
    "order, or the loop has other values. Put the iterator into the "
    "tf.train.Checkpoint and fetch batches inside of the step, put a loader into a "
    "tfpreempt.states.LoaderState, or select each batch by the number of the step "
    "(handler.total_run_calls). Put other values, such as parameters and random keys, "
    "into a State, and read the State after the restore."
)


class FollowingStepCheck:
    """Compares the first step after a restart with the step that followed the commit.

    Use on the main thread only. The methods log errors, and raise none.

    Args:
        trained: number of steps trained before this process.
        workers: number of workers. With another number of workers, each worker may get
            other batches.
        record: function that appends an event to the journal of the run.
        earlier: function that returns the `FollowingStep` records of earlier processes
            of this worker.
    """

    def __init__(
        self,
        trained: int,
        workers: int,
        record: Callable[[Event], None],
        earlier: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._trained = trained
        self._workers = workers
        self._record = record
        self._earlier = earlier

    @functools.cached_property
    def _recorded(self) -> Mapping[str, str] | None:
        """The newest record of the boundary at which the restored commit was made."""
        for each in reversed(self._earlier() if self._trained else ()):
            if each.get("trained") == self._trained:
                is_comparable = each.get("workers") == self._workers
                return each.get("values") or {} if is_comparable else {}
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
        """Records the values of a step, in front of which a commit may be made.

        Args:
            trained: number of steps trained before the step.
            function: the step function.
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.
        """
        values = _values_of_call(function, args, kwargs)
        self._record(
            FollowingStep(trained=trained, workers=self._workers, values=values)
        )

    def compare(
        self,
        trained: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Logs a warning if the first step of this process gets other values than the
        step that followed the restored commit.

        Args:
            trained: number of steps trained before the step.
            function: the step function.
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.
        """
        if trained == self._trained and (before := self._recorded):
            now = _values_of_call(function, args, kwargs)
            # The paths of a function's values may be different in a new process.
            changed = [
                f"{name} ({now[name]} instead of {was})" if name == _FUNCTION else name
                for name, was in before.items()
                if now.get(name, was) != was
            ]
            if changed:
                more = ", ..." if len(changed) > _SHOWN else ""
                _log.warning(_OTHER, ", ".join(changed[:_SHOWN]) + more)


def _values_of_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Returns a fingerprint of each argument of a call with an array or a number in it,
    by name, and the name of the function. If no argument has an array or is an
    iterator, adds the arrays that the function uses, by path.

    Empty if the values cannot be read.
    """
    try:
        found = {_FUNCTION: str(getattr(function, "__name__", type(function).__name__))}
        arguments = {f"args[{i}]": each for i, each in enumerate(args)} | dict(kwargs)
        has_batch = False
        for name, argument in arguments.items():
            marks = []
            for location in object_graph.walk({name: argument}, lambda kind: False):
                value = location.value
                has_batch |= hasattr(value, "__next__")
                if isinstance(value, _SCALARS):
                    marks.append(repr(value))
                elif mark := _mark(value):
                    marks.append(mark)
                    has_batch = True
            if marks:
                found[name] = _checksum("\n".join(marks).encode())
        return found if has_batch else found | _arrays_of(function)
    except Exception as error:  # noqa: BLE001 - from an object of the user
        _log.debug("the values of the step cannot be compared", exc_info=error)
        return {}


def _arrays_of(function: Callable[..., Any]) -> dict[str, str]:
    """Returns a fingerprint of each array that a function uses, by path.

    Leaves out variables, because other checks compare variables, and attributes of
    objects other than the object of a method: a loader may restore its attributes only
    when the step reads the first batch. Empty for a function that can reach more than
    `_MANY` values, because their search would delay each commit.
    """
    method: Any = function
    while isinstance(method, functools.partial):
        method = method.func
    owner = type(getattr(method, "__self__", None))
    locations = reachable({"": function}, lambda kind: kind is owner)
    adapters = frameworks.adapters("values")
    found: dict[str, str] = {}
    for path, value, *_ in locations if len(locations) <= _MANY else ():
        is_array = isinstance(value, np.ndarray)
        if not is_array and any(each.variables(value) for each in adapters):
            continue
        if len(found) < _RECORDED and (mark := _mark(value)):
            found[path] = mark
    return found


def _mark(value: Any) -> str:
    """Returns a fingerprint of an array, tensor or variable; "" for other objects.

    Other checks compare the States.
    """
    if object_graph.is_container(value) or isinstance(value, State):
        return ""
    is_numpy = isinstance(value, np.ndarray)
    adapters = frameworks.adapters("values")
    sample = sample_of_array(value) if is_numpy else sample_of(adapters, value)
    return "" if sample is None else _checksum(raw_bytes(sample))


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
