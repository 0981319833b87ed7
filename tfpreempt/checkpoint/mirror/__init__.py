"""The mirror: the copy of a checkpoint directory in an object store.

download         downloads the files of a commit in ranges, with many threads
download_target  the new directory that a download fills, checked by its manifest
import_commit    makes a commit of the mirror a commit of the directory
journal_mirror   copies journals to the object store
mirror           uploads commits in a thread, newest first
resolve          the checkpoint that a path or a URL names
retention        deletes commits of the mirror beyond the number to keep
shard_transfer   exchanges the parts of workers with separate disks
status           MirrorStatus: how far the mirror is; how long its retries take
store_selection  the directory and the object store of a run; scratch directories
upload           uploads one commit, large files in parts, its marker last

Imported by checkpoint/restore, cli, handler, keras, states.
"""
