"""The plot of the preempted run shows the losses that the demo's jobs printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import loss

pytestmark = pytest.mark.slow  # imports matplotlib


def job(directory: Path, *starts: range) -> None:
    (directory / "logs").mkdir(parents=True)
    lines = [
        f"step {step}, restart {restart}, loss {1 / (step + 1):.4g}\n"
        for restart, steps in enumerate(starts)
        for step in steps
    ]
    log = directory / "logs/worker-0.log"
    log.write_text("=== starts ===\n" + "noise\n".join(lines), encoding="utf-8")


@pytest.mark.slow
def test_each_start_has_its_line(tmp_path: Path) -> None:
    job(tmp_path / "interrupted", range(4), range(4, 9))
    job(tmp_path / "uninterrupted", range(9))
    first, second = loss.lives(tmp_path / "interrupted")
    assert first[-1] == (3, 0.25)
    assert second[0] == (4, 0.2)
    picture = tmp_path / "loss.svg"
    loss.draw(tmp_path, picture)
    drawn = picture.read_text(encoding="utf-8")
    assert "first start" in drawn
    assert "restart 1" in drawn
    assert "restart 2" not in drawn
