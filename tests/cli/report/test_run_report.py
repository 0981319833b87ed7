"""Reports are true: of scripted journals, to the hundredth that is promised."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.report.scripted import STEP, Scripted, read, report_of
from tfpreempt.cli.report import run_report, view
from tfpreempt.cli.report.goodput import Badput
from tfpreempt.cli.report.page import make_page
from tfpreempt.cli.report.process_spans import Phase
from tfpreempt.cli.report.run_report import RunReport
from tfpreempt.cli.tables import Console
from tfpreempt.handler.status_file import REPORT_INTERVAL

approx = pytest.approx


def check_account(run: Scripted, report: RunReport) -> None:
    """Checks that each class is right to one percent of the total."""
    total = sum(run.truth.values())
    told: dict[Any, float] = {"good": report.account.good, **report.account.bad}
    assert report.account.total == approx(total, rel=0.01)
    for kind, seconds in told.items():
        assert seconds == approx(run.truth[kind], abs=0.01 * total), kind


def one_of_each() -> Scripted:
    """A preemption, a kill after a periodic commit, a kill before any, and the end."""
    run = Scripted()
    run.start()
    run.train(100)
    run.preempt()
    run.down()
    run.start()
    run.train(60)
    run.save(2.0, beside=5)
    run.train(40)
    run.kill()
    run.down(10.0)
    run.start(tier="mirror")
    run.train(30)
    run.kill()
    run.down(5.0)
    run.start()
    run.train(100)
    run.finish()
    return run


def test_the_time_of_a_run_is_told_by_its_classes() -> None:
    run = one_of_each()
    report = run.report()
    check_account(run, report)
    assert report.outcome == "finished"
    assert report.warnings == ()
    assert report.step == run.step
    assert report.bytes_written == 3000


def test_what_interruptions_cost() -> None:
    report = one_of_each().report()
    preempted, late, early = report.interruptions
    assert preempted.cause == "preemption"
    assert preempted.sources == {"signal:SIGTERM": (0,)}
    assert preempted.steps_lost == 0
    assert preempted.saved_step == preempted.restored_step == preempted.step == 102
    assert preempted.notice_to_commit_seconds == 1.5
    assert preempted.down_seconds == approx(20.0)
    # The last step, the save, leaving, down, and a start to its first step.
    assert preempted.resumed_seconds == approx(0.5 + 1 + 1 + 20 + 8 + 2 + 3)

    assert (late.cause, late.is_estimated, late.tier) == ("failure", True, "mirror")
    assert late.steps_lost == approx(45, abs=1)
    assert (early.restored_step, early.is_estimated) == (late.restored_step, True)
    assert early.steps_lost == approx(31, abs=1)


def test_each_span_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each interruption, all later spans were searched for a step: hours for a
    journal of 20 MB with nothing but starts."""
    run, seen = Scripted(), list[object]()
    for _ in range(100):
        run.start()
        run.kill()

    class Watched(tuple[Phase, ...]):
        def __contains__(self, phase: object) -> bool:
            seen.append(phase)
            return super().__contains__(phase)

    monkeypatch.setattr(run_report, "MADE_STEPS", Watched(run_report.MADE_STEPS))
    report = run.report()
    assert len(report.interruptions) == 100
    assert len(seen) < 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and its report.

    Attributes:
        does: calls of `Scripted`, such as "train:80".
        outcome: how it ends.
        step: that it comes to; None for the last step of the script.
        interruptions: some attributes of each.
        wasted: seconds of lost steps, if that is known.
        is_exact: whether each class of time is that of the script.
        supervised: with a supervisor, without one, or both.
        workers: how many.
    """

    does: str
    outcome: str = "finished"
    step: int | None = None
    interruptions: Sequence[Mapping[str, Any]] = ()
    wasted: float | None = None
    is_exact: bool = True
    supervised: Sequence[bool] = (True,)
    workers: int = 2


SINCE_REPORT = (
    REPORT_INTERVAL / STEP
)  # steps, at most, since the last report of a worker
CASES = {
    "steps of a worker that stands still are not counted as lost": Case(
        does="start train:59 save train:40 stand:300.0 kill finish_later",
        interruptions=[
            {
                "is_estimated": True,
                "steps_lost": approx(40 + SINCE_REPORT / 2, abs=SINCE_REPORT / 2),
            }
        ],
    ),
    "a run without a supervisor": Case(
        does="start train:80 preempt:1 finish_later:80",
        interruptions=[{"cause": "preemption"}],
        supervised=(False,),
    ),
    "a notice that a commit under way serves": Case(
        does="start train:80 preempt_amid_save down start finish",
        interruptions=[
            {
                "saved_step": 81,
                "restored_step": 81,
                "notice_to_commit_seconds": approx(0.6),
            }
        ],
    ),
    "an error, of which all is known": Case(
        does="start train:80 save train:20 fail finish_later",
        interruptions=[
            {"cause": "failure", "step": 101, "is_estimated": False, "steps_lost": 20}
        ],
        supervised=(True, False),
    ),
    "an error that nothing followed": Case(
        does="start train:80 save train:20 fail",
        outcome="interrupted",
        interruptions=[{"step": 101, "restored_step": None, "steps_lost": 20}],
        wasted=2 * 20 * STEP,
        is_exact=False,  # the script counts steps as lost at the next start
        supervised=(False,),
    ),
    "a start that is refused after the end": Case(
        does="start train:80 finish down fail_to_start:4.0",
        interruptions=[{"steps_lost": 0}],
        is_exact=False,  # the time after the end is no time of the run
    ),
    "a start that fails, and tells the step that it did not restore": Case(
        does="start train:80 preempt down fail_to_start:4.0",
        outcome="interrupted",
        interruptions=[
            {"steps_lost": 0},
            {"steps_lost": 0, "cause": "failure", "step": 82},
        ],
    ),
    "a run that trains": Case(
        does="start train:100 save", outcome="running", wasted=0.0
    ),
    "a kill before the first commit": Case(
        does="start train:100 kill finish_later",
        interruptions=[{"restored_step": 0, "saved_step": None}],
    ),
    "a start that was killed before it had a journal": Case(
        does="start train:10 preempt die_early:4.0 start train:10 finish",
        interruptions=[{"cause": "preemption"}, {"cause": "failure"}],
        workers=1,
    ),
    "a long end that only the supervisor records": Case(
        does='start train:100 save:1.0:"finished" wait:50.0 end_unsaid',
    ),
}


def test_the_time_after_a_complete_training_is_idle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Scripted(workers=2)
    run.start()
    run.train(80)
    run.finish()
    assert run.report().idle_seconds == 0.0
    run.down(1000.0)
    run.start(restoring=1.0)
    run.train(10)
    run.finish()
    report = run.report()
    assert report.idle_seconds == approx(2 * 1000.0)
    assert report.account.total + report.idle_seconds == approx(2 * report.seconds)
    view.show(Console(width=160), report)
    row = r"^idle after completion +2000\.0 +- +not counted"
    assert re.search(row, capsys.readouterr().out, re.MULTILINE)
    assert view.to_json(report)["idle_seconds"] == report.idle_seconds
    assert view.IDLE in make_page(report, "run")


@pytest.mark.parametrize(
    ("name", "is_supervised"),
    [(name, each) for name, case in CASES.items() for each in case.supervised],
)
def test_a_report_is_true(name: str, is_supervised: bool) -> None:
    case = CASES[name]
    run = Scripted(workers=case.workers, is_supervised=is_supervised)
    for word in case.does.split():
        method, *arguments = word.split(":")
        getattr(run, method)(*map(json.loads, arguments))
    report = run.report()
    if case.is_exact:
        check_account(run, report)
    assert report.warnings == ()
    assert report.outcome == case.outcome
    assert report.step == (run.step if case.step is None else case.step)
    found = [
        {field: getattr(each, field) for field in expected}
        for each, expected in zip(report.interruptions, case.interruptions, strict=True)
    ]
    assert found == list(case.interruptions)
    if case.wasted is not None:
        assert report.account.bad[Badput.WASTED_PROGRESS] == approx(case.wasted)


def test_durations_include_a_notice_that_a_commit_under_way_serves() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(80)
    run.preempt_amid_save()
    run.down()
    run.start()
    run.finish()
    assert run.report().durations["notice to commit"] == [approx(0.6)]


def test_every_moment_of_a_worker_has_its_phase() -> None:
    report = one_of_each().report()
    for worker in report.workers:
        pairs = zip(worker.spans, worker.spans[1:], strict=False)
        assert all(one.end == approx(two.begin) for one, two in pairs)
        phases = [span.phase for span in worker.spans[:8]]
        assert phases == [
            Phase.STARTING,
            Phase.RESTORING,
            Phase.TRACING,
            Phase.TRAINING,
            Phase.NOTICED,
            Phase.SAVING,
            Phase.EXITING,
            Phase.DOWN,
        ]


@pytest.mark.parametrize("is_noticed", [True, False])
def test_the_death_of_a_supervisor_is_the_cause(is_noticed: bool) -> None:
    run = Scripted()
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.lose_supervisor(is_noticed=is_noticed)
    run.finish_later()
    report = run.report()
    [death] = report.interruptions
    assert death.cause == "supervisor terminated"
    if is_noticed:
        check_account(run, report)
        assert (death.step, death.steps_lost) == (102, 0)


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_bad_step_is_the_cause_of_an_interruption(
    is_supervised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the supervisor the exit code means a preemption."""
    run = Scripted(is_supervised=is_supervised)
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.find_bad_step(worker=1)
    run.finish_later()
    report = run.report()
    check_account(run, report)
    [found] = report.interruptions
    assert (found.cause, found.steps_lost) == ("bad step", 20)
    bad_step = {"fit": 1, "epoch": 2, "batch": 7, "is_sought": False}
    bad_step["reason"] = "the loss is nan"
    [interruption] = json.loads(json.dumps(view.to_json(report)))["interruptions"]
    assert interruption["bad_step"] == found.bad_step == bad_step
    assert interruption["sources"] == {"bad step": [1]}
    view.show(Console(width=200), report)
    shown = capsys.readouterr().out, make_page(report, "run")
    assert all("bad step: batch 7 of epoch 2" in each for each in shown)
    assert not any("bad step (1)" in each for each in shown)


@pytest.mark.parametrize("is_supervised", [True, False])
def test_without_a_commit_no_step_was_kept(is_supervised: bool) -> None:
    run = Scripted(is_supervised=is_supervised)
    for _ in range(3):
        run.start()
        run.train(30)
        run.fail()
        run.down()
    report = run.report()
    assert report.outcome == "interrupted"
    assert [each.steps_lost for each in report.interruptions] == [31, 31, 31]
    assert report.account.good == 0.0
    assert report.goodput == 0.0


@pytest.mark.parametrize("is_supervised", [True, False])
def test_without_the_journal_that_has_the_commits_no_loss_is_made_up(
    is_supervised: bool,
) -> None:
    run = Scripted(is_supervised=is_supervised)
    run.start()
    run.train(80)
    run.preempt()
    del run.lines["worker-0.jsonl"]
    report = run.report()
    assert [each.steps_lost for each in report.interruptions] == [None]
    assert report.account.bad[Badput.WASTED_PROGRESS] == 0.0
    assert report.account.good > 0.0


def test_a_save_of_which_there_is_no_record_has_kept_its_step() -> None:
    """A save_fn makes such saves; the process records an exit with a commit."""
    run = Scripted()
    run.start()
    run.train(80)
    run.preempt()
    lines = run.lines["worker-0.jsonl"]
    lines[:] = [line for line in lines if '"commit"' not in line]
    report = run.report()
    assert [each.steps_lost for each in report.interruptions] == [None]
    assert report.account.bad[Badput.WASTED_PROGRESS] == 0.0


def test_a_start_that_is_caught_is_not_the_one_that_follows_it() -> None:
    run = Scripted()
    run.start()
    run.train(80)
    run.preempt()
    run.down()
    run.fail_and_start()
    run.train(50)
    run.save()
    run.train(20)
    report = run.report()
    assert report.outcome == "running"
    assert report.step == run.step - 20
    run.kill()
    preempted, refused, killed = run.report().interruptions
    assert (preempted.steps_lost, refused.steps_lost) == (0, 0)
    assert killed.is_estimated
    assert killed.steps_lost == approx(20, abs=1)


def test_the_steps_of_a_killed_process_are_estimated_by_its_own_mean() -> None:
    """A later process may have slower steps."""
    run = Scripted()
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.kill()
    lines = run.lines["worker-0.jsonl"]
    before = len(lines)
    run.finish_later()
    for number, line in enumerate(lines[before:], before):
        record = json.loads(line)
        if "step_seconds" in record:
            lines[number] = json.dumps({**record, "step_seconds": STEP / 2})
    (killed,) = run.report().interruptions
    assert killed.is_estimated
    assert killed.steps_lost == approx(20, abs=1)


def test_a_killed_process_makes_no_steps_after_a_notice() -> None:
    """The wait for a lost worker counted as hundreds of lost steps."""
    run = Scripted()
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run._notice(0)
    run.wait(15.0)
    run.kill()
    run.finish_later()
    killed = run.report().interruptions[0]
    assert killed.is_estimated
    assert killed.steps_lost == approx(20, abs=1)


def test_an_end_that_nobody_recorded_is_said_to_be_unknown() -> None:
    run = Scripted(is_supervised=False)
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.kill()
    run.finish_later()
    report = run.report()
    assert "worker 0: no record of the end of 1 process(es); 30.0 s" in " ".join(
        report.warnings
    )
    assert report.account.bad[Badput.OTHER] == approx(2 * 30.0)
    assert [each.cause for each in report.interruptions] == ["killed"]


def test_a_clock_that_is_set_changes_no_duration() -> None:
    run = one_of_each()
    jumping = Scripted(jumps=((60.0, 3600.0), (150.0, -7200.0)))
    for name in vars(run):
        if name not in ("jumps", "lines"):
            setattr(jumping, name, getattr(run, name))
    for name, lines in run.lines.items():
        for line in lines:
            record = json.loads(line)
            at = record["monotonic"] - 5000.0
            record["wall"] += sum(by for when, by in jumping.jumps if at >= when)
            jumping.lines[name].append(json.dumps(record))
    report = jumping.report()
    check_account(run, report)
    [warning] = report.warnings
    assert "the wall clock was wrong by" in warning
    assert "supervisor.jsonl" in warning


def test_a_worker_whose_clock_differs_is_named() -> None:
    run = Scripted(is_supervised=False, skew=(0.0, 40.0))
    run.start()
    run.train(100)
    run.preempt()
    run.finish_later()
    report = run.report()
    [warning] = report.warnings
    assert warning.startswith("worker 1 exited +40.0 s after its last commit")
    check_account(run, report)


def test_a_machine_behind_the_one_before_it_is_moved_and_named() -> None:
    run = Scripted(is_supervised=False, jumps=((85.0, -500.0),))
    run.start()
    run.train(100)
    run.preempt()
    run.finish_later(steps=100)
    report = run.report()
    assert [w.split(":")[0] for w in report.warnings] == ["worker 0", "worker 1"]
    assert "wall clocks differ" in report.warnings[0]
    assert report.account.good == approx(run.truth["good"])


def test_what_went_wrong_and_what_was_logged_is_told() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(9)
    run.log(loss=0.5, note=float("nan"))
    run.train(10)
    run.log(loss=0.25)
    run.finish()
    report = run.report()
    assert [point[1:] for point in report.metrics["loss"]] == [(10, 0.5), (20, 0.25)]
    assert "note" not in report.metrics


def test_two_fits_of_a_process_are_one_start() -> None:
    run = Scripted(workers=1, is_supervised=False)
    run.start()
    run.train(10)
    run.finish()
    begun = run.now
    run.start(starting=1.0, restoring=1.0)
    raw = json.loads(run.lines["worker-0.jsonl"][-2])
    assert raw["event"] == "restored"
    raw["process_seconds"] = run.now  # since the process began
    run.lines["worker-0.jsonl"][-2] = json.dumps(raw)
    run.train(10)
    run.finish()
    report = run.report()
    assert report.warnings == ()
    spans = [
        s for s in report.workers[0].spans if s.begin >= report.begin + begun - 1e-6
    ]
    assert spans[0].phase is Phase.STARTING
    check_account(run, report)


@pytest.mark.slow  # searches long
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["preempt", "kill"]),
            st.integers(1, 300),
            st.lists(
                st.tuples(st.integers(1, 200), st.floats(0, 3), st.integers(0, 20)),
                max_size=3,
            ),
            st.floats(0.1, 60),
            st.floats(0.1, 60),
        ),
        max_size=6,
    ),
    st.booleans(),
    st.integers(1, 4),
)
def test_any_run_is_told_to_the_hundredth(
    lives: list[Any], has_jump: bool, workers: int
) -> None:
    jumps = ((50.0, 900.0),) if has_jump else ()
    run = Scripted(workers=workers, jumps=jumps)
    for how, steps, saves, starting, down in lives:
        run.start(starting=starting)
        run.train(steps)
        for more, blocked, beside in saves:
            run.save(blocked, beside=beside)
            run.train(more)
        getattr(run, how)()
        run.down(down)
    run.start()
    run.train(50)
    run.finish()
    report = run.report()
    check_account(run, report)
    assert report.step == run.step
    assert len(report.interruptions) == len(lives)


def cut(run: Scripted, directory: Path, *files: str) -> RunReport:
    """Returns the report of a run with incomplete last lines in some files."""
    run.write(directory)
    for name in files:
        path = directory / name
        path.write_bytes(path.read_bytes()[:-20])
    return read(directory)


FILES = ("supervisor.jsonl", "worker-0.jsonl", "worker-1.jsonl")


@pytest.mark.parametrize("files", [*((name,) for name in FILES), FILES], ids=str)
def test_a_run_whose_last_lines_are_torn_has_finished(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    run = one_of_each()
    report = cut(run, tmp_path, *files)
    check_account(run, report)
    assert (report.outcome, report.step) == ("finished", run.step)
    assert [each.cause for each in report.interruptions] == ["preemption"] + (
        ["failure"] * 2
    )
    assert len(report.warnings) == len(files)


@pytest.mark.parametrize("name", FILES)
def test_a_run_that_left_for_a_preemption_may_be_torn_at_its_end(
    name: str, tmp_path: Path
) -> None:
    run = Scripted()
    run.start()
    run.train(100)
    run.preempt()
    run.down()
    run.start()
    run.train(100)
    run.preempt(worker=1)
    report = cut(run, tmp_path, name)
    check_account(run, report)
    assert (report.outcome, len(report.interruptions)) == ("interrupted", 2)


def test_where_the_supervisor_is_gone_too_the_last_commit_says_that_it_finished(
    tmp_path: Path,
) -> None:
    run = Scripted(is_supervised=False)
    run.start()
    run.train(100)
    run.finish()
    report = cut(run, tmp_path, "worker-0.jsonl", "worker-1.jsonl")
    check_account(run, report)
    assert (report.outcome, report.interruptions) == ("finished", ())


def without(run: Scripted, *files: str) -> RunReport:
    for name in files:
        del run.lines[name]
    return run.report()


def test_a_supervisor_alone_knows_how_it_ended_and_no_steps() -> None:
    report = without(one_of_each(), "worker-0.jsonl", "worker-1.jsonl")
    [warning] = report.warnings
    assert "another directory than --checkpoint-dir" in warning
    assert (report.outcome, report.step, report.goodput) == ("finished", None, None)
    assert [each.step for each in report.interruptions] == [None] * 3
    assert "finished" not in {each.cause for each in report.interruptions}
    assert report.account.bad[Badput.TRAINING_PREP] == 0


def test_without_the_journal_of_worker_0_another_worker_tells() -> None:
    run = one_of_each()
    report = without(run, "worker-0.jsonl")
    [warning] = report.warnings
    assert "no records of worker 0, which records the commits" in warning
    assert (report.outcome, report.step) == ("finished", run.step)
    assert len(report.interruptions) == 3


def test_a_hang_whose_budget_was_torn_off_is_a_hang(tmp_path: Path) -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(100)
    run.hang()
    [interruption] = cut(run, tmp_path, "supervisor.jsonl").interruptions
    assert interruption.cause == "hang"


def test_a_line_that_was_cut_off_is_left_out_with_a_warning(tmp_path: Path) -> None:
    one_of_each().write(tmp_path)
    path = tmp_path / "worker-1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    report = read(tmp_path)
    [warning] = report.warnings
    assert warning.startswith("worker-1.jsonl: 1 line(s) are corrupt")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


LINES = [
    (name, json.loads(line))
    for name, lines in one_of_each().lines.items()
    for line in lines
]
CHANGES = st.tuples(
    st.integers(0, len(LINES) - 1),
    st.sampled_from(sorted({key for _, record in LINES for key in record})),
    VALUES,
    st.integers(0, len(LINES)),
)


@pytest.mark.slow  # searches long
@settings(max_examples=100, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=5))
def test_no_journal_breaks_the_story(changes: list[Any]) -> None:
    """Foreign records are read, or skipped with a warning; there is no error."""
    lines = list(LINES)
    for source, key, value, place in changes:
        name, record = LINES[source]
        lines.insert(place, (name, {**record, key: value}))
    of_file: dict[str, list[str]] = defaultdict(list)
    for name, record in lines:
        of_file[name].append(json.dumps(record))
    report_of(of_file)


@pytest.mark.slow  # searches long
def test_a_long_run_is_told_in_a_time_that_grows_with_its_commits() -> None:
    """If each commit rebuilt all spans, this would take minutes."""
    run = Scripted(workers=2)
    run.start()
    for _ in range(10_000):
        run.train(50)
        run.save(0.1)
    run.finish()
    report = run.report()
    check_account(run, report)
    assert len(report.commits) == 10_001


def test_saves_that_overlap_are_painted_once() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(20)
    run.save(4.0)
    [commit] = [line for line in run.lines["worker-0.jsonl"] if '"commit"' in line]
    run.lines["worker-0.jsonl"].append(commit)
    run.train(20)
    run.finish()
    report = run.report()
    check_account(run, report)
    assert len(report.commits) == 3


def test_a_program_that_fails_at_each_start_is_no_lost_journal() -> None:
    run = Scripted()
    for _ in range(2):
        run.die_early(2.0)
        run.down()
    report = run.report()
    assert [each.cause for each in report.interruptions] == ["failure"] * 2
    [warning] = report.warnings
    assert warning.startswith("every start of the program failed, and no worker has")
    assert "The logs of the workers show the error" in warning


def test_goodput_is_unknown_before_the_first_commit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Scripted()
    run.start()
    run.log(loss=1.0)  # a record of training, but too early for a share of the time
    report = run.report()
    assert (report.goodput, report.steps_lost) == (None, 0)
    assert view.headline(report).endswith(
        "0 step(s) lost, goodput not known before the first commit"
    )
    view.show(Console(width=160), report)
    assert re.search(r"kept steps +0\.0 +- +goodput", capsys.readouterr().out)


def test_a_start_that_has_told_of_nothing_yet_is_at_the_newest_commit() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(100)
    run.preempt()
    run.die_early(4.0)
    report = run.report()
    assert (report.outcome, report.step) == ("interrupted", 102)
    lines = run.lines["supervisor.jsonl"]
    del lines[-2:]  # as if it still ran
    assert (run.report().outcome, run.report().step) == ("running", 102)


def test_step_seconds_are_those_of_the_script() -> None:
    assert one_of_each().report().step_seconds == STEP
