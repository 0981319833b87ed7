"""What the demo shows: a progress bar while it trains, a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tfpreempt.cli.demo import plan
from tfpreempt.cli.demo.result import Result


@contextmanager
def show_progress(
    console: Console, title: str, steps: int
) -> Iterator[Callable[[plan.Progress], None]]:
    """A progress bar; yields what it is to be told of each progress."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("restarts {task.fields[restarts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss="     -", restarts=0)

        def show(latest: plan.Progress) -> None:
            bar.update(
                task,
                completed=latest.step + 1,
                loss=f"{latest.loss:.4f}",
                restarts=latest.restart,
            )

        yield show


def result_table(result: Result) -> Table:
    """The closing table."""
    table = Table(title="What the preemptions cost", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for number, each in enumerate(result.preemptions, start=1):
        workers = "worker" if len(each.notified) == 1 else "workers"
        names = ", ".join(str(worker) for worker in each.notified)
        table.add_row(
            f"preemption {number}: {workers} {names}, committed step {each.step}",
            f"notice to commit {each.notice_to_commit_seconds:.3f} s",
        )
    table.add_row("steps lost", str(result.steps_lost))
    table.add_row("restarts", str(result.restarts))
    table.add_row("final accuracy", f"{result.final_accuracy:.1%}")
    identical = "yes" if result.bit_identical else "NO"
    table.add_row("final weights byte-identical", identical)
    return table
