"""Recognition of crashed workers by TensorFlow's (2.21) errors of collectives."""

from __future__ import annotations

import pytest

from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.core.error_causes import describe_loss

WORKERS = Cluster(worker=0, jobs=(("worker", 3),))
WITH_CHIEF = Cluster(worker=0, jobs=(("chief", 1), ("worker", 2)))
SILENT = """Graph execution error:

Collective ops is aborted by: Error reported from /job:worker/task:1: The following \
tasks are unhealthy (stopped sending heartbeats):
{}
The tasks have crashed. Check the task logs for an earlier error.
Additional GRPC error information from remote target /job:worker/replica:0/task:0
"""
NO_HOST = """Graph execution error:

Collective ops is aborted by: Deadline Exceeded

RPC: /tensorflow.CoordinationService/Heartbeat
The error could be from a previous operation. Restart your program to reset.
"""
THAWED = """Graph execution error:

Collective ops is aborted by: Unexpected heartbeat request from an already-in-error \
task: /job:worker/replica:0/task:1 with existing error: UNAVAILABLE: Task \
/job:worker/replica:0/task:1 heartbeat timeout. This indicates that the remote task \
has failed. [type.googleapis.com/tensorflow.CoordinationServiceError='']

RPC: /tensorflow.CoordinationService/Heartbeat
The error could be from a previous operation. Restart your program to reset.
"""
NEW_HOST = """Collective ops is aborted by: Unexpected heartbeat request from an \
unregistered task. [type.googleapis.com/tensorflow.CoordinationServiceError='']

RPC: /tensorflow.CoordinationService/Heartbeat
"""
BROKEN_OFF = """Collective ops is aborted by: {said}
Additional GRPC error information from remote target /job:worker/replica:0/task:1 \
while calling /tensorflow.WorkerService/CompleteInstance:
:UNKNOWN:Error received from peer  {{grpc_message:"{said}", grpc_status:14}}
The error could be from a previous operation. Restart your program to reset.
"""


@pytest.mark.parametrize(
    ("cluster", "text", "said"),
    [
        (
            WORKERS,
            SILENT.format("/job:worker/replica:0/task:1"),
            "worker 1 stopped sending heartbeats in step 7",
        ),
        (
            WORKERS,
            SILENT.format("/job:worker/replica:0/task:2\n/job:worker/replica:0/task:1"),
            "workers 1, 2 stopped sending heartbeats in step 7",
        ),
        (
            WITH_CHIEF,
            SILENT.format("/job:worker/replica:0/task:1"),
            "worker 2 stopped sending heartbeats in step 7",
        ),
        (
            WORKERS,
            NO_HOST,
            "worker 0, which hosts the coordination service, is unreachable in step 7",
        ),
        (WORKERS, THAWED, "worker 1 stopped sending heartbeats in step 7"),
        (WORKERS, NEW_HOST, ""),
        (
            WORKERS,
            BROKEN_OFF.format(said="recvmsg:Connection reset by peer"),
            "worker 1 closed the connection in step 7",
        ),
        # It lives, and tells of an error that it has from another one.
        (WORKERS, BROKEN_OFF.format(said="Collective ops is aborted"), ""),
        (LOCAL, SILENT.format("/job:worker/replica:0/task:1"), ""),
        (WORKERS, "Incompatible shapes: [2] vs. [3]", ""),
    ],
)
def test_the_description_of_a_lost_worker(
    cluster: Cluster, text: str, said: str
) -> None:
    assert describe_loss(RuntimeError(text), cluster, "step 7") == said
