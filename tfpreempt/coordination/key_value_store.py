"""The interfaces of the key-value store used for the agreement, and of its service.

A key is inserted once, and its value never changes. So a key can be a decision: the
first insert counts, and every worker reads the same value.
"""

from __future__ import annotations

from typing import Protocol

from tfpreempt.core.cluster import Cluster


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


class CoordinationService(Protocol):
    """The service that connects the workers, implemented by a framework's adapter.

    An adapter is a module, "coordination" in `core/frameworks.py`.
    """

    def cluster(self) -> Cluster | None:
        """Returns the workers that the program has connected without a resolver.

        None if the program names the workers by a resolver, or has one process.
        """
        ...

    def make_store(self, cluster: Cluster) -> KeyValueStore:
        """Returns the store of the workers of a cluster.

        Raises:
            UnsupportedVersionError: the framework lacks a name needed by the store.
        """
        ...

    def read_native_notice(self) -> str:
        """Waits for the key that the framework's own SIGTERM handler sets.

        Returns:
            The value of the key, for people.

        Raises:
            CoordinationServiceUnavailableError: the service has ended.
        """
        ...

    def report_error(self, message: str, code: int | None = None) -> None:
        """Lets the collectives of every peer fail with an error, if possible.

        Args:
            message: text of the peers' error.
            code: status code of the error; None if unknown.
        """
        ...

    def disconnect(self, seconds: float | None, *, is_chief: bool) -> bool:
        """Disconnects this process, at its end, together with all other workers.

        Args:
            seconds: longest wait; 0 if not every worker will call; None: the timeout of
                the service.
            is_chief: whether this process hosts the service.

        Returns:
            Whether this process is disconnected. If not, the process must end at once;
            on the chief, the function returns False only after the other workers have
            had time to end.
        """
        ...
