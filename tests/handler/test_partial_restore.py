"""`restore="partial"`: matching values are restored, the others are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.handler.program import Program
from tfpreempt import errors
from tfpreempt.keras import PreemptionCallback
from tfpreempt.states import JsonState

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


@pytest.fixture
def committed(program: Program) -> Program:
    """A commit of step 2, with a variable of two floats: 3 and 4."""
    with program.handler() as handler:
        for _ in range(2):
            handler.run(program.step)
    return program


@pytest.mark.parametrize("scope", ["none", "mirrored"])
def test_variables_that_fit_are_restored_and_others_are_named(
    committed: Program, caplog: pytest.LogCaptureFixture, scope: str
) -> None:
    strategy = tf.distribute.get_strategy()
    if scope == "mirrored":
        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        fits = tf.Variable([9.0, 9.0])
        new = tf.Variable([9.0])
    other = tf.train.Checkpoint(variable=fits, more=new)
    with committed.handler(other, restore="partial") as handler:
        assert handler.total_run_calls == 2
        assert fits.numpy().tolist() == [3.0, 4.0]
        assert new.numpy().tolist() == [9.0]
        assert 'is restored in part (restore="partial"). These' in caplog.text
        assert "more: the model has a variable of shape (1,)" in caplog.text
        handler.run(lambda: None)
    caplog.clear()
    with committed.handler(other) as handler:  # the new commit fits completely
        assert handler.total_run_calls == 3
    assert "in part" not in caplog.text


@pytest.mark.parametrize(
    ("value", "difference"),
    [
        ([[9.0, 9.0, 9.0]], "shape (1, 3), the checkpoint (2,)"),
        ([9.0, 9.0, 9.0], "shape (3,), the checkpoint (2,)"),
        ([9, 9], "type int32, the checkpoint float32"),
    ],
)
def test_a_variable_of_another_shape_or_type_keeps_its_value(
    committed: Program, caplog: pytest.LogCaptureFixture, value: Any, difference: str
) -> None:
    variable = tf.Variable(value)
    with committed.handler(
        tf.train.Checkpoint(variable=variable), restore="partial"
    ) as handler:
        assert handler.total_run_calls == 2
        assert variable.numpy().tolist() == value
        assert f"variable: the model has {difference}" in caplog.text
        handler.run(lambda: None)


def test_a_model_with_another_head_keeps_its_body(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """With an optimizer, whose variables of the head do not fit, either."""
    import keras

    def make(outputs: int) -> tuple[Any, Any, JsonState]:
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(outputs)]
        )
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        return model, optimizer, JsonState("done", [])

    def step(model: Any, optimizer: Any, state: JsonState) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(np.ones((2, 3), "float32")))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        state.value.append(1)

    model, optimizer, state = make(2)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    with program.handler(checkpoint) as handler:
        for _ in range(2):
            handler.run(step, model, optimizer, state)
    body = model.layers[0].get_weights()
    del state

    other, optimizer, state = make(5)
    head = other.layers[1].get_weights()
    checkpoint = tf.train.Checkpoint(model=other, optimizer=optimizer)
    with pytest.raises(errors.CheckpointMismatchError):
        program.handler(checkpoint)
    with program.handler(checkpoint, restore="partial") as handler:
        assert state.value == [1, 1]
        for now, then in zip(other.layers[0].get_weights(), body, strict=True):
            np.testing.assert_array_equal(now, then)
        for now, then in zip(other.layers[1].get_weights(), head, strict=True):
            np.testing.assert_array_equal(now, then)
        assert int(optimizer.iterations) == 2
        # Kernel, bias, and two moments of each.
        assert "values of the program (6):" in caplog.text
        handler.run(step, other, optimizer, state)


@pytest.mark.parametrize("value", ["part", "True", ""])
def test_a_restore_that_cannot_be(program: Program, value: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="restore is"):
        program.handler(restore=value)


def test_a_callback_restores_completely_or_not(program: Program) -> None:
    with pytest.raises(errors.ConfigurationError, match="restore is 'partial'"):
        PreemptionCallback(program.directory, restore="partial")  # type: ignore[arg-type]
