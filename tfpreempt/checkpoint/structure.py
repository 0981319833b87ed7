"""Does a checkpoint fit the objects it is to be restored into? Decided without I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from tfpreempt import errors

_SHOWN = 20
VALUE = "VARIABLE_VALUE"  # the attribute under which a variable saves its value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a variable is, here or in a checkpoint.

    Attributes:
        shape: None in it for a side of no fixed length.
        dtype: the type's name.
    """

    shape: tuple[int | None, ...]
    dtype: str


def problem(here: Kind, saved: Kind | None) -> str | None:
    """What does not fit, for people; None if it fits."""
    if saved is None:
        return (
            f"the model has it with shape {here.shape} and type "
            f"{here.dtype}, the checkpoint has no such value"
        )
    if saved.dtype != here.dtype:
        return f"the model has type {here.dtype}, the checkpoint {saved.dtype}"
    if len(here.shape) != len(saved.shape) or any(
        now not in (None, then)
        for now, then in zip(here.shape, saved.shape, strict=True)
    ):
        return f"the model has shape {here.shape}, the checkpoint {saved.shape}"
    return None


def mismatch(prefix: str, problems: Sequence[str], unused: Sequence[str]) -> Exception:
    """The error that refuses a checkpoint of another model; it names what doesn't fit.

    Args:
        prefix: the checkpoint, for the message.
        problems: what of each existing variable does not fit.
        unused: names in the checkpoint that no existing object has; they may belong to
            layers that are built later, so alone they are no mismatch.
    """
    more = f"\nIn the checkpoint but not in the model: {listed(unused)}"
    return errors.CheckpointMismatchError(
        f"The checkpoint {prefix!r} was written by another model; nothing was "
        f"restored. What doesn't match ({len(problems)}):\n  "
        + "\n  ".join(problems[:_SHOWN])
        + (f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")
        + (more if unused else "")
        + "\nUse the model that wrote it, or another checkpoint directory."
    )


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


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


def unused(graph: Any, nodes: Collection[int]) -> list[str]:
    """The names of variables that only the checkpoint has.

    Args:
        graph: the TrackableObjectGraph of the saved one.
        nodes: those that living objects are restored from.
    """
    matched = set(nodes)
    for index in nodes:  # optimizers make slots when they first need them
        matched.update(
            s.slot_variable_node_id for s in graph.nodes[index].slot_variables
        )
    return [
        attribute.checkpoint_key.split("/.ATTRIBUTES/")[0]
        for index, node in enumerate(graph.nodes)
        for attribute in node.attributes
        if index not in matched and attribute.name == VALUE
    ]


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
