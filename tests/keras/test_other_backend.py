"""Names by which one backend of Keras 3 finds the other backend's variables."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from tests.keras.small_fit import BATCH, X, Y, machine  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.directory import catalog, layout  # noqa: E402
from tfpreempt.checkpoint.state import array_contents  # noqa: E402
from tfpreempt.keras.backends.named_variables import (  # noqa: E402
    NamedVariables,
    assign,
)
from tfpreempt.keras.fit.other_backend import KEYS, OtherBackend  # noqa: E402
from tfpreempt.keras.fit_record import EncodedValue, FitRecord  # noqa: E402


class Holder:
    """Variables that neither Keras nor TensorFlow finds."""

    def __init__(self) -> None:
        self.drift = keras.Variable(np.ones(2, "float32"), name="drift")
        self.second = keras.optimizers.SGD(0.1, momentum=0.9)
        self.second.build([self.drift])


class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        # Two layers with the same name; layers in a list of lists.
        self.parts = [[layers.Dense(4, name="same")], [layers.Dense(4, name="same")]]
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.3)
        self.last, self.holder = layers.Dense(1), Holder()

    def call(self, inputs: Any, training: bool = False) -> Any:
        for (part,) in self.parts:
            inputs = part(inputs)
        return self.last(self.drop(self.norm(inputs), training=training))


def test_a_commit_of_tensorflow_has_the_key_of_every_variable(tmp_path: Path) -> None:
    with machine("keras") as on:
        on.start()
        model = Model()
        model.compile(keras.optimizers.Adam(use_ema=True), "mse", metrics=["mae"])
        ours = on.preemption()
        model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[ours])
        [commit] = catalog.scan(str(on.checkpoints))
        assert commit.prefix is not None
        shared = os.path.join(commit.shards, layout.STATES)
        with open(
            os.path.join(shared, "tfpreempt.keras" + layout.STATE_SUFFIX), "rb"
        ) as f:
            keys = FitRecord.read(f)[KEYS].value()
        arrays = dict(array_contents.read(commit.prefix)[0])
        arrays |= array_contents.read_worker_values(commit)
        named = NamedVariables(SimpleNamespace(model=model, optimizer=model.optimizer))
        variables = named.find()
        assert list(keys) == list(variables)
        assert len(keys) == len(set(keys.values()))
        assert {"objects/drift", "model/model/same/kernel#2"} <= keys.keys()
        for name, variable in variables.items():
            np.testing.assert_array_equal(arrays[keys[name]], variable.numpy())


def variables(*names: str, dtype: str = "float32") -> dict[str, Any]:
    return {name: keras.Variable(np.zeros(2), dtype=dtype) for name in names}


def floats(*names: str) -> dict[str, Any]:
    return {name: np.full(2, n + 1.0, "float32") for n, name in enumerate(names)}


@pytest.mark.parametrize(
    ("here", "saved"),
    [
        ("model/dense_1/kernel", "model/dense_7/kernel"),
        ("optimizer/adam/dense_bias", "optimizer/loss_scale/adam_2/dense_bias"),
        ("metrics/mean/total#2", "metrics/mean/total#2"),
    ],
)
def test_names_differ_in_numbers_and_in_optimizers(here: str, saved: str) -> None:
    named = variables(here)
    assign(named, [saved], floats(saved))
    np.testing.assert_array_equal(named[here].numpy(), [1, 1])


def test_integers_may_have_another_number_of_bits() -> None:
    named = variables("seed", dtype="int32")
    assign(named, ["seed"], {"seed": np.array([7, 8], "uint32")})
    assert named["seed"].numpy().tolist() == [7, 8]


@pytest.mark.parametrize(
    ("saved", "named", "problem"),
    [
        ({"a": [2**40, 0]}, variables("a", dtype="int32"), "dtype int32, and int64"),
        ({"a": [0.0, 0.0]}, variables("a"), "dtype float32, and float64"),
        ({"a": [1, 2]}, variables("a"), "dtype float32, and int64"),
        (floats("a", "b"), variables("b", "a"), "b has the position of a"),
        (floats("a"), variables("a", "b"), "only one of the two has b"),
        ({"a": np.zeros(3, "float32")}, variables("a"), r"shape \(2,\), and \(3,\)"),
    ],
)
def test_another_model_is_refused(
    saved: dict[str, Any], named: dict[str, Any], problem: str
) -> None:
    arrays = {name: np.asarray(each) for name, each in saved.items()}
    with pytest.raises(errors.CheckpointMismatchError, match=problem):
        assign(named, list(saved), arrays)
    assert not any(each.numpy().any() for each in named.values())


@pytest.mark.parametrize(
    ("line", "workers", "replicas", "names", "reason"),
    [
        ("keras on JAX", (2, 1), [1], {KEYS: {}}, "several processes or devices"),
        ("keras on JAX", (1, 1), [1, 2], {KEYS: {}}, "several processes or devices"),
        ("keras on JAX", (1, 1), None, {KEYS: {}}, "several processes or devices"),
        ("keras on JAX", (1, 1), [1], {}, "an earlier version of tfpreempt"),
        ("keras", (1, 2), [0], {"variables": []}, "several processes or devices"),
    ],
)
def test_a_commit_that_cannot_be_restored_is_named(
    line: str, workers: Any, replicas: Any, names: Any, reason: str
) -> None:
    manifest, cluster = (SimpleNamespace(world_size=workers[0]), SimpleNamespace())
    cluster.num_workers = workers[1]
    run: Any = SimpleNamespace(
        candidate=SimpleNamespace(manifest=manifest, path="ckpt/7"),
        directory=SimpleNamespace(cluster=cluster),
        source=SimpleNamespace(random_state=None),
    )
    own = None if replicas is None else {"replicas": EncodedValue.of(replicas)}
    shared = {name: EncodedValue.of(value) for name, value in names.items()}
    fit: Any = SimpleNamespace(line=line)
    with pytest.raises(errors.CheckpointMismatchError, match=reason) as raised:
        OtherBackend(fit, run, shared, own)
    there = "tensorflow" if "JAX" in line else "jax"
    assert f"Set KERAS_BACKEND={there}" in str(raised.value)
