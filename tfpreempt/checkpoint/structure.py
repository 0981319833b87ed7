"""Does a checkpoint fit the objects it is to be restored into? Decided without I/O."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpreempt import errors

_log = logging.getLogger(__name__)
_SHOWN = 20
VALUE = "VARIABLE_VALUE"  # the attribute under which a variable saves its value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One variable, as it is now and as the checkpoint has it.

    Attributes:
        name: its path from the checkpoint's root.
        shape: the current shape; None for what has no fixed shape.
        dtype: the current type's name.
        saved_shape: None where the checkpoint has no such value.
        saved_dtype: None where the checkpoint has no such value.
        called: what Keras calls it, if it is Keras'.
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: str
    saved_shape: tuple[int, ...] | None = None
    saved_dtype: str | None = None
    called: str = ""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.called} ({self.name})" if self.called else self.name


def problem(value: Value) -> str | None:
    """What does not fit, for people; None if it fits."""
    if value.saved_dtype is None:
        return (
            f"{value.label}: the model has it with shape {value.shape} and type "
            f"{value.dtype}, the checkpoint has no such value"
        )
    if value.saved_dtype != value.dtype:
        return (
            f"{value.label}: the model has type {value.dtype}, the checkpoint "
            f"{value.saved_dtype}"
        )
    if not _fits(value.shape, value.saved_shape):
        return (
            f"{value.label}: the model has shape {value.shape}, the checkpoint "
            f"{value.saved_shape}"
        )
    return None


def check(
    prefix: str, values: Iterable[Value], unused: Iterable[str], optional: set[str]
) -> None:
    """Compares every existing variable with the checkpoint.

    Args:
        prefix: the checkpoint, for the message.
        values: the variables that exist now.
        unused: names in the checkpoint that no existing object has; they may belong to
            layers that are built later, so alone they are no mismatch.
        optional: names that a checkpoint from elsewhere may lack.

    Raises:
        CheckpointMismatchError: names everything that does not fit.
    """
    problems = [
        text
        for value in values
        if not (value.saved_dtype is None and value.name in optional)
        and (text := problem(value)) is not None
    ]
    if not problems:
        return
    left = sorted(unused)
    more = f"\nIn the checkpoint but not in the model: {_list(left)}" if left else ""
    raise errors.CheckpointMismatchError(
        f"The checkpoint {prefix!r} was written by another model; nothing was "
        f"restored. What doesn't match ({len(problems)}):\n  "
        + "\n  ".join(problems[:_SHOWN])
        + (f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")
        + more
        + "\nUse the model that wrote it, or another checkpoint directory."
    )


def warn_of_unused(prefix: str, unused: Iterable[str], optional: set[str]) -> None:
    """Says after a restore what the checkpoint has and nothing here took."""
    left = sorted(set(unused) - optional)
    if left:
        _log.warning(
            "%s has %d variables that nothing here has (yet), so they were not "
            "restored: %s. If no layer that is built later takes them, the model has "
            "changed since, and the next save drops them.",
            prefix,
            len(left),
            _list(left),
        )


def warn_of_new(prefix: str, names: Iterable[str]) -> None:
    """Says before a restore what the program has and the checkpoint has not."""
    if new := sorted(names):
        _log.warning(
            "%s does not have %s, which lie in lists, dicts or objects of the program; "
            "they stay as the program made them.",
            prefix,
            _list(new),
        )


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _fits(shape: tuple[int | None, ...] | None, saved: tuple[int, ...] | None) -> bool:
    if shape is None or saved is None:
        return True
    return len(shape) == len(saved) and all(
        now is None or now == then for now, then in zip(shape, saved, strict=True)
    )


def match(view: Any, graph: Any) -> dict[int, int]:
    """Which saved node TensorFlow would restore each living object from.

    Args:
        view: the ObjectGraphView of the living checkpoint.
        graph: the TrackableObjectGraph of the saved one.

    Returns:
        Node number by id() of the object.
    """
    matched: dict[int, int] = {}
    objects: dict[int, Any] = {0: view.root}
    todo = [0]
    while todo:
        node_id = todo.pop(0)
        obj = objects[node_id]
        matched.setdefault(id(obj), node_id)
        children = {child.name: child.ref for child in view.list_children(obj)}
        for edge in graph.nodes[node_id].children:
            if edge.local_name in children and edge.node_id not in objects:
                objects[edge.node_id] = children[edge.local_name]
                todo.append(edge.node_id)
    return matched


def compare(
    view: Any,
    graph: Any,
    living: Iterable[tuple[str, Any, tuple[int | None, ...], str]],
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, str],
) -> tuple[list[Value], list[str]]:
    """Puts the living variables next to the saved ones.

    Args:
        view: the ObjectGraphView of the living checkpoint.
        graph: the TrackableObjectGraph of the saved one.
        living: path, variable, shape and type of each living variable.
        shapes: of the saved values, by key.
        dtypes: of the saved values, by key.

    Returns:
        The living variables, and the names that only the checkpoint has.
    """
    nodes = match(view, graph)
    values = []
    for path, obj, shape, dtype in living:
        key = saved_key(graph, nodes.get(id(obj))) or ""
        values.append(
            Value(
                name=path,
                called=called(obj),
                shape=shape,
                dtype=dtype,
                saved_shape=tuple(shapes[key]) if key in shapes else None,
                saved_dtype=dtypes.get(key),
            )
        )
    matched = set(nodes.values())
    for index in tuple(matched):  # optimizers make slots when they first need them
        matched.update(
            s.slot_variable_node_id for s in graph.nodes[index].slot_variables
        )
    unused = [
        attribute.checkpoint_key.split("/.ATTRIBUTES/")[0]
        for index, node in enumerate(graph.nodes)
        for attribute in node.attributes
        if index not in matched and attribute.name == VALUE
    ]
    return values, unused


def called(variable: Any) -> str:
    """The name that Keras gives a variable: layer and weight; empty for others."""
    is_of_keras = hasattr(type(variable), "path")
    name = variable.path if is_of_keras else getattr(variable, "name", "")
    return str(name).partition(":")[0] if "/" in str(name) else ""


def saved_key(graph: Any, node_id: int | None) -> str | None:
    """The key of a node's value in the checkpoint; None if it has none."""
    if node_id is None:
        return None
    for attribute in graph.nodes[node_id].attributes:
        if attribute.name == VALUE:
            return str(attribute.checkpoint_key)
    return None
