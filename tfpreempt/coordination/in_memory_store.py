"""Implements the key-value store in memory, for a single worker and for simulations."""

from __future__ import annotations

import threading

from tfpreempt.errors import (
    CoordinationServiceUnavailableError,
    KeyExistsError,
    PeerTimeoutError,
)


class InMemoryStore:
    """A store of insert-once keys in a dictionary; any thread may call any method."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._gone = False

    def insert(self, key: str, value: str) -> None:
        with self._changed:
            self._check()
            if key in self._values:
                raise KeyExistsError(f"the key {key!r} was inserted before")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float | None = None) -> str:
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._gone or key in self._values, timeout
            )
            self._check()
            if not there:
                raise PeerTimeoutError(
                    f"the key {key!r} was not inserted within {timeout} s"
                )
            return self._values[key]

    def delete(self, key: str) -> None:
        with self._changed:
            self._check()
            for name in [n for n in self._values if f"{n}/".startswith(f"{key}/")]:
                del self._values[name]

    def dead_workers(self) -> frozenset[int]:
        with self._changed:
            self._check()
            return frozenset()

    def close(self) -> None:
        """Closes the store, as the end of the host closes TensorFlow's service.

        Waiting calls and later calls raise `CoordinationServiceUnavailableError`.
        """
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._gone:
            raise CoordinationServiceUnavailableError(
                "the store was closed; its host has ended"
            )
