"""Functions that return a cloud's notice source, for `TerminationConfig(sources=)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.deadline import remaining_after_delay
from tfpreempt.notice.aws import INTERVAL_SECONDS, AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.metadata_watch import MetadataWatch
from tfpreempt.notice.watcher import NoticeSourceConfig

GceTopic = Literal[
    "preempted", "maintenance-event", "upcoming-maintenance", "stop-state"
]
AwsTopic = Literal["spot-interruption", "rebalance", "lifecycle"]
AzureKind = Literal["Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"]


def gce_source(
    topic: GceTopic, *, grace_period: Grace = None
) -> Callable[[], NoticeSourceConfig]:
    """Returns a source of notices from Compute Engine's metadata server.

    | topic | a notice is given |
    |---|---|
    | `preempted` | when Compute Engine preempts the VM |
    | `maintenance-event` | before a maintenance that ends the VM; not before a live migration |
    | `upcoming-maintenance` | `grace_period` before the window of an announced maintenance; without a grace period, at the announcement, up to seven days before |
    | `stop-state` | when a graceful shutdown of the VM is pending |

    The address of the server is the value of GCE_METADATA_HOST, or else the usual
    address.

    Args:
        topic: the entry of the metadata server.
        grace_period: seconds, or a timedelta, from the notice until the VM is
            terminated. None: unknown; the step is committed at once.

    Returns:
        An element of `TerminationConfig(sources=[...])`.

    Raises:
        ConfigurationError: an argument or the address is invalid.
    """  # noqa: E501 - a table's row is one line
    grace = check_grace(grace_period)
    lead = grace if topic == "upcoming-maintenance" else None
    return _maker(
        topic, lambda: GceWatch([topic], maintenance_lead_seconds=lead), grace
    )


def aws_source(
    topic: AwsTopic, *, grace_period: Grace = None
) -> Callable[[], NoticeSourceConfig]:
    """Returns a source of notices from the instance metadata service of Amazon EC2.

    | topic | a notice is given |
    |---|---|
    | `spot-interruption` | two minutes before the interruption of a Spot instance |
    | `rebalance` | when the risk of an interruption is high: early, and sometimes without a later interruption |
    | `lifecycle` | when the Auto Scaling group terminates the instance |

    The address of the service is the value of AWS_EC2_METADATA_SERVICE_ENDPOINT, or
    else the usual address.

    Args:
        topic: the entry of the metadata service.
        grace_period: seconds, or a timedelta, from the notice until the instance is
            terminated. 5 s are subtracted, because the service is polled every 5 s.
            None: unknown; the step is committed at once.

    Returns:
        An element of `TerminationConfig(sources=[...])`.

    Raises:
        ConfigurationError: an argument or the address is invalid.
    """  # noqa: E501 - a table's row is one line
    grace = check_grace(grace_period)
    if grace is not None:
        grace = remaining_after_delay(grace, INTERVAL_SECONDS)
    return _maker(topic, lambda: AwsWatch([topic]), grace)


def azure_source(
    kind: AzureKind, *, grace_period: Grace = None
) -> Callable[[], NoticeSourceConfig]:
    """Returns a source of notices from Azure's Scheduled Events.

    The address of the service is the value of TFPREEMPT_AZURE_METADATA, or else the
    usual address.

    Args:
        kind: kind of events that are notices: Preempt, Terminate, Reboot, Redeploy or
            Freeze. In a Freeze the VM pauses for some seconds, and keeps its memory.
        grace_period: seconds, or a timedelta, from the notice until the VM is
            terminated. None: unknown; the step is committed at once.

    Returns:
        An element of `TerminationConfig(sources=[...])`.

    Raises:
        ConfigurationError: an argument or the address is invalid.
    """
    return _maker(kind, lambda: AzureWatch([kind]), check_grace(grace_period))


def _maker(
    topic: str, make_watch: Callable[[], MetadataWatch], grace_seconds: float | None
) -> Callable[[], NoticeSourceConfig]:
    """Returns a function that returns a new source of a topic.

    Every source has a separate, new watch. A forked process could not use a watch of
    its parent, because it does not inherit the watch's thread.

    Args:
        topic: topic of the source.
        make_watch: function that returns a new watch. It is also called once now, to
            check the arguments and the address.
        grace_seconds: grace period of the source; None if unknown.

    Raises:
        ConfigurationError: an argument or the address is invalid.
    """
    make_watch()
    return lambda: NoticeSourceConfig(make_watch().source(topic), grace_seconds)
