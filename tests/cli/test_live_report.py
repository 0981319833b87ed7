"""A run that continues: the sums that `tfpreempt report` shows later, slow workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.report.scripted import STEP, Scripted, a_run, read
from tests.fakes.clock import FakeClock
from tfpreempt.cli import main
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report.run_report import RunReport, build_report
from tfpreempt.cli.run import live_view
from tfpreempt.cli.run.live_view import _REPORTS_EVERY, LiveStatus
from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.restart_policy import RestartLimits
from tfpreempt.cli.status import metrics
from tfpreempt.cli.status.run_status import RunStatus
from tfpreempt.cli.status.text import one_line
from tfpreempt.core.clock import SystemClock
from tfpreempt.handler.status_file import (
    WorkerActivity,
    WorkerStatus,
    _pack,
    status_path,
)


def restarted() -> Scripted:
    """Preempted, killed after and before a commit, hung, failed and finished."""
    run = Scripted()
    run.start()
    run.train(40)
    run.save(beside=4)
    run.train(20)
    run.kill()
    run.down(3.0)
    run.start(tier="memory")
    run.train(30)
    run.kill()  # all steps since the commit before are lost once more
    run.start()
    run.train(10)
    run.preempt(worker=1)
    run.down(5.0)
    run.start(tier="mirror")
    run.train(10)
    run.hang()
    run.die_early(2.0)
    run.fail_to_start(1.0)
    run.start()
    run.train(20)
    run.finish()
    return run


def unsupervised() -> Scripted:
    """The same without a supervisor; no end of a killed process is recorded."""
    run = Scripted(workers=1, is_supervised=False)
    run.start()
    run.train(20)
    run.save()
    run.train(10)
    run.kill()
    run.down()
    run.start()
    run.train(30)
    run.preempt()
    run.start()
    run.train(5)
    run.finish()
    return run


class Live:
    """A live report of journals that grow, on a clock that the test moves."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.clock = FakeClock()
        journals = JournalTailer(directory, keeps_all=True)
        self.named: list[tuple[int, str | None, float, str]] = []
        self.whole = LiveStatus(
            journals, range(3), self.clock, lambda *slow: self.named.append(slow)
        )

    def append(self, name: str, line: str) -> None:
        with (self.directory / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def look(self, later: float = _REPORTS_EVERY) -> RunStatus:
        self.clock.advance(later)
        return self.whole.look()


@pytest.mark.parametrize("make", [a_run, restarted, unsupervised])
def test_live_sums_equal_those_of_the_report_after_every_record(
    tmp_path: Path, make: Callable[[], Scripted]
) -> None:
    run, live = make(), Live(tmp_path)
    records = sorted(
        (json.loads(line)["monotonic"], number, name, line)
        for name, lines in run.lines.items()
        for number, line in enumerate(lines)
    )
    for _, _, name, line in records:
        live.append(name, line)
        now = live.look().report
        if now is None:  # the supervisor has started, and no worker has written yet
            assert name == "supervisor.jsonl"
            continue
        later = read(tmp_path)
        assert now.account == later.account
        assert now.durations == later.durations
        assert now.goodput == later.goodput
    assert now is not None
    assert now.outcome == "finished"
    assert now.account.good == pytest.approx(run.truth["good"], rel=0.01)


@pytest.mark.parametrize("make", [a_run, restarted, unsupervised])
def test_status_has_the_sums_of_the_report(
    tmp_path: Path, make: Callable[[], Scripted]
) -> None:
    make().write(tmp_path)
    status, report = (
        json.loads(CliRunner().invoke(main, [name, str(tmp_path), "--json"]).stdout)
        for name in ("status", "report")
    )
    keys = ("goodput", "good_seconds", "badput_seconds", "durations")
    assert {key: status[key] for key in keys} == {key: report[key] for key in keys}
    assert status["goodput"] is not None
    shown = CliRunner().invoke(main, ["status", str(tmp_path)]).stdout
    assert f"Goodput {report['goodput']:.1%}; " in shown


def test_the_line_has_goodput_and_badput_by_class(tmp_path: Path) -> None:
    restarted().write(tmp_path)
    line = one_line(Live(tmp_path).look())
    assert "goodput " in line
    for category in ("lost steps", "starting processes", "waiting for saves", "down"):
        assert f"% {category}" in line


def test_before_the_first_commit_nothing_is_said_of_goodput(tmp_path: Path) -> None:
    run = Scripted()
    run.start()
    run.write(tmp_path)
    assert "goodput" not in one_line(Live(tmp_path).look())


def test_metrics_have_the_sums_and_histograms(tmp_path: Path) -> None:
    a_run(workers=2).write(tmp_path)
    status = Live(tmp_path).look()
    assert status.report is not None
    text = generate_latest(metrics.registry("r", lambda: status)).decode()
    found = {
        (s.name, *(v for k, v in s.labels.items() if k != "run")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    account = status.report.account
    assert found["tfpreempt_goodput_seconds",] == account.good
    for kind, seconds in account.bad.items():
        assert found["tfpreempt_badput_seconds", kind.value] == seconds
    saves = status.report.durations["save"]
    assert found["tfpreempt_save_seconds_count",] == len(saves) == 9
    assert found["tfpreempt_save_seconds_sum",] == pytest.approx(sum(saves))
    assert found["tfpreempt_save_seconds_bucket", "1.0"] == 2
    assert found["tfpreempt_save_seconds_bucket", "2.5"] == 9
    assert found["tfpreempt_save_seconds_bucket", "+Inf"] == 9
    assert found["tfpreempt_restore_seconds_count",] == 4
    assert found["tfpreempt_notice_to_commit_seconds_sum",] == 1.0 + STEP


def test_files_on_a_slow_disk_are_read_rarely(tmp_path: Path) -> None:
    """A shared disk with the files of a thousand workers."""
    clock, journals = SlowClock(), JournalTailer(tmp_path)
    named: list[int] = []
    whole = LiveStatus(journals, range(3), clock, lambda index, *_: named.append(index))
    whole.look()
    told(tmp_path, FAST, (1.3, 0.1, 0.5, 0.5), FAST)
    whole.look()
    clock.advance(5.0)
    whole.look()
    assert named == []
    clock.advance(3.0)
    whole.look()
    assert named == [1]


class SlowClock(FakeClock):
    """A clock of a slow machine: a second passes between two calls."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_a_report_that_takes_long_is_computed_rarely(tmp_path: Path) -> None:
    """A journal of months: the report takes at most a hundredth of the time."""
    run, clock = Scripted(), SlowClock()
    journals = JournalTailer(tmp_path, keeps_all=True)
    whole = LiveStatus(journals, range(2), clock, lambda *slow: None)
    run.start()
    run.write(tmp_path)
    first = whole.look().report
    run.train(9)
    run.save()
    run.write(tmp_path)
    clock.advance(90.0)
    assert whole.look().report is first
    whole.end()
    last = whole.look().report
    assert last is not None
    assert len(last.commits) == 1


def test_the_last_metrics_wait_for_a_report_that_another_thread_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, live = Scripted(), Live(tmp_path)
    run.start()
    run.write(tmp_path)
    is_computing, may_end = threading.Event(), threading.Event()

    def slowly(*journals: Any) -> RunReport | None:
        is_computing.set()
        report = build_report(*journals)
        assert may_end.wait(30.0)
        return report

    monkeypatch.setattr(live_view, "build_report", slowly)
    other = threading.Thread(target=live.look)
    other.start()
    assert is_computing.wait(30.0)
    assert live.whole.look().report is None  # does not wait before the end
    run.train(9)
    run.save()
    run.write(tmp_path)
    live.whole.end()
    threading.Timer(0.05, may_end.set).start()
    last = live.whole.look().report
    other.join()
    assert last is not None
    assert len(last.commits) == 1


@pytest.mark.parametrize(
    ("workers", "variables", "is_compared"),
    [
        pytest.param(1, {}, False, id="one worker"),
        pytest.param(2, {}, True, id="two workers"),
        pytest.param(
            1,
            {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"},
            True,
            id="two machines",
        ),
    ],
)
def test_one_worker_is_not_compared(
    tmp_path: Path, workers: int, variables: dict[str, str], is_compared: bool
) -> None:
    options = RunOptions(
        command=("true",),
        workers=workers,
        limits=RestartLimits(),
        checkpoint_dir=None,
        mirror_dir=None,
        log_dir=tmp_path,
        log_size=1,
        log_files=1,
        journal_dir=tmp_path,
        task=None,
        has_echo=False,
        environment=variables,
    )
    reporter: Any = SimpleNamespace(slow_worker=print, metrics_lost=print)
    with live_view.shown(options, FakeClock(), None, reporter):
        names = [each.name for each in threading.enumerate()]
    assert ("tfpreempt-compare" in names) == is_compared


# --- slow workers ---------------------------------------------------------------------


def worker(
    index: int, step: float, deviation: float, own: float, cpu: float
) -> WorkerStatus:
    """The status of a worker of a run with three workers."""
    return WorkerStatus(
        at=FakeClock().wall(),
        worker=index,
        num_workers=3,
        host=f"host-{index}",
        pid=index,
        doing=WorkerActivity.TRAINING,
        step=100,
        step_seconds=step,
        step_deviation=deviation,
        own_seconds=own,
        cpu_seconds=cpu,
    )


def told(directory: Path, *rows: tuple[float, float, float, float]) -> None:
    """Writes the status files of the workers."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, row in enumerate(rows):
        path = status_path(directory, index)
        path.write_bytes(_pack(worker(index, *row)))


FAST = (1.3, 0.1, 0.2, 0.5)
"""Step, deviation, own time and CPU time of a worker that waits for a slow worker."""


@pytest.mark.parametrize(
    ("slow", "slowdown", "measure"),
    [
        pytest.param(
            (1.3, 0.1, 0.5, 0.5), 1.3, "own time", id="its program or input is slow"
        ),
        pytest.param((1.3, 0.1, 0.2, 0.8), 1.3, "CPU time", id="it computes slowly"),
        pytest.param(
            (1.69, 0.1, 0.26, 0.65), 1.3, "step time", id="it waits for nobody"
        ),
        pytest.param(
            (1.3, 0.1, 1.3, 0.5),
            1.3 / 0.2,
            "own time",
            id="others wait most of the time",
        ),
    ],
)
def test_a_slow_worker_is_named(
    tmp_path: Path,
    slow: tuple[float, float, float, float],
    slowdown: float,
    measure: str,
) -> None:
    told(tmp_path, FAST, slow, FAST)
    live = Live(tmp_path)
    status = live.look()
    assert status.slow == {1: pytest.approx(slowdown)}
    shown = f"SLOW worker 1: {slowdown:.2g} x the step time, by {measure}"
    assert one_line(status).startswith(shown)
    live.look()
    assert live.named == [(1, "host-1", pytest.approx(slowdown), measure)]


def test_threads_in_parallel_are_compared_by_elapsed_time(tmp_path: Path) -> None:
    told(tmp_path, (1.0, 0.0, 0.0, 8.0), (1.0, 0.0, 0.0, 12.0))
    assert Live(tmp_path).look().slow == {1: pytest.approx(1.5)}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([FAST, FAST, FAST], id="equal workers"),
        pytest.param([FAST], id="one worker"),
        pytest.param([FAST, (1e-300, 1e10, 1e10, 1e10)], id="no times of a worker"),
        pytest.param([FAST, (1.3, 0.1, 0.3, 0.6), FAST], id="8 percent"),
        # The evaluation is in the mean of one worker, and not yet in that of the other.
        pytest.param([FAST, (2.6, 5.0, 0.4, 1.0), FAST], id="an evaluation"),
    ],
)
def test_nobody_is_named_without_need(
    tmp_path: Path, rows: list[tuple[float, float, float, float]]
) -> None:
    told(tmp_path, *rows)
    live = Live(tmp_path)
    assert live.look().slow == {}
    assert live.named == []


def test_a_worker_near_the_limit_is_reported_once(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for own in (0.45, 0.2, 0.45, 0.2, 0.45):
        told(tmp_path, FAST, (1.3, 0.1, own, 0.5), FAST)
        live.look()
    assert [index for index, *_ in live.named] == [1]


def test_a_worker_that_was_fast_for_long_is_reported_again(tmp_path: Path) -> None:
    live, named = Live(tmp_path), []
    for own, seconds in [(0.5, 900), (0.2, 580), (0.5, 580), (0.2, 610), (0.5, 30)]:
        for second in range(0, seconds, 10):
            fast = 1.3, 0.1 + second * 1e-6, 0.2, 0.5  # else the workers are silent
            told(tmp_path, fast, (*fast[:2], own, 0.5), fast)
            live.look(later=10.0)
        named.append(len(live.named))
    assert named == [1, 1, 1, 1, 2]


def test_a_silent_worker_is_not_compared(tmp_path: Path) -> None:
    told(tmp_path, FAST, (1.3, 0.1, 0.6, 0.5), FAST)
    live = Live(tmp_path)
    assert live.look().slow.keys() == {1}
    assert live.look(later=60.0).slow == {}


def test_status_names_a_slow_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "wall", lambda: FakeClock().wall())
    told(tmp_path / "journal", FAST, (1.3, 0.1, 0.5, 0.5), FAST)
    shown = CliRunner().invoke(main, ["status", str(tmp_path)]).stdout
    assert "1.3 s ± 0.1 s" in shown
    assert "slow: 1.3 x the step time, by own time" in shown
    found = json.loads(
        CliRunner().invoke(main, ["status", str(tmp_path), "--json"]).stdout
    )
    assert found["slow"] == [1]
    assert found["slowdowns"]["1"] == pytest.approx(1.3)
    assert found["slow_by"]["1"] == "own time"
    assert found["workers"][1]["own_seconds"] == 0.5
