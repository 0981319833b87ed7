"""Kubernetes: SIGTERM, and SIGKILL when the pod's grace period is over."""

from __future__ import annotations

import os

from typing_extensions import Unpack

from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms.config import Grace, Options, TerminationConfig, check_grace

GRACE_VARIABLE = "TFPREEMPT_GRACE_PERIOD"


class KubernetesTerminationConfig(TerminationConfig):
    """A pod that is evicted, drained, preempted or deleted; leaves with 143.

    Kubernetes does not tell a pod its `terminationGracePeriodSeconds`, so the pod's
    specification says it once more in the variable TFPREEMPT_GRACE_PERIOD. A preStop
    hook that creates the file of `notice_file` (or of TFPREEMPT_NOTICE_FILE) is heard
    as SIGTERM is; what the hook takes counts against the grace.

    Args:
        grace_period: seconds from SIGTERM to SIGKILL; by default what
            TFPREEMPT_GRACE_PERIOD says. With neither nobody knows: commit at once.
        **options: the other arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument or the variable cannot work.
    """

    def __init__(
        self, *, grace_period: Grace = None, **options: Unpack[Options]
    ) -> None:
        text = os.environ.get(GRACE_VARIABLE, "").strip()
        if grace_period is None and text:
            try:
                grace_period = check_grace(float(text))
            except ValueError as error:
                raise ConfigurationError(
                    f"the environment variable {GRACE_VARIABLE} is {text!r}; expected "
                    "the seconds of the pod's terminationGracePeriodSeconds, such as 30"
                ) from error
        super().__init__(grace_period=grace_period, **options)
