"""A fit that loses its disk at each preemption resumes from object storage."""

from __future__ import annotations

import shutil
import threading

import pytest

from tests.fakes.storage import FaultyObjectStore
from tests.keras.small_fit import machine, values
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle_writer

pytestmark = pytest.mark.tensorflow


def test_lost_disks(caplog: pytest.LogCaptureFixture) -> None:
    results, seen, told = [], [], []
    for cuts in ((), (("end", 1, 2), ("test", 2, 0))):
        with machine("keras") as each:
            store = FaultyObjectStore(uri=f"memory://{len(results)}")

            def program(each=each, store=store):
                shutil.rmtree(each.checkpoints, ignore_errors=True)
                model, data = each.model(), each.arrays()
                ours = each.preemption(mirror_dir=store)
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
                told.append(ours.mirror_status.mirrored_step)
                return history.history, values(model)

            results.append(each.run(program, *cuts))
            assert [name for name in store.list() if name.endswith("/COMMITTED")]
    assert results[0] == results[1]
    assert caplog.text.count("downloading step") == 2
    assert set(seen) == {"memory://0", "memory://1"}
    assert len(told) == 2
    assert told[0] == told[1] > 0


def test_an_incomplete_upload_is_reported(monkeypatch) -> None:
    with machine("keras") as each:
        monkeypatch.setattr("tfpreempt.checkpoint.mirror.mirror_status.STALLED", 0.0)
        store = FaultyObjectStore(uri="memory://away")
        model, data = each.model(), each.arrays()
        ours = each.preemption(mirror_dir=store)
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


def test_a_wait_for_the_upload_includes_the_save(monkeypatch) -> None:
    """The wait includes an asynchronous save that has begun."""
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    add, opened = bundle_writer.add, threading.Event()

    def add_later(*args, check, **more):
        assert check is None or opened.wait(20.0)
        return add(*args, check=check, **more)

    monkeypatch.setattr(bundle_writer, "add", add_later)
    told = []
    with machine("keras") as each:
        store = FaultyObjectStore(uri="memory://waits")
        model, data = each.model(), each.arrays()
        ours = each.preemption(mirror_dir=store, save_freq=3)

        def at_fourth(batch: int, logs: object = None) -> None:
            if batch == 3 and not told:
                told.append(ours.wait_for_mirror(0.1))
                opened.set()
                told.append(ours.wait_for_mirror(20.0))
                told.append(ours.mirror_status.mirrored_step)

        look = each.callback(on_train_batch_end=at_fourth)
        each.fit(model, look, ours=ours, **data)
    assert told == [False, True, 3]
