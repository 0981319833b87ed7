"""Kubernetes: SIGTERM, and SIGKILL when the pod's grace period is over."""

from __future__ import annotations

import os

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms.config import ConfigOptions, TerminationConfig

GRACE_VARIABLE = "TFPREEMPT_GRACE_PERIOD"


class KubernetesTerminationConfig(TerminationConfig):
    """Config of a pod that is evicted, drained, preempted or deleted. Exits with 143.

    Kubernetes does not pass `terminationGracePeriodSeconds` to a pod, so the pod's
    specification repeats the value in the variable TFPREEMPT_GRACE_PERIOD. A preStop
    hook that creates the file of `notice_file` (or of TFPREEMPT_NOTICE_FILE) is a
    notice like SIGTERM; the hook's running time counts against the grace period.

    Args:
        grace_period: seconds from SIGTERM to SIGKILL; by default the value of
            TFPREEMPT_GRACE_PERIOD. Without either the grace period is unknown: the step
            is committed at once.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument or the variable cannot work.
    """

    def __init__(
        self, *, grace_period: Grace = None, **options: Unpack[ConfigOptions]
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
