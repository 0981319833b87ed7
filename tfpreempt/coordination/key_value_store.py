"""The interface of the key-value store used for the agreement.

A key is inserted once, and its value never changes. So a key can be a decision: the
first insert counts, and every worker reads the same value.
"""

from __future__ import annotations

from typing import Protocol


class KeyValueStore(Protocol):
    """A store of insert-once keys, which all workers share while they run.

    Any thread may call any method. `get` without a timeout blocks until the key is
    inserted, so call `get` in a daemon thread.
    """

    def insert(self, key: str, value: str) -> None:
        """Inserts a key.

        Raises:
            KeyExistsError: any worker has inserted the key before.
            CoordinationServiceUnavailableError: the store cannot be reached.
        """
        ...

    def get(self, key: str, timeout: float | None = None) -> str:
        """Returns the key's value; waits until the key is inserted.

        Args:
            key: name of the key.
            timeout: maximum seconds to wait; None waits forever. Do not poll with a
                timeout: each wait that times out leaks a few KiB in TensorFlow's
                service.

        Raises:
            PeerTimeoutError: the key did not appear in time.
            CoordinationServiceUnavailableError: the store cannot be reached.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes a key, and all keys whose names begin with `key/`, if they exist.

        Raises:
            CoordinationServiceUnavailableError: the store cannot be reached.
        """
        ...

    def dead_workers(self) -> frozenset[int]:
        """Returns the workers that the service reports as crashed; empty if unknown.

        Raises:
            CoordinationServiceUnavailableError: the store cannot be reached.
        """
        ...
