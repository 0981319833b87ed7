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

import os
from collections.abc import Collection, Iterable

from tfpreempt.checkpoint import catalog, claims, layout, pointer
from tfpreempt.checkpoint.catalog import Condition, Entry, Kind
from tfpreempt.core.clock import Clock
from tfpreempt.storage import reading
from tfpreempt.storage.files import Files, remove_if_empty
from tfpreempt.storage.local import TEMPORARY


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
        pointer.unlist(files, entry.store.uri, f"{entry.name}/{layout.PAYLOAD}")
        witness = os.path.join(holder, layout.WITNESS)
        if reading.is_there(witness):
            files.remove(witness)
            files.sync_dir(holder)
    files.remove(os.path.join(holder, layout.MARKER))
    files.sync_dir(holder)
    folders = {holder}
    for path in (entry.file(file.name) for file in entry.manifest.files):
        if path.startswith(holder + "/"):  # else it belongs to the user's manager
            files.remove(path)
            folders.add(os.path.dirname(path))
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
    all, is the first: what is staged in its place is a commit with it.

    Raises:
        OSError: as the file system says.
    """
    if not reading.is_real_dir(path):
        return
    found = list(reading.walk(path))
    for folder, _, names in found:
        for name in names:
            files.remove(os.path.join(folder, name))
    for folder, folders, _ in reversed(found):
        for name in folders:
            inner = os.path.join(folder, name)
            if reading.is_link(inner):
                files.remove(inner)
            else:
                files.remove_dir(inner)
    files.remove_dir(path)


def clean(files: Files, directory: str, clock: Clock) -> list[str]:
    """Removes what dead saves of ours left; on the chief, before any save starts.

    Returns:
        What was removed.

    Raises:
        OSError: as the file system says.
    """
    removed = []
    for staged, paths in _staged(directory).items():
        with claims.left_over(staged, *paths, clock=clock) as is_left:
            for path in paths if is_left else ():
                delete_staging(files, path)
                removed.append(path)
            if is_left:
                claims.forget(files, staged)
    staging = os.path.join(directory, layout.STAGING)
    if reading.is_real_dir(staging):
        remove_if_empty(files, staging)
    for entry in filter(is_uncommitted, catalog.scan(directory)):
        if delete_uncommitted(files, entry, clock):
            removed.append(entry.path)
    return removed


def delete_uncommitted(files: Files, entry: Entry, clock: Clock) -> bool:
    """Deletes what a save renamed and did not live to mark; not that of a living one.

    Returns:
        Whether it did.

    Raises:
        OSError: as the file system says.
    """
    if not is_uncommitted(entry):
        return False
    assert entry.manifest is not None
    attempt = entry.manifest.metadata.get("attempt")
    is_named = isinstance(attempt, str) and layout.ATTEMPT.fullmatch(attempt)
    directory, staged = os.path.dirname(entry.path), entry.path
    if is_named:
        staged = layout.staging_directory(directory, str(attempt))
    with claims.left_over(staged, entry.path, clock=clock) as is_left:
        if is_left:
            delete(files, entry)
        return is_left


def is_uncommitted(entry: Entry) -> bool:
    """Whether it is in the own form, with a manifest of ours and no marker."""
    is_unmarked = entry.condition is Condition.NOT_COMMITTED
    return entry.kind is Kind.OWN and is_unmarked and entry.manifest is not None


def _staged(directory: str) -> dict[str, list[str]]:
    """What saves staged and have not committed, and that has no manifest.

    A staging directory is ours whole. One that was staged under its last name is taken
    for ours if every file in it is one that a save of ours writes: the name alone could
    be somebody else's.

    Returns:
        By the path where a save stages, the directories of it that are there.
    """
    staging = os.path.join(directory, layout.STAGING)
    found: dict[str, list[str]] = {}
    for name in reading.names(staging) if reading.is_real_dir(staging) else ():
        path = os.path.join(staging, name)
        if name.startswith(layout.FETCH):
            continue  # a download that goes on; `fetch` removes old ones
        if layout.ATTEMPT.fullmatch(name) and not reading.is_link(path):
            staged = path.removesuffix(layout.CLAIM_SUFFIX)
            parts = found.setdefault(staged.removesuffix(layout.PARTS_SUFFIX), [])
            parts += [path] if reading.is_dir(path) else []
    for name in reading.names(directory):
        path = os.path.join(directory, name)
        if (
            name.startswith(layout.IN_PLACE)
            and layout.COMMIT.fullmatch(name)
            and reading.is_real_dir(path)
            and catalog.at(path).condition is Condition.NOT_COMMITTED
            and all(map(layout.SAVED.fullmatch, reading.tree(path)))
        ):
            found[path] = [path]
    return found
