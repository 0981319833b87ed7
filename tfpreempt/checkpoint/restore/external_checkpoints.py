"""Finds foreign checkpoints in a directory: checkpoints written without tfpreempt.

A foreign checkpoint has no marker, so the time of its `.index` file is compared with
the times of the commits' markers. Files of a running or incomplete save of tfpreempt
are not a foreign checkpoint. The files of a corrupt commit do not count either, because
TensorFlow might restore incomplete files without an error. A flat commit (files of a
CheckpointManager) that was overwritten without tfpreempt is a foreign checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Sequence

from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.directory import checkpoint_state, flat_commit, layout
from tfpreempt.checkpoint.directory.catalog import (
    CommitStatus,
    Entry,
    Kind,
    corrupt,
    in_order,
    reader,
)
from tfpreempt.storage import checksum, file_reading, paths

_log = logging.getLogger(__name__)
INDEX = ".index"
_TEMPORARY = re.compile(r"_temp(/|$)")
_INCOMPLETE = (
    "incomplete: this save is running or was interrupted; it is never restored"
)
_OVERWRITTEN = "saved again without tfpreempt after the commit of this name"


def among(directory: str, ours: Sequence[Entry]) -> list[Entry]:
    """Returns tfpreempt's commits and the foreign checkpoints, newest first.

    Args:
        directory: the checkpoint directory; need not exist.
        ours: commits and saves of tfpreempt, from `catalog.scan` for the directory.

    Raises:
        OSError: the directory cannot be read; or TensorFlow's state file cannot be
            read, and there is no commit.
    """
    flat = [entry for entry in ours if entry.kind is Kind.FLAT]
    overwritten = {entry.name for entry in flat if is_overwritten(entry)}
    current = [entry for entry in ours if entry.name not in overwritten]
    has_commit = any(entry.is_committed for entry in current)
    names = file_reading.names(directory)
    found = _prefixes(directory, names, needs_pointer=not has_commit)
    found.update(flat_commit.intents(directory, names))
    known = {
        entry.path
        for entry in current
        if entry.is_committed or entry.condition is CommitStatus.CORRUPT
    }
    missed = _missed(directory, names)
    theirs = [
        entry
        for prefix in sorted(found)
        if known.isdisjoint((prefix, os.path.dirname(prefix)))
        and (entry := _entry(directory, prefix, overwritten, missed)) is not None
    ]
    return in_order([*current, *theirs])


def is_overwritten(entry: Entry) -> bool:
    """Returns whether a flat commit was saved again without tfpreempt.

    True if the `.index` file is newer than the marker and has another checksum than in
    the manifest. A newer time alone proves nothing: copying a directory gives every
    file a new time.
    """
    if entry.condition is CommitStatus.NOT_COMMITTED or entry.prefix is None:
        return False
    index = entry.path + INDEX
    known = {entry.file(each.name): (each.size, each.crc32c) for each in entry.files}
    try:
        found, (size, crc) = os.stat(index), known.get(index, (-1, 0))
        is_newer = found.st_mtime_ns / 1e9 > (entry.time or 0.0)
        return is_newer and (
            found.st_size != size or checksum.of_file(index) != (size, crc)
        )
    except OSError:
        return False


def check(entry: Entry) -> None:
    """Checks the `.index` file and the lengths of the data files of a foreign
    checkpoint.

    Raises:
        CheckpointCorruptedError: a file is missing, too short or unreadable; or the
            file, or a directory between the checkpoint directory and the file, is a
            link: another user may have made the link.
    """
    bundle.check(entry.path, entry.store.uri)


def _prefixes(directory: str, names: Sequence[str], *, needs_pointer: bool) -> set[str]:
    """Returns TensorFlow's prefixes of the checkpoints in a directory.

    The prefixes come from the names of `.index` files, and from TensorFlow's state
    file. A prefix in the state file that leads outside of the directory, or into a
    commit of tfpreempt, is skipped; so is a name with a line break, which would forge a
    line of a log.

    Args:
        directory: the checkpoint directory.
        names: names of all files in the directory.
        needs_pointer: whether an unreadable state file is an error: without a commit,
            the file may be the only one that names a checkpoint. If False, a warning is
            logged.

    Raises:
        OSError: the state file cannot be read.
    """
    found = {
        os.path.join(directory, name.removesuffix(INDEX))
        for name in names
        if name.endswith(INDEX) and name != INDEX and paths.why_unsafe(name) is None
    }
    try:
        listed = checkpoint_state.read(directory)
        for name in (listed.latest, *listed.paths) if listed else ():
            relative = os.path.relpath(os.path.join(directory, name), directory)
            first = os.path.join(directory, relative.split(os.sep)[0])
            if paths.why_unsafe(relative) is None and not any(
                file_reading.is_there(os.path.join(first, control))
                for control in (layout.MANIFEST, layout.MARKER)
            ):
                found.add(os.path.join(directory, relative))
    except OSError as error:
        if needs_pointer:
            raise
        _log.warning(
            "cannot read TensorFlow's state file: %s. tfpreempt finds the commits "
            "without this file.",
            error,
        )
    return {each for each in found if not _TEMPORARY.search(each) and _may_be(each)}


def _may_be(prefix: str) -> bool:
    """Returns whether a checkpoint may exist at a prefix, judged by the `.index` file.

    False if the path of the `.index` file leads to something else, such as a directory.
    True if the file is missing. True also after an error of the disk, so that the later
    read of the checkpoint reports the error.
    """
    try:
        there = file_reading.is_there(prefix + INDEX)
        return file_reading.is_file(prefix + INDEX) or not there
    except OSError:
        return True


def _entry(
    directory: str, prefix: str, overwritten: set[str], missed: set[str]
) -> Entry | None:
    """Returns the entry of a foreign checkpoint, written without tfpreempt.

    If tfpreempt's save of a CheckpointManager's checkpoint has left incomplete files
    with this prefix, returns an entry for the save. None if the files no longer exist.

    Args:
        directory: the checkpoint directory.
        prefix: TensorFlow's prefix of the checkpoint.
        overwritten: names of the commits of a CheckpointManager ("flat commits") that
            were saved again without tfpreempt.
        missed: result of `_missed`.
    """
    name = os.path.relpath(prefix, directory)
    entry = Entry(
        store=reader(directory),
        name=name,
        kind=Kind.EXTERNAL,
        remarks=(_OVERWRITTEN,) if name in overwritten else (),
    )
    if flat_commit.is_incomplete(prefix):
        return dataclasses.replace(entry, kind=Kind.FLAT, remarks=(_INCOMPLETE,))
    try:
        bundle.check_size(prefix)
        size, crc = checksum.of_file(prefix + INDEX)
        modified = os.stat(prefix + INDEX).st_mtime_ns / 1e9
    except FileNotFoundError as error:
        return corrupt(entry, f"{error}") if name in missed else None
    except OSError as error:
        return corrupt(entry, f"{prefix + INDEX!r} cannot be read: {error}")
    return dataclasses.replace(
        entry,
        condition=CommitStatus.EXTERNAL,
        prefix=entry.path,
        token=f"foreign-{name}-{size}-{crc:08x}",
        time=modified,
    )


def _missed(directory: str, names: Sequence[str]) -> set[str]:
    """Returns the names of checkpoints that are corrupt without an `.index` file.

    The file may be missing because a deletion was interrupted: a CheckpointManager
    deletes the `.index` file before the data, and the oldest checkpoint first, never
    the newest. So a deletion may have been interrupted only if a newer checkpoint has
    an `.index` file, and no older checkpoint has such a file. A corrupt checkpoint is
    named in TensorFlow's state file and has data files.

    Args:
        directory: the checkpoint directory.
        names: names of all files in the directory.
    """
    try:
        newest, *others = checkpoint_state.named(directory) or ("",)
    except OSError:  # `_prefixes` has logged or raised the error
        return set()
    by_age = [*dict.fromkeys(others)]
    intact = (
        place
        for place, each in enumerate(by_age)
        if file_reading.is_there(os.path.join(directory, each + INDEX))
    )
    newer = by_age[next(intact, -1) + 1 :]
    have_data = {each.rpartition(".data-")[0] for each in names if ".data-" in each}
    return {newest, *newer} & have_data
