"""The bench of goodput adds up correctly, and detects a wrong restored state."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks.goodput import WAYS, await_end, row
from benchmarks.goodput_account import (
    Life,
    Step,
    account,
    disagreements,
    read_life,
)
from benchmarks.preemption import ROOT

pytestmark = pytest.mark.slow  # starts interpreters

START_UP, STEP, SAVE, WAY_OUT = 4.0, 1.0, 0.5, 2.0


def life(
    restored: int, made: int, saved: int | None = None, *, tracing: float = 0.0
) -> Life:
    """A life of steps of a second with half a second between them."""
    at = START_UP + tracing
    steps: list[Step] = []
    for number in range(restored + 1, restored + 1 + made):
        began = at if steps else START_UP
        at += STEP
        steps.append(Step(number=number, began=began, ended=at))
        at += SAVE
    return Life(
        started=0.0,
        gone=steps[-1].ended + WAY_OUT,
        restored=restored,
        steps=tuple(steps),
        saved=restored if saved is None else saved,
    )


def test_each_second_of_a_process_has_one_category() -> None:
    one = life(0, 3, tracing=7.0)

    assert one.parts() == {
        "start_up": START_UP + 7.0,  # the tracing of the first step is start-up
        "training": 3 * STEP,
        "saves": 2 * SAVE,
        "way_out": WAY_OUT,
    }
    assert sum(one.parts().values()) == one.gone - one.started


def test_a_process_with_one_step_counts_the_complete_step() -> None:
    assert life(0, 1).parts()["training"] == STEP


def test_no_time_is_lost_if_each_process_resumes_at_the_last_step() -> None:
    found = account([life(0, 10), life(10, 10)], final=20)

    wall = 2 * (START_UP + 10 * STEP + 9 * SAVE + WAY_OUT)
    assert (found["useful_steps"], found["made_steps"]) == (20, 20)
    assert found["wasted_steps"] == 0
    assert found["goodput"] == round(20 * STEP / wall, 4)
    assert found["goodput_all"] == [found["goodput"]] * 2
    assert found["goodput_without_start_up"] == round(20 / (wall - 2 * START_UP), 4)


def test_steps_that_were_lost_and_made_again_count_once() -> None:
    found = account([life(0, 10), life(5, 10), life(15, 4)], final=15)

    assert (found["useful_steps"], found["made_steps"]) == (15, 24)
    assert found["wasted_steps"] == 5 + 4
    assert found["wasted_of_a_life_all"] == [5, 0, 4]
    assert found["wasted_of_a_life"] == 4
    assert found["useful_seconds"] == 15 * STEP
    assert found["lost_seconds"] == 9 * STEP


def test_the_time_of_a_step_made_again_is_that_of_the_kept_one() -> None:
    slow = Life(
        started=0.0,
        gone=30.0,
        restored=0,
        steps=(Step(number=1, began=1.0, ended=21.0),),
        saved=0,
    )

    assert account([slow, life(0, 1)], final=1)["useful_seconds"] == STEP


def test_a_way_that_saves_nothing_has_no_goodput() -> None:
    found = account([life(0, 10), life(0, 10)], final=0)

    assert found["goodput"] == found["goodput_without_start_up"] == 0
    assert found["wasted_steps"] == 20


@pytest.mark.parametrize(
    ("lives", "final"), [([life(0, 3)], 4), ([life(0, 3), life(5, 2)], 7)]
)
def test_a_state_with_untrained_steps_is_an_error(
    lives: Sequence[Life], final: int
) -> None:
    with pytest.raises(ValueError, match="the final state holds"):
        account(lives, final)


@pytest.mark.parametrize("held", [8, 10])
def test_a_state_may_be_the_saved_or_the_last_step(held: int) -> None:
    lives = [life(0, 10, saved=8), life(held, 2, saved=held + 2)]

    assert not list(disagreements(lives, final=held + 2))


@pytest.mark.parametrize("held", [0, 4, 9])
def test_any_other_state_is_named(held: int) -> None:
    found = list(disagreements([life(0, 10, saved=8)], final=held))

    assert found == [f"life 0: saved 8, made 10, left behind {held}"]


def test_a_row_says_whether_the_states_agree() -> None:
    good = row("SIGTERM", "tfpreempt", [life(0, 3, saved=3)], final=3)
    bad = row("SIGTERM", "tfpreempt", [life(0, 3, saved=3)], final=2)

    assert good["states_agree"]
    assert not bad["states_agree"]
    assert len(bad["disagreements"]) == 1
    json.dumps(bad)


def lines(*records: dict[str, float]) -> str:
    """Returns the lines of a worker's log."""
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_life_is_read_without_the_line_that_a_kill_cut() -> None:
    log = lines(
        {"restored": 4},
        {"step": 5, "began": 1.0, "ended": 2.0},
        {"saved": 5},
        {"step": 6, "began": 2.5, "ended": 3.0},
    )

    found = read_life(log + '{"step": 7, "beg', 0.5, 4.0, (-9, -9))

    assert (found.restored, found.saved, found.codes) == (4, 5, (-9, -9))
    assert [step.number for step in found.steps] == [5, 6]


@pytest.mark.parametrize(
    "log",
    [
        "",
        lines({"restored": 4}),
        lines({"restored": 4}, {"step": 6, "began": 1.0, "ended": 2.0}),
    ],
)
def test_a_log_that_describes_no_process_is_refused(log: str) -> None:
    with pytest.raises(ValueError, match=r"no life|then the steps"):
        read_life(log, 0.0, 1.0, (0, 0))


def pair(first: str, second: str) -> list[subprocess.Popen[bytes]]:
    """Two processes that stand for workers."""
    return [subprocess.Popen([sys.executable, "-c", code]) for code in (first, second)]


FOREVER = "import time; time.sleep(600)"


def test_a_crash_of_a_worker_ends_the_other_worker() -> None:
    processes = pair("import os; os.kill(os.getpid(), 9)", FOREVER)

    await_end(processes, grace=300.0)

    assert [process.returncode for process in processes] == [-9, -9]


def test_a_worker_that_leaves_by_itself_gives_the_other_the_grace() -> None:
    processes = pair("raise SystemExit(143)", "raise SystemExit(42)")

    await_end(processes, grace=300.0)

    assert [process.returncode for process in processes] == [143, 42]


def test_a_process_that_outlasts_the_grace_period_is_killed() -> None:
    processes = pair(FOREVER, "raise SystemExit(143)")

    await_end(processes, grace=0.1)

    assert processes[0].returncode == -9


def test_the_worker_knows_every_way() -> None:
    tree = ast.parse((ROOT / "benchmarks/goodput_train.py").read_text())
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "WAYS"
    ]

    (table,) = tables
    assert isinstance(table, ast.Dict)
    trained = [ast.literal_eval(key) for key in table.keys if key]
    assert sorted(trained) == sorted(set(itertools.chain(*WAYS.values())))
