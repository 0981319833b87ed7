"""A handler whose checkpoint directory is a URL, as gs://bucket/run would be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tensorflow as tf

from tests.checkpoint.fakes import Words
from tests.handler.program import Program
from tfpreempt import errors
from tfpreempt.handler import this_process

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


@pytest.fixture
def remote(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Program:
    """The program in a directory in memory, with its journal on the disk."""
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(tmp_path / "journal"))
    program.directory = f"ram:/{tmp_path}/run"  # type: ignore[assignment]
    return program


def names(program: Program) -> list[str]:
    found = tf.io.gfile.listdir(str(program.directory))
    return sorted(name for name in found if not name.startswith("."))


def test_a_notice_and_a_restart(remote: Program, tmp_path: Path) -> None:
    """The weights, a State and the generators are what they were."""
    word = Words("word", "before")
    handler = remote.handler()
    random.seed(5)
    handler.run(remote.step)
    random.random()
    remote.button.press()
    handler.run(remote.step)
    assert remote.exits == 1
    handle = handler.latest_checkpoint
    assert handle is not None
    assert handle.path.startswith(f"{remote.directory}/commit-")
    assert handle.prefix == tf.train.latest_checkpoint(str(remote.directory))
    assert len(names(remote)) == 2
    handler.close()
    drawn = random.random()

    again = Program(remote.directory)
    word.text = "after"
    with this_process.new_process(), again.handler() as restored:
        restored.run(again.step)
        assert (restored.total_run_calls, word.text) == (3, "before")
        assert again.variable.numpy().tolist() == [4.0, 5.0]
    random.seed(5)
    random.random()
    assert random.random() == drawn
    steps = [record["step"] for record in again.events("commit")]
    assert steps == [1, 2, 3]
    assert (tmp_path / "journal" / "worker-0.jsonl").exists()


def warnings_of_no_lease(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("nothing keeps a second run out of")


def test_that_nothing_keeps_two_runs_apart_is_said_once(
    remote: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that is a URL has no lease."""
    for _ in range(2):
        with remote.handler() as handler:
            handler.run(remote.step)
    assert warnings_of_no_lease(caplog) == 1
    assert f"out of {remote.directory}:" in caplog.text


def test_of_a_directory_on_a_disk_nothing_is_said(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    with program.handler() as handler:
        handler.run(program.step)
    assert warnings_of_no_lease(caplog) == 0


def test_periodic_saves_keep_two(remote: Program) -> None:
    with remote.handler(save_every=2, max_to_keep=2, async_save=False) as handler:
        for _ in range(9):
            handler.run(remote.step)
        handler.save()
        assert len(names(remote)) == 3
    latest = handler.latest_checkpoint
    assert latest is not None
    assert latest.step == 9
    assert [record["step"] for record in remote.events("commit")] == [2, 4, 6, 8, 9]


def test_a_manager_is_refused(remote: Program) -> None:
    manager = tf.train.CheckpointManager(
        remote.checkpoint, str(remote.directory), max_to_keep=2
    )
    with pytest.raises(
        errors.ConfigurationError, match=r"tf\.train\.Checkpoint itself"
    ):
        remote.handler(manager)
