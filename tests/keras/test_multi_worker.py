"""Keras 3 has equal results on two workers and on two devices of one process.

Compared values, and their accuracy:

- Two workers with a device each, and MirroredStrategy on two devices: equal to the last
  bit, history, weights, `evaluate`, `predict` and all. The rows of a batch are split
  the same way, and a sum of two numbers has no order. Dropout is included because Keras
  draws the same mask on every replica in both set-ups: its seed generators are
  mirrored variables with the same value everywhere. The moving statistics of
  BatchNormalization are compared replica by replica: Keras 3 never aggregates them, so
  each replica has its own, and each worker's `get_weights()` differs.

- Two workers with two devices each, and no strategy at all: to five digits. A mean of
  four means is the mean, except for the order of the sums. Batches split evenly in
  training, as Keras weighs every replica alike, however few rows it has; there is no
  Dropout (rows would share masks) and no BatchNormalization (statistics are local).

- `steps_per_execution=2` is compared with 1, because MirroredStrategy cannot do 2.

- Shuffling inside of `fit` is not compared: building the model reads a batch in one
  process and none with workers, which puts a shuffling data set an epoch ahead.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Zygote, place
from tfpreempt import errors
from tfpreempt.core import private_api
from tfpreempt.keras import multi_worker
from tfpreempt.keras.multi_worker import enable_multi_worker

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

PROGRAM = str(Path(__file__).with_name("programs") / "multi_worker.py")
ROWS = [float(row) for row in range(11)]


# --- the patch itself ----------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[Any]:
    """Keras' module as it was installed, before and after."""
    from keras.src.backend.tensorflow import trainer

    before = functions(trainer)
    yield trainer
    multi_worker.MultiWorkerPatch(is_first=True).remove()
    assert functions(trainer) == before


def functions(trainer: Any) -> tuple[Any, ...]:
    of_class = trainer.TensorFlowTrainer
    return (
        of_class._maybe_symbolic_build,
        of_class._make_function,
        trainer.reduce_per_replica,
    )


def test_the_front_door_loads_no_keras() -> None:
    code = (
        "import sys, tfpreempt.keras.multi_worker; "
        "sys.exit(sorted({'tensorflow', 'keras'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_twice_is_once_and_removal_restores(trainer: Any) -> None:
    before = functions(trainer)
    patch = enable_multi_worker()
    patched = functions(trainer)
    assert all(new is not old for new, old in zip(patched, before, strict=True))
    assert enable_multi_worker().is_active
    assert functions(trainer) == patched
    patch.remove()
    patch.remove()
    assert functions(trainer) == before
    assert not patch.is_active


def test_a_block_removes_the_patch_that_it_made(trainer: Any) -> None:
    """Also after an error; the patch of an earlier call stays."""
    before = functions(trainer)
    with enable_multi_worker() as patch:
        patched = functions(trainer)
        assert patched != before
        assert patch.is_active
        with enable_multi_worker() as inner:
            assert inner.is_active
        assert functions(trainer) == patched
    assert functions(trainer) == before
    with pytest.raises(ValueError, match="of the program"), enable_multi_worker():
        raise ValueError("of the program")
    assert functions(trainer) == before


def test_a_version_without_the_replaced_functions_is_refused(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_api.check_available.cache_clear()
    monkeypatch.setattr("keras.__version__", "3.99.0")
    monkeypatch.delattr(trainer, "reduce_per_replica")
    wanted = r"keras 3\.99\.0 lacks .*reduce_per_replica, .* enable_multi_worker\(\)"
    with pytest.raises(errors.UnsupportedVersionError, match=wanted):
        enable_multi_worker()


def test_an_untested_version_causes_a_warning(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enable_multi_worker().remove()
    assert "not yet with" not in caplog.text
    monkeypatch.setattr("keras.__version__", "3.99.0")
    enable_multi_worker().remove()
    assert "not yet with 3.99.0" in caplog.text


def test_another_backend_is_refused(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    with pytest.raises(errors.ConfigurationError, match=r"'jax'.*KERAS_BACKEND"):
        enable_multi_worker()


def test_a_patch_from_before_is_wrapped_and_put_back(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other calls still go through the older patch."""
    import tensorflow as tf

    calls = []

    def theirs(values: Any, strategy: Any, reduction: str) -> Any:
        calls.append(reduction)
        return values

    with monkeypatch.context() as patching:
        patching.setattr(trainer, "reduce_per_replica", theirs)
        patch = enable_multi_worker()
        strategy = tf.distribute.get_strategy()
        assert trainer.reduce_per_replica({"loss": 1}, strategy, "auto") == {"loss": 1}
        patch.remove()
        assert calls == ["auto"]
        assert trainer.reduce_per_replica is theirs


def test_a_later_patch_is_kept_with_a_warning(
    trainer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras_function = trainer.reduce_per_replica
    with monkeypatch.context() as patching:
        patch = enable_multi_worker()
        ours = trainer.reduce_per_replica

        def theirs(*arguments: Any) -> Any:
            return ours(*arguments)

        patching.setattr(trainer, "reduce_per_replica", theirs)
        with caplog.at_level(logging.WARNING):
            patch.remove()
        [record] = caplog.records
        assert "another library replaced" in record.message
        assert ".reduce_per_replica after enable_multi_worker()" in record.message
        assert trainer.reduce_per_replica is theirs
    assert ours.__wrapped__ is keras_function
    trainer.reduce_per_replica = keras_function


def test_without_workers_keras_is_asked(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device: Keras' own functions build the model and its steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    called = []

    def spied(name: str, function: Any) -> Any:
        def spy(self: Any, *arguments: Any, **keywords: Any) -> Any:
            called.append(name)
            return function(self, *arguments, **keywords)

        return spy

    of_class = trainer.TensorFlowTrainer
    with monkeypatch.context() as patching:
        for name in ("_maybe_symbolic_build", "_make_function"):
            patching.setattr(of_class, name, spied(name, getattr(of_class, name)))
        enable_multi_worker()
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=2)
            model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=1, verbose=0)
        multi_worker.MultiWorkerPatch(is_first=True).remove()
    assert called == ["_maybe_symbolic_build", "_make_function"]
    assert int(model.optimizer.iterations) == 4


# --- real processes ------------------------------------------------------------------

with_workers = pytest.mark.multiprocess


def trained(zygote: Zygote, world: int, *arguments: object) -> list[dict[str, Any]]:
    """Runs the program; returns the results of each process."""
    with place(zygote) as here:
        cluster = here.start(PROGRAM, *arguments, world=world)
        cluster.expect(*[0] * world, limit=240)
        return cluster.results()


@pytest.fixture(scope="module")
def results(zygote: Zygote) -> dict[str, Any]:
    """Returns the results of two workers with one device each, and of one process."""
    return {
        "workers": trained(zygote, 2, "workers", 1),
        "process": trained(zygote, 1, "process"),
    }


@with_workers
@pytest.mark.parametrize("case", ["layers", "schedule", "callbacks"])
def test_training_is_that_of_one_process(results: Any, case: str) -> None:
    """Within rounding: of one program, two runs may differ by the last bit.

    TensorFlow 2.21 did that once in a run of all tests, although
    op determinism was enabled.
    """
    [process] = results["process"]
    expected = process[case]
    replicas = expected["weights"]
    for worker, replica in zip(results["workers"], replicas, strict=True):
        found = worker[case]
        assert found.keys() == expected.keys()
        assert found["steps"] == expected["steps"]
        wanted = flat(expected | {"weights": [replica]})
        assert flat(found) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@with_workers
@pytest.mark.parametrize("case", ["schedule", "callbacks"])
def test_all_workers_hold_the_same_weights(results: Any, case: str) -> None:
    first, second = (worker[case]["weights"] for worker in results["workers"])
    assert first == second


@with_workers
def test_the_cases_match_their_names(results: Any) -> None:
    first, _ = results["workers"]
    assert first["callbacks"]["history"]["learning_rate"] == pytest.approx(
        [0.0005, 0.00025]
    )
    # Two epochs of three steps; Keras finds the end of data of unknown length by a step
    # without rows, in one process too.
    assert first["callbacks"]["steps"] == 2 * (3 + 1)
    assert all(map(math.isfinite, first["layers"]["history"]["val_loss"]))
    assert len(first["layers"]["predict"]) == 11
    assert len(first["schedule"]["on_batch"][-1]) == 2 * 8


@with_workers
def test_predictions_are_in_the_order_of_the_data(results: Any) -> None:
    expected = {"1": ROWS, "2": [2 * row for row in ROWS]}
    for worker in results["workers"]:
        assert worker["order"] == [expected] * 2


@with_workers
def test_two_devices_in_each_worker_come_close(zygote: Zygote) -> None:
    [plain] = trained(zygote, 1, "plain")
    expected = flat(plain["smooth"] | {"weights": None})
    [weights, *_] = plain["smooth"]["weights"]
    for worker in trained(zygote, 2, "workers", 2):
        found = worker["smooth"]
        for replica in found["weights"]:
            assert flat(replica) == pytest.approx(flat(weights), rel=1e-5, abs=1e-6)
        assert flat(found | {"weights": None}) == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        )


def flat(value: Any) -> list[float]:
    """Returns all numbers of a JSON value."""
    if isinstance(value, dict):
        return flat([value[name] for name in sorted(value)])
    if isinstance(value, list):
        return [number for each in value for number in flat(each)]
    return [] if value is None else [value]


@with_workers
def test_everything_is_made_before_the_first_step_without_reading(results: Any) -> None:
    for worker in results["workers"]:
        seen = worker["seen"]
        assert seen["rows_read"] == 0
        assert all(seen["built"])
        assert min(seen["made"]) > 0
        assert seen["made_later"] == [0, 0, 0]
        assert seen["rows_read_later"] > 0


@with_workers
def test_a_metric_from_outside_of_the_scope_is_refused(results: Any) -> None:
    for worker in results["workers"]:
        name, message = worker["stray_metric"]
        assert name == "ConfigurationError"
        assert "'outside/total'" in message
        assert "strategy.scope()" in message


@with_workers
def test_keras_still_needs_the_patch(results: Any) -> None:
    """If this test fails, check whether the installed version still needs the patch."""
    for worker in results["workers"]:
        name, message = worker["without"]
        assert name == "ValueError"
        assert "PerReplica" in message
