"""`model.fit` of Keras on JAX in real processes, with and without TensorFlow.

Also with `keras.distribution`, in one process or in several.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.conftest import SEED
from tests.multiprocess.harness import (
    LIMIT,
    PROGRAMS,
    RESTART,
    ROOT,
    Zygote,
    records,
)
from tests.multiprocess.jax_processes import (
    JaxProcess,
    ended,
    jax_processes,
    kill_the_peer_under_a_notice,
)
from tests.without_tensorflow import WITHOUT_TENSORFLOW_ALONE, python_path_without

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]
pytest.importorskip("jax")
pytest.importorskip("keras")


def run(
    directory: Path,
    *cut: str,
    zygote: Zygote | None = None,
    code: int = 0,
    path: str = str(ROOT),
    program: Path = PROGRAMS / "jax_fit.py",
) -> str:
    """Runs a program to its end; returns the text that the program printed.

    Args:
        directory: checkpoint directory.
        *cut: further arguments of the program.
        zygote: the process that forks the program, with Keras imported and with a cache
            of compiled functions; None: the program is a new process.
        code: expected exit code.
        path: PYTHONPATH of a new process.
        program: Python file.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFPREEMPT_")}
    env = kept | {"PYTHONPATH": path, "TFPREEMPT_PLATFORM": "generic"}
    env |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    if zygote is not None:
        words = (directory, *cut)
        here = directory.parent
        done = zygote.run(program, *words, directory=here, env=env, limit=2 * LIMIT)
    else:
        done = subprocess.run(
            [sys.executable, program, directory, *cut],
            env=env,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
        )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout if code in (0, RESTART) else done.stderr


@pytest.fixture
def forked(zygote_of: Callable[[str], Zygote]) -> Callable[..., str]:
    """`run` in forks of a process that has imported Keras."""
    return functools.partial(run, zygote=zygote_of("keras-jax"))


def test_exact_and_without_tensorflow(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    """TensorFlow is installed and not imported; or it is missing."""
    undisturbed = run(tmp_path / "undisturbed")
    assert "imported ['jax']\n" in undisturbed
    drawn = random.Random(f"{SEED} jax")
    # At the first batch of an epoch Keras has not drawn the order of the samples yet.
    # The drawn batch may be the same, and a directory belongs to one run.
    for point in {f"train:{drawn.randrange(3)}:{drawn.randrange(10)}", "train:1:0"}:
        print(f"SIGTERM at {point}; seed {SEED}")
        here = tmp_path / point.replace(":", "-")
        forked(here, point, code=RESTART)
        assert forked(here) == undisturbed

    alone = python_path_without(tmp_path / "missing", WITHOUT_TENSORFLOW_ALONE)
    path = os.pathsep.join([alone, str(ROOT)])
    point = f"validation:1:{drawn.randrange(4)}"
    print(f"SIGTERM at {point}; seed {SEED}")
    run(tmp_path / "alone", point, code=RESTART, path=path)
    assert run(tmp_path / "alone", path=path) == undisturbed


@pytest.mark.parametrize(
    ("bad", "epochs"), [(5, 1), pytest.param(0, 2, marks=pytest.mark.thorough)]
)
def test_a_bad_step_is_left_out(
    tmp_path: Path, forked: Callable[..., str], bad: int, epochs: int
) -> None:
    words, program = (str(bad), str(epochs)), PROGRAMS / "jax_bad_steps.py"
    for _ in range(epochs):
        forked(tmp_path / "run", *words, code=RESTART, program=program)
    assert "equal True\n" in forked(tmp_path / "run", *words, program=program)
    found = records(tmp_path / "run", "badstep")
    assert [(each["epoch"], each["batch"]) for each in found] == [
        (epoch, bad) for epoch in range(epochs)
    ]


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


def test_layers_in_another_order_are_refused(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    """Their shapes are equal, so only the names differ."""
    program = tmp_path / "program.py"
    program.write_text(NAMED, encoding="utf-8")
    forked(tmp_path / "run", "1", "first", "second", program=program)
    told = forked(tmp_path / "run", "2", "second", "first", code=1, program=program)
    assert "second/kernel has the position of model/" in told
    forked(tmp_path / "run", "2", "first", "second", program=program)
    # Numbers are compared, too, if the model has exactly the saved names.
    forked(tmp_path / "towers", "1", "tower_1", "tower_2", program=program)
    told = forked(
        tmp_path / "towers", "1", "tower_2", "tower_1", code=1, program=program
    )
    assert "tower_2/kernel has the position of model/" in told


SEVERAL_AT_ONCE = """
import os, sys
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy, tfpreempt.keras
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

if not keras.__version__.startswith("3.16"):
    read = ArrayDataAdapter.get_jax_iterator
    ArrayDataAdapter.get_jax_iterator = lambda self, super_batch=None: read(self)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse", steps_per_execution=2)
x = numpy.ones((8, 4))
model.fit(x, x[:, :1], callbacks=[tfpreempt.keras.PreemptionCallback(sys.argv[1])])
"""


def test_steps_of_several_batches_in_one_array_are_refused(tmp_path: Path) -> None:
    """Since Keras 3.16. A restart put a batch in the place of such an array."""
    program = tmp_path / "program.py"
    program.write_text(SEVERAL_AT_ONCE, encoding="utf-8")
    told = run(tmp_path / "run", code=1, program=program)
    assert "ConfigurationError: steps_per_execution is 2, and this version of" in told


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


def test_variables_that_keras_does_not_pass_to_the_step(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    """They are restored. A JAX array outside of a variable is named."""
    (tmp_path / "program.py").write_text(EAGER, encoding="utf-8")
    program = tmp_path / "program.py"
    undisturbed, told = forked(tmp_path / "undisturbed", program=program).splitlines()
    assert told.count("will not be restored") == 1
    assert "the change of model.key" in told
    forked(tmp_path / "run", "preempted", code=RESTART, program=program)
    resumed, told = forked(tmp_path / "run", program=program).splitlines()
    assert resumed == undisturbed
    assert "the change of model.key was not restored by this restart" in told


IN_VALIDATION = """
import os, signal, sys
import keras, numpy
import tfpreempt
from tfpreempt.handler import current_session

class Preempted(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_test_batch_begin(self, batch, logs=None):
        if sys.argv[2:] == ["preempted"] and (self.epoch, batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            while not current_session.current().step_flag.flag:
                pass

x = numpy.random.default_rng(0).normal(size=(32, 2)).astype("float32")
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
layers.append(keras.layers.Dense(1))
if sys.argv[2:] == ["failing"]:
    layers = [keras.layers.Reshape((2, 1)), keras.layers.LSTM(1, stateful=True)]
model = keras.Sequential([keras.Input(batch_shape=(8, 2)), *layers])
optimizer = keras.optimizers.Adam(
    0.1, use_ema=True, gradient_accumulation_steps=2, ema_overwrite_frequency=5)
model.compile(optimizer, "mse", metrics=["mae"])
swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
history = model.fit(
    x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0,
    validation_data=(x, x[:, :1]),
    validation_batch_size=32 if sys.argv[2:] == ["failing"] else 8,
    callbacks=[swap, tfpreempt.keras.PreemptionCallback(sys.argv[1]), Preempted()])
every = [*model.variables, *model.optimizer.variables]
print("final", history.history, [numpy.asarray(each.value).tobytes() for each in every])
"""


def test_averages_are_exchanged_with_the_weights_for_a_validation(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    """And the error of a validation is raised, not an error of the attempt to save."""
    program = tmp_path / "program.py"
    program.write_text(IN_VALIDATION, encoding="utf-8")
    undisturbed = forked(tmp_path / "undisturbed", program=program)
    forked(tmp_path / "run", "preempted", code=RESTART, program=program)
    assert forked(tmp_path / "run", program=program) == undisturbed
    told = forked(tmp_path / "failing", "failing", code=1, program=program)
    assert "If an RNN is stateful, the batch size" in told
    assert "error save failed" in told


# --- keras.distribution --------------------------------------------------------------

Start = Callable[..., AbstractContextManager[list[JaxProcess]]]


@pytest.fixture
def workers(zygote_of: Callable[[str], Zygote]) -> Start:
    """Starts the processes as forks of a process that has imported Keras."""
    program = PROGRAMS / "jax_fit_workers.py"
    return functools.partial(
        jax_processes, program=program, zygote=zygote_of("keras-jax")
    )


all_end = functools.partial(ended, limit=2 * LIMIT)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["data=arrays"], 2),
        (["data=sequence"], 2),
        (["data=tfdata"], 2),
        (["model"], 2),
        (["data=tfdata", "model"], 2),
        (["data=arrays"], 1),
    ],
    ids=["arrays", "sequence", "tfdata", "model", "model-tfdata", "one-process"],
)
def test_a_distributed_fit_resumes_exactly(
    tmp_path: Path, workers: Start, words: list[str], count: int
) -> None:
    """SIGTERM to a process in an epoch, and to another in a validation.

    The first case, which `make test` runs, has no second signal.
    """
    start = functools.partial(workers, count=count, devices=3 - count)
    drawn = random.Random(f"{SEED} {words} {count}")
    with start(tmp_path, str(tmp_path / "undisturbed"), *words) as processes:
        all_end(processes, *[0] * count)
        expected = [each.lines("final") for each in processes]
        assert "save failed" not in processes[0].output
        is_imported = str("data=tfdata" in words)
        assert {each.lines("TensorFlow")[0] for each in processes} == {is_imported}
    directory = tmp_path / "run"
    batch = drawn.randrange(1, 8)
    points = [f"{count - 1}:train:1:{batch}", f"0:validation:1:{drawn.randrange(4)}"]
    if (words, count) == (["data=arrays"], 2):
        del points[1]
    for point in points:
        print("SIGTERM at", point, "seed", SEED)
        with start(tmp_path, str(directory), f"cut={point}", *words) as processes:
            all_end(processes, *[RESTART] * count)
    commits = records(directory, "commit", because="preemption")
    steps = [each["step"] for each in commits]  # a peer may be one step further
    assert steps == [steps[0], 20][: len(points)]
    assert 10 + batch <= steps[0] < 20
    with start(tmp_path, str(directory), *words) as processes:
        all_end(processes, *[0] * count)
        assert [each.lines("final") for each in processes] == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["every=4"], 1),
        # The loss is finite, and only process 1 has NaN elements: found before the
        # commit of step 7, then sought.
        (["every=7", "model", "divided"], 2),
        (["model", "every=7"], 1),
    ],
    ids=["data", "divided", "model"],
)
def test_a_bad_step_of_one_process_is_left_out(
    tmp_path: Path, workers: Start, words: list[str], starts: int
) -> None:
    words, directory = [*words, "epochs=1"], tmp_path / "run"
    for codes in [[RESTART] * 2] * starts + [[0, 0]]:
        with workers(tmp_path, str(directory), *words, "bad=6") as processes:
            all_end(processes, *codes)
            final = [each.lines("final") for each in processes]
    found = records(directory, "badstep")
    assert [each["worker"] for each in found] == [0] * starts
    assert (found[-1]["epoch"], found[-1]["batch"]) == (0, 6)
    with workers(tmp_path, str(tmp_path / "clean"), *words, "without=6") as processes:
        all_end(processes, 0, 0)
        assert [each.lines("final") for each in processes] == final


@pytest.mark.parametrize("words", [[], ["model"]], ids=["data", "model"])
def test_a_peer_of_a_fit_that_is_killed_under_a_notice_costs_no_hang(
    tmp_path: Path, workers: Start, words: list[str]
) -> None:
    """The rest commits, unless the killed process alone has shards of a variable."""
    directory = tmp_path / "run"
    holds = [tmp_path / f"hold-{index}" for index in range(2)]
    for each in holds:
        each.touch()
    words = [*words, "hold=4", "grace=8"]
    with workers(tmp_path, str(directory), *words) as processes:
        kill_the_peer_under_a_notice(processes, holds[0])
    step = 10 if "model" in words else 15
    assert records(directory, "commit")[-1]["step"] == step
    with workers(tmp_path, str(directory), *words) as processes:
        assert processes[1].wait_line("starts") == f"1 {step - 10}"
        if "model" in words:
            holds[1].unlink()
        all_end(processes, 0, 0)


def test_divided_variables_are_restored_on_other_meshes(
    tmp_path: Path, workers: Start
) -> None:
    """With other numbers of processes, and of devices in a process."""
    found = []
    for count, devices in ((2, 1), (1, 2), (1, 1), (4, 1)):
        words = str(tmp_path / "run"), "model"
        with workers(tmp_path, *words, count=count, devices=devices) as processes:
            all_end(processes, *[0] * count)
            assert bool(processes[0].lines("starts")) is (not found)
            found += [each.lines("final")[0] for each in processes]
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("alone", "uses the devices of the processes []; expected every process"),
        ("local", "; expected every process"),
        ("eager", "compiled with run_eagerly=True or jit_compile=False"),
        ("early", "is not on the devices of every process of jax.distributed"),
    ],
)
def test_processes_that_cannot_save_one_state_are_an_error(
    tmp_path: Path, workers: Start, wrong: str, error: str
) -> None:
    with workers(tmp_path, str(tmp_path / "run"), f"wrong={wrong}") as processes:
        all_end(processes, 1, 1)
        assert error in processes[1].output
