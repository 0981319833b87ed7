"""Warns if the data of a loop start from the beginning after a restart.

A program may fetch a batch outside of its step, for example by `for batch in dataset`,
and pass the batch to `run()`. The iterator is then invisible here, and no commit has
its position. So the arguments of the first step of the run are compared with the
arguments of the first step after a restart: if both are the same batch, the data have
started again. Arguments that are equal in the first two steps, such as a mask or the
whole data, are no batches. Arrays of equal elements are no batches either. If no
argument is an array, as in `run(lambda: step(x, y))`, the arrays that the step function
uses are compared. A commit at the end of an epoch of data in a fixed order is followed
by the first batch, which is recorded at the commit.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.state.unsaved_state_check import raw_bytes
from tfpreempt.core import frameworks, object_graph
from tfpreempt.core.events import Batches, Event
from tfpreempt.core.object_graph import ObjectPath
from tfpreempt.core.reachable_values import reachable

_log = logging.getLogger(__name__)

_SAMPLES = 1 << 16  # elements compared, of an array with more elements
_MANY = 5_000
_AGAIN = (
    "the data start again from the beginning: the values %s of the first step after "
    "this restart are those of the first step of the run, although %d steps are "
    "trained. Put the iterator into the tf.train.Checkpoint and fetch batches inside "
    "of the step, put a loader into a tfpreempt.states.LoaderState, or select each "
    "batch by the number of the step (handler.total_run_calls). Put values such as "
    "parameters and random keys into a State, and read the State after the restore."
)


class FirstBatch:
    """Compares the arguments of the first steps. Use on the main thread only.

    Args:
        trained: number of steps trained before this process.
        record: function that appends an event to the journal of the run.
        earlier: function that returns the `Batches` records of earlier processes of
            this worker.
    """

    def __init__(
        self,
        trained: int,
        record: Callable[[Event], None],
        earlier: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._trained = trained
        self._record = record
        self._earlier = earlier
        self._of_first_step: dict[str, str] = {}  # fingerprints of all arrays
        # Fingerprints of the first batch; empty before the second step of the run.
        self._first: Mapping[str, str] = {}

    def before_step(
        self,
        number: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Records or compares the arguments of a step. Logs errors, and raises none.

        Args:
            number: 0 before the first step of this process, 1 before the second step.
            function: the step function.
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.
        """
        is_new = self._trained == 0
        if not (is_new or number == 0):
            return
        try:
            marks = _marks_of_call(function, args, kwargs)
            if number == 0 and is_new:
                self._of_first_step = marks
            elif is_new:
                first = sorted(self._of_first_step.items())
                self._first = {name: x for name, x in first if marks.get(name) != x}
                if self._first:
                    self._record(Batches(first=self._first))
            elif self._records:
                self._first = self._records[-1].get("first") or {}
                known = {x for each in self._here for x in each.get("again") or ()}
                again = [name for name in self._again(marks) if name not in known]
                if again and self.is_at_run:
                    _log.warning(_AGAIN, ", ".join(again), self._trained)
        except Exception as error:  # noqa: BLE001 - from an object of the user
            _log.debug("the arguments of the step cannot be compared", exc_info=error)

    @property
    def is_at_run(self) -> bool:
        """Whether the restored commit was made in front of a `run()`, as far as the
        journal shows; not at the end of a program, or in an evaluation."""
        return self._trained > 0 and bool(self._here)

    @functools.cached_property
    def _records(self) -> Sequence[Mapping[str, Any]]:
        return self._earlier()

    @property
    def _here(self) -> list[Mapping[str, Any]]:
        """The records of boundaries at which the restored commit may have been made."""
        return [each for each in self._records if each.get("trained") == self._trained]

    def before_commit(
        self,
        trained: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Records that a commit may be made in front of a step, and whether the step
        gets the first batch of the run again: a restart gets the batch too.

        Args:
            trained: number of steps trained before the next step.
            function: the function of the next step.
            args: positional arguments of the next step.
            kwargs: keyword arguments of the next step.
        """
        first = self._first
        try:
            marks = _marks_of_call(function, args, kwargs, first) if first else {}
            again = self._again(marks)
            self._record(Batches(first=first, again=again, trained=trained))
        except Exception as error:  # noqa: BLE001 - from an object of the user
            _log.debug("the arguments of the step cannot be compared", exc_info=error)

    def _again(self, marks: Mapping[str, str]) -> list[str]:
        """Returns the paths of arrays that are equal to arrays of the first batch."""
        return [name for name in marks if marks[name] == self._first.get(name)]


def _marks_of_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    only: Container[str] | None = None,
) -> dict[str, str]:
    """Returns a fingerprint of each array in the arguments of a call, by path; if there
    is no array, of each array that the function uses. Empty for a function that can
    reach more than `_MANY` values, because their search would delay each commit.

    Args:
        function: the function of the call.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        only: paths of the arrays; None for every array.
    """
    arguments = {"args": tuple(args), "kwargs": dict(kwargs)}
    if marks := _marks(object_graph.walk(arguments, lambda kind: False), only):
        return marks
    locations = reachable({"": function}, _is_searched)
    if len(locations) > _MANY:
        return {}
    return _marks(
        (
            location
            for location in locations
            # A variable is no batch, and may have its first value again in each epoch.
            if isinstance(location.value, np.ndarray)
            or not any(
                each.variables(location.value) for each in frameworks.adapters("values")
            )
        ),
        only,
    )


def _is_searched(kind: type) -> bool:
    return object_graph.is_user_code(kind) and not issubclass(kind, State)


def _marks(
    locations: Iterable[ObjectPath], only: Container[str] | None
) -> dict[str, str]:
    """Returns a fingerprint of each array at some locations, by path."""
    values = frameworks.adapters("values")
    found = {}
    for location in locations:
        value = location.value
        # A State is no batch, and may have its first value again in each epoch.
        if object_graph.is_container(value) or isinstance(value, State):
            continue
        if only is not None and location.path not in only:
            continue
        samples = (each.sample(value, _SAMPLES) for each in values)
        sample = (
            value.flat[:: max(1, value.size // _SAMPLES)]
            if isinstance(value, np.ndarray)
            else next((each for each in samples if each is not None), None)
        )
        # A single number, such as the number of a step, is no batch.
        if sample is not None and sample.size > 1:
            array = np.asarray(sample)
            data = raw_bytes(array)
            # Equal elements, such as a mask of ones, may be in many batches.
            kind = getattr(value, "dtype", None)
            width = getattr(kind, "itemsize", array.itemsize)
            if data[width:] != data[:-width]:
                found[location.path] = f"{zlib.crc32(data):08x}"
    return found
