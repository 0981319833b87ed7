"""The number of restarts of a run, reported by its supervisor or by Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfpreempt.errors import ConfigurationError

# `tfpreempt run` sets the first variable; Slurm sets the second variable when Slurm
# requeues a job.
_VARIABLES = ("TFPREEMPT_NUM_RESTARTS", "SLURM_RESTART_COUNT")


def num_restarts(environment: Mapping[str, str] | None = None) -> int:
    """Returns the number of restarts of this run; 0 in the first start.

    Args:
        environment: environment to read; by default os.environ.

    Returns:
        The number set by `tfpreempt run`; without the supervisor, the number set by
        Slurm; 0 without both.

    Raises:
        ConfigurationError: the environment variable is not a whole number.
    """
    return read_restarts(environment) or 0


def read_restarts(environment: Mapping[str, str] | None = None) -> int | None:
    """Returns the number of restarts like `num_restarts`, but None if unknown."""
    environment = os.environ if environment is None else environment
    counts = (read_count(name, environment) for name in _VARIABLES)
    return next((count for count in counts if count is not None), None)


def read_count(name: str, environment: Mapping[str, str]) -> int | None:
    """Returns the number of restarts in a variable; None if the variable is not set.

    Args:
        name: name of the environment variable.
        environment: environment to read.

    Raises:
        ConfigurationError: the variable is not a whole number.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigurationError(
            f"the environment variable {name} is {text!r}; expected the number of "
            "restarts, such as 0 or 3. `tfpreempt run` and Slurm set the variable: "
            "unset the variable, or correct its value."
        )
    return int(text)
