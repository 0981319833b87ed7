"""What the objects of a Checkpoint hold, and TensorFlow does not track.

Keras 3 keeps its own books. Of its models, a tf.train.Checkpoint sees neither layers
and optimizers in lists and dicts, nor metrics and seed generators. Here they are looked
up in Python's attributes: the first kind is made part of the Checkpoint, under a path
such as `m.blocks[0]`; the second differs between workers, and goes into their shards.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.variables import local_parts, walk
from tfpreempt.core import reach, seams

NAME = "tfpreempt_untracked"
_HOLDING = ("variables", "reset_state", "make_seed_for_stateless_op")
"""What layers, optimizers and modules have; tf_keras' list of metrics, and its random
generators."""
_SETTINGS = ("._steps_per_execution",)  # variables that hold what a user has set


seams.require("checkpoints")
_base: Any = seams.trackable_base
_Trackable: Any = _base.Trackable


class Untracked(_Trackable):  # type: ignore[misc]  # TensorFlow is untyped
    """One for each Checkpoint, as a child of it; main thread.

    Args:
        checkpoint: whose objects are looked into.

    Attributes:
        own: path and variable of the metrics and generators, in a fixed order.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint) -> None:
        self.own: list[tuple[str, Any]] = []
        self._checkpoint = checkpoint
        self._found: dict[str, Any] = {}

    def look(self) -> None:
        """Looks anew; ahead of a save or a restore, on all workers.

        What was found before keeps the name that it was found by first.
        """
        roots = dict(walk(self._checkpoint))
        tracked = {id(root) for root in roots.values()}
        own: dict[int, tuple[str, Any]] = {}
        new: list[tuple[str, Any]] = []
        held: set[int] = set()
        for place in reach.walk(roots, _may_hold, leaves=False):
            path, value = place.path, place.value
            kind: type = type(value)
            if place.owner is not None:
                held.add(id(value))
            if id(value) in tracked or path.endswith(_SETTINGS):
                continue
            if _is_own(kind):
                for number, variable in enumerate(_variables(value)):
                    own.setdefault(id(variable), (f"{path}[{number}]", variable))
            elif _may_be_tracked(kind):
                new.append((path, value))
                view = seams.graph_view.ObjectGraphView(value)
                tracked.update(map(id, view.breadth_first_traversal()[0]))
        for path, value in new:
            self._found[self._free(path, held)] = value
        self.own = [
            (path, variable)
            for path, variable in own.values()
            if id(variable) not in tracked and local_parts(variable)
        ]

    def _free(self, path: str, held: set[int]) -> str:
        """A name that nothing has which is still there."""
        names = itertools.chain([path], (f"{path} ({n})" for n in itertools.count(2)))
        return next(name for name in names if id(self._found.get(name)) not in held)

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(self._found)


def attach(checkpoint: tf.train.Checkpoint) -> Untracked:
    """Makes what a Checkpoint does not track a part of it, once for each."""
    if not hasattr(checkpoint, NAME):
        setattr(checkpoint, NAME, Untracked(checkpoint))
    found: Untracked = getattr(checkpoint, NAME)
    found.look()
    return found


@functools.cache
def _is_own(kind: type) -> bool:
    """Whether it is a worker's own: metrics count its rows, generators may differ."""
    is_metric = hasattr(kind, "reset_state") and hasattr(kind, "variables")
    is_seed = kind.__name__ == "SeedGenerator" and kind.__module__.startswith("keras.")
    return is_metric or is_seed or issubclass(kind, tf.random.Generator)


@functools.cache
def _may_be_tracked(kind: type) -> bool:
    """Whether it is a layer, optimizer, module or variable; lists are looked into."""
    if not issubclass(kind, seams.trackable_base.Trackable) or issubclass(
        kind, seams.data_structures.TrackableDataStructure
    ):
        return False
    is_variable = issubclass(kind, tf.Variable) or hasattr(kind, "_deferred_initialize")
    return is_variable or hasattr(kind, "variables")


@functools.cache
def _may_hold(kind: type) -> bool:
    """Whether attributes may hold variables: those of models, and of users' objects."""
    if _is_own(kind) or hasattr(kind, "_create_or_restore_slot_variable"):
        return False  # an old optimizer, whose slots TensorFlow finds by itself
    return any(hasattr(kind, n) for n in _HOLDING) or reach.is_of_program(kind)


def _variables(own: Any) -> list[Any]:
    return list(own.variables) if hasattr(type(own), "variables") else [own.state]
