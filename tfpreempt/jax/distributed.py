"""Adapter for JAX: the processes of `jax.distributed`, the key-value store, the errors.

`jax.distributed.initialize` connects every process to a coordination service in process
0, which has a key-value store. JAX has no public functions for the keys; the methods of
JAX's client object read and write the keys. Measured behaviour:

- An insert, or a get of an existing key, takes less than a millisecond. The calls do
  not hold the GIL.
- The service detects a crash only after the heartbeat timeout (100 s by default), and
  then aborts every process. The call that lists the live processes waits until every
  process has made the same call. So `JaxStore` reports no crashed workers.
- The end of process 0 aborts the other processes at once, from a C++ thread, with
  SIGABRT. So processes disconnect together, or process 0 ends last (`disconnect`).
- A call of the client that returns while Python finalizes also aborts the process. So
  no call may be in progress when Python finalizes.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator

import jax

from tfpreempt.core import private_api
from tfpreempt.core.cluster import JAX_HOST_OUTLIVES, Cluster, jax_cluster
from tfpreempt.core.threads import CallTimeoutError, call_within
from tfpreempt.errors import (
    CoordinationServiceUnavailableError,
    KeyExistsError,
    PeerTimeoutError,
)

log = logging.getLogger(__name__)

END_OF_DATA = (StopIteration, StopAsyncIteration)
"""Exceptions raised at the end of the data. Every worker gets the exception at the same
step, so the exception is no failure."""

_FOREVER = 10 * 365 * 24 * 3600 * 1000  # milliseconds
# Seconds in which open calls of JAX's client end after the disconnection.
_CALLS_END = 1.0


_STATUS_OF_LOSS = re.compile(
    "(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL): "
)


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether an error may come from a collective operation that failed because
    another process crashed.

    JAX raises such an error as a ValueError if the program reads a result, otherwise as
    a JaxRuntimeError. The text begins with a status: "UNKNOWN: Gloo all-reduce failed:
    ... Connection closed".
    """
    is_of_jax = isinstance(error, ValueError | jax.errors.JaxRuntimeError)
    return is_of_jax and _STATUS_OF_LOSS.match(str(error)) is not None


def is_lost_worker(error: BaseException) -> bool:
    """Returns False: in JAX no process controls remote workers, so no error reports the
    loss of a remote worker."""
    return False


def cluster() -> Cluster | None:
    """Returns the processes of `jax.distributed`, perhaps a single process; None if the
    program has not called `jax.distributed.initialize`."""
    is_connected = getattr(jax.distributed, "is_initialized", None)
    if is_connected is None or not is_connected():  # an old JAX, or not connected
        return None
    private_api.check_available("jax_coordination")
    state = private_api.jax_distributed.global_state
    return jax_cluster(state.process_id, state.num_processes)


def make_store(cluster: Cluster) -> JaxStore:
    """Returns the key-value store that the processes share."""
    return JaxStore()


class _OpenCalls:
    """Counts the calls of JAX's client in progress, on all threads."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def add(self) -> Iterator[None]:
        """Context manager for a call of the client: counts the call until the body
        ends."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def wait_none(self, seconds: float) -> bool:
        """Waits until no call is in progress, at most for the given seconds; returns
        whether no call is in progress."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, seconds)


_open_calls = _OpenCalls()


class JaxStore:
    """The key-value store in JAX's coordination service.

    Raises:
        UnsupportedVersionError: this JAX lacks a name needed by the store.
    """

    def __init__(self) -> None:
        private_api.check_available("jax_coordination")
        private_api.name_if_unseen("jax")
        self._client = private_api.jax_distributed.global_state.client

    def insert(self, key: str, value: str) -> None:
        try:
            with _open_calls.add():
                self._client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                raise KeyExistsError(f"the key {key!r} was inserted before") from None
            raise _gone(f"insert the key {key!r}", error) from error

    def get(self, key: str, timeout: float | None = None) -> str:
        milliseconds = _FOREVER if timeout is None else max(1, round(timeout * 1000))
        try:
            with _open_calls.add():
                return str(self._client.blocking_key_value_get(key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise PeerTimeoutError(
                    f"the key {key!r} was not inserted within {timeout} s"
                ) from None
            raise _gone(f"read the key {key!r}", error) from error

    def delete(self, key: str) -> None:
        try:
            with _open_calls.add():
                self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            raise _gone(f"delete the key {key!r}", error) from error

    def dead_workers(self) -> frozenset[int]:
        return frozenset()


NOTICE_KEY = "RECEIVED_PREEMPTION_NOTICE"
"""The key that JAX's preemption service inserts; the value is the time at which the
service expects the end of the process.

`jax.distributed.initialize` installs a C++ handler for SIGTERM, unless
`jax_enable_preemption_service` is off. A SIGTERM before the first handler of tfpreempt
reaches the C++ handler, and is known only by this key.
"""


def read_native_notice() -> str:
    """Waits for the key of JAX's preemption service; returns the value of the key.

    Raises:
        CoordinationServiceUnavailableError: the service has ended.
    """
    return JaxStore().get(NOTICE_KEY)


def report_error(message: str, code: int | None = None) -> None:
    """Does nothing, because JAX's service does not pass errors to other processes.

    The collective operations of the other processes fail when this process ends.
    """


def disconnect(seconds: float | None, *, is_chief: bool) -> bool:
    """Disconnects this process; see `CoordinationService.disconnect`.

    JAX's `shutdown` returns when every process has called `shutdown`. If process 0 ends
    earlier, the service aborts every process that is still connected. So if some
    process does not call in time, this function waits on process 0, to let the other
    processes end first.

    The main thread and the thread of a notice may call the function at the same time.
    """
    try:
        if seconds is None:
            _shut_down()
        elif seconds > JAX_HOST_OUTLIVES:
            call_within(seconds - JAX_HOST_OUTLIVES, _shut_down)
        if seconds is None or seconds > JAX_HOST_OUTLIVES:
            return _open_calls.wait_none(_CALLS_END)
    except (CallTimeoutError, jax.errors.JaxRuntimeError) as error:
        log.warning("not every process has disconnected from JAX's service: %s", error)
    if is_chief:
        threading.Event().wait(JAX_HOST_OUTLIVES)
    return False


_shutting_down = threading.Lock()


def _shut_down() -> None:
    shutdown: Callable[[], None] = jax.distributed.shutdown
    with _shutting_down:
        shutdown()


def _gone(what: str, error: Exception) -> CoordinationServiceUnavailableError:
    return CoordinationServiceUnavailableError(
        f"could not {what}: JAX's coordination service does not answer ({error}). "
        "Process 0, which hosts the service, has probably exited; restart all "
        "processes."
    )
