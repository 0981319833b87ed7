"""A fit whose disk is lost with each preemption goes on from object storage."""

from __future__ import annotations

import shutil

import pytest

from tests.keras.small_fit import machine, values
from tfpreempt.testing.storage import FaultyStore

pytestmark = pytest.mark.tensorflow


def test_lost_disks(caplog: pytest.LogCaptureFixture) -> None:
    results, seen = [], []
    for cuts in ((), (("end", 1, 2), ("test", 2, 0))):
        with machine("keras") as each:
            store = FaultyStore(uri=f"memory://{len(results)}")

            def program(each=each, store=store):
                shutil.rmtree(each.checkpoints, ignore_errors=True)
                model, data = each.model(), each.arrays()
                ours = each.preemption(remote_checkpoint_dir=store)
                look = each.callback(
                    on_epoch_end=lambda epoch, logs=None: seen.append(
                        ours.mirror_status.uri
                    )
                )
                validation = (data["x"], data["y"])
                history = each.fit(model, look, ours=ours, validation_data=validation)
                assert ours.mirror_status is None  # the fit is over, its copy there
                return history.history, values(model)

            results.append(each.run(program, *cuts))
            assert [name for name in store.list() if name.endswith("/COMMITTED")]
    assert results[0] == results[1]
    assert caplog.text.count("fetching step") == 2
    assert set(seen) == {"memory://0", "memory://1"}
