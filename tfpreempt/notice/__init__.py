"""Sources of preemption notices, and the watcher that starts and stops the sources.

`gce_source()`, `aws_source()` and `azure_source()` make sources for a config's
`sources`. The names are loaded on first use.

_signal_registry   the process's watched signals: one handler for each signal
_wakeup            the wake-up fd: signals as bytes in a socket, read by a thread
aws                notices from the instance metadata service of Amazon EC2
azure              notices from Azure's Scheduled Events
callable           notices from a function of the user, called again and again
cloud_sources      gce_source(), aws_source(), azure_source(): sources for users
file               notices from a file that appears
forked_children    keeps multiprocessing's children alive after a signal to the group
gce                notices from Google Compute Engine's metadata server
killed_children    children of the process that were killed by a signal
metadata_session   requests to a metadata server, bounded in time and size
metadata_watch     many sources over one thread that polls one service
polling            polling in a thread: reports changes, logs each failure once
signals            notices from signals
source             contract of every source, and the base class of tfpreempt's sources
tensorflow_notice  notices from TensorFlow's preemption key, set by its SIGTERM handler
watcher            one watcher for many sources, each with a grace period of its own

Imported by cli, handler, platforms, testing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpreempt.core.lazy_import import loader

if TYPE_CHECKING:
    from tfpreempt.notice.cloud_sources import aws_source, azure_source, gce_source
    from tfpreempt.notice.source import NoticeSource
    from tfpreempt.notice.watcher import NoticeSourceConfig

__all__ = [
    "NoticeSource",
    "NoticeSourceConfig",
    "aws_source",
    "azure_source",
    "gce_source",
]

_HOMES = {
    "NoticeSource": "tfpreempt.notice.source",
    "NoticeSourceConfig": "tfpreempt.notice.watcher",
    "aws_source": "tfpreempt.notice.cloud_sources",
    "azure_source": "tfpreempt.notice.cloud_sources",
    "gce_source": "tfpreempt.notice.cloud_sources",
}
__getattr__ = loader(__name__, _HOMES)
