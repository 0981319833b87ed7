"""The progress of a worker, as in the status of Kubeflow's TrainJob (KEP-2779)."""

from __future__ import annotations

import datetime
import math
import os
from pathlib import Path
from typing import Any

from tfpreempt.handler.status_file import WorkerStatus

_PREFIX = "KUBEFLOW_TRAINER_SERVER_"  # of variables that Kubeflow Trainer sets
_SECONDS = 5.0  # timeout of a request: a probe must end soon


def trainer_status(now: WorkerStatus, total_steps: int | None) -> dict[str, Any]:
    """Returns the body of the request that updates the status of a TrainJob.

    Args:
        now: status of a worker.
        total_steps: number of steps of the complete training; None if unknown.
    """
    rate, step = now.steps_per_second or 0.0, now.step
    at = datetime.datetime.fromtimestamp(now.at, datetime.timezone.utc)
    metrics = {"step": str(step), "steps_per_second": f"{rate:.4g}"}
    status: dict[str, Any] = {
        "lastUpdatedTime": at.isoformat(timespec="seconds"),
        "metrics": [{"name": key, "value": metrics[key]} for key in metrics],
    }
    if total_steps is not None:
        status["progressPercentage"] = min(100, 100 * step // total_steps)
        if rate > 0:
            seconds = math.ceil(max(0, total_steps - step) / rate)
            status["estimatedRemainingSeconds"] = min(seconds, (1 << 31) - 1)  # int32
    return {"trainerStatus": status}


def send_progress(status: dict[str, Any]) -> None:
    """Sends a status to the controller of Kubeflow Trainer.

    Raises:
        KeyError: a variable is not set.
        OSError: the controller did not answer, or refused the request.
    """
    import requests  # heavy, and not needed by other probes

    # Kubernetes replaces the token, so the file is read each time.
    token = Path(os.environ[f"{_PREFIX}TOKEN"]).read_text(encoding="ascii").strip()
    requests.post(
        os.environ[f"{_PREFIX}URL"],
        json=status,
        headers={"Authorization": f"Bearer {token}"},
        verify=os.environ[f"{_PREFIX}CA_CERT"],
        timeout=_SECONDS,
        allow_redirects=False,
    ).raise_for_status()
