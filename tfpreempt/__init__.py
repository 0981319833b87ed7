"""Turns a preemption notice into an exact restart of TensorFlow training.

The public names cover a preemption from start to end: notice, agreement on a step,
checkpoint commit, exit, restore. A name is loaded on first use (PEP 562), so neither
the command line nor a program that only catches tfpreempt's errors imports TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(
        f"tfpreempt runs on Linux only, this is {sys.platform!r}: it rests on POSIX "
        "signals, fsync of directories and TensorFlow's Linux runtime. Use a Linux "
        "machine, a container or WSL 2."
    )

if TYPE_CHECKING:
    from tfpreempt import data, errors, keras, states, trackers
    from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
    from tfpreempt.checkpoint.restore.handle import Checkpoint
    from tfpreempt.checkpoint.state.state import State
    from tfpreempt.core.restarts import num_restarts
    from tfpreempt.errors import TfpreemptError
    from tfpreempt.handler.bad_steps import BadSteps
    from tfpreempt.handler.current_session import handle_early_notices
    from tfpreempt.handler.handler import PreemptionCheckpointHandler
    from tfpreempt.handler.single_client import PreemptionWatcher, connect_to_cluster
    from tfpreempt.platforms.aws import AwsSpotTerminationConfig
    from tfpreempt.platforms.azure import AzureTerminationConfig
    from tfpreempt.platforms.borg import BorgTpuTerminationConfig
    from tfpreempt.platforms.config import (
        BorgTerminationConfig,
        GenericTerminationConfig,
        TerminationConfig,
    )
    from tfpreempt.platforms.detect import Platform, detect_platform
    from tfpreempt.platforms.gce import (
        GceCpuTerminationConfig,
        GceGpuTerminationConfig,
        GceSpotTerminationConfig,
        GceTpuTerminationConfig,
    )
    from tfpreempt.platforms.kubernetes import KubernetesTerminationConfig
    from tfpreempt.platforms.slurm import SlurmTerminationConfig
    from tfpreempt.states.api import load_state, save_all_states, save_state

__version__ = "0.1.0"

__all__ = [
    "AwsSpotTerminationConfig",
    "AzureTerminationConfig",
    "BadSteps",
    "BorgTerminationConfig",
    "BorgTpuTerminationConfig",
    "Checkpoint",
    "GceCpuTerminationConfig",
    "GceGpuTerminationConfig",
    "GceSpotTerminationConfig",
    "GceTpuTerminationConfig",
    "GenericTerminationConfig",
    "KubernetesTerminationConfig",
    "MirrorStatus",
    "Platform",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "SlurmTerminationConfig",
    "State",
    "TerminationConfig",
    "TfpreemptError",
    "__version__",
    "connect_to_cluster",
    "data",
    "detect_platform",
    "errors",
    "handle_early_notices",
    "keras",
    "load_state",
    "num_restarts",
    "save_all_states",
    "save_state",
    "states",
    "trackers",
]

# Public name -> module with the definition, or the public module.
_HOMES = {
    "TerminationConfig": "tfpreempt.platforms.config",
    "GenericTerminationConfig": "tfpreempt.platforms.config",
    "BorgTerminationConfig": "tfpreempt.platforms.config",
    "connect_to_cluster": "tfpreempt.handler.single_client",
    "PreemptionWatcher": "tfpreempt.handler.single_client",
    "BorgTpuTerminationConfig": "tfpreempt.platforms.borg",
    "GceCpuTerminationConfig": "tfpreempt.platforms.gce",
    "GceGpuTerminationConfig": "tfpreempt.platforms.gce",
    "GceSpotTerminationConfig": "tfpreempt.platforms.gce",
    "GceTpuTerminationConfig": "tfpreempt.platforms.gce",
    "AwsSpotTerminationConfig": "tfpreempt.platforms.aws",
    "AzureTerminationConfig": "tfpreempt.platforms.azure",
    "SlurmTerminationConfig": "tfpreempt.platforms.slurm",
    "KubernetesTerminationConfig": "tfpreempt.platforms.kubernetes",
    "Platform": "tfpreempt.platforms.detect",
    "detect_platform": "tfpreempt.platforms.detect",
    "handle_early_notices": "tfpreempt.handler.current_session",
    "PreemptionCheckpointHandler": "tfpreempt.handler.handler",
    "BadSteps": "tfpreempt.handler.bad_steps",
    "State": "tfpreempt.checkpoint.state.state",
    "save_all_states": "tfpreempt.states.api",
    "save_state": "tfpreempt.states.api",
    "load_state": "tfpreempt.states.api",
    "num_restarts": "tfpreempt.core.restarts",
    "Checkpoint": "tfpreempt.checkpoint.restore.handle",
    "MirrorStatus": "tfpreempt.checkpoint.mirror.mirror_status",
    "TfpreemptError": "tfpreempt.errors",
    "data": "tfpreempt.data",
    "errors": "tfpreempt.errors",
    "keras": "tfpreempt.keras",
    "states": "tfpreempt.states",
    "trackers": "tfpreempt.trackers",
}


def __getattr__(name: str) -> object:
    """Loads a public name on first use and keeps it."""
    loading = importlib.import_module("tfpreempt.core.lazy_import")
    value: object = loading.loader(__name__, _HOMES)(name)
    return value


def __dir__() -> list[str]:
    """Returns the public names, loaded or not, with the module's own attributes."""
    return sorted({*globals(), *__all__})
