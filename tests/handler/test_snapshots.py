"""Snapshots in a supervisor's memory, in one process; a kill is simulated by a stop."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfpreempt
from tests.checkpoint.fakes import Words
from tests.fakes.process import new_process
from tests.handler.program import Program, wait_until
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle_writer
from tfpreempt.checkpoint.state.state import State, StateRegistry
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.core.snapshot_memory import SnapshotMemory
from tfpreempt.handler import activity, current_session, session
from tfpreempt.handler.handler import PreemptionCheckpointHandler

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]

SOON = 0.05


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SnapshotMemory:
    """Gives memory to this process, which takes snapshots as often as possible."""
    lent = SnapshotMemory(directory=str(tmp_path / "memory"), bytes=1 << 24)
    os.mkdir(lent.directory)
    for name, value in lent.to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(activity, "SHORTEST", SOON)
    monkeypatch.setattr(
        session,
        "SnapshotScheduler",
        lambda *args: activity.SnapshotScheduler(
            *args,
            interval=activity.IntervalPolicy(share=1.0, shortest=SOON),
        ),
    )
    return lent


Make = Callable[[], Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Make]:
    """Starts the program, in a process of its own as far as handlers see; the one
    before it was killed."""
    with contextlib.ExitStack() as ends:

        def start() -> Program:
            ends.close()
            ends.enter_context(new_process())
            return Program(tmp_path / "ckpt")

        yield start


def snapshots(memory: SnapshotMemory) -> list[Path]:
    """Returns the intact snapshots, oldest first."""
    found = Path(memory.directory).glob("*-0/[0-9]*/COMMITTED")
    return sorted((each.parent for each in found), key=lambda each: int(each.name))


def newest(memory: SnapshotMemory) -> int:
    return max((int(each.name) for each in snapshots(memory)), default=0)


def train_until(
    program: Program, handler: PreemptionCheckpointHandler, is_there: Callable[[], Any]
) -> None:
    def look() -> Any:
        handler.run(program.step)
        return is_there()

    wait_until(look)


def test_a_killed_run_resumes_from_the_newest_snapshot(
    start: Make, memory: SnapshotMemory
) -> None:
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: len(snapshots(memory)) == 2)
    train_until(program, handler, lambda: handler.total_run_calls > newest(memory))
    again = start()
    step = newest(memory)
    handler = again.handler()
    assert handler.total_run_calls == step
    assert again.variable.numpy().tolist() == [1.0 + step, 2.0 + step]
    assert handler.latest_checkpoint is None
    restored = again.events("restored")
    assert [each["tier"] for each in restored] == [None, "memory"]
    handler.run(again.step)
    handler.close()
    assert [each["because"] for each in again.events("commit")] == ["finished"]
    assert snapshots(memory) == []


def test_unrestored_variables_of_a_snapshot_are_named_before_a_commit(
    start: Make, memory: SnapshotMemory, caplog: pytest.LogCaptureFixture
) -> None:
    program = start()
    program.checkpoint.extra = tf.Variable(1.0)
    handler = program.handler()
    train_until(program, handler, lambda: snapshots(memory))
    again = start()
    handler = again.handler()
    assert again.events("restored")[-1]["tier"] == "memory"
    handler.run(again.step)
    assert "this program does not have" not in caplog.text
    handler.save()
    assert (
        "this program does not have, so they were not restored (1): extra"
        in caplog.text
    )


def test_nothing_of_a_snapshot_counts_as_a_save(
    start: Make, memory: SnapshotMemory
) -> None:
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: snapshots(memory))
    assert int(program.checkpoint.save_counter) == 0
    assert not program.events("commit")
    assert not program.events("decision")
    assert handler.latest_checkpoint is None


def test_a_commit_of_that_step_or_a_later_one_is_restored(
    start: Make, memory: SnapshotMemory
) -> None:
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: snapshots(memory))
    made = handler.save()
    assert made is not None
    step = handler.total_run_calls
    again = start()
    assert again.handler().total_run_calls == step
    assert again.events("restored")[-1]["tier"] == "disk"


@pytest.mark.parametrize("how", ["garbled", "cut", "gone", "unmarked"])
def test_a_corrupt_snapshot_is_skipped_for_a_commit_on_disk(
    start: Make, memory: SnapshotMemory, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    program = start()
    handler = program.handler()
    handler.run(program.step)
    handler.save()
    train_until(program, handler, lambda: newest(memory) > 1)
    again = start()
    damaged = snapshots(memory)
    for each in damaged:
        [path] = each.glob("ckpt.data-*")
        data = path.read_bytes()
        if how == "garbled":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif how == "cut":
            path.write_bytes(data[:-1])
        elif how == "gone":
            path.unlink()
        else:
            (each / "COMMITTED").unlink()
    handler = again.handler()
    assert handler.total_run_calls == 1
    assert again.variable.numpy().tolist() == [2.0, 3.0]
    assert again.events("restored")[-1]["tier"] == "disk"
    said = "this snapshot is skipped"
    told = "\n".join(each for each in caplog.messages if each.endswith(said))
    assert all(str(each) in told for each in damaged)


def test_a_snapshot_is_restored_if_no_commit_is_intact(
    start: Make, memory: SnapshotMemory
) -> None:
    program = start()
    handler = program.handler()
    handler.run(program.step)
    handler.save()
    train_until(program, handler, lambda: newest(memory) > 1)
    again = start()
    step = newest(memory)
    [data] = (again.directory / "1").glob("ckpt.data-*")
    data.write_bytes(data.read_bytes()[:-1])
    handler = again.handler()
    assert handler.total_run_calls == step
    handler.run(again.step)
    assert handler.save() is not None
    assert [each["sequence"] for each in again.events("commit")] == [1, 2]


def test_a_start_without_intact_commits_is_refused(
    start: Make, memory: SnapshotMemory
) -> None:
    program = start()
    handler = program.handler()
    handler.run(program.step)
    handler.save()
    train_until(program, handler, lambda: newest(memory) > 1)
    again = start()
    for place in (again.directory / "1", *snapshots(memory)):
        [data] = place.glob("ckpt.data-*")
        data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(errors.CheckpointCorruptedError, match="no commit in"):
        again.handler()


def test_a_newer_commit_of_another_run_is_restored(
    start: Make, memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is of an earlier step: two runs are never mixed."""
    program = start()
    handler = program.handler()
    handler.run(program.step)
    handler.save()
    train_until(program, handler, lambda: newest(memory) > 3)
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("TFPREEMPT_SNAPSHOT_DIR")
        other = start()
        handler = other.handler(restore=False)
        for _ in range(2):
            handler.run(other.step)
        handler.save()
    again = start()
    assert again.handler().total_run_calls == 2
    assert again.events("restored")[-1]["tier"] == "disk"


def test_restore_false_starts_from_scratch(start: Make, memory: SnapshotMemory) -> None:
    program = start()
    train_until(program, program.handler(), lambda: snapshots(memory))
    assert start().handler(restore=False).total_run_calls == 0
    assert snapshots(memory) == []


def test_random_generators_continue(start: Make, memory: SnapshotMemory) -> None:
    program = start()
    random.seed(5)
    drawn: dict[int, tuple[float, float]] = {}
    handler = program.handler()

    def step() -> None:
        program.step()
        drawn[handler.total_run_calls] = random.random(), float(np.random.rand())

    def look() -> Any:
        handler.run(step)
        return snapshots(memory)

    wait_until(look)
    wait_until(lambda: look() and handler.total_run_calls > newest(memory) + 1)
    again = start()
    random.seed(6)
    expected, handler = dict(drawn), again.handler()
    first = handler.total_run_calls
    handler.run(step)
    assert drawn[first] == expected[first]


def test_a_state_can_be_loaded_after_its_snapshot_is_deleted(
    start: Make, memory: SnapshotMemory
) -> None:
    word = Words("word", "kept")
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: snapshots(memory))
    again = start()
    word.text = "new"
    handler = again.handler()
    assert word.text == "kept"
    restored = handler.total_run_calls
    word.text = "newer"
    train_until(
        again, handler, lambda: min(int(p.name) for p in snapshots(memory)) > restored
    )
    other = Words("word", registry=StateRegistry())
    assert handler._run.states.load(other)
    assert other.text == "kept"


def test_a_state_that_was_saved_since_is_newer(
    start: Make, memory: SnapshotMemory
) -> None:
    """Snapshots have numbers of their own, and the directory has no commit yet."""
    word = Words("word", "kept")
    program = start()
    train_until(program, program.handler(), lambda: len(snapshots(memory)) == 2)
    again = start()
    handler = again.handler()
    assert word.text == "kept"
    word.text = "since"
    tfpreempt.save_state(word, again.directory)
    word.text = ""
    assert tfpreempt.load_state(word)
    assert word.text == "since"
    del handler


def test_the_newest_of_several_commits_is_restored(
    start: Make, memory: SnapshotMemory
) -> None:
    """A snapshot names the newest commit, not the commit that the start restored."""
    program = start()
    handler = program.handler()
    for _ in range(2):
        handler.run(program.step)
        handler.save()
    train_until(program, handler, lambda: newest(memory) > 2)
    again = start()
    step = newest(memory)
    assert again.handler().total_run_calls == step


def test_the_memory_of_copies_is_freed_with_the_handler(
    start: Make, memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    add, used = bundle_writer.add, []

    def seen(files: Any, prefix: str, tensors: Any, *args: Any, **more: Any) -> Any:
        if prefix.startswith(memory.directory):
            used.extend(weakref.ref(each.data.base) for each in tensors)
        return add(files, prefix, tensors, *args, **more)

    monkeypatch.setattr(bundle_writer, "add", seen)
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: snapshots(memory))
    assert any(each() is not None for each in used)
    handler.close()
    gc.collect()
    assert all(each() is None for each in used)


def test_a_state_that_is_too_large_has_none(
    start: Make,
    memory: SnapshotMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = "no more snapshots are taken"
    monkeypatch.setenv("TFPREEMPT_SNAPSHOT_BYTES", "30")
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: said in caplog.text)
    for _ in range(50):
        handler.run(program.step)
    assert snapshots(memory) == []
    assert caplog.text.count(said) == 1


def test_an_unsavable_value_ends_snapshots_but_not_training(
    start: Make, memory: SnapshotMemory, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(State):
        def save(self, fileobj: Any) -> None:
            raise ValueError("not now")

        def load(self, fileobj: Any) -> None:
            pass

    said = "no more snapshots are taken"
    program = start()
    handler = program.handler()
    broken = Broken("broken")
    train_until(program, handler, lambda: said in caplog.text)
    assert "not now" in caplog.text
    del broken
    assert snapshots(memory) == []


def test_large_tensors_are_copied_into_the_same_memory_again(
    start: Make, memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    add, used = bundle_writer.add, []

    def seen(files: Any, prefix: str, tensors: Any, *args: Any, **more: Any) -> Any:
        if prefix.startswith(memory.directory):
            used.append({each.name: each.data for each in tensors})
        return add(files, prefix, tensors, *args, **more)

    monkeypatch.setattr(bundle_writer, "add", seen)
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: newest(memory) and len(used) > 2)
    assert all(np.shares_memory(used[1][name], data) for name, data in used[0].items())
    handler.save()
    saved = handler.total_run_calls
    assert int(program.checkpoint.save_counter) == 1
    train_until(program, handler, lambda: newest(memory) > saved)
    again = start()
    step = newest(memory)
    assert again.handler().total_run_calls == step
    assert again.variable.numpy().tolist() == [1.0 + step, 2.0 + step]


def test_their_rounds_keep_no_keys(start: Make, memory: SnapshotMemory) -> None:
    program = start()
    handler = program.handler()
    here = current_session.current()
    assert here is not None
    store = here.executor.store
    assert isinstance(store, InMemoryStore)
    train_until(program, handler, lambda: here.coordinator.state.round > 6)
    rounds = {name.split("/")[2] for name in store._values if "/0/" in name}
    assert len(rounds - {"start"}) <= 3


def test_a_snapshot_stays_for_the_next_handler_without_a_step(
    start: Make, memory: SnapshotMemory
) -> None:
    """Such as the handler of the first of two fits, which a restart skips."""
    program = start()
    handler = program.handler()
    train_until(program, handler, lambda: snapshots(memory))
    again = start()
    step = newest(memory)
    with again.handler() as handler:
        assert handler.total_run_calls == step
    with again.handler() as handler:
        assert handler.total_run_calls == step


def test_a_manager_has_them_too(start: Make, memory: SnapshotMemory) -> None:
    def manager(program: Program) -> tf.train.CheckpointManager:
        return tf.train.CheckpointManager(
            program.checkpoint, str(program.directory), max_to_keep=2
        )

    program = start()
    handler = program.handler(manager(program))
    handler.run(program.step)
    handler.save()
    train_until(program, handler, lambda: newest(memory) > 1)
    again = start()
    step = newest(memory)
    handler = again.handler(manager(again))
    assert handler.total_run_calls == step
    assert int(again.checkpoint.save_counter) == 1
    handler.run(again.step)
    assert handler.save() is not None
    assert (again.directory / "ckpt-2.index").exists()


@pytest.mark.parametrize("every", [2, datetime.timedelta(seconds=0.02)])
def test_periodic_commits_continue_beside_snapshots(
    start: Make, memory: SnapshotMemory, every: Any
) -> None:
    program = start()
    handler = program.handler(save_freq=every)
    train_until(program, handler, lambda: len(program.events("commit")) > 20)
    seen = {each["because"] for each in program.events("commit")}
    assert seen == {"periodic"}
    handler.close()


def test_a_commit_gives_up_the_snapshot_that_is_being_written(
    start: Make, memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start()
    handler = program.handler()
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    add, held = bundle_writer.add, []

    def slow(files: Any, prefix: str, *args: Any, **more: Any) -> Any:
        if prefix.startswith(memory.directory):
            held.append(prefix)
            wait_until(more["check"])  # which raises when it was given up
        return add(files, prefix, *args, **more)

    monkeypatch.setattr(bundle_writer, "add", slow)
    train_until(program, handler, lambda: held)
    assert handler.save() is not None
    assert snapshots(memory) == []
    train_until(program, handler, lambda: len(held) > 1)
    handler.close()


def test_no_snapshots_without_memory_or_asynchronous_saves(
    start: Make, memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in ({"async_save": False}, {"config": {"save_fn": lambda: None}}):
        handler = start().handler(**more)
        assert handler._run.snapshots is None
    os.rmdir(memory.directory)
    assert start().handler()._run.snapshots is None
