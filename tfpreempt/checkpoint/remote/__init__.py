"""The copy of a checkpoint directory in an object store.

destination  the directory that a download fills
download     fetches a commit into a local directory, and verifies it
exchange     shards of workers that have another disk than the chief
fetch        brings a remote commit into a checkpoint directory
mirror       copies commits to an object store behind training's back, the newest first
mirroring    a program's side of the object store: where it is, what goes there
ranges       ranges of a file that is downloaded: split, summed up, written into
status       mirrorStatus: how far the copies in an object store are, for users
tidy         keeps order in an object store: retention, and what dead uploads left
upload       uploads one commit: its files by parallel threads, the manifest
"""
