"""A fit whose checkpoint directory is gs://bucket/run, on machines that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.gcs import GcsServer
from tests.keras.small_fit import machine, values
from tfpreempt.core.scratch import VARIABLE, scratch_directory

pytestmark = pytest.mark.tensorflow


def test_an_interrupted_fit_is_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, starts = [], 0
    with GcsServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        for name, cuts in (("whole", ()), ("cut", (("end", 1, 2), ("test", 2, 0)))):
            with machine("keras") as each:
                each.checkpoints = f"gs://bucket/{name}"
                ours = []

                def program(each=each, ours=ours):
                    nonlocal starts
                    starts += 1
                    monkeypatch.setenv(VARIABLE, str(tmp_path / f"machine-{starts}"))
                    model = each.model()
                    ours[:] = [each.preemption()]
                    data = each.arrays()
                    validation = (data["x"], data["y"])
                    history = each.fit(model, ours=ours[0], validation_data=validation)
                    return history.history, values(model)

                results.append(each.run(program, *cuts))
                latest = ours[0].latest_checkpoint
                assert latest.startswith(scratch_directory(each.checkpoints))
                assert ours[0].mirror_status.is_complete
    assert results[0] == results[1]
    assert starts == 4
