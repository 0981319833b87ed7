"""TensorFlow for the session: its errors, and its coordination service as a store.

The coordination service has no public interface; the eager context leads to it. Its
behaviour and cost were measured: an insert or a get of an existing key takes under a
millisecond; a get that times out leaks in both processes, so no thread polls; its
barrier holds the GIL while it waits, so barriers are built from keys. A question for
the states of the tasks holds the GIL too: only the host, which answers itself, asks for
dead workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import seams
from tfpreempt.errors import (
    KeyExistsError,
    StoreGoneError,
    UsageError,
    WaitTimeoutError,
)

END_OF_DATA = (StopIteration, StopAsyncIteration, tf.errors.OutOfRangeError)
"""Errors of a step whose data end: no failure, and equal on all workers."""

PEER_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
"""Errors of a collective whose other worker has died."""

_POISONED = re.compile(
    "poisoned|incarnation|context_id|cancelled|aborted|unavailable|connect",
    re.IGNORECASE,
)


def is_lost_worker(error: BaseException) -> bool:
    """Returns whether an error may come of the loss of a remote worker.

    An op that reads the result of the lost worker later raises an `InternalError`,
    "Remote address looked up from remote data found to be poisoned".
    """
    if isinstance(error, tf.errors.InternalError):
        return _POISONED.search(str(error)) is not None
    return isinstance(error, PEER_LOST)


NATIVE_NOTICE_KEY = "TF_DEFAULT_PREEMPTION_NOTICE_KEY"
"""The key that TensorFlow's own SIGTERM handler sets (its C++ preemption notifier)."""

_UNKNOWN = 2  # status codes of absl, as report_error_to_cluster takes them


class TensorFlowStore:
    """Insert-once keys in the coordination service of this cluster.

    Args:
        jobs: (job name, number of tasks) in the order in which workers are numbered.

    Raises:
        UnsupportedVersionError: this TensorFlow lacks a name that the store rests on.
    """

    def __init__(self, jobs: Sequence[tuple[str, int]]) -> None:
        seams.require("coordination")
        self._jobs = list(jobs)

    def insert(self, key: str, value: str) -> None:
        try:
            seams.eager_context.context().set_config_key_value(key, value)
        except tf.errors.AlreadyExistsError:
            raise KeyExistsError(f"the key {key!r} was inserted before") from None
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone(f"insert the key {key!r}", error) from error

    def get(self, key: str, timeout: float | None = None) -> str:
        milliseconds = 0 if timeout is None else max(1, round(timeout * 1000))
        try:
            value = seams.eager_context.context().get_config_key_value(
                key, milliseconds
            )
        except tf.errors.DeadlineExceededError:
            raise WaitTimeoutError(
                f"the key {key!r} was not inserted within {timeout} s"
            ) from None
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone(f"read the key {key!r}", error) from error
        return str(value)

    def delete(self, key: str) -> None:
        try:
            seams.eager_context.context().delete_config_key_value(key)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone(f"delete the key {key!r}", error) from error

    def dead_workers(self) -> frozenset[int]:
        try:
            states = seams.eager_context.context().get_task_states(self._jobs)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise _gone("ask for the states of the tasks", error) from error
        return frozenset(i for i, state in enumerate(states) if state is not None)


def read_native_notice() -> str:
    """Waits for TensorFlow's own key; returns the task that got SIGTERM.

    Raises:
        StoreGoneError: the service is gone, or this process has none.
    """
    return TensorFlowStore(()).get(NATIVE_NOTICE_KEY)


def forget_native_notice() -> None:
    """Deletes TensorFlow's own key, which outlives the task that it is about.

    Raises:
        StoreGoneError: the service is gone, or this process has none.
    """
    TensorFlowStore(()).delete(NATIVE_NOTICE_KEY)


def wait_service_gone(limit: float) -> bool:
    """Waits at most so many seconds until the service's host has ended.

    A get fails then; that of a key which nobody inserts fails only then. Each wait
    that comes to its limit costs about 35 KiB in two processes.
    """
    try:
        TensorFlowStore(()).get("tfpreempt/never", limit)
    except WaitTimeoutError:
        return False
    except StoreGoneError:
        return True
    return False


def connect(
    spec: Any, job: str, task: int, protocol: str, *, leader: str | None
) -> None:
    """Connects this process to the tasks of a cluster.

    Args:
        spec: a tf.train.ClusterSpec or a cluster resolver.
        job: the name of this process's job.
        task: the index of this process in the job.
        protocol: of the servers of the tasks.
        leader: the remote task that is to host the service, such as
            "/job:worker/replica:0/task:0"; None if the service was configured before.

    Raises:
        UsageError: TensorFlow has its devices already, so no service can be configured.
        UnsupportedVersionError: this TensorFlow cannot connect to remote workers.
    """
    seams.require("remote_cluster")
    if leader is not None:
        context = seams.eager_context.context()
        if context._context_handle is not None:
            raise UsageError(
                "connect_to_cluster() was called after TensorFlow had listed its "
                "devices or run an op; call it first, before any tensor, variable or "
                "strategy is made"
            )
        context.configure_coordination_service(
            service_type="standalone", service_leader=leader, enable_health_check=False
        )
    tf.config.experimental_connect_to_cluster(
        spec, job_name=job, task_index=task, protocol=protocol
    )


def report_error(message: str, code: int | None = None) -> None:
    """Makes every peer's collectives fail with this message.

    Holds the GIL until the service has answered.

    Args:
        message: what peers see.
        code: status code of the TensorFlow error; None for an error of another kind.
    """
    seams.eager_context.context().report_error_to_cluster(
        _UNKNOWN if code is None else code, message
    )


def _gone(what: str, error: Exception) -> StoreGoneError:
    return StoreGoneError(
        f"could not {what}: the coordination service does not answer ({error}). Its "
        "host, worker 0, has probably ended; all workers must start again."
    )
