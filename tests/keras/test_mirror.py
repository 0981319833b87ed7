"""A fit whose disk is lost with each preemption goes on from object storage."""

from __future__ import annotations

import shutil

import pytest

from tests.keras.small_fit import machine, values
from tfpreempt import errors
from tfpreempt.testing.storage import FaultyStore

pytestmark = pytest.mark.tensorflow


def test_lost_disks(caplog: pytest.LogCaptureFixture) -> None:
    results, seen, told = [], [], []
    for cuts in ((), (("end", 1, 2), ("test", 2, 0))):
        with machine("keras") as each:
            store = FaultyStore(uri=f"memory://{len(results)}")

            def program(each=each, store=store):
                shutil.rmtree(each.checkpoints, ignore_errors=True)
                model, data = each.model(), each.arrays()
                ours = each.preemption(remote_checkpoint_dir=store)
                assert ours.mirror_status is None
                look = each.callback(
                    on_epoch_end=lambda epoch, logs=None: seen.append(
                        ours.mirror_status.uri
                    )
                )
                validation = (data["x"], data["y"])
                history = each.fit(model, look, ours=ours, validation_data=validation)
                assert ours.mirror_status.is_complete
                assert ours.wait_for_mirror(0)
                told.append(ours.mirror_status.mirrored)
                return history.history, values(model)

            results.append(each.run(program, *cuts))
            assert [name for name in store.list() if name.endswith("/COMMITTED")]
    assert results[0] == results[1]
    assert caplog.text.count("fetching step") == 2
    assert set(seen) == {"memory://0", "memory://1"}
    assert len(told) == 2
    assert told[0] == told[1] > 0


def test_a_copy_that_did_not_come_to_its_end_is_told(monkeypatch) -> None:
    with machine("keras") as each:
        monkeypatch.setattr("tfpreempt.checkpoint.remote.tries.STALLED", 0.0)
        store = FaultyStore(uri="memory://away")
        model, data = each.model(), each.arrays()
        ours = each.preemption(remote_checkpoint_dir=store)
        assert ours.mirror_status is None
        assert ours.wait_for_mirror()  # nothing was to be copied yet
        gone = errors.CheckpointError("no route")
        look = each.callback(
            on_epoch_end=lambda epoch, logs=None: store.fail_from(
                len(store.operations), gone
            )
        )
        each.fit(model, look, ours=ours, **data)
        assert not ours.mirror_status.is_complete
        assert not ours.wait_for_mirror()
        with pytest.raises(errors.ConfigurationError, match="timeout is"):
            ours.wait_for_mirror(-1)
