"""Keeps a mirror, which is a copy of a checkpoint directory in an object store.

download          downloads the files of a commit, with several threads
download_target   the directory that a download fills, verified by a manifest
import_commit     imports a commit of the mirror into the checkpoint directory
journal_mirror    uploads and downloads the journals of a run
mirror            uploads commits in a thread, newest first
mirror_retention  deletes commits of the mirror beyond the number to keep
mirror_status     MirrorStatus, the progress of a mirror; the state of upload retries
resolve           finds the checkpoint at a path or a URL
shard_transfer    transfers the shards of workers without access to the chief's disk
store_selection   chooses the directory and the store of a run; scratch directories
upload            uploads one commit, large files in parts, its marker last

Imported by checkpoint/restore, cli, handler, jax, keras, states, tfpreempt.
"""
