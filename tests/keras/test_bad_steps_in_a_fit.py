"""Bad steps are left out: the result is that of a fit whose data lack the batches."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.journals import read_journal  # noqa: E402
from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    Machine,
    X,
    Y,
    machine,
    values,
)
from tfpreempt import errors  # noqa: E402
from tfpreempt.keras import BadSteps  # noqa: E402

EPOCHS = 2
THOROUGH = pytest.mark.thorough
ONE_LINE = pytest.mark.parametrize(
    "line", ["keras", pytest.param("tf_keras", marks=THOROUGH)]
)


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def data(
    bad: int, *, value: float = np.nan, left_out: int = 0, in_x: bool = False
) -> Any:
    """Returns batches with one bad batch.

    Args:
        bad: number of the bad batch.
        value: target of the samples of the bad batch.
        left_out: number of batches to omit, from the bad batch on.
        in_x: whether the inputs have the value, instead of the targets.
    """
    rows = slice(bad * BATCH, (bad + (left_out or 1)) * BATCH)
    x, y = X.copy(), Y.copy()
    (x if in_x else y)[rows] = value
    if left_out:
        x, y = np.delete(x, rows, 0), np.delete(y, rows, 0)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def trained(
    on: Machine,
    batches: Any,
    *,
    steps: int = 1,
    epochs: int = EPOCHS,
    activation: Callable[[Any], Any] | None = None,
    loss: Any = "mse",
    **options: Any,
) -> Any:
    """Returns all results of a fit; without options, of a fit without the callback."""
    model = on.model(steps_per_execution=steps, loss=loss)
    if activation is not None:
        model.layers[0].activation = activation
    seen: list[str] = []
    hooks = on.callback(
        on_train_batch_begin=lambda batch, logs=None: seen.append("begin"),
        on_train_batch_end=lambda batch, logs=None: seen.append("end"),
    )
    ours = on.preemption(**options) if options else False
    fitted = on.fit(
        model, hooks, ours=ours, x=batches, y=None, batch_size=None, epochs=epochs
    )
    assert seen == ["begin", "end"] * (len(seen) // 2)
    return [*values(model).values()], fitted.history, fitted.epoch


def until_the_end(on: Machine, program: Callable[[], Any], starts: int = 20) -> Any:
    """Starts a program until it ends; returns its result, and the exit codes."""
    codes: list[Any] = []
    for _ in range(starts):
        on.start()
        try:
            return program(), codes
        except SystemExit as left:
            codes.append(left.code)
    raise AssertionError(f"no end after {codes}")


@pytest.mark.parametrize(
    ("line", "bad", "save_freq", "cuts"),
    [
        ("keras", 2, 1, []),  # a commit is due before the loss is read
        ("tf_keras", 0, "epoch", [("end", 1, 3)]),
        pytest.param("tf_keras", 2, 1, [], marks=THOROUGH),
        pytest.param("keras", 0, "epoch", [("end", 1, 3)], marks=THOROUGH),
        pytest.param("keras", 5, 4, [("end", 1, 4)], marks=THOROUGH),
        pytest.param("tf_keras", 5, 4, [("end", 1, 4)], marks=THOROUGH),
        pytest.param("keras", 2, None, [], marks=THOROUGH),
    ],
)
def test_the_result_is_that_of_data_without_the_batch(
    on: Machine, line: str, bad: int, save_freq: Any, cuts: list[Any]
) -> None:
    on.start()
    expected = trained(on, data(bad, left_out=1))
    on.cuts = [*cuts]
    fit = functools.partial(
        trained, on, data(bad), on_bad_step=BadSteps(), save_freq=save_freq
    )
    result, codes = until_the_end(on, fit)
    assert result == expected
    assert codes == [143] * (EPOCHS + len(cuts))
    assert on.cuts == []


@pytest.mark.parametrize(
    ("line", "bad", "save_freq", "starts"),
    [
        ("keras", 2, 1, 1),  # found at once
        ("keras", 1, 4, 2),  # found before the commit of step 4, then sought
        ("tf_keras", 2, "epoch", 2),
        pytest.param("tf_keras", 1, 4, 2, marks=THOROUGH),
        pytest.param("keras", 5, None, 2, marks=THOROUGH),
    ],
)
def test_a_step_that_only_makes_weights_nan_is_left_out(
    on: Machine, line: str, bad: int, save_freq: Any, starts: int
) -> None:
    on.start()
    expected = trained(on, data(bad, left_out=1, in_x=True), activation=without_nan)
    options: dict[str, Any] = {"activation": without_nan, "save_freq": save_freq}
    fit = functools.partial(
        trained, on, data(bad, in_x=True), on_bad_step=BadSteps(), **options
    )
    result, codes = until_the_end(on, fit)
    assert result == expected
    assert codes == [143] * starts * EPOCHS


def without_nan(values: Any) -> Any:
    """An activation that hides NaN from the loss, as a fused ReLU on a CPU does."""
    return tf.where(tf.math.is_nan(values), 0.0, values)


@pytest.mark.parametrize("line", ["keras"])
def test_the_step_before_a_bad_loss_is_found(on: Machine) -> None:
    """The loss of the step that makes the weights NaN is finite, only the next loss is
    NaN: the innocent next step is trained after all."""
    on.start()
    options: dict[str, Any] = {"epochs": 1, "loss": with_nan_gradient}
    expected = trained(on, data(2, value=1e3, left_out=1), **options)
    options["on_bad_step"] = BadSteps(limit=1)
    fit = functools.partial(trained, on, data(2, value=1e3), **options)
    result, codes = until_the_end(on, fit)
    assert result == expected
    assert codes == [143, 143]


def with_nan_gradient(truth: Any, predicted: Any) -> Any:
    """A loss that is 0 for a target above 100, with a NaN in its gradient."""
    loss = (truth - predicted) ** 2 * tf.sqrt(100.0 - truth)
    return tf.reduce_mean(tf.where(truth > 100.0, 0.0, loss))


@THOROUGH
@LINES
def test_a_step_of_several_batches(on: Machine, line: str) -> None:
    on.start()
    expected = trained(on, data(2, left_out=2), steps=2)
    fit = functools.partial(trained, on, data(2), steps=2, on_bad_step=BadSteps())
    result, codes = until_the_end(on, fit)
    assert result == expected
    assert codes == [143] * EPOCHS


@ONE_LINE
def test_a_spike(on: Machine, line: str) -> None:
    on.start()
    expected = trained(on, data(3, left_out=1))
    options: dict[str, Any] = {"on_bad_step": BadSteps(spike_factor=1000)}
    options["save_freq"] = 2  # the next start compares with the mean of the commit
    fit = functools.partial(trained, on, data(3, value=1e4), **options)
    result, codes = until_the_end(on, fit)
    assert result == expected
    assert codes == [143] * EPOCHS


@ONE_LINE
def test_two_crashes_at_a_step(on: Machine, line: str) -> None:
    """The batch cannot be read, not even to leave it out."""
    on.start()
    expected = trained(on, data(2, left_out=1), epochs=1)
    fit = functools.partial(
        trained, on, checked(data(2)), epochs=1, on_bad_step=BadSteps(crashes=2)
    )
    for notes in ([], ["the next start leaves out batch 2 of epoch 0: crash 2"]):
        on.start()
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            fit()
        assert getattr(raised.value, "__notes__", []) == notes
    on.start()
    assert fit() == expected


@pytest.mark.parametrize("line", ["keras"])
def test_by_default_an_error_leaves_no_step_out(on: Machine) -> None:
    """The cause may be the program or the storage: the next start trains the step."""
    for _ in range(3):
        on.start()
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            trained(on, checked(data(2)), epochs=1, on_bad_step=BadSteps())
        assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("line", ["keras"])
def test_a_limit_names_all_steps(on: Machine) -> None:
    fit = functools.partial(
        trained, on, data(2), on_bad_step=BadSteps(limit=1, crashes=2)
    )
    text = r"limit=1 .* batch 2 of epoch 0, batch 2 of epoch 1\. Check"
    with pytest.raises(errors.BadStepsError, match=text):
        until_the_end(on, fit)


def checked(batches: Any) -> Any:
    """The batches; a batch with a target that is not finite cannot be read."""
    return batches.map(lambda x, y: (x, tf.debugging.check_numerics(y, "bad row")))


@ONE_LINE
def test_a_crash_just_after_a_restore_is_counted(on: Machine, line: str) -> None:
    on.start()
    expected = trained(on, data(2, left_out=1), epochs=1)
    on.cuts = [("end", 0, 1)]
    fit = functools.partial(
        trained, on, checked(data(2)), epochs=1, on_bad_step=BadSteps(crashes=2)
    )
    for kind in (SystemExit, *[tf.errors.InvalidArgumentError] * 2):
        on.start()
        with pytest.raises(kind):
            fit()
    on.start()
    assert fit() == expected


@pytest.mark.parametrize("line", ["keras"])
def test_a_crash_after_a_bad_step_is_of_the_bad_step(on: Machine) -> None:
    batches = data(3).take(4).concatenate(checked(data(4)).skip(4))
    fit = functools.partial(
        trained, on, batches, on_bad_step=BadSteps(limit=1, crashes=2)
    )
    text = "the loss is nan at batch 3 of epoch 0; the next start leaves this step out"
    for notes in ([text], []):
        on.start()
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            fit()
        assert getattr(raised.value, "__notes__", []) == notes
    on.start()
    text = "^InvalidArgumentError: .*, and limit=1 .* 3 of epoch 0, batch 4 of epoch 0"
    with pytest.raises(errors.BadStepsError, match=text):
        fit()


def generator(_: Any) -> Iterator[Any]:
    for batch in range(6):
        if batch == 2:
            raise ValueError("bad row")
        yield X[:BATCH], Y[:BATCH]


def sequence(keras: Any) -> Any:
    class Rows(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise ValueError("bad row")
            return X[:BATCH], Y[:BATCH]

    return Rows()


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("keras", generator),
        pytest.param("tf_keras", generator, marks=THOROUGH),
        pytest.param("keras", sequence, marks=THOROUGH),
    ],
)
def test_data_that_end_after_a_crash_are_refused(
    on: Machine, line: str, made: Callable[[Any], Any]
) -> None:
    for kind in (*[tf.errors.OpError] * 2, errors.BadStepsError):
        on.start()
        with pytest.raises(kind, match=r"bad row|cannot be read past batch 2 of"):
            trained(on, made(on.keras), epochs=1, on_bad_step=BadSteps(crashes=2))


@ONE_LINE
@pytest.mark.parametrize("has_length", [True, False])
def test_an_epoch_needs_a_step(on: Machine, line: str, has_length: bool) -> None:
    batches = data(0).take(1)
    batches = batches if has_length else batches.filter(lambda *_: True)
    fit = functools.partial(
        trained, on, batches, epochs=1, on_bad_step=BadSteps(crashes=2)
    )
    text = r"^Each step of epoch 0 is left out \(batch 0 of epoch 0\)"
    with pytest.raises(errors.BadStepsError, match=text):
        until_the_end(on, fit, 2)


@pytest.mark.parametrize("line", ["keras"])
def test_a_start_compares_its_options_with_the_records(on: Machine) -> None:
    batches = data(2).take(5).concatenate(data(5).skip(5))
    on.start()
    with pytest.raises(SystemExit):
        trained(on, batches, epochs=1, on_bad_step=BadSteps(crashes=2))
    on.start()
    with pytest.raises(errors.ConfigurationError, match="recorded with 1 batches"):
        trained(on, batches, steps=2, epochs=1, on_bad_step=BadSteps(crashes=2))
    on.start()
    with pytest.raises(SystemExit):
        trained(on, batches, epochs=1, on_bad_step=BadSteps(crashes=2))
    on.start()
    with pytest.raises(errors.BadStepsError, match=r"^2 steps are left out already"):
        trained(on, batches, epochs=1, on_bad_step=BadSteps(limit=1, crashes=2))
    assert permanent_exits(on) == [False, False, False, True]


def permanent_exits(on: Machine) -> list[bool]:
    """For each exit in the journal: whether no restart can help."""
    records = read_journal(on.checkpoints / "journal")
    return [each["is_permanent"] for each in records if each["event"] == "exit"]


def refuse(batch: int, logs: Any = None) -> None:
    """A hook of a user that cannot work with NaN."""
    if not np.isfinite(logs["loss"]):
        raise ValueError(f"no loss at {batch}")


@ONE_LINE
def test_a_callback_that_refuses_a_bad_loss(on: Machine, line: str) -> None:
    def fit() -> Any:
        on.start()
        model, hooks = on.model(), on.callback(on_train_batch_end=refuse)
        ours = on.preemption(on_bad_step=BadSteps(crashes=2))
        on.fit(model, hooks, ours=ours, x=data(2), y=None, batch_size=None, epochs=1)
        return [*values(model).values()]

    on.start()
    expected, *_ = trained(on, data(2, left_out=1), epochs=1)
    with pytest.raises(ValueError, match="no loss at 2"):
        fit()
    assert fit() == expected


def raise_error(logs: Any = None) -> None:
    raise ValueError("of the user")


@pytest.mark.parametrize("line", ["keras"])
@pytest.mark.parametrize(
    ("bad", "hooks", "kinds", "commits"),
    [
        (2, {}, [SystemExit, errors.BadStepsError, errors.BadStepsError], []),
        (5, {"on_test_begin": raise_error}, [SystemExit, ValueError], [5]),
    ],
)
def test_no_error_before_a_validation_commits_a_bad_step(
    on: Machine,
    bad: int,
    hooks: dict[str, Any],
    kinds: list[type[BaseException]],
    commits: list[int],
) -> None:
    batches = data(bad).take(5).concatenate(data(5).skip(5))
    for kind in kinds:
        on.start()
        with pytest.raises(kind):
            on.fit(
                on.model(),
                on.callback(**hooks),
                ours=on.preemption(on_bad_step=BadSteps(limit=1, crashes=2)),
                x=batches,
                y=None,
                batch_size=None,
                epochs=1,
                validation_data=(X, Y),
            )
    assert on.commits == commits


@pytest.mark.parametrize("line", ["keras"])
def test_a_new_machine_reads_the_journal_of_the_mirror(on: Machine) -> None:
    on.start()
    expected = trained(on, data(2, left_out=1), epochs=1)
    mirror = f"file://{on.directory}/mirror"

    def fit() -> Any:
        shutil.rmtree(on.checkpoints, ignore_errors=True)
        options = {"save_freq": 1, "mirror_dir": mirror}
        return trained(
            on, data(2), epochs=1, on_bad_step=BadSteps(crashes=2), **options
        )

    result, codes = until_the_end(on, fit)
    assert result == expected
    assert codes == [143]


@pytest.mark.parametrize("line", ["keras"])
def test_a_step_that_cannot_be_recorded_ends_the_fit(on: Machine) -> None:
    on.start()
    model = on.model()
    journal = on.checkpoints / "journal" / "worker-0.jsonl"
    opened = on.callback(
        on_train_batch_end=lambda batch, logs=None: journal.chmod(0o666)
    )
    ours = on.preemption(on_bad_step=BadSteps(crashes=2))
    with pytest.raises(errors.BadStepsError, match="could not be recorded"):
        on.fit(model, opened, ours=ours, x=data(2), y=None, batch_size=None)


@pytest.mark.parametrize("line", ["keras"])
def test_a_commit_with_a_bad_loss_is_refused(on: Machine) -> None:
    on.cuts = [("end", 0, 3)]
    on.start()
    with pytest.raises(SystemExit):
        trained(on, data(2), epochs=1, save_freq=1)
    on.start()
    with pytest.raises(errors.BadStepsError, match="so the commit contains a bad step"):
        trained(on, data(2), epochs=1, on_bad_step=BadSteps(crashes=2))


@ONE_LINE
def test_a_commit_with_nan_weights_is_refused(on: Machine, line: str) -> None:
    batches, codes = data(2, in_x=True), [SystemExit, errors.BadStepsError]
    given: list[dict[str, Any]] = [{"save_freq": None}, {"on_bad_step": BadSteps()}]
    on.cuts = [("end", 0, 4)]
    for kind, options in zip(codes, given, strict=True):
        on.start()
        with pytest.raises(kind) as raised:
            trained(on, batches, epochs=1, activation=without_nan, **options)
    assert "contains NaN, so the commit contains a bad step" in str(raised.value)


@pytest.mark.parametrize("line", ["keras"])
@pytest.mark.parametrize(
    ("hook", "commits"), [("on_epoch_end", []), ("on_train_end", [6])]
)
def test_weights_that_a_callback_makes_nan_are_not_committed(
    on: Machine, hook: str, commits: list[int]
) -> None:
    def assign(*_: Any) -> None:
        layer = hooks.model.layers[0]
        layer.set_weights([np.full_like(each, np.nan) for each in layer.get_weights()])

    hooks = on.callback(**{hook: assign})
    ours = on.preemption(on_bad_step=BadSteps())
    on.start()
    with pytest.raises(errors.BadStepsError, match="no step has caused this"):
        on.fit(on.model(), hooks, ours=ours, epochs=2)
    assert on.commits == commits
    if hook == "on_train_end":
        assert permanent_exits(on) == [True]


@pytest.mark.parametrize("line", ["keras"])
def test_infinite_masks_and_nan_metrics_are_no_fault(on: Machine) -> None:
    on.start()
    model = on.model()
    mask = on.keras.layers.Dense(2, use_bias=False, trainable=False)
    mask.build((3,))
    mask.set_weights([np.full((3, 2), -np.inf)])
    model.mask = mask
    hooks = on.callback(
        on_train_batch_end=lambda batch, logs=None: [
            each.assign(each + np.nan)
            for metric in model.metrics[1:]
            for each in metric.variables
        ]
    )
    on.fit(model, hooks, ours=on.preemption(on_bad_step=BadSteps(), save_freq=1))


@pytest.mark.parametrize("line", ["keras"])
def test_without_on_bad_step_a_nan_loss_is_named_once(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    on.start()
    trained(on, data(2), save_freq=1)
    assert caplog.text.count("the loss is nan at step 3: from now on the commits") == 1


@pytest.mark.parametrize("line", ["keras"])
def test_the_loss_must_be_in_the_logs(on: Machine) -> None:
    on.start()
    with pytest.raises(errors.ConfigurationError, match="have no 'cost', only"):
        trained(on, data(2), on_bad_step=BadSteps(loss="cost"))


@pytest.mark.parametrize("line", ["keras"])
def test_a_spike_needs_the_train_step_of_keras(on: Machine) -> None:
    on.start()
    model = on.model()
    step = type(model).train_step
    model.__class__ = type(
        "Own", (type(model),), {"train_step": lambda self, data: step(self, data)}
    )
    ours = on.preemption(on_bad_step=BadSteps(spike_factor=3))
    with pytest.raises(errors.ConfigurationError, match="its own train_step"):
        on.fit(model, ours=ours)
