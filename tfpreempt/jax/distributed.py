"""Adapter of JAX: the processes of `jax.distributed`, their service, their errors.

`jax.distributed.initialize` connects every process to a coordination service in process
0. JAX has no public functions for the keys of the service; the client object of JAX has
methods for them. Measured behaviour:

- An insert, or a get of an existing key, takes less than a millisecond. The calls do
  not hold the GIL.
- The service knows of a crash only after the heartbeat timeout (100 s by default), and
  then aborts every process. The call that lists the live processes waits until every
  process has made the same call. So the store reports no crashed workers.
- The end of process 0 aborts the other processes at once, from a C++ thread, with
  SIGABRT. So processes disconnect together, or process 0 ends last (`disconnect`).
- A call that returns while Python finalizes aborts the process, too. So no call may be
  in progress then.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator

import jax

from tfpreempt.core import private_api
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.threads import CallTimeoutError, call_within
from tfpreempt.errors import (
    CoordinationServiceUnavailableError,
    KeyExistsError,
    PeerTimeoutError,
)

log = logging.getLogger(__name__)

JOB = "jax_worker"
"""Name of the processes' job in the messages of the service."""

END_OF_DATA = (StopIteration, StopAsyncIteration)
"""Errors at the end of the data: no failure, and equal on every worker."""

_FOREVER = 10 * 365 * 24 * 3600 * 1000  # milliseconds
_CHIEF_WAITS = 1.0  # seconds by which process 0 ends later than the others
_CALLS_END = 1.0  # seconds in which calls end after the service has disconnected


_STATUS_OF_LOSS = re.compile(
    "(UNKNOWN|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL): "
)


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether a collective may have failed by the crash of another process.

    JAX raises a ValueError if a result is read, and a JaxRuntimeError otherwise, with
    the status in the text: "UNKNOWN: Gloo all-reduce failed: ... Connection closed".
    """
    is_of_jax = isinstance(error, ValueError | jax.errors.JaxRuntimeError)
    return is_of_jax and _STATUS_OF_LOSS.match(str(error)) is not None


def is_lost_worker(error: BaseException) -> bool:
    """Returns False: JAX has no programs that drive remote workers."""
    return False


def cluster() -> Cluster | None:
    """Returns the processes of `jax.distributed`; None for a single process."""
    is_connected = getattr(jax.distributed, "is_initialized", None)
    if is_connected is None or not is_connected():  # an old JAX, or a single process
        return None
    private_api.check_available("jax_coordination")
    state = private_api.jax_distributed.global_state
    if state.num_processes == 1:
        return None
    return Cluster(
        worker=state.process_id,
        jobs=((JOB, state.num_processes),),
        framework="jax",
    )


def make_store(cluster: Cluster) -> JaxStore:
    """Returns the store of the processes."""
    return JaxStore()


class _OpenCalls:
    """Counts the calls of JAX's client in progress, on all threads."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def add(self) -> Iterator[None]:
        """Context manager around one call."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def wait_none(self, seconds: float) -> None:
        """Waits until no call is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, seconds)


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
"""The key that JAX's preemption service sets, with the time at which it expects death.

JAX's C++ handler receives a SIGTERM between `jax.distributed.initialize` and the first
handler of tfpreempt, unless `jax_enable_preemption_service` is off.
"""


def read_native_notice() -> str:
    """Waits for the key of JAX's preemption service; returns the value of the key.

    Raises:
        CoordinationServiceUnavailableError: the service has ended.
    """
    return JaxStore().get(NOTICE_KEY)


def report_error(message: str, code: int | None = None) -> None:
    """Does nothing: JAX's service passes no errors on.

    The collectives of the peers fail when this process ends.
    """


def disconnect(seconds: float | None, *, is_chief: bool) -> bool:
    """Disconnects this process; see `CoordinationService.disconnect`.

    The service answers when every process has called, and aborts a process that is
    connected when process 0 ends.
    """
    shutdown: Callable[[], None] = jax.distributed.shutdown
    try:
        if seconds is None:
            shutdown()
        elif seconds > _CHIEF_WAITS:
            call_within(seconds - _CHIEF_WAITS, shutdown)
        if seconds is None or seconds > _CHIEF_WAITS:
            _open_calls.wait_none(_CALLS_END)
            return True
    except (CallTimeoutError, jax.errors.JaxRuntimeError) as error:
        log.warning("not every process has disconnected from JAX's service: %s", error)
    if is_chief:
        threading.Event().wait(_CHIEF_WAITS)
    return False


def _gone(what: str, error: Exception) -> CoordinationServiceUnavailableError:
    return CoordinationServiceUnavailableError(
        f"could not {what}: JAX's coordination service does not answer ({error}). "
        "Process 0, which hosts the service, has probably exited; restart all "
        "processes."
    )
