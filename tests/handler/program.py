"""A user's program in one process; the test triggers its notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.journals import read_journal
from tfpreempt import TerminationConfig
from tfpreempt.core.journal import journal_directory
from tfpreempt.handler import current_session
from tfpreempt.handler.handler import PreemptionCheckpointHandler
from tfpreempt.notice.source import OnNotice

LIMIT = 20.0


class Button:
    """A notice source that a test presses."""

    name = "button"

    def start(self, on_notice: OnNotice) -> None:
        self._tell = on_notice

    def rearm(self) -> None:
        pass

    def close(self) -> None:
        pass

    def press(self) -> None:
        """The machine is going away; returns when the handler knows."""
        self._tell("pressed")
        wait_until(is_told)


class Program:
    """A user's program: a variable, a button for notices, and a counted exit."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.variable = tf.Variable([1.0, 2.0])
        self.checkpoint = tf.train.Checkpoint(variable=self.variable)
        self.button = Button()
        self.exits = 0

    def leave(self) -> None:
        self.exits += 1

    def handler(self, given: Any = None, **more: Any) -> PreemptionCheckpointHandler:
        """Returns a handler that continues after a commit."""
        config = {
            "exit_fn": self.leave,
            "signals": (),
            "sources": [lambda: self.button],
        }
        config |= more.pop("config", {})
        given = given or self.checkpoint
        if isinstance(given, tf.train.Checkpoint):
            more = {"checkpoint_dir": self.directory} | more
        return PreemptionCheckpointHandler(
            None, given, termination_config=TerminationConfig(**config), **more
        )

    def step(self) -> None:
        self.variable.assign_add([1.0, 1.0])

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Records of the journal."""
        records = read_journal(journal_directory(self.directory))
        return [record for record in records if record["event"] == kind]


def is_told() -> bool:
    """Whether this process has a notice that its next boundary serves."""
    here = current_session.current()
    return here is not None and here.step_flag.flag


def wait_until(condition: Callable[[], Any]) -> None:
    """Waits for a thread, with a limit."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)
