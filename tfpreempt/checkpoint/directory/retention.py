"""Deletes commits beyond the number to keep, and leftovers of interrupted saves.

Only files written by tfpreempt are deleted: the files that the manifest of a commit
names, and directories that are then empty. The evidence that a commit exists is deleted
first: the entry in TensorFlow's state file, or the witness file. The marker is deleted
next; the manifest is the last file. So an interrupted deletion leaves an uncommitted
save, which the next start of the program deletes completely.

Directories `workertemp_*` are never deleted: they belong to TensorFlow's own handler.
tfpreempt creates no such directories (the workers write into `.parts`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable

from tfpreempt.checkpoint.directory import catalog, checkpoint_state, layout
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.core import contained
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files, remove_if_empty
from tfpreempt.storage.local import TEMPORARY

_LARGE_BYTES = 1 << 25
"""Smallest size in bytes of a file that is removed by one of several threads."""

QUIET_SECONDS = 3600.0
"""Seconds without a change after which a save counts as ended, if there is no lease."""


def plan(
    entries: Iterable[Entry], max_to_keep: int | None, corrupt: Collection[str] = ()
) -> tuple[list[Entry], list[Entry]]:
    """Decides which commits to keep and which to delete. Flat checkpoints are in
    neither list: the user's CheckpointManager deletes flat checkpoints.

    Args:
        entries: the checkpoints in the directory, newest first.
        max_to_keep: number of commits to keep, at least 1; None keeps all.
        corrupt: tokens of commits known to be corrupt. These commits are deleted, and
            do not count for `max_to_keep`; with None, they stay.

    Returns:
        The commits to keep and the commits to delete, both oldest first.
    """
    own = [e for e in entries if e.is_committed and e.kind is Kind.OWN][::-1]
    if max_to_keep is None:
        return own, []
    kept = [entry for entry in own if entry.token not in corrupt][-max_to_keep:]
    return kept, [entry for entry in own if entry not in kept]


def delete(files: Files, entry: Entry) -> None:
    """Deletes the files of a commit that tfpreempt wrote. Does nothing if the manifest,
    which names the files, cannot be read.

    Args:
        files: file system operations that make the changes.
        entry: the commit. Of a flat checkpoint, only the sidecar is deleted.

    Raises:
        OSError: error of the file system.
    """
    holder = os.path.join(entry.store.uri, entry.holder)
    if entry.manifest is None or not file_reading.is_real_dir(holder):
        return  # not tfpreempt's, or already deleted
    if entry.kind is Kind.OWN:
        checkpoint_state.unlist(
            files, entry.store.uri, f"{entry.name}/{layout.PAYLOAD}"
        )
        witness = os.path.join(holder, layout.WITNESS)
        if file_reading.is_there(witness):
            files.remove(witness)
            files.sync_dir(holder)
    files.remove(os.path.join(holder, layout.MARKER))
    files.sync_dir(holder)
    sizes = {entry.file(file.name): file.size for file in entry.manifest.files}
    # Files outside of the directory belong to the user's manager, and stay.
    paths = [path for path in sizes if path.startswith(holder + "/")]
    folders = {holder, *map(os.path.dirname, paths)}
    # Remove large files with several threads: the kernel frees the memory pages of a
    # file in the thread that removes the file.
    large = [path for path in paths if sizes[path] >= _LARGE_BYTES]
    # RuntimeError: no new thread can start. Remove the large files with the others.
    with contextlib.suppress(RuntimeError):
        map_in_threads(
            files.remove, large, threads=os.cpu_count() or 1, name="tfpreempt-delete"
        )
        paths = [path for path in paths if sizes[path] < _LARGE_BYTES]
    with contained.parents_kept_open():
        for path in paths:
            files.remove(path)
    files.remove(os.path.join(holder, layout.METADATA))
    for name in file_reading.names(holder):
        # Remove the temporary file of the metadata, left by a killed process.
        if name.startswith(TEMPORARY):
            files.remove(os.path.join(holder, name))
    for name in (layout.MARKER, layout.MANIFEST, layout.METADATA, layout.WITNESS):
        files.remove(os.path.join(holder, name + ".tmp"))
    for folder in sorted(folders, key=len, reverse=True):
        # Remove the manifest last: it proves that tfpreempt wrote the directory.
        if folder == holder:
            files.remove(os.path.join(holder, layout.MANIFEST))
        if file_reading.is_real_dir(folder) and not file_reading.names(folder):
            files.remove_dir(folder)


def delete_staging(files: Files, path: str) -> None:
    """Deletes a staging directory and its content. Does nothing if the path is a link.

    Files are deleted from the top down, in name order, so a marker, if there is one,
    is deleted before other files. The manifest is deleted last: a process that lost the
    lease may rename the directory to a commit's name during the deletion. With a
    manifest, the remaining files count as an uncommitted save, which the next start of
    the program deletes.

    Raises:
        OSError: error of the file system.
    """
    if not file_reading.is_real_dir(path):
        return
    found = list(file_reading.walk(path))
    manifest = os.path.join(path, layout.MANIFEST)
    for folder, _, names in found:
        for name in names:
            if os.path.join(folder, name) != manifest:
                files.remove(os.path.join(folder, name))
    for folder, folders, _ in reversed(found):
        for name in folders:
            inner = os.path.join(folder, name)
            if file_reading.is_link(inner):
                files.remove(inner)
            else:
                files.remove_dir(inner)
    files.remove(manifest)
    files.remove_dir(path)


def clean(
    files: Files, directory: str, clock: Clock, *, is_sole: bool = True
) -> list[str]:
    """Deletes uncommitted saves that have ended. Called before the first save of the
    process.

    The chief holds the lease of the directory, so no other process can commit there,
    and every uncommitted save has ended. A worker with separate storage has no lease,
    and another worker on the machine may use the same directory. In this case a save
    counts as ended after `QUIET_SECONDS` without a change.

    Args:
        files: file system operations that make the changes.
        directory: the checkpoint directory.
        clock: time source that is compared with the modification times of files.
        is_sole: whether no other process can commit in the directory.

    Returns:
        The removed paths.

    Raises:
        OSError: error of the file system.
    """
    removed = []

    def is_over(path: str) -> bool:
        return is_sole or _is_quiet(path, clock.wall())

    # Delete staged saves, and the `.parts` of workers, but no download:
    # `mirror/import_commit.py` completes or deletes downloads.
    staging = os.path.join(directory, layout.STAGING)
    is_there = file_reading.is_real_dir(staging)
    for name in file_reading.names(staging) if is_there else ():
        path = os.path.join(staging, name)
        is_ours = layout.ATTEMPT.fullmatch(name) and not name.startswith(layout.FETCH)
        if is_ours and file_reading.is_real_dir(path) and is_over(path):
            delete_staging(files, path)
            removed.append(path)
    if is_there:
        remove_if_empty(files, staging)
    for entry in filter(is_uncommitted, catalog.scan(directory)):
        if is_over(entry.path):
            delete(files, entry)
            removed.append(entry.path)
    return removed


def is_uncommitted(entry: Entry) -> bool:
    """Returns whether an entry is a save without a marker, with the directory name of a
    commit. (Flat checkpoints do not count.)"""
    is_unmarked = entry.condition is CommitStatus.NOT_COMMITTED
    return entry.kind is Kind.OWN and is_unmarked and entry.manifest is not None


def _is_quiet(path: str, now: float) -> bool:
    """Returns whether no file at or below a path has changed for QUIET_SECONDS."""
    changed = 0
    for each in (path, *(os.path.join(path, name) for name in file_reading.tree(path))):
        with contextlib.suppress(FileNotFoundError):
            changed = max(changed, os.stat(each).st_mtime_ns)
    return now - changed / 1e9 > QUIET_SECONDS
