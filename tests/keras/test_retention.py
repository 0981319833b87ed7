"""`keep_every` and `best_by` in a fit that is preempted between two epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Zygote
from tfpreempt.checkpoint.directory import catalog, retention

pytestmark = [pytest.mark.tensorflow]

PROGRAM = Path(__file__).with_name("programs") / "retention.py"
RESTORED = PROGRAM.with_name("restored_weights.py")


@pytest.mark.parametrize("cut", [-1, 3])
def test_the_best_epochs_stay(zygote: Zygote, tmp_path: Path, cut: int) -> None:
    run = tmp_path / "run"

    def start() -> Any:
        return zygote.run(PROGRAM, run, cut, directory=tmp_path, limit=120)

    done = start()
    if cut >= 0:
        assert done.returncode == 143, done.stderr
        (newest, *_) = catalog.scan(str(run))
        assert newest.manifest is not None
        assert newest.step == 16
        assert retention.metrics_of(newest.manifest)["course"] == 2.0
        done = start()
    assert done.returncode == 0, done.stderr
    every, best = "every 12 steps", "best course"
    # Four steps an epoch: the commits of steps 4, 12 and 24 are the first of a period,
    # those of steps 8 and 16 have the values 1.0 and 2.0.
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "4": every, "8": best, "12": every, "16": best, "24": every,
        "28": "newest", "32": "newest",
    }  # fmt: skip


@pytest.mark.parametrize("best", [0, 1, 3])
def test_weights_of_an_earlier_epoch_have_no_metrics_of_the_last_epoch(
    zygote: Zygote, tmp_path: Path, best: int
) -> None:
    run = tmp_path / "run"
    done = zygote.run(RESTORED, run, best, directory=tmp_path, limit=120)
    assert done.returncode == 0, done.stderr
    newest, *_, first = catalog.scan(str(run))
    assert newest.manifest is not None
    assert newest.manifest.because == "finished"
    metrics = {"accuracy": 0.9} if best == 3 else {}
    assert retention.metrics_of(newest.manifest).items() >= metrics.items()
    assert ("accuracy" in retention.metrics_of(newest.manifest)) == (best == 3)
    assert first.manifest is not None
    assert "accuracy" in retention.metrics_of(first.manifest)
