"""A fit whose checkpoint directory is a URL, as gs://bucket/run would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.keras.small_fit import machine, values

pytestmark = pytest.mark.tensorflow


def test_an_interrupted_fit_is_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(tmp_path))
    results = []
    for name, cuts in (("whole", ()), ("cut", (("end", 1, 2), ("test", 2, 0)))):
        with machine("keras") as each:
            each.checkpoints = f"ram:/{tmp_path}/{name}"
            ours = []

            def program(each=each, ours=ours):
                model = each.model()
                ours[:] = [each.preemption()]
                data = each.arrays()
                validation = (data["x"], data["y"])
                history = each.fit(model, ours=ours[0], validation_data=validation)
                return history.history, values(model)

            results.append(each.run(program, *cuts))
            latest = ours[0].latest_checkpoint
            assert latest.path.startswith(f"{each.checkpoints}/commit-")
    assert results[0] == results[1]
