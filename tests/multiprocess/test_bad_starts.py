"""Bad input of several workers causes a clear error on all workers."""

from __future__ import annotations

import pytest

from tests.multiprocess.harness import Place

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def test_workers_that_differ_in_storage_or_model(here: Place) -> None:
    """F: other storage, a file, another model's commit: an error on every worker.

    After it the same processes can start properly.
    """
    cluster = here.start("bad_starts.py", "storage", world=2)
    cluster.expect(0, 0)
    for worker in cluster:
        [storage], [file], [good], [model] = (
            worker.lines(name) for name in ("storage", "file", "good", "model")
        )
        assert storage[0] == "StorageNotSharedError"
        text = " ".join(storage)
        assert "worker 1" in text
        assert "/proc/self/cwd/ckpt" in text
        assert "mirror_dir" in text
        assert "bad_starts.py" in " ".join(file)
        assert good == ["works"]
        assert model[0] == "CheckpointMismatchError"
        assert "kernel" in " ".join(model)
    assert cluster[0].lines("file")[0][0] == "ConfigurationError"
    assert list(here.path.glob("*/ckpt/.tfpreempt-lease")) == []
    assert list(here.checkpoints.glob(".tfpreempt-lease")) == []


def test_workers_that_disagree_on_the_world_size(here: Place) -> None:
    """F: workers of one incarnation with different clusters; both report an error."""
    cluster = here.start("bad_starts.py", "world", world=2)
    cluster.expect(7, 7)
    for worker in cluster:
        [told] = worker.lines("world")
        assert told[0] == "WorkerMismatchError"
        assert "worker 0 counts 2 workers, this one 3" in " ".join(told)


def test_a_disk_that_is_full(here: Place) -> None:
    """F: a save on a full disk reports the error and keeps the last commit."""
    cluster = here.start("full_disk.py")
    cluster.expect(0)
    worker = cluster[0]
    if worker.lines("forbidden"):
        pytest.skip(f"no mount here: {worker.lines('forbidden')}")
    [error] = worker.lines("failed")
    assert error[0] == "SaveError", cluster.story()
    assert "the disk is full" in " ".join(error)
    first, last = worker.lines("saved")
    assert first[0].endswith("/1")
    assert last[0].endswith("/3")
    left = " ".join(worker.lines("left")[0])
    assert "'1'" in left
    assert "'2'" not in left
    assert "staging" not in left
