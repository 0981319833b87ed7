"""The copy of a checkpoint directory in an object store.

bar        a progress bar for bytes, on a terminal only
download   fetches a commit from an object store into a local directory, and verifies it
exchange   shards of workers that have another disk than the chief
fetch      brings a remote commit into a checkpoint directory
landing    the local side of a download: a directory that is filled
mirror     copies commits to an object store behind training's back, the newest first
mirroring  a program's side of the object store: where it is, what goes there
sink       what a store writes into: a range of a file, checksummed on the way
status     mirrorStatus: how far the copies in an object store are, for users
tidy       keeps order in an object store: retention, and what dead uploads left
upload     uploads one commit: its files by parallel threads, the manifest
"""
