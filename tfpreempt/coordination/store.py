"""The key-value store that workers agree through.

A key is inserted once and then never changes, which makes it a consensus object:
whoever inserts first decides, everyone reads the same value.
"""

from __future__ import annotations

from typing import Protocol


class KeyValueStore(Protocol):
    """An insert-once store shared by the workers of one incarnation.

    All methods may be called from any thread. `get` without a time-out blocks until the
    key appears, so it belongs in a daemon thread of its own.
    """

    def insert(self, key: str, value: str) -> None:
        """Inserts a key.

        Raises:
            KeyExistsError: the key was inserted before (by anyone).
            StoreGoneError: the store cannot be reached.
        """
        ...

    def get(self, key: str, timeout: float | None = None) -> str:
        """Returns the key's value, waiting until it is inserted.

        Args:
            key: the key.
            timeout: seconds to wait at most; None waits for ever. A time-out leaks a
                few KiB in TensorFlow's service, so it is for start-up and last resort,
                never for polling.

        Raises:
            WaitTimeoutError: the key did not appear in time.
            StoreGoneError: the store cannot be reached.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes a key and everything under `key/`; absent keys are no error.

        Raises:
            StoreGoneError: the store cannot be reached.
        """
        ...

    def dead_workers(self) -> frozenset[int]:
        """Indices of workers that the service reports dead; empty if it can't tell.

        Raises:
            StoreGoneError: the store cannot be reached.
        """
        ...
