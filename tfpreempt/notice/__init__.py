"""Sources of preemption notices, and the watcher that starts and stops the sources.

`gce_source()`, `aws_source()` and `azure_source()` return sources for
`TerminationConfig(sources=[...])`. The names are loaded on first use.

_signal_registry   registry of the watched signals, with one handler per signal
_wakeup            reads signals from Python's wake-up fd, in a thread
aws                notices from the instance metadata service of Amazon EC2
azure              notices from Azure's Scheduled Events
callable           notices from a function of the user, called repeatedly
cloud_sources      gce_source(), aws_source(), azure_source(): sources for users
file               notices from the appearance of a file
forked_children    keeps children of multiprocessing alive if a signal is sent to the
                   whole process group
gce                notices from Google Compute Engine's metadata server
killed_children    finds children of this process that a signal has killed
metadata_session   requests to a metadata server, with limits for time and size
metadata_watch     several sources that share one thread, which polls a metadata service
polling            a source that polls in a thread, and logs each failure once
signals            notices from signals
source             the interface of a source, and a base class for sources
tensorflow_notice  notices from TensorFlow's preemption key, set by its SIGTERM handler
watcher            starts and stops the sources, each with its own grace period

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
