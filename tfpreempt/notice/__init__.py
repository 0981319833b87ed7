"""Is this machine going away?  Sources of notices, and the watcher over them.

_azure_events     the document of Azure's Scheduled Events, as frozen values
_faults           what a source does about its own failures: each logged once
_gce_topics       what the entries of GCE's metadata server say
_http             one request to a metadata server: bounded in time and size
_outlet           the one way out of a source: open from start to close, once
_polling          one loop that asks again and again: edges out, faults logged once
_shared           many sources over one thread that asks for all of them
_signal_registry  the process's watched signals: one handler for each
_times            times as the clouds write them
_transport        hTTP over sockets with a total deadline, a byte limit
_wakeup           signals become bytes in a socket, read by a thread
aws               notices from the instance metadata service of Amazon EC2
azure             notices from Azure's Scheduled Events
callable          a notice from a function that is asked again and again
children          the children of this process that a signal ended
file              a notice from a file that appears
gce               notices from Google Compute Engine's metadata server
native            a notice from TensorFlow's own key, which its C++ SIGTERM handler sets
readers           children that multiprocessing forks outlive a signal to the whole
signals           a notice from a signal
source            what every source of notices promises
watcher           one watcher, many sources, each with its own grace
"""

from __future__ import annotations
