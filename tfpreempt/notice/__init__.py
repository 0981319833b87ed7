"""Is this machine going away?  Sources of notices, and the watcher over them.

source            what every source promises, and what all of ours share
signals           a notice from a signal
_signal_registry  the process's watched signals: one handler for each
_wakeup           signals become bytes in a socket, read by a thread
readers           children that multiprocessing forks outlive a signal to the group
children          the children of this process that a signal ended
callable          a notice from a function that is asked again and again
file              a notice from a file that appears
polling           what asks again and again: edges out, faults logged once
gce               notices from Google Compute Engine's metadata server
aws               notices from the instance metadata service of Amazon EC2
azure             notices from Azure's Scheduled Events
topics            many sources over one thread, which asks one service for all of them
metadata          requests to a metadata server: bounded in time and size
native            a notice from TensorFlow's own key, which its SIGTERM handler sets
watcher           one watcher, many sources, each with its own grace

Imported by cli, handler, platforms, testing.
"""
