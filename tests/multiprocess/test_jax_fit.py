"""`model.fit` of Keras on JAX in real processes, with and without TensorFlow."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SEED
from tests.multiprocess.harness import LIMIT, PROGRAMS, RESTART, ROOT
from tests.without_tensorflow import WITHOUT_TENSORFLOW_ALONE, python_path_without

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]
pytest.importorskip("jax")
pytest.importorskip("keras")


def run(
    directory: Path,
    *cut: str,
    code: int = 0,
    path: str = str(ROOT),
    program: Path = PROGRAMS / "jax_fit.py",
) -> str:
    """Runs a program to its end; returns what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFPREEMPT_")}
    done = subprocess.run(
        [sys.executable, program, directory, *cut],
        env=kept
        | {"PYTHONPATH": path, "TFPREEMPT_PLATFORM": "generic", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout if code in (0, RESTART) else done.stderr


def test_exact_and_without_tensorflow(tmp_path: Path) -> None:
    """TensorFlow is installed and not imported; or it is missing."""
    undisturbed = run(tmp_path / "undisturbed")
    assert "imported ['jax']\n" in undisturbed
    drawn = random.Random(f"{SEED} jax")
    # At the first batch of an epoch Keras has not drawn the order of the samples yet.
    for point in (f"train:{drawn.randrange(3)}:{drawn.randrange(10)}", "train:1:0"):
        print(f"SIGTERM at {point}; seed {SEED}")
        here = tmp_path / point.replace(":", "-")
        run(here, point, code=RESTART)
        assert run(here) == undisturbed

    alone = python_path_without(tmp_path / "missing", WITHOUT_TENSORFLOW_ALONE)
    path = os.pathsep.join([alone, str(ROOT)])
    point = f"validation:1:{drawn.randrange(4)}"
    print(f"SIGTERM at {point}; seed {SEED}")
    run(tmp_path / "alone", point, code=RESTART, path=path)
    assert run(tmp_path / "alone", path=path) == undisturbed


def test_a_restart_loads_compiled_functions(tmp_path: Path) -> None:
    """From the directory, and on an empty disk from the mirror; the result is exact."""
    undisturbed = run(tmp_path / "undisturbed").splitlines()[-1]
    here, words = tmp_path / "run", ("cached", f"mirror=file://{tmp_path}/mirror")
    told = run(here, "train:1:4", *words, code=RESTART)
    run(here, "train:2:3", *words, code=RESTART)
    assert len(list((tmp_path / "mirror" / "compiled").iterdir())) == 1
    shutil.rmtree(here)
    shutil.rmtree(tmp_path / "mirror" / "journals")
    *_, loaded, compiled, final = run(here, *words).splitlines()
    assert final == undisturbed, told
    print(
        loaded, compiled
    )  # a function that is called just before a signal is not kept
    assert int(loaded.split()[1]) >= 5


REFUSED = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy, sys, tfpreempt.keras
from tfpreempt import errors

x = numpy.zeros((8, 2))
def fit():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ours = tfpreempt.keras.PreemptionCallback(sys.argv[1])
    model.fit(x, x[:, :1], verbose=0, callbacks=[ours])

fit()
keras.distribution.set_distribution(keras.distribution.DataParallel())
try:
    fit()
except errors.ConfigurationError as error:
    print(error)
"""


def test_an_unsupported_feature_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(REFUSED, encoding="utf-8")
    told = run(tmp_path / "run", program=tmp_path / "program.py")
    assert "does not support keras.distribution on JAX yet" in told


NAMED = """
import os, sys
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy, tfpreempt.keras

directory, epochs, *names = sys.argv[1:]
if epochs == "1":
    keras.layers.Dense(1)  # so Keras' numbers in the names differ after the restart
layers = [*(keras.layers.Dense(4, name=name) for name in names), keras.layers.Dense(4)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
x = numpy.ones((8, 4))
ours = tfpreempt.keras.PreemptionCallback(directory)
model.fit(x, x, epochs=int(epochs), verbose=0, callbacks=[ours])
"""


def test_layers_in_another_order_are_refused(tmp_path: Path) -> None:
    """Their shapes are equal, so only the names tell them apart."""
    program = tmp_path / "program.py"
    program.write_text(NAMED, encoding="utf-8")
    run(tmp_path / "run", "1", "first", "second", program=program)
    told = run(tmp_path / "run", "2", "second", "first", code=1, program=program)
    assert "second/kernel has the position of model/" in told
    run(tmp_path / "run", "2", "first", "second", program=program)
    # Numbers are compared, too, if the model has exactly the saved names.
    run(tmp_path / "towers", "1", "tower_1", "tower_2", program=program)
    told = run(tmp_path / "towers", "1", "tower_2", "tower_1", code=1, program=program)
    assert "tower_2/kernel has the position of model/" in told


EAGER = """
import logging, os, signal, sys, types
os.environ["KERAS_BACKEND"] = "jax"
import jax, keras, numpy, tfpreempt.keras
from tfpreempt.handler import current_session

jnp, told = jax.numpy, []
class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())

logging.getLogger("tfpreempt").addHandler(Told())

class Own(keras.Sequential):
    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y = data
        means = x.mean(axis=0)
        self.inside.drift.assign(self.inside.drift.value * 0.9 + means)
        self.second.apply([means], [self.inside.shift])
        self.key, key = jax.random.split(self.key)
        x = x + self.inside.drift.value + self.inside.shift.value
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, predicted, others, metrics)), gradients = gradient(
            trainable, others, metrics, x, y, None, training=True,
            optimizer_variables=optimizer)
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable)
        logs, metrics = self._update_metrics_variables(
            metrics, loss, x, y, predicted, None)
        return logs, (trainable, others, optimizer, metrics)

class Preempted(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if sys.argv[2:] and batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not current_session.current().step_flag.flag:
                pass

x = numpy.random.default_rng(0).normal(size=(32, 2)).astype("float32")
model = Own([keras.layers.Dense(1, kernel_initializer="ones")])
model.key = jax.random.key(1)
model.inside = types.SimpleNamespace(
    drift=keras.Variable(numpy.zeros(2)), shift=keras.Variable(numpy.zeros(2)))
model.second = keras.optimizers.Adam(0.1)
model.second.build([model.inside.shift])
model.compile("sgd", "mse", run_eagerly=True)
history = model.fit(
    x, x[:, :1], batch_size=8, shuffle=False, verbose=0,
    callbacks=[tfpreempt.keras.PreemptionCallback(sys.argv[1]), Preempted()])
inside = vars(model.inside).values()
every = [*model.variables, *model.second.variables, *inside]
print("final", history.history, [numpy.asarray(each.value).tobytes() for each in every])
print("told", [each for each in told if "restored" in each])
"""


def test_variables_that_keras_does_not_pass_to_the_step(tmp_path: Path) -> None:
    """They are restored. An array of JAX that is not in a variable is named."""
    (tmp_path / "program.py").write_text(EAGER, encoding="utf-8")
    program = tmp_path / "program.py"
    undisturbed, told = run(tmp_path / "undisturbed", program=program).splitlines()
    assert told.count("will not be restored") == 1
    assert "the change of model.key" in told
    run(tmp_path / "run", "preempted", code=RESTART, program=program)
    resumed, told = run(tmp_path / "run", program=program).splitlines()
    assert resumed == undisturbed
    assert "the change of model.key was not restored by this restart" in told
