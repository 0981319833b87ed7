"""The workers of a run, from a resolver, `jax.distributed` or environment variables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tfpreempt.core import frameworks
from tfpreempt.errors import ConfigurationError, UnsupportedClusterError

TRAINING_JOBS = ("chief", "worker")

JAX_JOB = "jax_worker"
"""The job name of JAX's processes in messages of JAX's service."""

JAX_HOST_OUTLIVES = 1.0
"""Seconds for which process 0 of JAX waits for the end of the other processes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers of a run, and the index of this process among them.

    Attributes:
        worker: index of this worker; the chief is worker 0.
        jobs: (job name, number of tasks) for every job of TF_CONFIG with training
            workers. Workers are numbered in this order.
        saves_all: whether every worker saves the complete state into a separate
            directory, as for snapshots. If False, only the chief writes the state that
            is equal on every worker.
        framework: package whose coordination service connects the workers, a key of
            `frameworks.ADAPTERS`.
        host_outlives: seconds by which worker 0 outlives the other workers at a
            deadline. Worker 0 hosts the service, and the end of JAX's service ends all
            processes.
    """

    worker: int
    jobs: tuple[tuple[str, int], ...]
    saves_all: bool = False
    framework: str = "tensorflow"
    host_outlives: float = 0.0

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return sum(tasks for _, tasks in self.jobs) or 1

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the state that is equal on every worker.

        True on worker 0, and on every worker if `saves_all` is True. (Worker 0 also
        hosts the key-value store.)
        """
        return self.worker == 0 or self.saves_all


LOCAL = Cluster(worker=0, jobs=())


def read_cluster(resolver: Any, *, drives_others: bool = False) -> Cluster:
    """Returns the workers described by a cluster resolver, or connected by JAX.

    Args:
        resolver: a `tf.distribute.cluster_resolver.ClusterResolver` (only
            `cluster_spec()`, `task_type` and `task_id` are used); None for the
            processes of `jax.distributed`, or for a run with one process.
        drives_others: whether this process alone runs the program, and the tasks of the
            cluster only execute operations for this process. If True, the result is
            one worker.

    Raises:
        ConfigurationError: tfpreempt does not support the cluster.
    """
    if resolver is None:
        return LOCAL if drives_others else connected_cluster()
    if not hasattr(resolver, "cluster_spec"):
        raise ConfigurationError(
            f"cluster_resolver is {resolver!r}; expected a "
            "tf.distribute.cluster_resolver.ClusterResolver, such as "
            "strategy.cluster_resolver, or None for one process alone"
        )
    if drives_others:
        return LOCAL
    spec: dict[str, Any] = resolver.cluster_spec().as_dict()
    return _from_spec(spec, resolver.task_type, resolver.task_id)


def connected_cluster() -> Cluster:
    """Returns the processes that a framework has connected without a resolver.

    These are the processes of `jax.distributed`; a single process otherwise.
    """
    for each in frameworks.adapters("coordination"):
        found: Cluster | None = each.cluster()
        if found is not None:
            return found
    return LOCAL


def _from_spec(spec: Mapping[str, Any], task_type: Any, task_id: Any) -> Cluster:
    """Returns the cluster, with the worker index of this task.

    Args:
        spec: list of task addresses for every job name, as in TF_CONFIG.
        task_type: job name of this task, such as "worker".
        task_id: index of this task in its job.

    Raises:
        ConfigurationError: the cluster does not contain the task, or tfpreempt does not
            support the cluster.
    """
    if "ps" in spec:
        raise UnsupportedClusterError(
            f"the cluster {spec} has parameter servers; their workers do not step "
            "together, so there is no step to agree on. Save periodically with a "
            "tf.train.CheckpointManager on the coordinator instead."
        )
    jobs = tuple((job, len(spec[job])) for job in TRAINING_JOBS if spec.get(job))
    if not jobs:
        return LOCAL
    first = 0
    for job, tasks in jobs:
        if job == task_type and task_id is not None and 0 <= int(task_id) < tasks:
            return Cluster(worker=first + int(task_id), jobs=jobs)
        first += tasks
    raise ConfigurationError(
        f"the cluster resolver says that this process is task {task_type}:{task_id} of "
        f"the cluster {spec}; expected one of its chief or worker tasks. Evaluators "
        "and parameter servers need no handler; a process that drives remote workers "
        "calls tfpreempt.connect_to_cluster(resolver) first; otherwise correct "
        "TF_CONFIG."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenTask:
    """The content of TF_CONFIG: the task of this process, and the cluster.

    Attributes:
        type: job name of this process, such as "worker".
        index: index of this process among the tasks of its job.
        jobs: list of task addresses for every job name.
    """

    type: str
    index: int
    jobs: Mapping[str, list[str]]


def given_task(environment: Mapping[str, str]) -> GivenTask | None:
    """Returns the content of TF_CONFIG; None if the variable is not set.

    Raises:
        ConfigurationError: TF_CONFIG is not JSON, or has no valid task.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
        task = config.get("task", {})
        return GivenTask(
            type=str(task.get("type", "worker")),
            index=int(task.get("index", 0)),
            jobs={job: list(at) for job, at in config.get("cluster", {}).items()},
        )
    except (
        *(ValueError, TypeError, AttributeError, OverflowError, RecursionError),
    ) as error:
        raise ConfigurationError(
            f"TF_CONFIG is set to {text!r}, from which no task can be read. Expected "
            'JSON such as {"cluster": {"worker": ["host:port"]}, "task": {"type": '
            '"worker", "index": 0}}. Correct it, or unset it.'
        ) from error


def cluster_from_environment(environment: Mapping[str, str]) -> Cluster:
    """Returns the workers described by environment variables; otherwise one worker.

    TF_CONFIG describes the workers, or JAX_NUM_PROCESSES and JAX_PROCESS_ID. A program
    passes the two numbers to `jax.distributed.initialize`.

    Raises:
        ConfigurationError: TF_CONFIG cannot be read, or tfpreempt does not support the
            cluster.
    """
    task = given_task(environment)
    if task is not None:
        return _from_spec(task.jobs, task.type, task.index)
    names = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    texts = [environment.get(name, "") for name in names]
    if not all(text.isdecimal() for text in texts):
        return LOCAL  # JAX ignores such values, too
    worker, count = map(int, texts)
    return jax_cluster(worker, count) if worker < count else LOCAL


def jax_cluster(process: int, count: int) -> Cluster:
    """Returns the cluster of the processes of `jax.distributed`.

    Args:
        process: index of this process.
        count: number of processes.
    """
    return Cluster(
        worker=process,
        jobs=((JAX_JOB, count),),
        framework="jax",
        host_outlives=JAX_HOST_OUTLIVES,
    )
