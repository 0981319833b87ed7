"""What TensorFlow does not track keeps its name in a Checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tfpreempt.checkpoint.tensors.variables import attach  # noqa: E402


class Parts:
    """A user's object."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [*parts]


def test_an_object_keeps_its_name_when_another_comes_before_it() -> None:
    module, old, new = tf.Module(), tf.Variable(1.0), tf.Variable(2.0)
    module.held = Parts(old)
    checkpoint = tf.train.Checkpoint(m=module)
    attach(checkpoint)
    module.held.parts.insert(0, new)
    untracked = attach(checkpoint)
    children = untracked._trackable_children()
    assert children["m.held.parts[0]"] is old
    assert any(child is new for child in children.values())


def test_what_takes_the_place_of_another_has_its_name() -> None:
    module, new = tf.Module(), tf.Variable(2.0)
    module.held = Parts(tf.Variable(1.0))
    checkpoint = tf.train.Checkpoint(m=module)
    attach(checkpoint)
    module.held.parts[0] = new
    untracked = attach(checkpoint)
    assert untracked._trackable_children()["m.held.parts[0]"] is new
