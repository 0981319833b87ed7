"""Deletes what is no longer wanted, and nothing that tfpreempt didn't write.

From a commit only the files that its manifest names are deleted, and the directories
that are empty. What TensorFlow's state file says of it goes first, or its own witness,
because that says that there was a commit; then the marker; and the manifest last,
before its own directory.
So a deletion that is cut short leaves something that is no commit and that the next
start can finish.

tfpreempt makes no `workertemp_*` directories (what other workers than the chief write
of the payload lies in `.parts`), so it never deletes one: those it finds belong to
TensorFlow's own handler.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable

from tfpreempt.checkpoint.directory import catalog, checkpoint_state, layout
from tfpreempt.checkpoint.directory.catalog import Condition, Entry, Kind
from tfpreempt.core import contained
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import reading
from tfpreempt.storage.files import Files, remove_if_empty
from tfpreempt.storage.local import TEMPORARY

_LARGE_BYTES = 1 << 25
"""Size of a file that is worth a thread: its removal takes some milliseconds."""

QUIET_SECONDS = 3600.0
"""Age of the newest change at which a save in a directory without a lease is over."""


def plan(
    entries: Iterable[Entry], max_to_keep: int | None, damaged: Collection[str] = ()
) -> tuple[list[Entry], list[Entry]]:
    """Which of our own commits stay and which go.

    Args:
        entries: what lies in the directory, newest first.
        max_to_keep: how many to keep, at least 1; None keeps all.
        damaged: tokens of commits that are known to be damaged: they don't count, and
            go first.

    Returns:
        Those to keep and those to delete, oldest first.
    """
    own = [e for e in entries if e.is_committed and e.kind is Kind.OWN][::-1]
    if max_to_keep is None:
        return own, []
    kept = [entry for entry in own if entry.token not in damaged][-max_to_keep:]
    return kept, [entry for entry in own if entry not in kept]


def delete(files: Files, entry: Entry) -> None:
    """Deletes what we wrote in a commit's directory (or a sidecar directory).

    Raises:
        OSError: as the file system says.
    """
    holder = os.path.join(entry.store.uri, entry.holder)
    if entry.manifest is None or not reading.is_real_dir(holder):
        return  # not ours, or somebody else was quicker
    if entry.kind is Kind.OWN:
        checkpoint_state.unlist(
            files, entry.store.uri, f"{entry.name}/{layout.PAYLOAD}"
        )
        witness = os.path.join(holder, layout.WITNESS)
        if reading.is_there(witness):
            files.remove(witness)
            files.sync_dir(holder)
    files.remove(os.path.join(holder, layout.MARKER))
    files.sync_dir(holder)
    sizes = {entry.file(file.name): file.size for file in entry.manifest.files}
    # A file that is elsewhere belongs to the user's manager.
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
    for name in reading.names(holder):
        if name.startswith(TEMPORARY):  # of metadata, by a process that was killed
            files.remove(os.path.join(holder, name))
    for name in (layout.MARKER, layout.MANIFEST, layout.METADATA, layout.WITNESS):
        files.remove(os.path.join(holder, name + ".tmp"))
    for folder in sorted(folders, key=len, reverse=True):
        if folder == holder:  # until here the manifest says that all this is ours
            files.remove(os.path.join(holder, layout.MANIFEST))
        if reading.is_real_dir(folder) and not reading.names(folder):
            files.remove_dir(folder)


def delete_staging(files: Files, path: str) -> None:
    """Deletes a staging directory with all that is in it; a link to one is left alone.

    Files go from the top down in name order, so that a marker, if there is one after
    all, is the first. The manifest goes last: if a process that lost its lease renames
    the directory meanwhile, the rest still counts as an uncommitted save, which the
    next start removes.

    Raises:
        OSError: as the file system says.
    """
    if not reading.is_real_dir(path):
        return
    found = list(reading.walk(path))
    manifest = os.path.join(path, layout.MANIFEST)
    for folder, _, names in found:
        for name in names:
            if os.path.join(folder, name) != manifest:
                files.remove(os.path.join(folder, name))
    for folder, folders, _ in reversed(found):
        for name in folders:
            inner = os.path.join(folder, name)
            if reading.is_link(inner):
                files.remove(inner)
            else:
                files.remove_dir(inner)
    files.remove(manifest)
    files.remove_dir(path)


def clean(
    files: Files, directory: str, clock: Clock, *, is_sole: bool = True
) -> list[str]:
    """Removes saves that never committed, before the first save of this process.

    The chief holds the lease of the directory, so no other process can commit there,
    and each save that another process began is over. The directory of a worker with
    separate storage has no lease, and another worker of the machine may use it too:
    there a save is over after `QUIET_SECONDS` without a change.

    Args:
        files: the file operations.
        directory: the checkpoint directory.
        clock: for the age of files.
        is_sole: whether no other process can commit in the directory.

    Returns:
        The paths that were removed.

    Raises:
        OSError: as the file system says.
    """
    removed = []

    def is_over(path: str) -> bool:
        return is_sole or _is_quiet(path, clock.wall())

    # Saves, and the shares that other workers wrote for them. A download is finished or
    # removed by `mirror/import_commit.py`.
    staging = os.path.join(directory, layout.STAGING)
    is_there = reading.is_real_dir(staging)
    for name in reading.names(staging) if is_there else ():
        path = os.path.join(staging, name)
        is_ours = layout.ATTEMPT.fullmatch(name) and not name.startswith(layout.FETCH)
        if is_ours and reading.is_real_dir(path) and is_over(path):
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
    """Whether it is in the own form, with a manifest of ours and no marker."""
    is_unmarked = entry.condition is Condition.NOT_COMMITTED
    return entry.kind is Kind.OWN and is_unmarked and entry.manifest is not None


def _is_quiet(path: str, now: float) -> bool:
    """Returns whether nothing at or below a path has changed for QUIET_SECONDS."""
    changed = 0
    for each in (path, *(os.path.join(path, name) for name in reading.tree(path))):
        with contextlib.suppress(FileNotFoundError):
            changed = max(changed, os.stat(each).st_mtime_ns)
    return now - changed / 1e9 > QUIET_SECONDS
