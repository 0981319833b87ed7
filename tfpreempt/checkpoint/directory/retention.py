"""Deletes unneeded commits and leftovers, and only files written by tfpreempt.

From a commit only the files named by its manifest are deleted, and empty directories.
The evidence that there was a commit goes first: the entry in TensorFlow's state file,
or the witness. Then the marker goes, and the manifest last, before its own directory.
An interrupted deletion therefore leaves an uncommitted save, whose deletion the next
start finishes.

tfpreempt creates no `workertemp_*` directories (the payload written by workers other
than the chief is in `.parts`), and so never deletes such directories: they belong to
TensorFlow's own handler.
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
"""Smallest size in bytes of a file removed by a thread; removal takes milliseconds."""

QUIET_SECONDS = 3600.0
"""Age in seconds of the last change after which a save without a lease has ended."""


def plan(
    entries: Iterable[Entry], max_to_keep: int | None, corrupt: Collection[str] = ()
) -> tuple[list[Entry], list[Entry]]:
    """Returns the commits of the own form to keep and to delete.

    Args:
        entries: the checkpoints in the directory, newest first.
        max_to_keep: number of commits to keep, at least 1; None keeps all.
        corrupt: tokens of known corrupt commits: not counted as kept, and deleted
            first.

    Returns:
        The commits to keep and the commits to delete, oldest first.
    """
    own = [e for e in entries if e.is_committed and e.kind is Kind.OWN][::-1]
    if max_to_keep is None:
        return own, []
    kept = [entry for entry in own if entry.token not in corrupt][-max_to_keep:]
    return kept, [entry for entry in own if entry not in kept]


def delete(files: Files, entry: Entry) -> None:
    """Deletes tfpreempt's files in a commit's directory (or a sidecar directory).

    Raises:
        OSError: the file system reports an error.
    """
    holder = os.path.join(entry.store.uri, entry.holder)
    if entry.manifest is None or not file_reading.is_real_dir(holder):
        return  # written by another program, or already deleted by another process
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
    # A file outside of this directory belongs to the user's manager.
    paths = [path for path in sizes if path.startswith(holder + "/")]
    folders = {holder, *map(os.path.dirname, paths)}
    # The kernel frees the pages of a file in the thread that removes it.
    large = [path for path in paths if sizes[path] >= _LARGE_BYTES]
    with contextlib.suppress(RuntimeError):  # no thread can start
        map_in_threads(
            files.remove, large, threads=os.cpu_count() or 1, name="tfpreempt-delete"
        )
        paths = [path for path in paths if sizes[path] < _LARGE_BYTES]
    with contained.parents_kept_open():
        for path in paths:
            files.remove(path)
    files.remove(os.path.join(holder, layout.METADATA))
    for name in file_reading.names(holder):
        if name.startswith(TEMPORARY):  # metadata, left by a killed process
            files.remove(os.path.join(holder, name))
    for name in (layout.MARKER, layout.MANIFEST, layout.METADATA, layout.WITNESS):
        files.remove(os.path.join(holder, name + ".tmp"))
    for folder in sorted(folders, key=len, reverse=True):
        if folder == holder:  # until here the manifest proves tfpreempt's ownership
            files.remove(os.path.join(holder, layout.MANIFEST))
        if file_reading.is_real_dir(folder) and not file_reading.names(folder):
            files.remove_dir(folder)


def delete_staging(files: Files, path: str) -> None:
    """Deletes a staging directory and its content; a link to a directory is left alone.

    Files are deleted from the top down in name order, so that a marker, if there is a
    marker after all, is the first. The manifest is deleted last: if a process that lost
    its lease renames the directory meanwhile, the rest still counts as an uncommitted
    save, removed by the next start.

    Raises:
        OSError: the file system reports an error.
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
    """Removes uncommitted saves; called before the first save of the process.

    The chief holds the lease of the directory, so no other process can commit there,
    and every save begun by another process is over. The directory of a worker with
    separate storage has no lease, and another worker of the machine may use the
    directory too: there a save is over after `QUIET_SECONDS` without a change.

    Args:
        files: the file operations.
        directory: the checkpoint directory.
        clock: time source for the age of files.
        is_sole: whether no other process can commit in the directory.

    Returns:
        The removed paths.

    Raises:
        OSError: the file system reports an error.
    """
    removed = []

    def is_over(path: str) -> bool:
        return is_sole or _is_quiet(path, clock.wall())

    # Saves, and the shares of other workers. `mirror/import_commit.py` finishes or
    # removes a download.
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
    """Returns whether an entry is a save in the own form, without a marker."""
    is_unmarked = entry.condition is CommitStatus.NOT_COMMITTED
    return entry.kind is Kind.OWN and is_unmarked and entry.manifest is not None


def _is_quiet(path: str, now: float) -> bool:
    """Returns whether nothing at or below a path has changed for QUIET_SECONDS."""
    changed = 0
    for each in (path, *(os.path.join(path, name) for name in file_reading.tree(path))):
        with contextlib.suppress(FileNotFoundError):
            changed = max(changed, os.stat(each).st_mtime_ns)
    return now - changed / 1e9 > QUIET_SECONDS
