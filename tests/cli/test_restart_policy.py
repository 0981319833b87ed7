"""The supervisor's decisions, without processes and with time as a number."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tfpreempt.cli.run import restart_policy
from tfpreempt.cli.run.restart_policy import (
    Action,
    BudgetUsed,
    Cause,
    DumpStacks,
    ExitSupervisor,
    Restart,
    RestartLimits,
    ReturnCode,
    SendSigkill,
    SendSigterm,
    SupervisorState,
    Wait,
    WorkerExit,
    decide,
)

LIMITS = RestartLimits(
    max_preemptions=2,
    max_preemptions_without_progress=3,
    max_failures=1,
    grace=30.0,
    kill_after=10.0,
    stacks_grace=1.0,
    unkillable=5.0,
    backoff=1.0,
    backoff_max=4.0,
    backoff_reset=600.0,
)


def ended(worker: int, code: int, at: float = 50.0, asked: bool = False) -> WorkerExit:
    return WorkerExit(
        worker=worker, returncode=ReturnCode(code), at=at, was_asked=asked
    )


def failed(failures: int = 1, *, in_a_row: int = 1) -> BudgetUsed:
    """Returns the budget used by failures at second 50, one of them in this hour."""
    return BudgetUsed(failures=failures, in_a_row=in_a_row, failed_at=(50.0,))


def situation(
    *codes: int, workers: int = 2, now: float = 50.0, **more: object
) -> object:
    exits = tuple(ended(i, code) for i, code in enumerate(codes))
    return dataclasses.replace(
        SupervisorState(now=now, workers=workers, exits=exits),
        **more,  # type: ignore[arg-type]  # each test names real fields
    )


def judge(*codes: int, limits: RestartLimits = LIMITS, **more: object) -> Action:
    seen = situation(*codes, **more)  # type: ignore[arg-type]  # see above
    assert isinstance(seen, SupervisorState)
    return decide(limits, seen)


# --- while some run ------------------------------------------------------------------


def test_all_run() -> None:
    assert judge() == Wait(until=None)


def test_uneven_ends_are_waited_for_without_limit() -> None:
    assert judge(0, now=1e9) == Wait(until=None)


@pytest.mark.parametrize("code", [143, 42])
def test_after_a_preemption_the_others_get_the_grace_period(code: int) -> None:
    assert judge(code, now=79.9) == Wait(until=80.0)
    assert judge(code, now=80.0) == SendSigterm()
    assert judge(code, now=80.0, asked_at=80.0) == Wait(until=90.0)
    assert judge(code, now=90.0, asked_at=80.0) == SendSigkill()


def test_a_worker_killed_by_sigterm_does_not_delay_the_others() -> None:
    assert judge(-15) == SendSigterm()
    assert judge(-15, now=51.0, asked_at=50.0) == Wait(until=60.0)
    assert judge(-15, now=60.0, asked_at=50.0) == SendSigkill()
    assert judge(-15, now=51.0, asked_at=50.0, stop_at=50.0) == Wait(until=60.0)


@pytest.mark.parametrize("code", [1, 2, -9, -11, 255])
def test_after_a_failure_the_others_are_asked_at_once_and_killed_soon(
    code: int,
) -> None:
    assert judge(code) == SendSigterm()
    assert judge(code, now=51.0, asked_at=50.0) == Wait(until=60.0)
    assert judge(code, now=60.0, asked_at=50.0) == SendSigkill()


def test_a_stop_asks_all_and_gives_them_the_grace_period() -> None:
    assert judge(stop_at=50.0) == SendSigterm()
    assert judge(stop_at=50.0, asked_at=50.0) == Wait(until=80.0)
    assert judge(stop_at=50.0, asked_at=50.0, now=80.0) == SendSigkill()


def test_without_a_grace_period_a_step_has_no_time_limit() -> None:
    limits = dataclasses.replace(LIMITS, grace=None)
    told = {"stop_at": 50.0, "asked_at": 50.0, "now": 1e9}
    assert judge(limits=limits, **told) == Wait(until=None)
    assert judge(143, limits=limits, **told) == Wait(until=None)
    assert judge(limits=limits, urges=2, **told) == SendSigkill()
    assert judge(-15, limits=limits, **told) == SendSigkill()
    # A worker that exited by itself has committed, together with the others.
    assert judge(143, limits=limits, now=51.0) == Wait(until=85.0)


def test_a_repeated_ctrl_c_kills_the_workers() -> None:
    assert judge(stop_at=50.0, asked_at=50.0, urges=2) == SendSigkill()
    assert judge(143, stop_at=50.0, asked_at=50.0, urges=2) == SendSigkill()
    assert judge(stop_at=50.0, asked_at=50.0, urges=1) == Wait(until=80.0)
    killed = judge(stop_at=50.0, asked_at=50.0, killed_at=50.0, urges=2)
    assert killed == Wait(until=55.0)


def test_a_stop_during_a_failure_leaves_time_to_commit() -> None:
    assert judge(1, now=61.0, asked_at=50.0, stop_at=55.0) == Wait(until=80.0)


def test_a_failure_after_a_stop_does_not_shorten_the_grace_period() -> None:
    assert judge(1, now=61.0, asked_at=40.0, stop_at=40.0) == Wait(until=70.0)


def test_the_killed_are_waited_for_and_then_given_up() -> None:
    assert judge(1, now=62.0, asked_at=50.0, killed_at=60.0) == Wait(until=65.0)
    given_up = judge(7, now=65.0, asked_at=50.0, killed_at=60.0)
    assert isinstance(given_up, ExitSupervisor)
    assert given_up.code == 7
    given_up = judge(143, now=65.0, asked_at=50.0, killed_at=60.0)
    assert isinstance(given_up, ExitSupervisor)
    assert given_up.code == 143


@pytest.mark.parametrize("codes", [(), (0,), (143,)])
def test_unkillable_workers_after_a_signal_to_stop(codes: tuple[int, ...]) -> None:
    action = judge(*codes, now=65.0, stop_at=20.0, asked_at=20.0, killed_at=60.0)
    assert isinstance(action, ExitSupervisor)
    assert (action.cause, action.code) == (Cause.STOPPED, 143)


# --- hangs ---------------------------------------------------------------------------


def test_a_worker_without_a_boundary_in_time_writes_stacks_and_is_ended() -> None:
    assert judge(hang_due=60.0) == Wait(until=60.0)
    assert judge(hang_due=60.0, now=60.0) == DumpStacks()
    assert judge(hung_at=60.0, now=60.5) == Wait(until=61.0)
    assert judge(hung_at=60.0, now=61.0) == SendSigterm()
    assert judge(hung_at=60.0, asked_at=61.0, now=62.0) == Wait(until=71.0)
    assert judge(hung_at=60.0, asked_at=61.0, now=71.0) == SendSigkill()


def test_others_that_train_on_after_one_has_finished_may_hang_too() -> None:
    assert judge(0, hang_due=60.0, now=60.0) == DumpStacks()


@pytest.mark.parametrize("ends", [(143,), (1,)])
def test_no_hang_is_detected_after_a_worker_has_exited(ends: tuple[int, ...]) -> None:
    """The others wait for that worker, and other rules end the remaining workers."""
    assert judge(*ends, hang_due=40.0) in (SendSigterm(), Wait(until=80.0))


def test_a_stop_during_a_hang_leaves_no_time_to_commit() -> None:
    limits = dataclasses.replace(LIMITS, grace=None)
    hung = {"hung_at": 50.0, "stop_at": 50.5, "asked_at": 50.5}
    assert judge(now=50.5, hung_at=50.0, stop_at=50.5, limits=limits) == SendSigterm()
    assert judge(now=60.5, limits=limits, **hung) == SendSigkill()
    assert judge(-9, -9, limits=limits, **hung) == ExitSupervisor(
        cause=Cause.STOPPED, code=143, spent=failed()
    )


def test_a_hang_is_one_failure_whatever_ends_the_workers() -> None:
    for ends in ((-9, -9), (143, 143), (143, -9), (0, -9), (1, 1)):
        assert judge(*ends, hung_at=50.0) == Restart(
            cause=Cause.HANG, delay=1.0, spent=failed()
        )


def test_a_worker_that_finishes_after_a_hang_was_only_slow() -> None:
    finished = ExitSupervisor(cause=Cause.FINISHED, code=0, spent=BudgetUsed())
    assert judge(0, 0, hung_at=50.0, asked_at=51.0) == finished


def test_one_hang_too_many() -> None:
    spent = BudgetUsed(failures=1, in_a_row=1)
    assert judge(-9, 143, hung_at=50.0, spent=spent) == ExitSupervisor(
        cause=Cause.HANG,
        code=137,
        spent=failed(2, in_a_row=2),
        is_over_budget=True,
    )


def test_a_process_that_hangs_in_the_kernel_is_given_up() -> None:
    given_up = judge(now=65.0, hung_at=40.0, asked_at=41.0, killed_at=60.0)
    assert isinstance(given_up, ExitSupervisor)
    assert (given_up.cause, given_up.code) == (Cause.HANG, 137)


# --- after the last ------------------------------------------------------------------


def test_all_finished() -> None:
    assert judge(0, 0) == ExitSupervisor(
        cause=Cause.FINISHED, code=0, spent=BudgetUsed()
    )


def test_sigterm_itself_is_a_preemption_whatever_the_restart_code() -> None:
    """A worker that SIGTERM ends has no handler yet to exit with that code."""
    limits = dataclasses.replace(LIMITS, restart_codes=(42,))
    assert judge(-15, limits=limits) == SendSigterm()
    seen = judge(-15, 42, limits=limits)
    assert isinstance(seen, Restart)
    assert seen.cause is Cause.PREEMPTION
    over = judge(-15, -15, limits=limits, spent=BudgetUsed(preemptions=2))
    assert isinstance(over, ExitSupervisor)
    assert (over.cause, over.code) == (Cause.PREEMPTION, 42)


@pytest.mark.parametrize("codes", [(143, 143), (0, 143), (143, 0), (42, 0), (-15, 143)])
def test_a_preemption_restarts_at_once(codes: tuple[int, int]) -> None:
    assert judge(*codes, has_progressed=True) == Restart(
        cause=Cause.PREEMPTION, delay=0.0, spent=BudgetUsed(preemptions=1)
    )


@pytest.mark.parametrize("has_progressed", [True, False])
def test_a_program_that_is_preempted_at_once_does_not_spin(
    has_progressed: bool,
) -> None:
    action = judge(143, 143, started_at=49.9, has_progressed=has_progressed)
    assert isinstance(action, Restart)
    assert action.delay == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("idle", "lasted", "delay"),
    [(0, 0.0, 1.0), (1, 0.0, 2.0), (2, 0.0, 4.0), (2, 3.0, 1.0), (2, 50.0, 0.0)],
)
def test_restarts_without_progress_have_growing_delays(
    idle: int, lasted: float, delay: float
) -> None:
    spent = BudgetUsed(idle_in_a_row=idle)
    assert judge(143, 143, started_at=50.0 - lasted, spent=spent) == Restart(
        cause=Cause.PREEMPTION,
        delay=delay,
        spent=BudgetUsed(preemptions=1, idle_in_a_row=idle + 1),
    )


def test_too_many_preemptions_in_a_row_that_gain_nothing() -> None:
    limits = dataclasses.replace(LIMITS, max_preemptions=None)
    spent = BudgetUsed(preemptions=9, idle_in_a_row=3)
    assert judge(42, 143, limits=limits, spent=spent) == ExitSupervisor(
        cause=Cause.NO_PROGRESS,
        code=42,
        spent=BudgetUsed(preemptions=10, idle_in_a_row=4),
        is_over_budget=True,
    )
    unlimited = dataclasses.replace(limits, max_preemptions_without_progress=None)
    assert isinstance(judge(42, 143, limits=unlimited, spent=spent), Restart)


@pytest.mark.parametrize("how", [{"has_progressed": True}, {"started_at": -550.0}])
def test_a_newer_commit_or_a_long_run_forgets_those_that_gained_nothing(
    how: dict[str, object],
) -> None:
    limits = dataclasses.replace(LIMITS, max_preemptions=None)
    action = judge(143, 143, limits=limits, spent=BudgetUsed(idle_in_a_row=3), **how)
    assert isinstance(action, Restart)
    assert action.spent == BudgetUsed(preemptions=1)


@pytest.mark.parametrize(
    ("codes", "code"),
    [((1, 0), 1), ((143, 3), 3), ((-9, 143), 137), ((0, -11), 139), ((5, 6), 5)],
)
def test_a_failure_outweighs_a_preemption(codes: tuple[int, int], code: int) -> None:
    assert judge(*codes) == Restart(cause=Cause.FAILURE, delay=1.0, spent=failed())
    no_more = judge(*codes, spent=BudgetUsed(failures=1, in_a_row=1))
    assert isinstance(no_more, ExitSupervisor)
    assert (no_more.cause, no_more.code) == (Cause.FAILURE, code)
    assert no_more.is_over_budget


def test_the_others_ends_after_a_failure_count_as_nothing() -> None:
    exits = (ended(1, -9), ended(0, 143, at=51.0, asked=True))
    action = judge(exits=exits)
    assert isinstance(action, Restart)
    assert action.cause is Cause.FAILURE
    assert action.spent == failed()


def test_a_straggler_that_was_killed_is_not_a_failure() -> None:
    exits = (ended(0, 143), ended(1, -9, at=95.0, asked=True))
    action = judge(exits=exits, now=95.0, asked_at=80.0, killed_at=90.0)
    assert isinstance(action, Restart)
    assert action.cause is Cause.PREEMPTION


def test_the_preemption_budget_ends_with_the_code_of_the_workers() -> None:
    assert isinstance(judge(42, 42, spent=BudgetUsed(preemptions=1)), Restart)
    action = judge(42, 42, spent=BudgetUsed(preemptions=2))
    assert action == ExitSupervisor(
        cause=Cause.PREEMPTION,
        code=42,
        spent=BudgetUsed(preemptions=3, idle_in_a_row=1),
        is_over_budget=True,
    )


def test_budgets_without_limit_and_of_zero() -> None:
    free = dataclasses.replace(LIMITS, max_preemptions=None, max_failures=None)
    assert isinstance(
        judge(143, 0, limits=free, spent=BudgetUsed(preemptions=999)), Restart
    )
    assert isinstance(judge(1, 0, limits=free, spent=BudgetUsed(failures=999)), Restart)
    none = dataclasses.replace(LIMITS, max_preemptions=0, max_failures=0)
    assert isinstance(judge(143, 0, limits=none), ExitSupervisor)
    assert isinstance(judge(1, 0, limits=none), ExitSupervisor)


def test_only_the_chosen_code_is_a_preemption() -> None:
    borg = dataclasses.replace(LIMITS, restart_codes=(42,))
    action = judge(143, 42, limits=borg)
    assert isinstance(action, Restart)
    assert action.cause is Cause.FAILURE


@pytest.mark.parametrize(
    ("in_a_row", "delay"), [(0, 1.0), (1, 2.0), (2, 4.0), (3, 4.0), (5000, 4.0)]
)
def test_the_back_off_doubles_up_to_its_limit(in_a_row: int, delay: float) -> None:
    limits = dataclasses.replace(LIMITS, max_failures=None)
    action = judge(1, 0, limits=limits, spent=BudgetUsed(in_a_row=in_a_row))
    assert isinstance(action, Restart)
    assert action.delay == delay


def test_a_long_run_starts_the_back_off_afresh() -> None:
    limits = dataclasses.replace(LIMITS, max_failures=None)
    exits = (ended(0, 1, at=600.0), ended(1, 143, at=601.0, asked=True))
    action = judge(limits=limits, exits=exits, spent=BudgetUsed(failures=5, in_a_row=5))
    assert isinstance(action, Restart)
    assert action.delay == 1.0
    assert action.spent.in_a_row == 6  # no newer commit: nothing is gained


@pytest.mark.parametrize(
    ("has_progressed", "lasted", "in_a_row"),
    [
        (True, 1.0, 1),
        (True, 600.0, 1),
        (False, 1.0, 3),
        (False, 600.0, 3),
        (None, 599.0, 3),  # commits are not seen: a long run is progress
        (None, 600.0, 1),
    ],
)
def test_progress_forgets_the_failures_before(
    has_progressed: bool | None, lasted: float, in_a_row: int
) -> None:
    action = judge(
        1,
        143,
        has_progressed=has_progressed,
        started_at=50.0 - lasted,
        spent=BudgetUsed(failures=9, in_a_row=2),
        limits=dataclasses.replace(LIMITS, max_failures=2),
    )
    if in_a_row > 2:
        assert isinstance(action, ExitSupervisor)
        assert (action.cause, action.is_over_budget) == (Cause.FAILURE, True)
    else:
        assert isinstance(action, Restart)
    assert (action.spent.failures, action.spent.in_a_row) == (10, in_a_row)


@pytest.mark.parametrize(
    ("has_progressed", "in_a_row"), [(True, 0), (False, 2), (None, 2)]
)
def test_a_preemption_with_progress_forgets_the_failures_before(
    has_progressed: bool | None, in_a_row: int
) -> None:
    action = judge(
        143,
        143,
        has_progressed=has_progressed,
        spent=BudgetUsed(failures=9, in_a_row=2),
    )
    assert isinstance(action, Restart)
    assert action.spent.in_a_row == in_a_row


def test_a_hang_without_visible_commits_is_no_progress() -> None:
    """A start may hang for an hour, each time."""
    spent = BudgetUsed(failures=1, in_a_row=1)
    hung = {"started_at": -3550.0, "hung_at": 50.0, "has_progressed": None}
    action = judge(-9, -9, spent=spent, **hung)
    assert isinstance(action, ExitSupervisor)
    assert action.cause is Cause.HANG


@pytest.mark.parametrize(
    ("seconds", "max_failures", "allowed"),
    [
        (7 * 24 * 3600.0, 1, None),  # a month of crashes, one a week
        (180.0, 1, None),  # just 20 in an hour
        (10.0, 1, 20),
        (10.0, 30, 30),  # the user allows more
        (1.0, None, None),
    ],
)
def test_failures_after_progress_have_a_limit_per_hour(
    seconds: float, max_failures: int | None, allowed: int | None
) -> None:
    limits = dataclasses.replace(LIMITS, max_failures=max_failures)
    spent, now = BudgetUsed(), 0.0
    for count in range(1, 100):
        exits = (ended(0, 1, at=now + seconds), ended(1, 143, at=now + seconds))
        action = judge(
            limits=limits, exits=exits, started_at=now, has_progressed=True, spent=spent
        )
        if isinstance(action, ExitSupervisor):
            assert (action.cause, action.code) == (Cause.FAILURE_RATE, 1)
            assert action.is_over_budget
            assert count - 1 == allowed
            return
        assert isinstance(action, Restart)
        spent, now = action.spent, now + seconds
    assert allowed is None


# --- told to stop --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0), 0),
        ((143, 143), 143),
        ((42, 42), 42),
        ((0, 143), 143),
        ((-9, -9), 143),  # killed at the limit: the last commit stands
        ((143, -9), 143),
        ((1, 143), 143),
    ],
)
def test_a_stop_ends_with_the_restart_code_or_finished(
    codes: tuple[int, int], code: int
) -> None:
    exits = tuple(ended(i, c, asked=True) for i, c in enumerate(codes))
    action = judge(exits=exits, stop_at=40.0, asked_at=40.0)
    assert isinstance(action, ExitSupervisor)
    assert action.code == code
    assert action.cause is (Cause.STOPPED if code else Cause.FINISHED)
    assert action.spent == BudgetUsed()


def test_a_failure_during_a_stop_exits_with_the_restart_code() -> None:
    action = judge(1, 143, stop_at=50.0)
    assert isinstance(action, ExitSupervisor)
    assert (action.cause, action.code) == (Cause.STOPPED, 143)


def test_a_stop_after_a_failure_that_had_budget_leaves_with_the_restart_code() -> None:
    exits = (ended(0, 1), ended(1, 143, asked=True))
    action = judge(exits=exits, stop_at=51.0, asked_at=50.0)
    assert isinstance(action, ExitSupervisor)
    assert action.code == 143
    assert action.spent.failures == 1


@pytest.mark.parametrize(
    ("at", "asked", "spent"),
    [
        (50.0, False, BudgetUsed(preemptions=4, idle_in_a_row=1)),
        (52.0, False, BudgetUsed(preemptions=3)),
        (50.0, True, BudgetUsed(preemptions=3)),
    ],
)
def test_a_preemption_counts_if_it_came_before_the_stop(
    at: float, asked: bool, spent: BudgetUsed
) -> None:
    """Also the one too many: the stop's code is the same."""
    exits = (ended(0, 143, at=at, asked=asked), ended(1, 143, at=53.0, asked=True))
    action = judge(
        exits=exits, stop_at=51.0, asked_at=51.0, spent=BudgetUsed(preemptions=3)
    )
    assert action == ExitSupervisor(cause=Cause.STOPPED, code=143, spent=spent)


def test_a_stop_does_not_hide_the_failure_that_used_up_the_budget() -> None:
    exits = (ended(0, 9), ended(1, 143, asked=True))
    spent = BudgetUsed(failures=1, in_a_row=1)
    action = judge(exits=exits, stop_at=51.0, asked_at=50.0, spent=spent)
    assert isinstance(action, ExitSupervisor)
    assert (action.cause, action.code) == (Cause.FAILURE, 9)


def test_a_stop_in_the_back_off() -> None:
    action = restart_policy.leave_between_runs(LIMITS, BudgetUsed(failures=1))
    assert (action.code, action.spent.failures) == (143, 1)


# --- over all situations -------------------------------------------------------------


def test_every_situation_has_an_end() -> None:
    """For any ends of 3 workers that react or not, the run reaches an outcome."""
    codes = (None, 0, 1, 42, 143, -9, -15)
    for own in itertools.product(codes, repeat=3):
        for obeys, stops in itertools.product((True, False), repeat=2):
            if not stops and not any(own):
                continue  # workers that train on for ever are waited for
            verdict = follow(own, obeys=obeys, stops=stops)
            assert isinstance(verdict, Restart | ExitSupervisor)
            is_bad = (
                isinstance(verdict, ExitSupervisor)
                and verdict.cause is not Cause.FINISHED
            )
            assert not is_bad or verdict.code != 0  # type: ignore[union-attr]


def follow(own: tuple[int | None, ...], *, obeys: bool, stops: bool) -> Action:
    """Acts as the supervisor: workers with None run until they get SIGTERM."""
    exits = tuple(ended(i, c, at=1.0) for i, c in enumerate(own) if c is not None)
    seen = SupervisorState(
        now=1.0, workers=len(own), exits=exits, stop_at=1.0 if stops else None
    )
    for _ in range(20):
        action = decide(LIMITS, seen)
        match action:
            case Wait(until=until):
                assert until is not None, seen
                assert until > seen.now
                seen = dataclasses.replace(seen, now=until)
            case SendSigterm():
                assert seen.asked_at is None
                seen = dataclasses.replace(seen, asked_at=seen.now)
                seen = end_rest(seen, 143) if obeys else seen
            case SendSigkill():
                assert seen.asked_at is not None
                seen = end_rest(dataclasses.replace(seen, killed_at=seen.now), -9)
            case _:
                return action
    raise AssertionError(f"no end in 20 actions: {seen}")


def end_rest(seen: SupervisorState, code: int) -> SupervisorState:
    gone = {each.worker for each in seen.exits}
    rest = (i for i in range(seen.workers) if i not in gone)
    more = tuple(ended(i, code, at=seen.now, asked=True) for i in rest)
    return dataclasses.replace(seen, exits=(*seen.exits, *more))


@pytest.mark.parametrize(
    ("returncode", "code", "text"),
    [
        (3, 3, "exit code 3"),
        (-9, 137, "killed by SIGKILL"),
        (-15, 143, "killed by SIGTERM"),
        (-63, 191, "killed by signal 63"),
    ],
)
def test_exits_read_as_a_shell_reads_them(
    returncode: int, code: int, text: str
) -> None:
    one = ended(0, returncode)
    assert (one.code, one.describe()) == (code, text)
