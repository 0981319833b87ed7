"""What stands in for `model.train_function`: each call is one step of the handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Steps(Protocol):
    """What is asked when something is out of the ordinary."""

    def is_mine(self, iterator: Any) -> bool:
        """Whether the fit made this iterator; a later one without us may not have."""

    def before_step(self, iterator: Any) -> Any:
        """What the step returns if it was trained before a restart; otherwise None."""


class TrainFunction:
    """While all is quiet it compares twice and calls.

    Args:
        steps: see there.
        inner: Keras' own train function.
        handler: runs it.

    Attributes:
        iterator: of the newest step.
        logs: what the newest step returned.
        stop_at: the number of runs at which `before_step` is asked next.
    """

    __slots__ = ("_member", "_run", "_steps", "inner", "iterator", "logs", "stop_at")

    def __init__(self, steps: Steps, inner: Callable[[Any], Any], handler: Any) -> None:
        self.inner = inner
        self.iterator: Any = None
        self.logs: Any = None
        self.stop_at = 0
        self._steps = steps
        self._member = handler.member
        self._run = handler.run

    def __call__(self, iterator: Any) -> Any:
        if iterator is not self.iterator or self._member.runs >= self.stop_at:
            if not self._steps.is_mine(iterator):
                return self.inner(iterator)
            logs = self._steps.before_step(iterator)
            if logs is not None:
                self.logs = logs
                return logs
        self.logs = logs = self._run(self.inner, iterator)
        return logs

    def expect_trace(self, first: Callable[[Callable[[Any], Any], Any], Any]) -> None:
        """The next call traces the function: `first(function, iterator)` makes it."""
        inner = self.inner

        def traced(iterator: Any) -> Any:
            self.inner = inner
            return first(inner, iterator)

        self.inner = traced
