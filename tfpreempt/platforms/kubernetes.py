"""Kubernetes: SIGTERM, then SIGKILL after the pod's grace period."""

from __future__ import annotations

import os

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms.config import ConfigOptions, TerminationConfig

GRACE_VARIABLE = "TFPREEMPT_GRACE_PERIOD"


class KubernetesTerminationConfig(TerminationConfig):
    """Config of a pod that is evicted, drained, preempted or deleted.

    The process exits with code 143.

    A program cannot read the `terminationGracePeriodSeconds` of its pod, so repeat the
    value in the environment variable TFPREEMPT_GRACE_PERIOD of the pod's specification.
    A preStop hook may create the notice file (`notice_file`, or TFPREEMPT_NOTICE_FILE),
    which is a notice like SIGTERM. The time that the hook takes is part of the grace
    period.

    Args:
        grace_period: seconds from SIGTERM to SIGKILL; by default the value of
            TFPREEMPT_GRACE_PERIOD. If neither is given, the grace period is unknown,
            and the step is committed at once.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument or the variable is invalid.
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
