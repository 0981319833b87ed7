"""Which process speaks for all of them, where the platform is to be asked once."""

from __future__ import annotations

import json
from collections.abc import Mapping


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Whether this is the process that the others of its job leave to speak.

    It is the chief, or worker 0, by TF_CONFIG, which also leaves last of all; without
    it Slurm's first task; and a process alone.

    Args:
        environment: the process's environment variables.
    """
    try:
        told = environment.get("TF_CONFIG", "").strip()
        if told:
            return _is_chief(told)
        return int(environment.get("SLURM_PROCID", "").strip() or "0") == 0
    except (ValueError, TypeError, AttributeError):
        return False  # asked on the way out: what is odd must not keep a process here


def _is_chief(text: str) -> bool:
    config = json.loads(text)
    task = config.get("task", {})
    kind, index = task.get("type", "worker"), int(task.get("index", 0))
    has_chief = bool(config.get("cluster", {}).get("chief"))
    return index == 0 and kind == ("chief" if has_chief else "worker")
