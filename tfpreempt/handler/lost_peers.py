"""Which workers are gone, by what TensorFlow says where a collective fails."""

from __future__ import annotations

import re

from tfpreempt.core.cluster import Cluster

_SILENT = re.compile(
    r"stopped sending heartbeats\):(?:\s*/job:\w+/replica:\d+/task:\d+)+"
    r"|Task /job:\w+/replica:\d+/task:\d+ heartbeat timeout"  # to itself, if it thaws
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_SERVICE = "tensorflow.CoordinationService/"  # a call of the host that failed
_ANSWERED = "tensorflow.CoordinationServiceError"  # the host itself said that


def describe_loss(error: BaseException, cluster: Cluster, where: str) -> str:
    """Says who was lost, for people.

    Args:
        error: what a collective, or the store, has raised.
        cluster: who the workers are.
        where: the phase in which it did, such as "step 12".

    Returns:
        One line; "" where the error does not say who.
    """
    text = str(error)
    jobs = [job for job, _ in cluster.jobs]
    lost = sorted(
        {
            sum(tasks for _, tasks in cluster.jobs[: jobs.index(job)]) + int(task)
            for tasks in _SILENT.findall(text)
            for job, task in _TASK.findall(tasks)
            if job in jobs  # one client's remote workers are no part of it
        }
    )
    if lost:
        names = ", ".join(map(str, lost))
        workers = "worker" if len(lost) == 1 else "workers"
        return f"{workers} {names} stopped sending heartbeats in {where}"
    if _SERVICE in text and _ANSWERED not in text:
        return f"worker 0, which hosts the coordination service, is silent in {where}"
    return ""
