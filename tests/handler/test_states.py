"""Named States with a real handler: one commit holds them and the variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfpreempt
from tests.checkpoint.fakes import Words
from tests.handler.program import Program
from tfpreempt import errors
from tfpreempt.checkpoint.lease.directory_lease import DirectoryLease
from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.checkpoint.tensors.data_order import OrderState
from tfpreempt.states import DatasetIteratorState, JsonState

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def no_states() -> Iterator[None]:
    yield
    for left in REGISTRY.in_order():  # by a test that failed, in its traceback
        left.unregister()


def values_in(path: str) -> list[float]:
    """Returns the variable as stock TensorFlow reads it."""
    variable = tf.Variable([0.0, 0.0])
    tf.train.Checkpoint(variable=variable).restore(f"{path}/ckpt").expect_partial()
    return list(variable.numpy().tolist())


def holder(directory: Path) -> str:
    """The token of the lease."""
    found = DirectoryLease(str(directory)).read_owner()
    assert found is not None
    return found.token


def test_one_commit_contains_states_and_variables(program: Program) -> None:
    words = Words("words", "zero")
    paths = []
    with program.handler() as handler:
        for _ in range(2):
            handler.run(program.step)
            words.text = f"{program.variable.numpy().tolist()}"
            paths.append(tfpreempt.save_all_states())
        for path in paths:
            text = Path(path, "states", "words.state").read_text()
            assert text == str(values_in(path))
        assert [each.path for each in handler.checkpoints()] == paths
        assert handler.latest_checkpoint == f"{paths[-1]}/ckpt"
        words.text = ""
        assert tfpreempt.load_state(words)  # the newest commit since
        assert words.text == "[3.0, 4.0]"
    assert paths == [str(program.directory / "1"), str(program.directory / "2")]


def test_a_state_that_cannot_be_saved_is_named_early(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the preemption finds the error, and each restart begins at step 0."""
    good, bad = JsonState("good", [1]), JsonState("bad", (1, 2))
    with program.handler() as handler:
        for _ in range(4):
            handler.run(program.step)
        said = [record.getMessage() for record in caplog.records]
        assert [text for text in said if "'good'" in text] == []
        [warning] = [text for text in said if "'bad'" in text]
        assert "value is a tuple" in warning
        assert "every save fails" in warning
        assert ".." not in warning
        assert warning.count("<JsonState 'bad'") == 1
        bad.value = good.value


def test_a_state_made_after_the_handler(program: Program) -> None:
    words = Words("words", "one")
    with program.handler() as handler:
        handler.run(program.step)
    words.unregister()
    with program.handler() as handler:
        late = Words("words")
        assert tfpreempt.load_state(late)
        assert late.text == "one"
        other = Words("other", "mine")
        assert not tfpreempt.load_state(other)
        handler.run(program.step)
        late.text = "two"
        tfpreempt.save_all_states()
        late.text = ""
        assert tfpreempt.load_state(late)
        assert late.text == "two"


def test_a_state_made_after_the_handler_and_not_loaded_is_named(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    words = Words("words", "one")
    with program.handler() as handler:
        handler.run(program.step)
    words.unregister()
    with program.handler() as handler:
        late, new = Words("words"), Words("new")
        for _ in range(2):
            handler.run(program.step)
    assert "'words' replicated> was created after the restore, so its" in caplog.text
    assert "'new'" not in caplog.text
    assert (late.text, new.text) == ("", "")


def test_a_fresh_start_loads_nothing_old(program: Program) -> None:
    words = Words("words", "one")
    with program.handler() as handler:
        handler.run(program.step)
    words.text = "mine"
    with program.handler(restore=False) as handler:
        assert not tfpreempt.load_state(words)
        assert words.text == "mine"
        handler.run(program.step)
        tfpreempt.save_all_states()
        words.text = ""
        assert tfpreempt.load_state(words)
        assert words.text == "mine"


def test_a_loose_state_with_a_handler(program: Program) -> None:
    words = Words("words", "alone")
    with program.handler():
        tfpreempt.save_state(words, program.directory)
        words.text = ""
        assert tfpreempt.load_state(words)
        assert words.text == "alone"


def test_a_separate_state_uses_the_lease_of_the_handler(program: Program) -> None:
    """With a separate lease in the same directory, the handler would lose its lease."""
    words = Words("words", "alone")
    with program.handler() as handler:
        before = holder(program.directory)
        handler.run(program.step)
        tfpreempt.save_state(words, program.directory)
        assert handler.save() is not None
        assert holder(program.directory) == before


def test_a_managers_commit_has_no_directory_of_its_own(program: Program) -> None:
    words = Words("words", "one")
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )
    with program.handler(manager) as handler:
        handler.run(program.step)
        assert tfpreempt.save_all_states() == str(program.directory)
        words.text = ""
        assert tfpreempt.load_state(words)
        assert words.text == "one"


def test_not_inside_run(program: Program) -> None:
    words = Words("words", "one")
    with program.handler() as handler, pytest.raises(errors.NestedRunError):
        handler.run(tfpreempt.save_all_states)
    assert words.text == "one"


def test_states_alone_with_a_handler(program: Program) -> None:
    words = Words("words", "one")
    config = tfpreempt.TerminationConfig(signals=(), exit_fn=program.leave)
    with tfpreempt.PreemptionCheckpointHandler(
        None, None, program.directory, config
    ) as handler:
        handler.run(lambda: None)
        path = tfpreempt.save_all_states()
        assert not Path(path, "ckpt.index").exists()
        assert [each.path for each in handler.checkpoints()] == [path]
        assert handler.latest_checkpoint is None  # nothing that TensorFlow restores
    assert Path(path, "states", "words.state").read_text() == words.text


def test_a_pipeline_resumes_with_the_step(program: Program) -> None:
    """The iterator is no part of the Checkpoint here, only a State."""
    dataset = tf.data.Dataset.range(20).shuffle(10, seed=1)
    data = DatasetIteratorState("data", iter(dataset))
    seen = JsonState("seen", [])

    def step() -> None:
        seen.value.append(int(next(data.iterator)))

    with program.handler() as handler:
        for _ in range(7):
            handler.run(step)
        tfpreempt.save_all_states()
    expected = [int(x) for x in tf.data.Dataset.range(20).shuffle(10, seed=1)]
    data.unregister()
    seen.unregister()
    again = DatasetIteratorState("data", iter(dataset))
    before = JsonState("seen", [])
    with program.handler():
        assert before.value == expected[:7]
        assert before.value + [int(x) for x in again.iterator] == expected


def numbers(seed: int) -> Any:
    """Returns an endless pipeline of tfpreempt.data."""
    data = tfpreempt.data.from_index(lambda i: i, 20, batch_size=4, seed=seed)
    return data.repeat()


@pytest.mark.parametrize("kind", ["plain", "named", "distributed"])
def test_a_tfpreempt_pipeline_in_another_order_is_refused(
    program: Program, kind: str
) -> None:
    def use(seed: int) -> list[int]:
        """Takes two batches; the last one is saved."""
        if kind == "distributed":
            strategy = tf.distribute.MirroredStrategy(["CPU:0"])
            iterator = tfpreempt.data.distribute(numbers(seed), strategy)
        else:
            iterator = iter(numbers(seed))
        state = DatasetIteratorState("data", iterator) if kind == "named" else None
        held = {"variable": program.variable} | ({} if state else {"data": iterator})
        try:
            with program.handler(tf.train.Checkpoint(**held)) as handler:
                return [int(handler.run(next, iterator)[0]) for _ in range(2)]
        finally:
            if state is not None:
                state.unregister()

    undisturbed = iter(numbers(7))
    expected = [int(next(undisturbed)[0]) for _ in range(4)]
    assert use(7) + use(7) == expected
    with pytest.raises(errors.CheckpointMismatchError, match="have another order"):
        use(8)


def test_a_commit_without_fingerprints_of_data_is_restored(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version's."""
    checkpoint = tf.train.Checkpoint(data=iter(numbers(7)))
    with monkeypatch.context() as earlier:
        earlier.setattr(OrderState, "should_save", lambda self: False)
        with program.handler(checkpoint) as handler:
            handler.run(next, checkpoint.data)
    checkpoint = tf.train.Checkpoint(data=iter(numbers(8)))
    with program.handler(checkpoint) as handler:
        assert handler.total_run_calls == 1


def test_a_loop_of_named_states_refuses_the_commit_of_another_program(
    program: Program,
) -> None:
    """Otherwise the loop would start from initial values, or end at once."""
    with program.handler() as handler:
        handler.run(program.step)
    other = Words("other", "own")
    with pytest.raises(errors.CheckpointMismatchError, match="has no State 'other'"):
        tfpreempt.PreemptionCheckpointHandler(None, None, program.directory)
    assert other.text == "own"
    words = Words("words", "zero")
    with tfpreempt.PreemptionCheckpointHandler(
        None, None, program.directory, restore=False
    ) as handler:
        handler.run(lambda: None)
    words.text = ""
    # With one of its States, the program continues; the other keeps its value.
    other.unregister()
    late = Words("late", "own")
    tfpreempt.PreemptionCheckpointHandler(None, None, program.directory).close()
    assert (words.text, late.text) == ("zero", "own")
