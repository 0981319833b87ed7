"""Collects the checkpoints that `tfpreempt inspect` and `tfpreempt verify` show.

Includes the entries that a restart skips: corrupt commits, running and interrupted
saves, links to other directories. No file is changed, and no content is trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, flat_commit, layout
from tfpreempt.checkpoint.directory.catalog import (
    CommitStatus,
    Entry,
    Kind,
    VerificationLevel,
)
from tfpreempt.checkpoint.restore import external_checkpoints
from tfpreempt.checkpoint.restore.verification import THREADS, faults
from tfpreempt.storage import file_reading, open_store, paths

_MAX_EXTRA = 5
_MAX_NAMES = 1_000_000
_SAVE = "no marker: this save is running or was interrupted"
_UPLOAD = "no marker: this upload is running or was interrupted"
_LINK = "is a symbolic link; links are not followed"
_DELETED = "checkpoint deleted; the next commit deletes the remaining files"
_EXTERNAL = "written without tfpreempt: only index and lengths can be checked"


def at(location: str) -> list[Entry]:
    """Returns the checkpoints of a run, or the single checkpoint at a path.

    Args:
        location: directory of a run or of a commit, TensorFlow's prefix of a
            checkpoint, or the URI of a mirror or of one commit in a mirror.

    Raises:
        ConfigurationError: there is no checkpoint.
        CheckpointError: the path cannot be listed or read.
    """
    path = open_store.local_path(location)
    if path is not None:
        return _at_path(path, location)
    store = open_store.open_store(location)
    one = catalog.read(catalog.unread_entry(store))
    if one.manifest is None and not one.problems:
        if one.kind is not Kind.MIRROR:
            return [_with_remark(each) for each in catalog.contents(store)]
        if next(iter(store.list()), None) is None:
            raise _nothing(location)
    return [_with_remark(one)]


def check(
    entry: Entry,
    *,
    every_byte: bool,
    threads: int = THREADS,
    watch: Callable[[int], None] = lambda done: None,
) -> Entry:
    """Checks the files of an entry; returns the entry with the result.

    Args:
        entry: the entry to check. For a checkpoint of another program, TensorFlow's
            `.index` file and the lengths of the data files are checked. An uncommitted
            entry is returned unchanged.
        every_byte: whether to read all bytes; otherwise only sizes are compared.
        threads: number of reading threads, see `verification.faults`.
        watch: function called with the bytes read so far, see `verification.faults`.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    if entry.condition is CommitStatus.EXTERNAL:
        return _check_foreign(entry)
    if not entry.is_committed:
        return entry
    found = faults(entry, every_byte=every_byte, threads=threads, watch=watch)
    # Retention may have deleted the commit during the check, first its marker.
    if found and catalog.control_file(entry, layout.MARKER) == (None, None):
        return dataclasses.replace(
            entry,
            condition=CommitStatus.NOT_COMMITTED,
            remarks=(*entry.remarks, "deleted during the check"),
        )
    return dataclasses.replace(
        entry,
        condition=CommitStatus.CORRUPT if found else CommitStatus.COMMITTED,
        checked=VerificationLevel.EVERY_BYTE if every_byte else VerificationLevel.SIZES,
        problems=tuple(found.values()),
        remarks=(*entry.remarks, *(_extra_files(entry) if every_byte else ())),
    )


# --- listing -------------------------------------------------------------------------


def _at_path(path: str, location: str) -> list[Entry]:
    above, name = os.path.split(path)
    is_sidecar = name.endswith(layout.SIDECAR_SUFFIX)
    if os.path.isdir(path):
        if not _has_control(path) and catalog.kind_of(name) is not Kind.MIRROR:
            if not os.path.isdir(layout.sidecar(path)):
                return _in_directory(path)
        elif not is_sidecar:
            return [
                _with_remark(catalog.read(catalog.unread_entry(catalog.reader(path))))
            ]
    elif name == layout.PAYLOAD and _has_control(above):
        # The path is TensorFlow's prefix inside a commit.
        return _at_path(above, location)
    name = name.removesuffix(external_checkpoints.INDEX).removesuffix(
        layout.SIDECAR_SUFFIX
    )
    named = _in_directory(above) if os.path.isdir(above) else []
    if found := [each for each in named if each.name == name]:
        return found
    raise _nothing(location)


def _in_directory(directory: str) -> list[Entry]:
    """Returns the checkpoints in a directory, and the running or interrupted saves.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    try:
        ours = [
            _with_remark(_unless_deleted(entry)) for entry in catalog.scan(directory)
        ]
        flats = {entry.name for entry in ours if entry.kind is Kind.FLAT}
        listed = [
            _described(entry) if entry.kind is Kind.EXTERNAL else entry
            for entry in external_checkpoints.among(directory, ours)
            if entry.kind is not Kind.EXTERNAL
            or entry.remarks
            or entry.name not in flats
        ]
        return [*listed, *_odd(directory), *_staged(directory)]
    except OSError as error:
        raise errors.CheckpointError(
            f"The directory {directory!r} cannot be read: {error}. Check the path and "
            "its permissions."
        ) from error


def _with_remark(entry: Entry) -> Entry:
    """Returns the entry; if its marker is missing, adds a remark that says so."""
    if entry.condition is not CommitStatus.NOT_COMMITTED or entry.remarks == (
        _DELETED,
    ):
        return entry
    remark = _UPLOAD if entry.kind is Kind.MIRROR else _SAVE
    return dataclasses.replace(entry, remarks=(remark, *entry.remarks))


def _unless_deleted(entry: Entry) -> Entry:
    """Returns the entry, with the status "not committed" if the user's
    CheckpointManager has deleted its files.

    Only a flat commit (in files of a CheckpointManager) can get this status here.
    """
    there = (entry.path, entry.path + external_checkpoints.INDEX)
    is_flat = entry.kind is Kind.FLAT and entry.is_committed
    if not is_flat or any(map(os.path.lexists, there)):
        return entry
    return dataclasses.replace(
        entry, condition=CommitStatus.NOT_COMMITTED, remarks=(_DELETED,)
    )


def _described(entry: Entry) -> Entry:
    """Adds the size and a remark to the entry of another program's checkpoint; returns
    the new entry."""
    remarks = ("; ".join((*entry.remarks, _EXTERNAL)),)
    size = _size_of(flat_commit.payload_files(entry.path))
    return dataclasses.replace(entry, size=size, remarks=remarks)


def _odd(directory: str) -> Iterator[Entry]:
    """Yields a corrupt entry for each link or directory that must not be read.

    The name has the form of a commit's name. A link may lead out of the checkpoint
    directory. The name of a directory may be unsafe as a path, for example because of a
    control character. The files are not read.
    """
    store = catalog.reader(directory)
    for name in sorted(os.listdir(directory)):
        if catalog.kind_of(name) is None:
            continue
        entry = catalog.unread_entry(store, name)
        path = os.path.join(directory, name)
        if os.path.islink(path):
            yield catalog.corrupt(entry, f"{name!r} {_LINK}")
        elif os.path.isdir(path) and (reason := paths.why_unsafe(name)):
            yield catalog.corrupt(entry, f"the name {reason}")


def _staged(directory: str) -> Iterator[Entry]:
    """Yields entries for running and interrupted saves in the staging directory."""
    root = os.path.join(directory, layout.STAGING)
    if os.path.islink(root):
        return
    store = catalog.reader(directory)
    _, names, _ = next(file_reading.walk(root), ("", [], []))
    for name in names:
        path, others = os.path.join(root, name), set(names) - {name}
        if os.path.islink(path) or name.removesuffix(layout.PARTS_SUFFIX) in others:
            continue
        entry = Entry(store=store, name=f"{layout.STAGING}/{name}", kind=Kind.STAGING)
        is_safe = paths.why_unsafe(entry.name) is None
        manifest = catalog.read(entry).manifest if is_safe else None
        if manifest is not None:
            entry = catalog.with_manifest(entry, manifest)
        try:
            modified = os.lstat(path).st_mtime
        except FileNotFoundError:
            continue  # the save has ended, and its directory is gone
        size = _size_of(
            os.path.join(folder, each)
            for folder in (path, path + layout.PARTS_SUFFIX)
            for each in file_reading.tree(folder)
        )
        yield dataclasses.replace(entry, time=modified, size=size, remarks=(_SAVE,))


def _size_of(files: Iterable[str]) -> int:
    total = 0
    for path in files:
        # Ignore the error: a running save or deletion has removed the file.
        with contextlib.suppress(FileNotFoundError):
            total += os.lstat(path).st_size
    return total


def _nothing(location: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"No checkpoint was found at {location!r}; expected the directory of a run, "
        "the directory of a commit (run/5), a flat prefix (run/ckpt-5), or a URI such "
        "as gs://bucket/run. Check the path."
    )


def _has_control(path: str) -> bool:
    names = (layout.MARKER, layout.MANIFEST)
    return any(os.path.lexists(os.path.join(path, name)) for name in names)


# --- checking ------------------------------------------------------------------------


def _extra_files(entry: Entry) -> tuple[str, ...]:
    """Returns a remark about the files of a commit that its manifest does not name.

    The result is empty if there are no such files.
    """
    known = {entry.object(file.name) for file in entry.files}
    control = (layout.MANIFEST, layout.MARKER, layout.METADATA, layout.WITNESS)
    known.update(entry.control(name) for name in control)
    names = itertools.islice(entry.store.list(entry.control("")), _MAX_NAMES)
    extra = [name for name in names if name not in known]
    if not extra:
        return ()
    shown = ", ".join(map(ascii, extra[:_MAX_EXTRA]))
    more = f" and {len(extra) - _MAX_EXTRA} more" if len(extra) > _MAX_EXTRA else ""
    return (f"not in the manifest: {shown}{more}",)


def _check_foreign(entry: Entry) -> Entry:
    entry = dataclasses.replace(entry, checked=VerificationLevel.LENGTHS)
    try:
        external_checkpoints.check(entry)
    except (errors.CheckpointCorruptedError, OSError) as error:
        return catalog.corrupt(entry, str(error))
    return entry
