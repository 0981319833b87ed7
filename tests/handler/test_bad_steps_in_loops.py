"""Bad steps of custom loops, without a framework: named States are the checkpoint."""

from __future__ import annotations

import gc
import itertools
import math
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.process import new_process
from tests.journals import read_journal
from tfpreempt import BadSteps, PreemptionCheckpointHandler, TerminationConfig, errors
from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.core.journal import journal_directory
from tfpreempt.core.replay import Replay, read_replay
from tfpreempt.handler.bad_steps import LoopBadSteps, find_loss
from tfpreempt.states import JsonState, save_all_states

VALUES = [1.0, 2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0]


@pytest.fixture(autouse=True)
def no_states() -> Iterator[None]:
    yield
    for left in REGISTRY.in_order():
        left.unregister()


class Reader:
    """An iterator over values, whose position is saved. An error of the data is
    raised, and counts as read."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.position = JsonState("position", 0)

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> float:
        if self.position.value == len(self.values):
            raise StopIteration
        self.position.value += 1
        value = self.values[self.position.value - 1]
        if isinstance(value, Exception):
            raise value
        return float(value)


class Loop:
    """A program with a loop; each call of `start` is a process.

    Args:
        directory: the checkpoint directory.
        values: the batches.
        by_number: whether the step gets the number of the batch, instead of an
            iterator.
    """

    def __init__(
        self, directory: Path, values: list[Any], *, by_number: bool = False
    ) -> None:
        self.directory = directory
        self.values = values
        self.by_number = by_number
        self.results: list[Any] = []  # of run(), in the newest process
        self.before: Callable[[PreemptionCheckpointHandler], object] = id

    def start(self, **options: Any) -> Any:
        """Returns the final state of the loop."""
        with new_process():
            for each in REGISTRY.in_order():
                each.unregister()
            reader = Reader(self.values)
            state = JsonState("state", [0.0])
            self.results = []

            def step(batch: Any) -> float:
                value = self.values[batch] if self.by_number else next(batch)
                if isinstance(value, Exception):
                    raise value
                # A bad value does not reach the state, which JSON could not save.
                state.value[0] = 0.5 * state.value[0] + (
                    value if math.isfinite(value) else 99.0
                )
                return float(value)

            options = {"save_freq": 2, "on_bad_step": BadSteps()} | options
            with PreemptionCheckpointHandler(
                None,
                None,
                self.directory,
                TerminationConfig(signals=(), sources=[]),
                **options,
            ) as handler:
                while handler.total_run_calls < len(self.values):
                    self.before(handler)
                    batch = handler.total_run_calls if self.by_number else reader
                    self.results.append(handler.run(step, batch))
            return state.value

    def until_the_end(self, **options: Any) -> tuple[Any, list[Any]]:
        """Starts the program until it ends; returns the state, and the exit codes."""
        codes: list[Any] = []
        for _ in range(20):
            try:
                return self.start(**options), codes
            except SystemExit as left:
                codes.append(left.code)
        raise AssertionError(codes)

    @property
    def bad(self) -> list[int]:
        """Numbers of the recorded steps."""
        records = read_journal(journal_directory(self.directory))
        return [each["batch"] for each in records if each["event"] == "badstep"]


def replaced(value: Any, *numbers: int) -> list[Any]:
    return [value if n in numbers else each for n, each in enumerate(VALUES)]


def expected(*left_out: int) -> list[float]:
    """The state of a run whose data never had some batches."""
    state = 0.0
    for number, value in enumerate(VALUES):
        if number not in left_out:
            state = 0.5 * state + value
    return [state]


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize(
    ("bad", "save_freq"), [(0, 2), (1, None), (3, 1), (4, 2), (7, 3)]
)
def test_the_state_is_that_of_data_without_the_batch(
    tmp_path: Path, bad: int, save_freq: int | None, by_number: bool
) -> None:
    loop = Loop(tmp_path, replaced(math.nan, bad), by_number=by_number)
    state, codes = loop.until_the_end(save_freq=save_freq)
    assert state == expected(bad)
    assert codes == [143]
    assert loop.bad == [bad]
    assert loop.results.count(None) == 1
    # A further start trains nothing.
    assert loop.start(save_freq=save_freq) == expected(bad)
    assert loop.results == []


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("cut", range(9))
def test_a_restart_at_any_step_leaves_the_same_steps_out(
    tmp_path: Path, cut: int, by_number: bool
) -> None:
    """Also between the steps, before and after a step that was left out."""
    loop = Loop(tmp_path, replaced(math.inf, 3, 4), by_number=by_number)
    for _ in range(2):
        with pytest.raises(SystemExit):
            loop.start(save_freq=None)

    def cut_off(handler: PreemptionCheckpointHandler) -> None:
        if handler.total_run_calls == cut:
            handler.save()
            raise KeyboardInterrupt

    loop.before = cut_off
    if cut < 8:
        with pytest.raises(KeyboardInterrupt):
            loop.start(save_freq=None)
    loop.before = id
    assert loop.start() == expected(3, 4)
    assert loop.bad == [3, 4]


def test_a_step_that_crashes_twice_is_left_out(tmp_path: Path) -> None:
    loop = Loop(tmp_path, replaced(OSError("bad record"), 5))
    options = {"on_bad_step": BadSteps(crashes=2)}
    for _ in range(2):
        with pytest.raises(OSError, match="bad record"):
            loop.start(**options)
    assert loop.start(**options) == expected(5)


def test_a_retry_in_the_program_is_no_second_crash(tmp_path: Path) -> None:
    def step(number: int) -> float:
        if number:
            raise OSError("bad record")
        return 0.0

    with (
        new_process(),
        PreemptionCheckpointHandler(
            None, None, tmp_path, on_bad_step=BadSteps(crashes=2)
        ) as handler,
    ):
        handler.run(step, 0)
        for _ in range(3):
            with pytest.raises(OSError, match="bad record"):
                handler.run(step, 1)
    assert Loop(tmp_path, []).bad == [1]


def test_the_bad_step_before_a_crash_is_recorded(tmp_path: Path) -> None:
    """The error of the loop itself, too: the program may check the loss."""
    loop = Loop(tmp_path, replaced(math.nan, 3))

    def check(handler: PreemptionCheckpointHandler) -> None:
        if any(math.isnan(each) for each in loop.results if each is not None):
            raise ValueError("the loss is NaN")

    loop.before = check
    with pytest.raises(ValueError, match="the loss is NaN") as caught:
        loop.start()
    assert any("step 3" in each for each in caught.value.__notes__)
    assert loop.start() == expected(3)


def test_an_exit_function_that_returns_is_refused(tmp_path: Path) -> None:
    """Otherwise the program would train on with the bad step."""
    config = TerminationConfig(signals=(), sources=[], exit_fn=lambda: None)
    with new_process():
        handler = PreemptionCheckpointHandler(
            None, None, tmp_path, config, on_bad_step=BadSteps(), save_freq=1
        )
        handler.run(lambda loss: loss, math.nan)
        for call in (lambda: handler.run(lambda loss: loss, 0.0), handler.save):
            with pytest.raises(errors.UsageError, match="the exit_fn returned"):
                call()
        assert handler.checkpoints() == []


def test_the_limit_names_the_steps(tmp_path: Path) -> None:
    loop = Loop(tmp_path, replaced(math.nan, 2, 5))
    options = {"on_bad_step": BadSteps(limit=1)}
    with pytest.raises(SystemExit):
        loop.start(**options)
    with pytest.raises(errors.BadStepsError, match=r"step 2, step 5\. Check the data"):
        loop.start(**options)
    records = read_journal(journal_directory(tmp_path))
    assert [each["is_permanent"] for each in records if each["event"] == "exit"] == [
        False,
        True,
    ]


def test_the_losses_are_read_in_some_steps_only(tmp_path: Path) -> None:
    loop = Loop(tmp_path, replaced(math.nan, 4))
    with pytest.raises(SystemExit):
        loop.start(save_freq=None, on_bad_step=BadSteps(check_every=3))
    assert len(loop.results) == 7  # the losses of the first four steps are read at once
    assert loop.bad == [4]


@pytest.mark.parametrize(
    "save",
    [
        lambda handler: handler.save(),
        lambda handler: handler.save(wait=False),
        lambda handler: save_all_states(),
        lambda handler: handler.close(),
    ],
)
def test_no_save_contains_a_bad_step(
    tmp_path: Path, save: Callable[[PreemptionCheckpointHandler], object]
) -> None:
    loop = Loop(tmp_path, replaced(math.nan, 6))
    loop.before = lambda handler: (
        save(handler) if handler.total_run_calls == 7 else None
    )
    with pytest.raises(SystemExit) as left:
        loop.start(save_freq=None)
    assert (left.value.code, loop.bad) == (143, [6])
    assert not (tmp_path / "7").exists()


def test_data_that_end_after_an_unreadable_batch_are_refused(tmp_path: Path) -> None:
    """A generator ends after an error, and the end would look like the planned end."""

    def batches() -> Iterator[float]:
        yield from (1.0, 2.0)
        raise OSError("bad record")

    def start() -> None:
        with new_process():
            reader = batches()
            with PreemptionCheckpointHandler(
                None, None, tmp_path, on_bad_step=BadSteps(crashes=2)
            ) as handler:
                while True:
                    handler.run(next, reader)

    for _ in range(2):
        with pytest.raises(OSError, match="bad record"):
            start()
    with pytest.raises(errors.BadStepsError, match="cannot be read past step 2"):
        start()


def test_a_handler_that_is_dropped_before_training_is_closed(tmp_path: Path) -> None:
    """Otherwise the directory would count as open."""
    gc.disable()
    try:
        with new_process():
            for _ in range(2):
                PreemptionCheckpointHandler(
                    None, None, tmp_path, on_bad_step=BadSteps()
                )
    finally:
        gc.enable()


def test_the_limit_at_the_start_is_permanent(tmp_path: Path) -> None:
    loop = Loop(tmp_path, replaced(math.nan, 2, 5))
    for _ in range(2):
        with pytest.raises(SystemExit):
            loop.start()
    with pytest.raises(errors.BadStepsError, match="2 steps are left out already"):
        loop.start(on_bad_step=BadSteps(limit=1))
    records = read_journal(journal_directory(tmp_path))
    assert [each["is_permanent"] for each in records if each["event"] == "exit"][-1]


def test_a_replay_ends_before_a_step_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path / "run", replaced(math.nan, 4))
    loop.until_the_end(max_to_keep=None)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    for each in ("4", "6", "8"):
        shutil.rmtree(copy / each)
    replay = Replay(directory=str(loop.directory), copy=str(copy), until=4)
    for name, value in replay.to_environment().items():
        monkeypatch.setenv(name, value)
    read_replay.cache_clear()
    try:
        with pytest.raises(SystemExit):
            loop.start()
    finally:
        monkeypatch.undo()
        read_replay.cache_clear()
    assert (copy / "4").is_dir()
    assert loop.results == [3.0, 5.0]


def test_a_step_without_arguments_is_refused(tmp_path: Path) -> None:
    with new_process():
        handler = PreemptionCheckpointHandler(
            None, None, tmp_path, on_bad_step=BadSteps()
        )
        with pytest.raises(errors.ConfigurationError, match="without arguments"):
            handler.run(lambda: 0.0)
        with pytest.raises(errors.ConfigurationError, match="only run"):
            handler.save_checkpoint_if_preempted()
        assert handler.total_run_calls == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_bad_step": True}, "on_bad_step is True"),
        ({"on_bad_step": BadSteps(), "restore": False}, "restore is False"),
        ({"on_bad_step": BadSteps(spike_factor=2)}, "spike_factor is 2 for a custom"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with (
        new_process(),
        pytest.raises(errors.ConfigurationError, match=text),
    ):
        PreemptionCheckpointHandler(None, None, tmp_path, **options)


def test_crashes_are_refused_with_several_workers() -> None:
    session: Any = types.SimpleNamespace(cluster=types.SimpleNamespace(num_workers=2))
    nothing: Any = None
    with pytest.raises(errors.ConfigurationError, match="in a run of 2 workers"):
        LoopBadSteps(BadSteps(crashes=2), session, nothing, nothing)


@pytest.mark.parametrize(
    ("result", "loss"),
    [
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        ((0.5, "accuracy"), 0.5),
        ([np.array(0.5)], 0.5),
        ({"loss": 0.5, "accuracy": 1.0}, 0.5),
        ({"cost": 0.5}, None),
        (np.array([0.5]), None),
        ("0.5", None),
        ((), None),
        (None, None),
    ],
)
def test_the_loss_of_a_step(result: Any, loss: float | None) -> None:
    assert find_loss(result, "loss") == loss


def test_a_step_without_a_loss_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        new_process(),
        PreemptionCheckpointHandler(
            None, None, tmp_path, on_bad_step=BadSteps()
        ) as handler,
    ):
        for number in itertools.islice(itertools.count(), 5):
            handler.run(lambda number: {"cost": number}, number)
    assert caplog.text.count("has returned dict; with on_bad_step, expected the") == 1


def test_a_refused_save_is_captured_first(tmp_path: Path) -> None:
    """Other workers may wait in a collective operation of the capture."""
    state = JsonState("state", 1)
    synced: list[str] = []
    state.sync = lambda: synced.append("synced")  # type: ignore[method-assign]
    with (
        new_process(),
        PreemptionCheckpointHandler(None, None, tmp_path) as handler,
    ):
        handler.run(lambda: None)
        synced.clear()
        run = handler._run
        run.before_save = lambda: errors.SaveError("a bad step")
        with pytest.raises(errors.SaveError, match="a bad step"):
            handler.save()
        assert synced == ["synced"]
        assert handler.checkpoints() == []
        assert [*(tmp_path / ".staging").glob("*")] == []
        run.before_save = lambda: None
