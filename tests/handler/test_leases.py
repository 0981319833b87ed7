"""What handlers do with the leases of their directory and of their store."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.handler.program import Program
from tfpreempt import errors
from tfpreempt.checkpoint.fence import LeaseDirectory
from tfpreempt.checkpoint.remote.place import StorePlace
from tfpreempt.handler.commits import Commits
from tfpreempt.testing.storage import FaultyStore, damage

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(uri=f"memory://{uuid.uuid4()}")


def is_free(directory: Path) -> bool:
    return LeaseDirectory(str(directory)).look() is None


def commit(program: Program, **more: Any) -> None:
    with program.handler(**more) as handler:
        handler.run(program.step)


def test_a_start_that_finds_nothing_whole_keeps_no_lease(
    program: Program, store: FaultyStore
) -> None:
    commit(program)
    for name in (program.directory / "1").glob("ckpt.data-*"):
        damage(str(name))
    with pytest.raises(errors.CheckpointDamagedError) as caught:
        program.handler(remote_checkpoint_dir=store)
    assert caught.tb is not None  # which holds all that the start had
    assert is_free(program.directory)
    assert StorePlace(store).look() is None


def test_a_handler_that_cannot_restore_keeps_no_lease(
    program: Program, store: FaultyStore
) -> None:
    commit(program, remote_checkpoint_dir=store)
    other = tf.train.Checkpoint(variable=tf.Variable([1.0, 2.0, 3.0]))
    with pytest.raises(errors.CheckpointMismatchError) as caught:
        program.handler(other, remote_checkpoint_dir=store)
    assert caught.tb is not None
    assert is_free(program.directory)
    assert StorePlace(store).look() is None


def test_a_fit_that_cannot_begin_keeps_no_lease(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras

    from tfpreempt.keras import PreemptionCallback

    def fail(commits: Commits) -> None:
        raise errors.CheckpointMismatchError("the States of another program")

    monkeypatch.setattr(Commits, "load_states", fail)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = PreemptionCallback(program.directory)
    with pytest.raises(errors.CheckpointMismatchError) as caught:
        model.fit(np.ones((1, 1)), np.ones(1), callbacks=[callback], verbose=0)
    assert caught.tb is not None
    assert is_free(program.directory)
