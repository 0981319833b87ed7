"""Compares searches of an object graph with and without reuse of the last result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from tfpreempt.core import object_graph

T = TypeVar("T")


class Searches:
    """Makes each search twice: with the last result, and through all objects.

    Attributes:
        answers: results of `Reached.is_unchanged` in searches with a last result.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: set[bool] = set()
        self._patch = monkeypatch

    def results(self, repeated: Callable[[], T], new: Callable[[], T]) -> tuple[T, T]:
        """Returns the results of both searches."""
        is_unchanged = object_graph.Reached.is_unchanged

        def record(reached: object_graph.Reached) -> bool:
            answer = is_unchanged(reached)
            self.answers.add(answer)
            return answer

        with self._patch.context() as patch:
            patch.setattr(object_graph.Reached, "is_unchanged", record)
            found = repeated()
        with self._patch.context() as patch:
            patch.setattr(object_graph.Reached, "is_unchanged", lambda _: False)
            return found, new()
