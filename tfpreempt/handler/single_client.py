"""Single-client clusters: this process alone runs the program, on remote workers.

TPU pods are used in this way. Servers of `tf.distribute.Server` can be used in the same
way. The platform preempts the machines of the remote workers. When a worker gets
SIGTERM, TensorFlow's C++ code on its machine inserts a key into the coordination
service, and the worker continues to serve until the machine is terminated.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from tfpreempt import errors
from tfpreempt.core import frameworks, lazy_import
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.core.threads import CallTimeoutError, call_within
from tfpreempt.notice.tensorflow_notice import NativeKeySource, read_again

if TYPE_CHECKING:
    import tensorflow as tf

log = logging.getLogger(__name__)

NATIVE_DELAY = 1.0
"""Maximum delay of TensorFlow's notice key in seconds: TensorFlow checks for SIGTERM at
this interval."""

FORGET_LIMIT = 5.0
"""Seconds allowed for the coordination service to delete the notice key."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection to remote workers.

    Attributes:
        number: number of connections made in this process, including this connection.
        device: TensorFlow's name of this machine's CPU, which writes and reads files.
    """

    number: int
    device: str

    @property
    def notice_identity(self) -> tuple[str, int]:
        """Identity that separates the notice keys of different connections."""
        return "tfpreempt-remote-cluster", self.number


_connection: Connection | None = None


def connection() -> Connection | None:
    """Returns the newest connection of `connect_to_cluster`; None before the first."""
    return _connection


def connect_to_cluster(
    resolver: tf.distribute.cluster_resolver.ClusterResolver, *, protocol: str = "grpc"
) -> None:
    """Connects this process to remote workers, and receives their preemption notices.

    Call the function in place of `tf.config.experimental_connect_to_cluster`, before
    any other function of TensorFlow. The coordination service, through which workers
    report a SIGTERM, cannot be set up later. The first worker hosts the service. After
    workers were replaced, call the function again in the same process, and then create
    the strategy, the variables and the handler again.

    Call the function on the main thread.

    Args:
        resolver: a `tf.distribute.cluster_resolver.ClusterResolver`, such as a
            TPUClusterResolver, or a `tf.train.ClusterSpec` with a job "worker".
        protocol: protocol of the workers' servers.

    Raises:
        ConfigurationError: the resolver names no remote workers.
        UsageError: TensorFlow was used before the first call.
        TensorFlowMissingError: TensorFlow is not installed.
    """
    global _connection
    show_log_lines()
    if not lazy_import.has_tensorflow():
        raise errors.TensorFlowMissingError(
            f"connect_to_cluster() {lazy_import.WANTED}"
        )
    spec = _cluster_spec(resolver)
    job = _worker_job(resolver, spec)
    leader = f"/job:{job}/replica:0/task:0" if _connection is None else None
    task_type, task_id = getattr(resolver, "task_type", None), 0
    if task_type in spec.jobs and task_type != job:
        task_id = int(getattr(resolver, "task_id", None) or 0)
    else:
        task_type = "coordinator" if "coordinator" in spec.jobs else "localhost"
    _service().connect(spec, task_type, task_id, protocol, leader=leader)
    _connection = Connection(
        number=1 if _connection is None else _connection.number + 1,
        device=f"/job:{task_type}/replica:0/task:{task_id}/device:CPU:0",
    )


class PreemptionWatcher:
    """Reports whether a remote worker is preempted; the program itself saves.

    For programs without a handler. The interface is the interface of TensorFlow's class
    `PreemptionWatcher`, whose op is missing in the pip packages of TensorFlow. Create
    the watcher after `connect_to_cluster()`; a new connection needs a new watcher.

    Attributes:
        preemption_message: the task that has received SIGTERM, such as
            "/job:worker/task:1"; None without a notice. A thread sets the attribute.

    Raises:
        UsageError: there is no connection.
    """

    def __init__(self) -> None:
        made = connection()
        if made is None:
            raise errors.UsageError(
                "PreemptionWatcher() was created before connect_to_cluster(), whose "
                "connection reports preemptions of remote workers; call "
                "connect_to_cluster() first"
            )
        self.preemption_message: str | None = None
        self._source = NativeKeySource(
            _service().read_native_notice,
            identity=made.notice_identity,
            is_alone=True,
        )
        self._source.start(self._on_notice)

    def _on_notice(self, detail: str) -> None:
        self.preemption_message = detail

    def block_until_worker_exit(self, limit: float = 60.0) -> bool:
        """Waits until the first worker, the host of the service, has ended.

        A program that reconnects earlier would connect to the worker that is about to
        end.

        Args:
            limit: longest wait in seconds.

        Returns:
            Whether the worker has ended.
        """
        is_gone: bool = _service().wait_service_gone(limit)
        return is_gone

    def close(self) -> None:
        """Stops watching, and deletes a reported notice, so that a later watcher sees
        only later notices."""
        self._source.close()
        if self.preemption_message is not None:
            notice_was_served()


def notice_was_served() -> None:
    """Deletes TensorFlow's notice key after a notice was handled.

    The key would otherwise remain after the preempted worker has ended, and this
    program or a restarted program would treat the key as a new notice. Without a
    connection to remote workers the function does nothing.
    """
    if _connection is None:
        return
    try:
        call_within(FORGET_LIMIT, _service().forget_native_notice)
    except (errors.TfpreemptError, CallTimeoutError) as error:
        log.debug("TensorFlow's notice could not be deleted: %s", error)
    read_again(_connection.notice_identity)


def _service() -> Any:
    """Returns the adapter of TensorFlow's coordination service."""
    return frameworks.adapter("tensorflow", "coordination")


def _cluster_spec(resolver: Any) -> Any:
    spec = resolver.cluster_spec() if hasattr(resolver, "cluster_spec") else resolver
    if hasattr(spec, "jobs") and hasattr(spec, "as_dict"):
        return spec
    raise errors.ConfigurationError(
        f"resolver is {resolver!r}; expected a "
        "tf.distribute.cluster_resolver.ClusterResolver or a tf.train.ClusterSpec"
    )


def _worker_job(resolver: Any, spec: Any) -> str:
    get_job_name = getattr(resolver, "get_job_name", lambda: "worker")
    job = str(get_job_name())
    if job not in spec.jobs:
        raise errors.ConfigurationError(
            f"the cluster {spec.as_dict()} has no job {job!r}; expected the addresses "
            "of remote workers there. A program that every worker runs itself, as "
            "under MultiWorkerMirroredStrategy, needs no connect_to_cluster()."
        )
    return job
