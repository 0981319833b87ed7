"""Draws docs/img/loss.svg from a run of the demo.

    tfpreempt demo --steps 600
    python -m tests.docs.loss demo-out/<its folder>

The loss of each step is Keras' mean so far, as printed by worker 0 of the preempted job
and of the uninterrupted job. The style is that of the plots of docs/performance.md.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from tests.docs.plots import COLOURS, GREY, INCHES, STYLE
from tfpreempt.cli.demo.job import STEP

PICTURE = Path(__file__).parents[2] / "docs/img/loss.svg"
Life = list[tuple[int, float]]


def lives(job: Path) -> list[Life]:
    """Returns the steps of each start of a job, with their losses."""
    log = (job / "logs/worker-0.log").read_text(encoding="utf-8", errors="replace")
    by_restart = itertools.groupby(STEP.findall(log), key=lambda found: found[1])
    return [
        [(int(step), float(loss)) for step, _, loss in found] for _, found in by_restart
    ]


def draw(directory: Path, picture: Path) -> None:
    """Draws both jobs of a demo into one picture."""
    (undisturbed,) = lives(directory / "uninterrupted")
    preempted = lives(directory / "interrupted")
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(INCHES, 2.8), layout="constrained")
        axes = canvas.subplots()
        axes.plot(
            *zip(*undisturbed, strict=True),
            color=GREY,
            alpha=0.4,
            linewidth=5,
            label="never preempted",
        )
        for number, life in enumerate(preempted):
            axes.plot(
                *zip(*life, strict=True),
                color=COLOURS[number % len(COLOURS)],
                linewidth=1.6,
                label=f"restart {number}" if number else "first start",
            )
        for life in preempted[1:]:
            axes.axvline(life[0][0], color=GREY, linestyle=":")
        axes.set(
            xlabel="step; a dotted line is a SIGTERM and a restart",
            ylabel="mean loss so far",
        )
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0)
        canvas.legend(
            *axes.get_legend_handles_labels(), loc="outside upper center", ncols=5
        )
        canvas.savefig(
            picture,
            format="svg",
            transparent=True,
            metadata={"Title": "The loss through preemptions", "Date": None},
        )


if __name__ == "__main__":
    draw(Path(sys.argv[1]), PICTURE)
