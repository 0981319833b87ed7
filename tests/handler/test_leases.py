"""Leases of a handler: of the directory, and of the object store."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.checkpoint.test_lease import ELSEWHERE
from tests.fakes.storage import FaultyObjectStore, damage
from tests.handler.program import Program, wait_until
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import DirectoryLease
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.object_store_lease import ObjectStoreLease
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.handler.restore_agreement import upload_for_others
from tfpreempt.handler.run import Run
from tfpreempt.handler.session import Session

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def store() -> FaultyObjectStore:
    return FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")


def is_free(directory: Path) -> bool:
    return DirectoryLease(str(directory)).read_owner() is None


def commit(program: Program, **more: Any) -> None:
    with program.handler(**more) as handler:
        handler.run(program.step)


def test_a_start_that_finds_nothing_intact_keeps_no_lease(
    program: Program, store: FaultyObjectStore
) -> None:
    commit(program)
    for name in (program.directory / "1").glob("ckpt.data-*"):
        damage(str(name))
    with pytest.raises(errors.CheckpointCorruptedError) as caught:
        program.handler(mirror_dir=store)
    assert caught.tb is not None  # which holds all that the start had
    assert is_free(program.directory)
    assert ObjectStoreLease(store).read_owner() is None


def test_a_handler_that_cannot_restore_keeps_no_lease(
    program: Program, store: FaultyObjectStore
) -> None:
    commit(program, mirror_dir=store)
    other = tf.train.Checkpoint(variable=tf.Variable([1.0, 2.0, 3.0]))
    with pytest.raises(errors.CheckpointMismatchError) as caught:
        program.handler(other, mirror_dir=store)
    assert caught.tb is not None
    assert is_free(program.directory)
    assert ObjectStoreLease(store).read_owner() is None


def test_a_fit_that_cannot_begin_keeps_no_lease(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    from tfpreempt.keras import PreemptionCallback

    def fail(session: Session, run: Run, every: object) -> None:
        raise errors.CheckpointMismatchError("the States of another program")

    monkeypatch.setattr(Session, "open", fail)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = PreemptionCallback(program.directory)
    with pytest.raises(errors.CheckpointMismatchError) as caught:
        model.fit(np.ones((1, 1)), np.ones(1), callbacks=[callback], verbose=0)
    assert caught.tb is not None
    assert is_free(program.directory)


def test_training_after_a_commit_of_another_run_exits_as_lost(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit function returned, and another start committed meanwhile."""
    handler = program.handler()
    handler.run(program.step)
    program.button.press()
    handler.run(program.step)
    assert program.exits == 1
    assert is_free(program.directory)
    commit_of_another_run(program.directory, 7, monkeypatch)
    with pytest.raises(
        errors.LeaseLostError, match="another run has acquired the lease"
    ):
        handler.save()
    wait_until(lambda: handler._session.step_flag.flag)  # the notice comes by a thread
    handler.run(program.step)
    assert program.exits == 2
    assert [e["outcome"] for e in program.events("exit")] == ["committed", "lost"]
    assert catalog.scan(str(program.directory))[0].step == 7


def commit_of_another_run(
    directory: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.directory.head._PROCESS", "another")
        lease = Lease()
        lease.acquire(str(directory))
        save(open_directory(directory, OwnContents(), lease=lease), step)
        lease.release()


def test_a_second_handler_refuses_a_commit_of_another_run(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(program)
    commit(program)  # of this process itself
    commit_of_another_run(program.directory, 7, monkeypatch)
    for _ in range(2):
        with pytest.raises(errors.DirectoryLockedError, match="since this process"):
            program.handler()
        assert is_free(program.directory)
    assert catalog.scan(str(program.directory))[0].step == 7


def test_a_second_handler_refuses_a_commit_of_another_run_in_the_store(
    program: Program,
    store: FaultyObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit(program, mirror_dir=store)
    with monkeypatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.directory.head._PROCESS", "another")
        there = tmp_path / "elsewhere"
        with program.handler(checkpoint_dir=there, mirror_dir=store) as other:
            other.run(program.step)
    with pytest.raises(errors.DirectoryLockedError, match="since this process"):
        program.handler(mirror_dir=store)
    assert ObjectStoreLease(store).read_owner() is None


def test_a_process_without_commits_starts_from_commits_of_others(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_of_another_run(program.directory, 6, monkeypatch)
    with program.handler(restore=False):
        pass
    commit_of_another_run(program.directory, 7, monkeypatch)
    with program.handler(restore=False) as handler:
        handler.run(program.step)


def test_a_start_imports_for_other_workers_under_the_lease(
    program: Program, store: FaultyObjectStore
) -> None:
    commit(program)
    mirror = Mirror(store, RetentionPolicy(), lease=Lease())
    mirror.look()
    commit_of_chief = catalog.read_at(str(program.directory / "1"))
    other = ObjectStoreLease(store)
    found = other.read_owner()
    assert found is not None
    other.end(found.token)
    assert other.take(ELSEWHERE)
    with pytest.raises(errors.LeaseLostError):
        upload_for_others(mirror, commit_of_chief)
    assert not any(name.endswith(layout.MARKER) for name in store.list())
