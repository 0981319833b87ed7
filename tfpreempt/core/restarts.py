"""How often this run was started again, as whoever starts it says."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfpreempt.errors import ConfigurationError

# `tfpreempt run` sets the first one; Slurm the second one when it requeues a job.
_VARIABLES = ("TFPREEMPT_NUM_RESTARTS", "SLURM_RESTART_COUNT")


def num_restarts(environment: Mapping[str, str] | None = None) -> int:
    """How many times this run was started again; 0 in its first start.

    Args:
        environment: to read it from; None: this process's.

    Returns:
        What `tfpreempt run` says, else what Slurm says, else 0.

    Raises:
        ConfigurationError: the variable that says it is no whole number.
    """
    return read_restarts(environment) or 0


def read_restarts(environment: Mapping[str, str] | None = None) -> int | None:
    """As `num_restarts`, but None where nobody counts."""
    environment = os.environ if environment is None else environment
    counts = (read_count(name, environment) for name in _VARIABLES)
    return next((count for count in counts if count is not None), None)


def read_count(name: str, environment: Mapping[str, str]) -> int | None:
    """A number of restarts as a variable says it; None where it is not set.

    Raises:
        ConfigurationError: it is no whole number.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigurationError(
            f"the environment variable {name} is {text!r}; expected the number of "
            "restarts, such as 0 or 3. `tfpreempt run` and Slurm set it: unset it, "
            "or correct what sets it."
        )
    return int(text)
