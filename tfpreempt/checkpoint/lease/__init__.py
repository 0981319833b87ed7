"""Leases: only one run at a time uses a checkpoint directory or a mirror.

directory_lease     the lease of a directory, as files in the directory; its fence
                    (protection against commits by an earlier holder)
lease               takes, waits for, renews and releases a lease; detects a loss
lease_record        the record of a lease's holder; whether that process still runs
lease_timeouts      how long a new run waits for the lease of another process
object_store_lease  the lease of a mirror, as objects in its object store

Imported by checkpoint/mirror, checkpoint/restore, cli, handler, states.
"""
