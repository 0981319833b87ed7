"""One run at a time for each directory and each mirror.

directory_lease     the lease of a directory on its disk, and the fence of its commits
lease               takes, waits for, renews and loses a lease
lease_record        the holder of a lease, and whether the holder's process runs
lease_timeouts      how long a start waits for the lease of another process
object_store_lease  the lease of a mirror, in its object store

Imported by checkpoint/mirror, checkpoint/restore, handler, states.
"""
