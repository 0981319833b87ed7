"""Unsupported programs are refused before training, with a name and advice.

No file is deleted, and the correct program resumes afterwards.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import io
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    EPOCHS,
    Machine,
    Seen,
    X,
    Y,
    machine,
)
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.state.encoding import write_parts  # noqa: E402
from tfpreempt.handler import current_session  # noqa: E402
from tfpreempt.handler.handler import PreemptionCheckpointHandler  # noqa: E402
from tfpreempt.keras import PreemptionCallback  # noqa: E402
from tfpreempt.keras.fit_record import FitRecord  # noqa: E402

BOTH = ("keras", "tf_keras")


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def test_a_callback_can_be_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is spawned gets the callback, and no variable of this process."""
    monkeypatch.delenv("TFPREEMPT_PLATFORM")
    monkeypatch.setenv("SECRET_OF_THIS_PROCESS", "1")
    callback = PreemptionCallback(tmp_path)
    data = pickle.dumps(callback)
    assert b"SECRET_OF_THIS_PROCESS" not in data
    for same in (pickle.loads(data), copy.deepcopy(callback)):
        assert type(same) is PreemptionCallback
        assert same.checkpoints() == []


@LINES
def test_a_callback_is_an_instance_of_keras_callback(line: str, tmp_path: Path) -> None:
    """Of both Keras at once, for libraries that sort callbacks by class."""
    keras = importlib.import_module(line)
    callback = PreemptionCallback(tmp_path)
    assert isinstance(callback, keras.callbacks.Callback)
    assert isinstance(callback, PreemptionCallback)
    assert not isinstance(callback, keras.callbacks.EarlyStopping)
    assert callback.__class__.__name__ == "PreemptionCallback"
    assert type(callback).__mro__ == (PreemptionCallback, object)

    class Mine(PreemptionCallback):
        """Of a program."""

    assert isinstance(Mine(tmp_path), keras.callbacks.Callback)
    assert isinstance(Mine(tmp_path), Mine)
    assert not isinstance(callback, Mine)


@LINES
def test_subclasses_of_a_program_work_as_those_of_other_classes(
    line: str, tmp_path: Path
) -> None:
    """Their hooks of pickle and of class creation, and `self.__class__(...)`."""
    keras = importlib.import_module(line)
    made: list[str] = []

    class Registered(PreemptionCallback):
        """Subclasses are counted."""

        def __init_subclass__(cls, *, name: str) -> None:
            made.append(name)

    class Mine(Registered, name="mine"):
        """Makes objects of its own class."""

        def again(self) -> PreemptionCallback:
            return self.__class__(self.where)

        def __init__(self, where: Path) -> None:
            super().__init__(where)
            self.where = where

        def __getstate__(self) -> dict[str, object]:
            return {**vars(self), "where": "elsewhere"}

    mine = Mine(tmp_path)
    assert isinstance(mine, keras.callbacks.Callback)
    assert made == ["mine"]
    again = mine.again()
    assert type(again) is Mine
    assert again.checkpoints() == []
    same = copy.copy(mine)
    assert (type(same), same.where) == (Mine, "elsewhere")


@LINES
def test_a_subclass_may_inherit_from_keras_callback_as_well(on: Machine) -> None:
    """As users write who know only Keras' class; `model` is read-only there."""
    callback = on.keras.callbacks.Callback
    mine = type("Mine", (PreemptionCallback, callback), {})(on.checkpoints)
    on.model().fit(X, Y, batch_size=BATCH, callbacks=[mine], verbose=0)
    assert mine.latest_checkpoint is not None
    with pytest.raises(errors.UsageError, match=r"'Hidden'.*PreemptionCallback first"):
        type("Hidden", (callback, PreemptionCallback), {})


def test_the_class_of_a_callback_imports_no_keras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imported line counts, also if the callback is older; none is imported."""
    modules = [importlib.import_module(f"{each}.callbacks") for each in BOTH]
    for module in modules:
        monkeypatch.delitem(sys.modules, module.__name__)
    callback = PreemptionCallback(tmp_path)
    assert callback.__class__ is PreemptionCallback
    assert [each.__name__ for each in modules if each.__name__ in sys.modules] == []
    for module in modules:
        assert not isinstance(callback, module.Callback)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert isinstance(callback, module.Callback)


@pytest.fixture(scope="module")
def interrupted_runs() -> Iterator[dict[str, Path]]:
    """Returns, for each Keras, checkpoints of a run interrupted in its second epoch."""
    with machine("keras") as on, machine("tf_keras") as legacy:
        for each in (on, legacy):
            each.start()
            each.cuts = [("begin", 1, 3)]
            with pytest.raises(SystemExit):
                each.fit(each.model())
        yield {each.line: each.checkpoints for each in (on, legacy)}


@pytest.fixture
def interrupted(
    on: Machine, line: str, interrupted_runs: dict[str, Path]
) -> Callable[[], None]:
    """Copies these checkpoints; checks afterwards that no file is lost."""
    shutil.copytree(interrupted_runs[line], on.checkpoints)
    before = contents(on.checkpoints)

    def check() -> None:
        assert contents(on.checkpoints) == before
        assert on.run(lambda: on.fit()).epoch == list(range(EPOCHS))

    return check


def contents(directory: Path) -> dict[str, bytes]:
    """Returns all files except the journal, which grows, and the lease.

    This process stands for several processes, and has the lease until its next fit or
    its end.
    """
    apart = {"journal", ".tfpreempt-lease"}
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and apart.isdisjoint(path.parts)
    }


def refused(
    on: Machine, kind: type[Exception], program: Callable[[], Any], *words: str
) -> None:
    """Checks that a start is refused with all these words, and trains no step."""
    on.start()
    with pytest.raises(kind) as raised:
        program()
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, str(raised.value)


Check = Callable[[], None]


# --- another run than that of the checkpoint -----------------------------------------


@pytest.mark.parametrize("line", ["keras"])
def test_a_complete_fit_of_another_model(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """No line says that the fit of the other model is complete."""
    on.start()
    on.fit(on.model(), ours=on.preemption(), epochs=1)
    other = on.keras.Sequential([on.keras.layers.Dense(1, use_bias=False)])
    caplog.clear()
    with caplog.at_level("INFO"):
        for optimizer in ("adam", on.keras.optimizers.SGD(0.005, momentum=0.9)):
            other.compile(optimizer, "mse")
            on.start()
            with pytest.raises(errors.CheckpointMismatchError):
                on.fit(other, ours=on.preemption(), epochs=1)
        assert "complete" not in caplog.text
        on.start()
        on.fit(on.model(), ours=on.preemption(), epochs=1)
    lines = [each.getMessage() for each in caplog.records]
    resumed, complete = lines[-2:]
    assert resumed.startswith("resumed at step 6")
    assert complete.startswith("this fit was complete after 1 epochs")


@LINES
def test_another_shape_of_a_layer(on: Machine, line: str, interrupted: Check) -> None:
    layers = on.keras.layers

    def program() -> Any:
        kinds = [layers.Dense(5, use_bias=False, name="first"), layers.Dropout(0.3)]
        last = layers.Dense(1, use_bias=False, name="second")
        model = on.keras.Sequential([*kinds, last])
        optimizer = on.keras.optimizers.SGD(0.005, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae"])
        return on.fit(model)

    words = ("first/kernel", "(3, 5)", "(3, 2)", "(2, 1)", "another checkpoint")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_a_layer_more(on: Machine, line: str, interrupted: Check) -> None:
    def program() -> Any:
        model = on.model()
        model.add(on.keras.layers.Dense(1, name="third"))
        return on.fit(model)

    words = ("third/kernel", "(1, 1)", "the checkpoint has no value", "another check")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_a_layer_less(on: Machine, line: str, interrupted: Check) -> None:
    def program() -> Any:
        layers = on.keras.layers
        model = on.keras.Sequential([layers.Dense(2, use_bias=False, name="first")])
        optimizer = on.keras.optimizers.SGD(0.005, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae"])
        return on.fit(model)

    words = ("the number of the optimizer's variables was", "the same layers")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@pytest.mark.parametrize("line", ["keras"])
def test_other_settings_of_the_optimizer(
    on: Machine, line: str, interrupted: Check
) -> None:
    """TensorFlow alone would omit the momentum without a message.

    tf_keras makes the slot in any case.
    """

    def program() -> Any:
        return on.fit(on.model(optimizer=on.keras.optimizers.SGD(0.005)))

    words = ("the optimizer's variables was 4", "is 2 in this run", "same settings")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_another_optimizer(on: Machine, line: str, interrupted: Check) -> None:
    def program() -> Any:
        return on.fit(on.model(optimizer="adam"))

    words = ("optimizer", "'SGD'", "'Adam'", "compile with the same optimizer")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_another_metric(on: Machine, line: str, interrupted: Check) -> None:
    def program() -> Any:
        return on.fit(on.model(metrics=["mae", "mse"]))

    words = ("metrics", "Use the model of the interrupted run")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_another_length_of_the_data(on: Machine, line: str, interrupted: Check) -> None:
    def program() -> Any:
        return on.fit(None, x=X[:9], y=Y[:9])

    words = ("the number of", " in that run", " in this run", "data of the same length")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_another_kind_of_data(on: Machine, line: str, interrupted: Check) -> None:
    def program() -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        given = {"batch_size": None, "shuffle": None, "y": None}
        return on.fit(None, x=data, **given)

    words = ("data was", "DatasetAdapter", "the same kind of data")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@LINES
def test_steps_that_do_not_divide(on: Machine, line: str, interrupted: Check) -> None:
    """The checkpoint is before batch 3."""

    def program() -> Any:
        return on.fit(on.model(steps_per_execution=2))

    words = ("batch 3", "epoch 1", "steps_per_execution is 2", "interrupted run (1)")
    refused(on, errors.CheckpointMismatchError, program, *words)
    interrupted()


@pytest.mark.parametrize("line", ["tf_keras"])
def test_the_other_keras(
    on: Machine, line: str, interrupted_runs: dict[str, Path]
) -> None:
    shutil.copytree(interrupted_runs["keras"], on.checkpoints)
    before = contents(on.checkpoints)
    words = (
        "keras was 'keras' in that run, and is 'tf_keras' in this run",
        "the same Keras",
    )
    refused(on, errors.CheckpointMismatchError, on.fit, *words)
    assert contents(on.checkpoints) == before


# --- arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [0, -1, True, 2.5, "batch", b"epoch", [1], datetime.timedelta(0), np.float32(3)],
    ids=str,
)
def test_save_freq_of_no_known_kind(tmp_path: Path, value: Any) -> None:
    with pytest.raises(errors.ConfigurationError) as raised:
        PreemptionCallback(tmp_path, save_freq=value)
    assert f"save_freq is {value!r}" in str(raised.value)
    assert '"epoch"' in str(raised.value)
    assert "timedelta" in str(raised.value)


@pytest.mark.parametrize("value", [None, "", 3, b"path"], ids=repr)
def test_a_directory_that_is_no_path(value: Any) -> None:
    with pytest.raises(errors.ConfigurationError) as raised:
        PreemptionCallback(value)
    assert f"checkpoint_dir is {value!r}" in str(raised.value)


@LINES
def test_a_config_of_no_known_kind(on: Machine, line: str) -> None:
    def program() -> Any:
        return on.fit(ours=on.preemption(termination_config=30))

    refused(on, errors.ConfigurationError, program, "termination_config is 30")


# --- the directory of somebody else --------------------------------------------------


@LINES
def test_a_checkpoint_of_another_program(on: Machine, line: str) -> None:
    variable = tf.Variable(0.0)
    handler = PreemptionCheckpointHandler(
        None, tf.train.Checkpoint(v=variable), on.checkpoints
    )
    with handler:
        handler.run(variable.assign_add, 1.0)
    before = contents(on.checkpoints)
    words = (str(on.checkpoints), "another program", "a separate directory")
    refused(on, errors.ConfigurationError, on.fit, *words)
    assert contents(on.checkpoints) == before


@LINES
def test_model_checkpoint_in_the_same_directory(
    on: Machine, line: str, interrupted: Check
) -> None:
    path = str(on.checkpoints / "{epoch}.weights.h5")

    def program() -> Any:
        kind = on.keras.callbacks.ModelCheckpoint
        return on.fit(None, kind(path, save_weights_only=True))

    words = (
        "ModelCheckpoint",
        path,
        str(on.checkpoints),
        "Use two separate directories",
    )
    refused(on, errors.ConfigurationError, program, *words)
    interrupted()


# --- the wrong place -----------------------------------------------------------------


@LINES
def test_two_of_them_in_one_fit(
    on: Machine, line: str, interrupted: Check, caplog: pytest.LogCaptureFixture
) -> None:
    def program() -> Any:
        other = PreemptionCallback(on.directory / "other")
        return on.fit(None, other)

    words = ("two PreemptionCallbacks", "Remove one")
    refused(on, errors.UsageError, program, *words)
    assert "initial values" not in caplog.text
    assert not contents(on.directory / "other")
    interrupted()


@LINES
def test_outside_of_fit(on: Machine, line: str) -> None:
    model = on.model()

    def program() -> None:
        ours = on.preemption()
        ours.set_params({"epochs": 1})
        ours.set_model(model)
        ours.on_train_begin()

    refused(on, errors.UsageError, program, "model.fit", "PreemptionCheckpointHandler")


@pytest.mark.parametrize("line", ["keras"])
def test_another_backend(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on.keras.backend, "backend", lambda: "torch")

    def program() -> None:
        on.preemption().set_model(on.keras.Sequential([]))

    words = ("'torch'", "the backend 'tensorflow' or 'jax'", "KERAS_BACKEND=tensorflow")
    refused(on, errors.ConfigurationError, program, *words)


@LINES
@pytest.mark.parametrize("has_length", [True, False])
def test_an_empty_dataset(on: Machine, line: str, has_length: bool) -> None:
    """tf_keras raises an error; Keras 3 would train empty epochs."""

    def program() -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        data = data.take(0) if has_length else data.filter(lambda x, y: False)
        return on.model().fit(data, epochs=2, verbose=0, callbacks=[on.preemption()])

    if line == "keras":
        words = ("training data are empty", "Nothing was trained", "filter")
        refused(on, errors.ConfigurationError, program, *words)
    else:
        refused(on, ValueError, program)
    assert on.commits == []
    assert on.run(lambda: on.fit()).epoch == list(range(EPOCHS))


@LINES
def test_data_that_became_shorter_unnoticed(on: Machine, line: str) -> None:
    """The length of a generator is not known before it is read."""
    seen = Seen()

    def program(rows: int) -> Any:
        data = tf.data.Dataset.from_generator(
            lambda: ([float(row)] for row in range(rows)),
            output_signature=tf.TensorSpec([1]),
        )
        callbacks = [on.preemption(), seen.callback(on), on.interrupter()]
        return seen.model(on).fit(data.batch(2), verbose=0, callbacks=callbacks)

    on.start()
    on.cuts = [("begin", 0, 4)]
    with pytest.raises(SystemExit):
        program(12)
    words = (
        "end after 2 batches",
        "made after 4",
        "shorter than in the interrupted run",
    )
    refused(on, errors.CheckpointMismatchError, lambda: program(4), *words)


# --- the end -------------------------------------------------------------------------


@LINES
def test_an_end_that_cannot_be_saved(on: Machine, line: str) -> None:
    """The fit raises an error; the next start repeats the uncommitted steps."""
    in_the_way = on.checkpoints / ".tfpreempt-staging"

    def block(logs: Any = None) -> None:
        session = current_session.current()
        assert session is not None
        assert session.wait_for_save(60), "the save of the last epoch is not over"
        in_the_way.write_text("a file")

    end = on.callback(on_train_end=block)
    on.start()
    model = on.model()
    with pytest.raises(errors.SaveError, match="step"):
        on.fit(model, end)
    model.fit(**on.arrays(), verbose=0)  # nothing of ours is left in it
    in_the_way.unlink()
    assert on.run(lambda: on.fit()).epoch == list(range(EPOCHS))


def test_a_commit_of_an_earlier_version_is_recognized() -> None:
    """Metrics and seeds have other positions in such a commit."""
    state = FitRecord("tfpreempt.keras", lambda: pytest.fail("nothing is saved"))
    file = io.BytesIO()
    write_parts(file, {"progress": {}, "callbacks": {}}, [])
    file.seek(0)
    with pytest.raises(
        errors.CheckpointMismatchError, match="earlier version of tfpreempt"
    ):
        state.load(file)
    state.unregister()
