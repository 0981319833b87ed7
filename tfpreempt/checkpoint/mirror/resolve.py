"""Finds the checkpoint that a `tfpreempt.Checkpoint` refers to, local or in a store.

The checkpoint is a commit, or any directory with files. The functions read the storage
at each call; nothing is cached. File names are validated before use.
"""

from __future__ import annotations

import dataclasses
import logging
import os

from tfpreempt import errors
from tfpreempt.checkpoint.directory import (
    catalog,
    checkpoint_state,
    flat_commit,
    layout,
)
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.directory.manifest import MAX_FILES, FileEntry, Manifest
from tfpreempt.checkpoint.mirror import download_target
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectStore, read_object, summed

_log = logging.getLogger(__name__)
_THREADS = 8


def at_path(path: str, *, with_sums: bool = False) -> Entry:
    """Returns the checkpoint at a local path.

    Args:
        path: absolute path of a directory, or TensorFlow's prefix of a flat checkpoint
            (`.../ckpt-5`).
        with_sums: whether to compute checksums if the checkpoint is not a commit; this
            reads every byte.

    Raises:
        CheckpointError: no checkpoint is at the path; the message describes what the
            path leads to.
    """
    path = path.removesuffix(layout.SIDECAR_SUFFIX)
    directory, name = os.path.split(path)
    if os.path.isdir(layout.sidecar(path)):
        unread = catalog.unread_entry(catalog.reader(directory), layout.sidecar(name))
        if (found := _commit(unread)) is not None:
            return found
    if os.path.isdir(path):
        return in_store(catalog.reader(path), with_sums=with_sums)
    if not os.path.isfile(path + ".index"):
        raise _nothing(path)
    foreign = Entry(store=catalog.reader(directory), name=name, kind=Kind.EXTERNAL)
    names = [os.path.basename(each) for each in flat_commit.payload_files(path)]
    return _plain(foreign, [each for each in names if each != name], with_sums)


def in_store(store: ObjectStore, *, with_sums: bool = False) -> Entry:
    """Returns the checkpoint in a store that contains only this checkpoint's files.

    Args:
        store: store to read.
        with_sums: whether to get checksums if the checkpoint is not a commit; this
            takes a request per object.

    Raises:
        CheckpointError: the store does not contain exactly one checkpoint; the message
            describes the content.
    """
    unread = catalog.unread_entry(store)
    if (found := _commit(unread)) is not None:
        return found
    inner = catalog.listing(store)
    committed = [entry for entry in map(catalog.read, inner) if entry.is_committed]
    copies = [entry for entry in inner if entry.kind is Kind.MIRROR]
    if newest := catalog.in_order(committed) or copies:
        raise errors.CheckpointError(
            f"{store.uri} contains all commits of a run; expected the path of a single "
            "commit. Pass a commit, for example the newest: "
            f"Checkpoint({newest[0].path!r})."
        )
    names = _names(store)
    if unread.kind is Kind.MIRROR or download_target.PROGRESS in names:
        raise _unfinished(unread.path)
    if not names:
        raise _nothing(store.uri)
    return _plain(unread, names, with_sums)


def listed_in_store(store: ObjectStore) -> Entry | None:
    """Returns the flat checkpoint that TensorFlow's state file in a store names.

    Returns:
        The checkpoint, with a manifest made from its files; None if the state file is
        missing, or names a checkpoint that does not exist.

    Raises:
        CheckpointError: the store failed, or the state file names a path outside the
            store.
    """
    data = read_object(store, layout.POINTER, checkpoint_state.MAX_BYTES)
    listed = None if data is None else checkpoint_state.parse(data)
    if listed is None:
        return None
    latest = listed.latest.removeprefix(store.uri).lstrip("/")
    if reason := paths.why_unsafe(latest):
        raise errors.CheckpointError(
            f"TensorFlow's state file in {store.uri} names {listed.latest!r}, which "
            f"{reason}; expected a checkpoint below {store.uri}. Copy the checkpoint "
            "into a separate directory, and pass this directory."
        )
    # Cut the names, and do not normalize them: `download` refuses a name with "..".
    start = len(latest) - len(os.path.basename(latest))
    names = [name[start:] for name in store.list(latest + ".")]
    if not any(name.endswith(".index") for name in names):
        return None
    entry = Entry(store=store, name=latest, kind=Kind.EXTERNAL)
    return _plain(entry, names, with_sums=True)


def tensorflow_prefix(found: Entry) -> str | None:
    """Returns TensorFlow's prefix of a local checkpoint; None without tensors."""
    if found.is_committed:
        return found.prefix
    names = [entry.name for entry in found.files]
    indices = [name.removesuffix(".index") for name in names if name.endswith(".index")]
    listed = checkpoint_state.read(found.store.uri)
    if listed is not None and listed.latest in indices:
        return found.file(listed.latest)
    return found.file(indices[0]) if len(indices) == 1 else None


def _commit(unread: Entry) -> Entry | None:
    """Returns an entry completed by manifest and marker; None if neither exists.

    Raises:
        CheckpointError: the commit is corrupt or incomplete.
    """
    found = catalog.read(unread)
    if found.condition is CommitStatus.CORRUPT:
        raise errors.CheckpointCorruptedError(found.problems[0])
    if not found.is_committed and (found.manifest is not None or found.remarks):
        raise _unfinished(found.path)
    return found if found.is_committed else None


def _names(store: ObjectStore) -> list[str]:
    """Returns the names of all files in a store. Skips links, with one warning.

    Raises:
        CheckpointCorruptedError: a name is not a safe path, or there are too many
            files.
    """
    found: list[str] = []
    left_out = ""
    for name in store.list():
        path = os.path.join(store.uri, name)
        is_plain = os.path.isfile(path) and not os.path.islink(path)
        if isinstance(store, LocalStore) and not is_plain:
            left_out = left_out or path
        elif reason := paths.why_unsafe(name):
            raise errors.CheckpointCorruptedError(
                f"{store.uri} has a file {name[:120]!r}, which {reason}. Rename the "
                "file, or use another directory."
            )
        elif name not in (layout.METADATA, layout.METADATA + ".tmp"):
            found.append(name)
        if len(found) > MAX_FILES:
            raise errors.CheckpointCorruptedError(
                f"{store.uri} has more than {MAX_FILES} files; expected the files of "
                "one checkpoint. Pass the directory of the checkpoint itself."
            )
    if left_out:
        _log.warning(
            "%s is not a regular file; links in a checkpoint are skipped", left_out
        )
    return sorted(found)


def _plain(entry: Entry, names: list[str], with_sums: bool) -> Entry:
    """Returns an entry for a checkpoint that is not a commit, and has no manifest.

    The entry gets a substitute for the manifest, in which only `files` has a meaning:
    the names, and with `with_sums` also the sizes and checksums.
    """
    files = {name: FileEntry(name=name, size=0, crc32c=0) for name in names}

    def look(name: str) -> None:
        status = summed(entry.store, entry.object(name))
        if status is None or status.crc32c is None:
            del files[name]  # the file was deleted since the listing
        else:
            files[name] = FileEntry(name=name, size=status.size, crc32c=status.crc32c)

    if with_sums:
        map_in_threads(look, names, threads=_THREADS, name="tfpreempt-stat")
    manifest = Manifest(
        step=0, sequence=1, world_size=1, workers=(), files=tuple(files.values())
    )
    lines = (f"{each.name}\0{each.size}\0{each.crc32c}\0" for each in manifest.files)
    data = "".join(lines).encode("utf-8", "surrogatepass")
    return dataclasses.replace(
        entry,
        condition=CommitStatus.EXTERNAL,
        manifest=manifest,
        token=f"plain-{checksum.of_bytes(data):08x}-{manifest.bytes}",
    )


def _unfinished(where: str) -> Exception:
    return errors.CheckpointError(
        f"{where!r} has no marker, so the checkpoint is incomplete: a save, copy, "
        "upload or deletion was interrupted or is in progress. Use another checkpoint; "
        "to complete an interrupted to_directory(), call to_directory() again."
    )


def _nothing(where: str) -> Exception:
    return errors.CheckpointError(
        f"There is no checkpoint at {where!r}; expected the directory of a commit, the "
        "prefix of a TensorFlow checkpoint, or a directory with files. Check the name, "
        "and whether the checkpoint was deleted."
    )
