"""Custom loops with a Keras model: the whole model is restored."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.handler.program import Button
from tests.keras.both_lines import LINES
from tfpreempt import PreemptionCheckpointHandler, TerminationConfig

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]

STEPS = 6
X = tf.reshape(tf.range(12.0), (4, 3)) / 12


class Loop:
    """A program with a model, which can stop after any step and resume.

    Args:
        directory: checkpoint directory.
        keras: the module of either Keras.
        make: creates the model.
        step: runs a step, and returns its result.
    """

    def __init__(
        self,
        directory: Path,
        keras: Any,
        make: Callable[[Any], Any],
        step: Callable[[Any], Any],
    ) -> None:
        self._directory = directory
        self._keras = keras
        self._make = make
        self._step = step

    def start(self, until: int) -> list[bytes]:
        """Starts the program; returns the results of its steps."""
        self._keras.backend.clear_session(*([False] if self._is_new else []))
        self._keras.utils.set_random_seed(7)
        model = self._make(self._keras)
        if not self._is_new:
            model.build((None, *X.shape[1:]))  # its Dropout makes the generator there
        config = TerminationConfig(signals=(), sources=[Button])
        checkpoint = tf.train.Checkpoint(m=model)
        seen: list[bytes] = []
        with PreemptionCheckpointHandler(
            None, checkpoint, self._directory, config
        ) as handler:
            while handler.total_run_calls < until:
                result = handler.run(self._step, model)
                seen.append(tf.convert_to_tensor(result).numpy().tobytes())
        return seen

    @property
    def _is_new(self) -> bool:
        return self._keras.__name__ == "keras"


@pytest.fixture
def goes_on(tmp_path: Path, line: str) -> Iterator[Callable[..., None]]:
    """Checks that a loop in two parts has the results of a loop in one part."""

    def check(make: Callable[[Any], Any], step: Callable[[Any], Any]) -> None:
        keras = importlib.import_module(line)
        whole = Loop(tmp_path / "whole", keras, make, step).start(STEPS)
        parts = Loop(tmp_path / "parts", keras, make, step)
        assert len(set(whole)) == STEPS, "the steps do not differ"
        assert parts.start(2) + parts.start(STEPS) == whole

    legacy = importlib.import_module("tf_keras").backend.experimental
    legacy.enable_tf_random_generator()
    yield check
    legacy.disable_tf_random_generator()


def call(model: Any) -> Any:
    return model(X, training=True)


def learn(model: Any) -> Any:
    """Trains a step of a model with a list of optimizers."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X, training=True) ** 2)
    weights = model.trainable_variables
    model.optimizers[0].apply_gradients(
        zip(tape.gradient(loss, weights), weights, strict=True)
    )
    return loss


@LINES
def test_masks_and_noise(goes_on: Callable[..., None], line: str) -> None:
    def make(keras: Any) -> Any:
        layers = keras.layers
        noise = [layers.Dropout(0.5), layers.GaussianNoise(0.1)]
        return keras.Sequential([layers.Dense(3), *noise])

    goes_on(make, call)


@LINES
def test_images_are_turned(goes_on: Callable[..., None], line: str) -> None:
    def make(keras: Any) -> Any:
        layers = keras.layers
        return keras.Sequential([layers.Reshape((3, 1, 1)), layers.RandomRotation(0.4)])

    goes_on(make, call)


@pytest.mark.parametrize("line", ["keras"])
def test_numbers_without_a_seed(goes_on: Callable[..., None], line: str) -> None:
    def make(keras: Any) -> Any:
        return keras.Sequential([keras.layers.Dense(3)])

    def step(model: Any) -> Any:
        return importlib.import_module(line).random.normal((2,))

    goes_on(make, step)


@LINES
def test_layers_and_optimizers_in_lists(
    goes_on: Callable[..., None], line: str
) -> None:
    """No layer is built when the handler restores."""

    def make(keras: Any) -> Any:
        class Listed(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                dense = [keras.layers.Dense(3), keras.layers.Dropout(0.5)]
                self.blocks = {"first": dense}
                self.optimizers = [keras.optimizers.Adam(0.1)]

            def call(self, inputs: Any, training: bool = False) -> Any:
                for layer in self.blocks["first"]:
                    inputs = layer(inputs, training=training)
                return inputs

        return Listed()

    goes_on(make, learn)


@pytest.mark.parametrize("line", ["keras"])
def test_generators_in_lists(goes_on: Callable[..., None], line: str) -> None:
    def make(keras: Any) -> Any:
        class Listed(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.seeds = [keras.random.SeedGenerator(1)]
                self.counts = ({"a": tf.Variable(0.0)},)

            def call(self, inputs: Any, training: bool = False) -> Any:
                count = self.counts[0]["a"].assign_add(1.0)
                return keras.random.normal((2,), seed=self.seeds[0]) + count

        return Listed()

    goes_on(make, call)


@LINES
def test_metrics_continue(goes_on: Callable[..., None], line: str) -> None:
    def make(keras: Any) -> Any:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        model.train_step((X, X[:, :1]))  # makes the metrics
        return model

    goes_on(make, lambda model: model.train_step((X, X[:, :1]))["mae"])


def test_dropout_with_an_unreadable_state_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The default of tf_keras."""
    layers = importlib.import_module("tf_keras").layers
    checkpoint = tf.train.Checkpoint(m=layers.Dropout(0.5), other=layers.Dense(1))
    config = TerminationConfig(signals=())
    with PreemptionCheckpointHandler(None, checkpoint, tmp_path, config):
        assert "the layers m of tf_keras" in caplog.text
        assert "enable_tf_random_generator()" in caplog.text


@pytest.mark.parametrize(("rate", "named"), [(0.0, ""), (0.5, "m/forward_layer")])
def test_layers_of_tf_keras_that_draw_no_numbers_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rate: float, named: str
) -> None:
    layers = importlib.import_module("tf_keras").layers
    both = layers.Bidirectional(layers.GRU(2, dropout=rate))
    model = tf.Module()
    model.parts = both, layers.LSTM(2), layers.MultiHeadAttention(2, 2)
    checkpoint = tf.train.Checkpoint(m=both, model=model)
    config = TerminationConfig(signals=())
    with PreemptionCheckpointHandler(None, checkpoint, tmp_path, config):
        texts = [each for each in caplog.messages if "of tf_keras draw" in each]
        assert [each.partition("the layers ")[2].split(", ")[0] for each in texts] == (
            [named] if named else []
        )
        assert not any("untracked" in each or "parts" in each for each in texts)


def test_a_tuple_in_the_checkpoint_is_no_trouble(tmp_path: Path) -> None:
    """TensorFlow's own wrapper of one has no attributes."""
    module = tf.Module()
    module.pair = (tf.Variable(1.0), 2)
    config = TerminationConfig(signals=())
    with PreemptionCheckpointHandler(
        None, tf.train.Checkpoint(m=module), tmp_path, config
    ) as handler:
        handler.run(lambda: module.pair[0].assign_add(1.0))
        assert handler.save() is not None
