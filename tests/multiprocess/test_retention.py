"""`keep_every` and `best_by` of a handler in real processes: disk and mirror."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.harness import worker_environment
from tfpreempt.checkpoint.directory import catalog, retention
from tfpreempt.storage.open_store import open_store

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import json, os, signal, sys, time
import tfpreempt
from tfpreempt.states import JsonState

directory, mirror, cut = sys.argv[1], sys.argv[2], int(sys.argv[3])
done = JsonState("done", [])
with tfpreempt.PreemptionCheckpointHandler(
    None, None, directory, mirror_dir=mirror, save_freq=25,
    keep_every=100, best_by=("loss", "min", 2),
) as handler:
    while handler.total_run_calls < 400:
        step = handler.total_run_calls
        handler.run(done.value.append, step)
        if step + 1 == cut:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        if (step + 1) % 30 == 0:
            handler.save(metrics={"loss": abs(150 - step - 1)})
            assert handler.wait_for_mirror()
print(json.dumps({each.step: each.kept_because for each in handler.checkpoints()}))
"""


def test_a_handler_keeps_its_best_and_its_first(tmp_path: Path) -> None:
    """Three processes; the mirror has the same commits, for the same reasons."""
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    done = None
    for cut in (130, 290, 0):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(run), f"file://{mirror}", str(cut)],
            env=worker_environment(tmp_path), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == (143 if cut else 0), done.stderr
    assert done is not None
    kept = json.loads(done.stdout.splitlines()[-1])
    newest = {step: why for step, why in kept.items() if "newest" in why}
    assert list(newest) == ["390", "400"]
    every = "every 100 steps"
    assert {step: why for step, why in kept.items() if step not in newest} == {
        "25": every, "100": every, "120": "best loss", "150": "best loss",
        "200": every, "300": every,
    }  # fmt: skip
    copies = catalog.contents(open_store(str(mirror)))
    assert retention.explain(copies) == retention.explain(catalog.scan(str(run)))
