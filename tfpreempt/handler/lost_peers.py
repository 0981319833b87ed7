"""Which workers are gone, by what TensorFlow says where a collective fails."""

from __future__ import annotations

import re

from tfpreempt.core.cluster import Cluster

_SILENT = re.compile(
    r"stopped sending heartbeats\):(?:\s*/job:\w+/replica:\d+/task:\d+)+"
    r"|Task /job:\w+/replica:\d+/task:\d+ heartbeat timeout"  # to itself, if it thaws
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_BROKEN_OFF = re.compile(
    r"remote target (/job:\w+/replica:\d+/task:\d+) while calling [\w/.]+:\s*"
    r":UNKNOWN:[^\n]*grpc_message:\"[^\"\n]*"
    r"(?:Connection reset by peer|Socket closed|Broken pipe|failed to connect)"
)
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
    if lost := _workers(" ".join(_SILENT.findall(text)), cluster):
        return f"{lost} stopped sending heartbeats in {where}"
    if _SERVICE in text and _ANSWERED not in text:
        return f"worker 0, which hosts the coordination service, is silent in {where}"
    if lost := _workers(" ".join(_BROKEN_OFF.findall(text)), cluster):
        return f"{lost} broke off the connection in {where}"
    return ""


def _workers(tasks: str, cluster: Cluster) -> str:
    """Those that tasks are of, for people; one client's remote workers are none."""
    jobs = [job for job, _ in cluster.jobs]
    found = sorted(
        {
            sum(tasks for _, tasks in cluster.jobs[: jobs.index(job)]) + int(task)
            for job, task in _TASK.findall(tasks)
            if job in jobs
        }
    )
    if not found:
        return ""
    return f"worker{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
