"""Bad input and misuse get a clear error, and nothing is lost."""

from __future__ import annotations

import datetime
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.handler.program import LIMIT, Program
from tfpreempt import TerminationConfig, errors
from tfpreempt.handler import current_session
from tfpreempt.handler.handler import PreemptionCheckpointHandler
from tfpreempt.handler.single_client import connect_to_cluster
from tfpreempt.handler.training_end import close_unfinished

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


# --- bad input -----------------------------------------------------------------------


def test_a_checkpoint_without_a_directory(program: Program) -> None:
    """F: also an InvalidArgumentError, as TensorFlow's handler raises."""
    with pytest.raises(errors.ConfigurationError, match="checkpoint_dir") as raised:
        PreemptionCheckpointHandler(None, program.checkpoint)
    assert isinstance(raised.value, tf.errors.InvalidArgumentError)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("file", "file"),
        ("file/below", "file"),
        ("/proc/tfpreempt", "proc"),
    ],
)
def test_a_directory_that_cannot_be_one(
    program: Program, tmp_path: Path, path: str, advice: str
) -> None:
    """F: a file, a path below a file, a file system that makes no directories."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.TfpreemptError, match=advice) as raised:
        program.handler(checkpoint_dir=tmp_path / path)
    assert str(tmp_path / path) in str(raised.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_warning_names_the_skipped_and_the_used_commit(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """A corrupt manifest does not show its age; here the other commit is newer."""
    handler = program.handler()
    for _ in range(2):
        handler.run(program.step)
        handler.save()
    close_unfinished(handler._session, handler._run)
    (program.directory / "1" / "MANIFEST.json").write_text("{")
    program.handler().close()
    assert f"'{program.directory / '2'}' is used" in caplog.text


def test_a_directory_without_an_intact_commit(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """Training from scratch would overwrite files that can still be repaired."""
    handler = program.handler()
    for _ in range(2):
        handler.run(program.step)
        handler.save()
    handler.close()
    damaged = sorted(program.directory.glob("*/*.data-*"))
    for path in damaged:
        path.write_bytes(path.read_bytes() + b"?")
    with pytest.raises(errors.CheckpointCorruptedError) as raised:
        program.handler()
    assert len(damaged) == 2
    assert all(str(path) in str(raised.value) for path in damaged)
    assert "is used" not in caplog.text
    assert all(path.read_bytes().endswith(b"?") for path in damaged)
    anew = program.handler(restore=False)
    assert anew.total_run_calls == 0
    anew.close()


@pytest.mark.parametrize("given", ["mk/5", None, 15])
def test_only_a_checkpoint_reference_can_be_deleted(
    program: Program, given: Any
) -> None:
    says = r"expected a tfpreempt\.Checkpoint"
    with (
        program.handler() as handler,
        pytest.raises(errors.ConfigurationError, match=says),
    ):
        handler.delete_checkpoint(given)


def test_deleting_twice_is_logged_and_after_close_refused(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    handler = program.handler()
    for _ in range(2):
        handler.run(program.step)
        handler.save()
    *_, newest = handler.checkpoints()
    handler.delete_checkpoint(newest)
    handler.delete_checkpoint(newest)
    assert caplog.text.count("is no longer in the checkpoint directory") == 1
    handler.close()
    with pytest.raises(errors.HandlerClosedError, match="after close"):
        handler.delete_checkpoint(newest)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_a_timeout_that_is_none(program: Program, timeout: Any) -> None:
    with program.handler() as handler:
        for wait in (handler.wait_for_mirror, handler.close):
            with pytest.raises(errors.ConfigurationError, match="timeout is"):
                wait(timeout)
        handler.close(0)


def test_files_that_are_no_commit_do_not_prevent_a_start(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """Other files, and a first save of a process that crashed before the marker."""
    program.directory.mkdir()
    (program.directory / "faiss.index").write_bytes(b"vectors")
    program.handler().close()
    assert "faiss" in caplog.text
    assert "; this checkpoint is skipped" in caplog.text


def by_python(value: Any) -> Any:
    return tf.py_function(lambda given: given, [value], tf.int64)


def at_random(value: Any) -> Any:
    return value + tf.random.uniform([], maxval=3, dtype=tf.int64)


@pytest.mark.parametrize("is_managed", [False, True])
@pytest.mark.parametrize(
    ("pipeline", "why"),
    [
        (lambda data: data.map(by_python), "PyFunc is stateful"),
        (lambda data: data.map(by_python).shuffle(8).batch(2), "PyFunc is stateful"),
        (lambda data: data.take(1).concatenate(data.map(at_random)), "RandomUniform"),
        (
            lambda data: tf.data.Dataset.from_generator(
                lambda: range(9), output_signature=tf.TensorSpec([], tf.int64)
            ).prefetch(2),
            "Python generator",
        ),
        (
            lambda data: tf.data.Dataset.sample_from_datasets([data, data]).repeat(),
            "wait for ever",
        ),
    ],
)
def test_an_iterator_without_a_position_is_refused_at_the_start(
    program: Program, is_managed: bool, pipeline: Any, why: str
) -> None:
    """Otherwise every save fails, and each restart begins at step 0."""
    iterator = iter(pipeline(tf.data.Dataset.range(9)))
    inner = tf.train.Checkpoint(data=iterator)
    given: Any = tf.train.Checkpoint(variable=program.variable, inner=inner)
    if is_managed:
        given = tf.train.CheckpointManager(given, str(program.directory), 1)
    with pytest.raises(errors.ConfigurationError, match=f"'inner/data'.*{why}") as e:
        program.handler(given)
    assert "dataset.skip(handler.total_run_calls)" in str(e.value)


def test_a_dict_of_arrays_is_refused_with_the_state_for_it(program: Program) -> None:
    given: Any = {"weights": program.variable.numpy()}
    with pytest.raises(errors.ConfigurationError, match=r"states\.PyTreeState"):
        program.handler(given)


def test_the_check_at_the_start_changes_no_state(program: Program) -> None:
    """Endless or empty, an iterator is not read; nor does a shuffle draw."""
    options = tf.data.Options()
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
    options.experimental_external_state_policy = ignore
    calls = []

    def seen(value: Any) -> Any:
        calls.append(int(value))
        return value

    def endless() -> Any:
        return tf.data.Dataset.range(9).shuffle(9, seed=1).repeat()

    by_us = endless().map(lambda x: tf.py_function(seen, [x], tf.int64)).shuffle(3)
    numbers, sample = tf.data.Dataset.range(9), tf.data.Dataset.sample_from_datasets
    given = tf.train.Checkpoint(
        sampled_endless=iter(sample([numbers, endless()])),
        sampled_first=iter(sample([numbers, numbers], stop_on_empty_dataset=True)),
        endless=iter(endless()),
        empty=iter(endless().take(0)),
        allowed=iter(by_us.with_options(options)),
    )
    with program.handler(given):
        assert calls == []
        order = [int(next(given.endless)) for _ in range(9)]
        assert order == [int(x) for x in endless().take(9)]


def test_a_parameter_server_cluster(program: Program) -> None:
    """F: also a NotImplementedError, as TensorFlow's handler raises."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["h:1"], "ps": ["h:2"]}),
        task_type="worker",
        task_id=0,
    )
    with pytest.raises(errors.UnsupportedClusterError, match="parameter servers") as e:
        PreemptionCheckpointHandler(resolver, program.checkpoint, program.directory)
    assert isinstance(e.value, NotImplementedError)


def test_a_checkpoint_of_another_model(program: Program) -> None:
    """F: the error names the difference, nothing is assigned, the commit stays."""
    with program.handler() as handler:
        handler.run(program.step)
    shape = tf.Variable([[0.0]])
    fits = tf.Variable([9.0, 9.0])
    other = tf.train.Checkpoint(variable=shape, more=fits)
    with pytest.raises(errors.CheckpointMismatchError) as raised:
        program.handler(other)
    assert "variable" in str(raised.value)
    assert "more" in str(raised.value)
    assert shape.numpy().tolist() == [[0.0]]
    assert fits.numpy().tolist() == [9.0, 9.0]
    again = Program(program.directory)
    with again.handler() as handler:
        assert handler.total_run_calls == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("save_freq", 0),
        ("save_freq", -1),
        ("save_freq", 2.5),
        ("save_freq", True),
        ("save_freq", "10"),
        ("save_freq", datetime.timedelta(0)),
        ("peer_timeout", 0),
        ("peer_timeout", float("nan")),
        ("peer_timeout", None),
        ("max_to_keep", 0),
        ("max_to_keep", "2"),
        ("keep_every", 0),
        ("best_by", ("val_loss", "low", 1)),
        ("termination_config", "SIGTERM"),
    ],
)
def test_arguments_that_cannot_work(
    program: Program, argument: str, value: object
) -> None:
    """F: the error names the argument and its value; no file is left."""
    with pytest.raises(errors.ConfigurationError, match=argument) as raised:
        PreemptionCheckpointHandler(
            None, program.checkpoint, program.directory, **{argument: value}
        )
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "rule", [{"keep_every": 5}, {"best_by": ("loss", "min", 1)}], ids=str
)
def test_rules_of_a_manager_are_its_own(program: Program, rule: Any) -> None:
    """F: the manager deletes its checkpoints itself."""
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )
    config = TerminationConfig(save_fn=lambda: None)
    with pytest.raises(errors.ConfigurationError, match="keep_every= and best_by="):
        PreemptionCheckpointHandler(None, manager, **rule)
    with pytest.raises(errors.ConfigurationError, match="keep_every= and best_by="):
        PreemptionCheckpointHandler(
            None, program.checkpoint, program.directory, config, **rule
        )


def test_a_manager_and_a_compile_cache(program: Program) -> None:
    """F: a program with a manager does not train on JAX."""
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )
    with pytest.raises(errors.ConfigurationError, match="compile_cache=True"):
        PreemptionCheckpointHandler(None, manager, compile_cache=True)


@pytest.mark.parametrize(
    "metrics",
    [
        3, {"loss": "low"}, {"loss": None}, {"loss": []}, {"loss": "0.5"},
        {"loss": True}, {"loss": 10**400}, {1: 0.5},
    ],
)  # fmt: skip
def test_metrics_that_are_no_numbers(program: Program, metrics: Any) -> None:
    """F: named; nothing is committed."""
    with program.handler() as handler:
        handler.run(program.step)
        with pytest.raises(errors.ConfigurationError, match="metrics is"):
            handler.save(metrics=metrics)
        assert handler.checkpoints() == []


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf"), "30"])
def test_a_grace_that_cannot_be(grace: Any) -> None:
    """F: negative, NaN, infinite, no number."""
    with pytest.raises(errors.ConfigurationError, match="grace_period"):
        TerminationConfig(grace_period=grace)


@pytest.mark.parametrize("name", ["KILL", "STOP", "NOPE", 9, 4711, "SEGV"])
def test_a_signal_that_cannot_be_watched(name: str | int) -> None:
    """F: an unknown signal, or a signal that cannot be a notice."""
    with pytest.raises(errors.ConfigurationError, match=str(name)):
        TerminationConfig(signals=(name,))


def test_tensorflows_config_with_a_bad_grace(program: Program) -> None:
    """F: TensorFlow's object does not check the value, so tfpreempt does."""
    config = tf.distribute.experimental.TerminationConfig(grace_period=float("nan"))
    with pytest.raises(errors.ConfigurationError, match="grace_period"):
        PreemptionCheckpointHandler(None, program.checkpoint, program.directory, config)


def test_something_that_is_no_resolver(program: Program) -> None:
    """F: the strategy itself in place of its resolver."""
    strategy = tf.distribute.get_strategy()
    with pytest.raises(errors.ConfigurationError, match="cluster_resolver"):
        PreemptionCheckpointHandler(strategy, program.checkpoint, program.directory)


@pytest.mark.parametrize(
    ("cluster", "error", "words"),
    [
        (None, errors.ConfigurationError, "ClusterResolver or a tf.train.ClusterSpec"),
        ({"chief": ["a:1"]}, errors.ConfigurationError, "no job 'worker'"),
        ({"worker": ["a:1"]}, errors.UsageError, "call connect_to_cluster\\(\\) first"),
    ],
)
def test_a_connection_that_cannot_be(
    cluster: Any, error: type[Exception], words: str
) -> None:
    tf.constant(0)  # TensorFlow has its devices
    spec = None if cluster is None else tf.train.ClusterSpec(cluster)
    with pytest.raises(error, match=words):
        connect_to_cluster(spec)


def test_something_that_is_no_checkpoint(program: Program) -> None:
    """F: a model in place of its checkpoint."""
    with pytest.raises(errors.ConfigurationError, match=r"tf\.train\.Checkpoint"):
        PreemptionCheckpointHandler(None, tf.Module(), program.directory)


# --- misuse --------------------------------------------------------------------------


def test_nested_run(program: Program) -> None:
    """F: the inner run is refused, and the outer run continues."""
    with program.handler() as handler:

        def outer() -> str:
            with pytest.raises(errors.NestedRunError):
                handler.run(program.step)
            with pytest.raises(errors.NestedRunError):
                handler.save_checkpoint_if_preempted()
            with pytest.raises(errors.UsageError, match="inside run"):
                handler.close()
            return "done"

        assert handler.run(outer) == "done"
        assert handler.run(outer) == "done"
        assert handler.run(outer) == "done"
        assert handler.total_run_calls == 3
        program.button.press()
        handler.run(program.step)
    assert [r["step"] for r in program.events("commit")] == [3, 4]


def test_after_close(program: Program) -> None:
    """F: every call is refused; closing again does nothing."""
    handler = program.handler()
    handler.run(program.step)
    handler.close()
    handler.close()
    for call in (
        lambda: handler.run(program.step),
        handler.save_checkpoint_if_preempted,
        handler.save,
        handler.__enter__,
        handler.watch_preemption_scope().__enter__,
    ):
        with pytest.raises(errors.HandlerClosedError):
            call()
    assert handler.total_run_calls == 1


def test_off_the_main_thread(program: Program) -> None:
    """F: signals need the main thread: the error names another way."""
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            program.handler(config={"signals": ("TERM",)})
        except errors.NotMainThreadError as error:
            found.append(error)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(LIMIT)
    assert "main thread" in str(found[0])
    assert "signals=()" in str(found[0])
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(current_session.current().runs) == []
