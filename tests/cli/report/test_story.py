"""The story is true: of scripted journals, to the hundredth that is promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.report.scripted import STEP, Scripted
from tfpreempt.cli.report.goodput import Badput
from tfpreempt.cli.report.lives import Phase
from tfpreempt.cli.report.records import take_records
from tfpreempt.cli.report.story import Story, make_story
from tfpreempt.core.journal import JournalFile, parse_record, read_files
from tfpreempt.handler.now import TOLD_EVERY


def tell(run: Scripted) -> Story:
    files = [
        JournalFile(
            path=Path(name),
            records=tuple(json.loads(line) for line in lines),
            damaged=0,
        )
        for name, lines in run.lines.items()
    ]
    story = make_story(*take_records(files))
    assert story is not None
    return story


def check_account(run: Scripted, story: Story) -> None:
    """Each class is right to one per cent of the whole."""
    total = sum(run.truth.values())
    told: dict[Any, float] = {"good": story.account.good, **story.account.bad}
    assert story.account.total == pytest.approx(total, rel=0.01)
    for kind, seconds in told.items():
        assert seconds == pytest.approx(run.truth[kind], abs=0.01 * total), kind


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
    run.start(tier="bucket")
    run.train(30)
    run.kill()
    run.down(5.0)
    run.start()
    run.train(100)
    run.finish()
    return run


def test_the_time_of_a_run_is_told_by_its_classes() -> None:
    run = one_of_each()
    story = tell(run)
    check_account(run, story)
    assert story.outcome == "finished"
    assert story.warnings == ()
    assert story.step == run.step
    assert story.bytes_written == 3000


def test_what_interruptions_cost() -> None:
    story = tell(one_of_each())
    preempted, late, early = story.interruptions
    assert preempted.cause == "preemption"
    assert preempted.sources == {"signal:SIGTERM": (0,)}
    assert preempted.steps_lost == 0
    assert preempted.saved_step == preempted.restored_step == preempted.step == 102
    assert preempted.notice_to_commit_seconds == 1.5
    assert preempted.down_seconds == pytest.approx(20.0)
    # The last step, the save, leaving, down, and a start to its first step.
    assert preempted.away_seconds == pytest.approx(0.5 + 1 + 1 + 20 + 8 + 2 + 3)

    assert (late.cause, late.is_estimated, late.tier) == ("failure", True, "bucket")
    assert late.steps_lost == pytest.approx(45, abs=1)
    assert (early.restored_step, early.is_estimated) == (late.restored_step, True)
    assert early.steps_lost == pytest.approx(31, abs=1)


def test_where_a_worker_stood_still_no_steps_were_lost_for_it() -> None:
    run = Scripted()
    run.start()
    run.train(59)
    run.save()
    run.train(40)
    run.stand(300.0)
    run.kill()
    run.finish_later()
    story = tell(run)
    check_account(run, story)
    [interruption] = story.interruptions
    assert interruption.is_estimated
    assert 40 <= interruption.steps_lost <= 40 + TOLD_EVERY / STEP


def test_every_moment_of_a_worker_has_its_phase() -> None:
    story = tell(one_of_each())
    for worker in story.workers:
        pairs = zip(worker.spans, worker.spans[1:], strict=False)
        assert all(one.end == pytest.approx(two.begin) for one, two in pairs)
        phases = [span.phase for span in worker.spans[:8]]
        assert phases == [
            Phase.STARTING,
            Phase.RESTORING,
            Phase.TRACING,
            Phase.TRAINING,
            Phase.NOTICED,
            Phase.SAVING,
            Phase.LEAVING,
            Phase.DOWN,
        ]


def test_a_run_without_a_supervisor_is_told_as_well() -> None:
    run = Scripted(is_supervised=False)
    run.start()
    run.train(80)
    run.preempt(worker=1)
    run.finish_later(steps=80)
    story = tell(run)
    check_account(run, story)
    assert story.outcome == "finished"
    assert [each.cause for each in story.interruptions] == ["preemption"]


def test_a_notice_may_be_served_by_the_commit_that_is_under_way() -> None:
    run = Scripted()
    run.start()
    run.train(80)
    run.preempt_amid_save(before=0.4, after=0.6)
    run.down()
    run.start()
    run.finish()
    story = tell(run)
    check_account(run, story)
    [preemption] = story.interruptions
    assert preemption.saved_step == preemption.restored_step == 81
    assert preemption.notice_to_commit_seconds == pytest.approx(0.6)


@pytest.mark.parametrize("is_supervised", [True, False])
def test_an_error_is_a_failure_of_which_all_is_known(is_supervised: bool) -> None:
    run = Scripted(is_supervised=is_supervised)
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.fail()
    run.finish_later()
    story = tell(run)
    check_account(run, story)
    assert story.warnings == ()
    [failure] = story.interruptions
    assert failure.cause == "failure"
    assert (failure.step, failure.is_estimated, failure.steps_lost) == (101, False, 20)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_the_death_of_a_supervisor_is_the_cause(is_noticed: bool) -> None:
    run = Scripted()
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.lose_supervisor(is_noticed=is_noticed)
    run.finish_later()
    story = tell(run)
    [death] = story.interruptions
    assert death.cause == "supervisor died"
    if is_noticed:
        check_account(run, story)
        assert (death.step, death.steps_lost) == (102, 0)


def test_after_an_error_that_nothing_followed_the_steps_are_lost() -> None:
    run = Scripted(is_supervised=False)
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.fail()
    story = tell(run)
    assert story.outcome == "interrupted"
    assert story.account.bad[Badput.WASTED_PROGRESS] == pytest.approx(2 * 20 * STEP)
    [failure] = story.interruptions
    assert (failure.step, failure.restored_step, failure.steps_lost) == (101, None, 20)


@pytest.mark.parametrize("is_supervised", [True, False])
def test_without_a_commit_no_step_was_kept(is_supervised: bool) -> None:
    run = Scripted(is_supervised=is_supervised)
    for _ in range(3):
        run.start()
        run.train(30)
        run.fail()
        run.down()
    story = tell(run)
    assert story.outcome == "interrupted"
    assert [each.steps_lost for each in story.interruptions] == [31, 31, 31]
    assert story.account.good == 0.0
    assert story.goodput == 0.0


@pytest.mark.parametrize("is_supervised", [True, False])
def test_without_the_journal_that_has_the_commits_no_loss_is_made_up(
    is_supervised: bool,
) -> None:
    run = Scripted(is_supervised=is_supervised)
    run.start()
    run.train(80)
    run.preempt()
    del run.lines["worker-0.jsonl"]
    story = tell(run)
    assert [each.steps_lost for each in story.interruptions] == [None]
    assert story.account.bad[Badput.WASTED_PROGRESS] == 0.0
    assert story.account.good > 0.0


def test_a_save_of_which_there_is_no_record_has_kept_its_step() -> None:
    """As a save_fn makes it; the process says that it left with one."""
    run = Scripted()
    run.start()
    run.train(80)
    run.preempt()
    lines = run.lines["worker-0.jsonl"]
    lines[:] = [line for line in lines if '"commit"' not in line]
    story = tell(run)
    assert [each.steps_lost for each in story.interruptions] == [None]
    assert story.account.bad[Badput.WASTED_PROGRESS] == 0.0


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
    story = tell(run)
    assert story.outcome == "running"
    assert story.step == run.step - 20
    run.kill()
    preempted, refused, killed = tell(run).interruptions
    assert (preempted.steps_lost, refused.steps_lost) == (0, 0)
    assert killed.is_estimated
    assert killed.steps_lost == pytest.approx(20, abs=1)


def test_what_was_finished_stays_so_whatever_is_refused_later() -> None:
    run = Scripted()
    run.start()
    run.train(80)
    run.finish()
    run.down()
    run.fail_to_start(seconds=4.0)
    story = tell(run)
    assert story.outcome == "finished"
    assert story.steps_lost == 0


def test_a_start_that_fails_costs_no_step() -> None:
    """It says the step of the commit that it did not come to restore."""
    run = Scripted()
    run.start()
    run.train(80)
    run.preempt()
    run.down()
    run.fail_to_start(seconds=4.0)
    story = tell(run)
    check_account(run, story)
    assert story.step == run.step
    preempted, failed = story.interruptions
    assert (preempted.steps_lost, failed.steps_lost) == (0, 0)
    assert (failed.cause, failed.step) == ("failure", run.step)


def test_an_end_that_nobody_recorded_is_said_to_be_unknown() -> None:
    run = Scripted(is_supervised=False)
    run.start()
    run.train(80)
    run.save()
    run.train(20)
    run.kill()
    run.finish_later()
    story = tell(run)
    assert "worker 0: no record says when 1 process(es) ended; 30.0 s" in " ".join(
        story.warnings
    )
    assert story.account.bad[Badput.OTHER] == pytest.approx(2 * 30.0)
    assert [each.cause for each in story.interruptions] == ["killed"]


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
    story = tell(jumping)
    check_account(run, story)
    [warning] = story.warnings
    assert "the wall clock was off by" in warning
    assert "supervisor.jsonl" in warning


def test_a_worker_whose_clock_differs_is_named() -> None:
    run = Scripted(is_supervised=False, skew=(0.0, 40.0))
    run.start()
    run.train(100)
    run.preempt()
    run.finish_later()
    story = tell(run)
    [warning] = story.warnings
    assert warning.startswith("worker 1 left +40.0 s from the commit")
    check_account(run, story)


def test_a_machine_behind_the_one_before_it_is_moved_and_named() -> None:
    run = Scripted(is_supervised=False, jumps=((85.0, -500.0),))
    run.start()
    run.train(100)
    run.preempt()
    run.finish_later(steps=100)
    story = tell(run)
    assert [w.split(":")[0] for w in story.warnings] == ["worker 0", "worker 1"]
    assert "wall clocks differ" in story.warnings[0]
    assert story.account.good == pytest.approx(run.truth["good"])


def test_what_went_wrong_and_what_was_logged_is_told() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(9)
    run.log(loss=0.5, note=float("nan"))
    run.train(10)
    run.log(loss=0.25)
    run.finish()
    story = tell(run)
    assert [point[1:] for point in story.metrics["loss"]] == [(10, 0.5), (20, 0.25)]
    assert "note" not in story.metrics


def test_a_run_that_goes_on_has_lost_nothing() -> None:
    run = Scripted()
    run.start()
    run.train(100)
    run.save()
    story = tell(run)
    assert story.outcome == "running"
    assert story.interruptions == ()
    assert story.account.bad[Badput.WASTED_PROGRESS] == 0
    check_account(run, story)


def test_a_run_that_begins_anew_has_lost_all() -> None:
    run = Scripted()
    run.start()
    run.train(100)
    run.kill()
    run.finish_later()
    story = tell(run)
    check_account(run, story)
    [interruption] = story.interruptions
    assert interruption.restored_step == 0
    assert interruption.saved_step is None


def test_a_start_that_died_before_it_had_a_journal_is_a_start() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(10)
    run.preempt()
    run.die_early(4.0)
    run.start()
    run.train(10)
    run.finish()
    story = tell(run)
    check_account(run, story)
    assert [each.cause for each in story.interruptions] == ["preemption", "failure"]


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
    story = tell(run)
    assert story.warnings == ()
    spans = [s for s in story.workers[0].spans if s.begin >= story.begin + begun - 1e-6]
    assert spans[0].phase is Phase.STARTING
    check_account(run, story)


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
    story = tell(run)
    check_account(run, story)
    assert story.step == run.step
    assert len(story.interruptions) == len(lives)


def cut(run: Scripted, directory: Path, *files: str) -> Story:
    """The story of a run of which the last lines of some files are torn."""
    run.write(directory)
    for name in files:
        path = directory / name
        path.write_bytes(path.read_bytes()[:-20])
    story = make_story(*take_records(read_files(directory)))
    assert story is not None
    return story


FILES = ("supervisor.jsonl", "worker-0.jsonl", "worker-1.jsonl")


@pytest.mark.parametrize("files", [*((name,) for name in FILES), FILES], ids=str)
def test_a_run_whose_last_lines_are_torn_has_finished(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    run = one_of_each()
    story = cut(run, tmp_path, *files)
    check_account(run, story)
    assert (story.outcome, story.step) == ("finished", run.step)
    assert [each.cause for each in story.interruptions] == ["preemption"] + (
        ["failure"] * 2
    )
    assert len(story.warnings) == len(files)


def test_a_long_end_that_only_the_supervisor_tells_is_no_lost_training() -> None:
    run = Scripted()
    run.start()
    run.train(100)
    run.save(1.0, "finished")
    run.wait(50.0)
    run.end_unsaid()
    story = tell(run)
    check_account(run, story)
    assert (story.outcome, story.interruptions) == ("finished", ())


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
    story = cut(run, tmp_path, name)
    check_account(run, story)
    assert (story.outcome, len(story.interruptions)) == ("interrupted", 2)


def test_where_the_supervisor_is_gone_too_the_last_commit_says_that_it_finished(
    tmp_path: Path,
) -> None:
    run = Scripted(is_supervised=False)
    run.start()
    run.train(100)
    run.finish()
    story = cut(run, tmp_path, "worker-0.jsonl", "worker-1.jsonl")
    check_account(run, story)
    assert (story.outcome, story.interruptions) == ("finished", ())


def without(run: Scripted, *files: str) -> Story:
    for name in files:
        del run.lines[name]
    return tell(run)


def test_a_supervisor_alone_knows_how_it_ended_and_no_steps() -> None:
    story = without(one_of_each(), "worker-0.jsonl", "worker-1.jsonl")
    [warning] = story.warnings
    assert "another directory than --checkpoint-dir" in warning
    assert (story.outcome, story.step, story.goodput) == ("finished", None, None)
    assert [each.step for each in story.interruptions] == [None] * 3
    assert "finished" not in {each.cause for each in story.interruptions}
    assert story.account.bad[Badput.TRAINING_PREP] == 0


def test_without_the_journal_of_worker_0_another_worker_tells() -> None:
    run = one_of_each()
    story = without(run, "worker-0.jsonl")
    [warning] = story.warnings
    assert "no records of worker 0, which records the commits" in warning
    assert (story.outcome, story.step) == ("finished", run.step)
    assert len(story.interruptions) == 3


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
    story = make_story(*take_records(read_files(tmp_path)))
    assert story is not None
    [warning] = story.warnings
    assert warning.startswith("worker-1.jsonl: 1 line(s) are damaged")


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


@settings(max_examples=100, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=5))
def test_no_journal_breaks_the_story(changes: list[Any]) -> None:
    """What others wrote is read, or left out with a warning; never an error."""
    lines = list(LINES)
    for source, key, value, place in changes:
        name, record = LINES[source]
        lines.insert(place, (name, {**record, key: value}))
    files = []
    for name in {name for name, _ in lines}:
        raw = [json.dumps(each).encode() for of, each in lines if of == name]
        parsed = tuple(r for r in map(parse_record, raw) if r is not None)
        files.append(JournalFile(path=Path(name), records=parsed, damaged=0))
    make_story(*take_records(files))


def test_a_long_run_is_told_in_a_time_that_grows_with_its_commits() -> None:
    """If each commit painted all spans anew, this would take minutes."""
    run = Scripted(workers=2)
    run.start()
    for _ in range(10_000):
        run.train(50)
        run.save(0.1)
    run.finish()
    story = tell(run)
    check_account(run, story)
    assert len(story.commits) == 10_001


def test_saves_that_overlap_are_painted_once() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(20)
    run.save(4.0)
    [commit] = [line for line in run.lines["worker-0.jsonl"] if '"commit"' in line]
    run.lines["worker-0.jsonl"].append(commit)
    run.train(20)
    run.finish()
    story = tell(run)
    check_account(run, story)
    assert len(story.commits) == 3


def test_a_start_that_has_told_of_nothing_yet_is_at_the_newest_commit() -> None:
    run = Scripted(workers=1)
    run.start()
    run.train(100)
    run.preempt()
    run.die_early(4.0)
    story = tell(run)
    assert (story.outcome, story.step) == ("interrupted", 102)
    lines = run.lines["supervisor.jsonl"]
    del lines[-2:]  # as if it still ran
    assert (tell(run).outcome, tell(run).step) == ("running", 102)


def test_step_seconds_are_those_of_the_script() -> None:
    assert tell(one_of_each()).step_seconds == STEP
