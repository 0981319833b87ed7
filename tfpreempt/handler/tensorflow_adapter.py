"""Adapter of TensorFlow: error classes, and the coordination service as a store.

The coordination service has no public interface; the eager context gives access to it.
Measured behaviour:

- An insert, or a get of an existing key, takes less than a millisecond.
- A get that times out leaks memory in both processes, so no thread polls.
- The service's barrier holds the GIL during the wait, so tfpreempt's barriers use keys.
- A query of the task states holds the GIL too, so only the host of the service, which
  needs no network for the query, asks for crashed workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import private_api
from tfpreempt.core.cluster import Cluster
from tfpreempt.errors import (
    CoordinationServiceUnavailableError,
    KeyExistsError,
    PeerTimeoutError,
    UsageError,
)

END_OF_DATA = (StopIteration, StopAsyncIteration, tf.errors.OutOfRangeError)
"""Errors that mean the end of the data: no failure, and raised at the same step on
every worker."""

_PEER_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)

_POISONED = re.compile(
    "poisoned|incarnation|context_id|cancelled|aborted|unavailable|connect",
    re.IGNORECASE,
)


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether the crash of another worker may have caused an error."""
    return isinstance(error, _PEER_LOST)


def is_lost_worker(error: BaseException) -> bool:
    """Returns whether an error may be caused by the loss of a remote worker.

    If an op reads a result of the worker after the loss, the error is an
    `InternalError`: "Remote address looked up from remote data found to be poisoned".
    """
    if isinstance(error, tf.errors.InternalError):
        return _POISONED.search(str(error)) is not None
    return is_peer_lost(error)


NATIVE_NOTICE_KEY = "TF_DEFAULT_PREEMPTION_NOTICE_KEY"
"""The key that TensorFlow's own SIGTERM handler sets (its C++ preemption notifier)."""

_UNKNOWN = 2  # the absl status code for an unknown error


def cluster() -> None:
    """Returns None, because a program passes TensorFlow's cluster as a resolver."""


def make_store(cluster: Cluster) -> TensorFlowStore:
    """Returns the key-value store that the workers of a cluster share."""
    return TensorFlowStore(cluster.jobs)


class TensorFlowStore:
    """The key-value store in TensorFlow's coordination service.

    Args:
        jobs: (job name, number of tasks) in the order in which workers are numbered.

    Raises:
        UnsupportedVersionError: this TensorFlow lacks a name needed by the store.
    """

    def __init__(self, jobs: Sequence[tuple[str, int]]) -> None:
        private_api.check_available("coordination")
        self._jobs = list(jobs)
        # References to the classes of errors, see `dead_workers`.
        self._classes: list[type] = []

    def insert(self, key: str, value: str) -> None:
        try:
            private_api.eager_context.context().set_config_key_value(key, value)
        except tf.errors.AlreadyExistsError:
            raise KeyExistsError(f"the key {key!r} was inserted before") from None
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone(f"insert the key {key!r}", error) from error

    def get(self, key: str, timeout: float | None = None) -> str:
        milliseconds = 0 if timeout is None else max(1, round(timeout * 1000))
        try:
            value = private_api.eager_context.context().get_config_key_value(
                key, milliseconds
            )
        except tf.errors.DeadlineExceededError:
            raise PeerTimeoutError(
                f"the key {key!r} was not inserted within {timeout} s"
            ) from None
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone(f"read the key {key!r}", error) from error
        return str(value)

    def delete(self, key: str) -> None:
        try:
            private_api.eager_context.context().delete_config_key_value(key)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone(f"delete the key {key!r}", error) from error

    def dead_workers(self) -> frozenset[int]:
        try:
            states = private_api.eager_context.context().get_task_states(self._jobs)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone("ask for the states of the tasks", error) from error
        # For each error, `TFE_GetTaskStates` releases a reference to the class of the
        # error that TensorFlow does not own. Without these references, Python would
        # delete the class after some calls, and the process would crash.
        self._classes += [type(state) for state in states if state is not None]
        return frozenset(i for i, state in enumerate(states) if state is not None)


def read_native_notice() -> str:
    """Waits for TensorFlow's own notice key; returns the task that received SIGTERM.

    Raises:
        CoordinationServiceUnavailableError: the service has ended, or this process
            has no service.
    """
    return TensorFlowStore(()).get(NATIVE_NOTICE_KEY)


def forget_native_notice() -> None:
    """Deletes TensorFlow's own notice key, which remains after the preempted task.

    Raises:
        CoordinationServiceUnavailableError: the service has ended, or this process
            has no service.
    """
    TensorFlowStore(()).delete(NATIVE_NOTICE_KEY)


def wait_service_gone(limit: float) -> bool:
    """Waits until the host of the coordination service has ended.

    The function reads a key that is never inserted: the read fails when the host ends.
    A timeout leaks about 35 KiB in two processes.

    Args:
        limit: longest wait in seconds.

    Returns:
        Whether the host has ended.
    """
    try:
        TensorFlowStore(()).get("tfpreempt/never", limit)
    except PeerTimeoutError:
        return False
    except CoordinationServiceUnavailableError:
        return True
    return False


def connect(
    spec: Any, job: str, task: int, protocol: str, *, leader: str | None
) -> None:
    """Connects this process to the tasks of a cluster.

    Args:
        spec: a tf.train.ClusterSpec or a cluster resolver.
        job: name of this process's job.
        task: index of this process in the job.
        protocol: protocol of the tasks' servers.
        leader: remote task that is to host the service, such as
            "/job:worker/replica:0/task:0"; None if the service was configured before.

    Raises:
        UsageError: TensorFlow has already initialized its devices, so no service can be
            configured.
        UnsupportedVersionError: this TensorFlow cannot connect to remote workers.
    """
    private_api.check_available("remote_cluster")
    if leader is not None:
        context = private_api.eager_context.context()
        if context._context_handle is not None:
            raise UsageError(
                "connect_to_cluster() was called after TensorFlow had listed its "
                "devices or run an op; call connect_to_cluster() first, before any "
                "tensor, variable or strategy is created"
            )
        context.configure_coordination_service(
            service_type="standalone", service_leader=leader, enable_health_check=False
        )
    tf.config.experimental_connect_to_cluster(
        spec, job_name=job, task_index=task, protocol=protocol
    )


def report_error(message: str, code: int | None = None) -> None:
    """Makes the running collectives of every peer fail with an error.

    The call holds the GIL until the service has answered.

    Args:
        message: text of the peers' error.
        code: status code of a TensorFlow error; None for any other error.
    """
    private_api.eager_context.context().report_error_to_cluster(
        _UNKNOWN if code is None else code, message
    )


def disconnect(seconds: float | None, *, is_chief: bool) -> bool:
    """Does nothing, because TensorFlow disconnects a worker when the process ends.

    Returns:
        True: the process need not end at once; see `CoordinationService`.
    """
    return True


def _gone(what: str, error: Exception) -> CoordinationServiceUnavailableError:
    return CoordinationServiceUnavailableError(
        f"could not {what}: the coordination service does not answer ({error}). "
        "Worker 0, which hosts the service, has probably exited; restart all workers."
    )
