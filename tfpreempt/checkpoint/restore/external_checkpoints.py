"""Checkpoints that somebody else wrote, among ours in a directory.

They have no marker, so they rank among our commits by the time of their index against
the times of our markers. What our own save is writing, or left half-written, is none,
and neither is a commit of ours, be it damaged: what TensorFlow can read of it may be
half of it. A flat one that was saved over without us is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Sequence

from tfpreempt.checkpoint.directory import checkpoint_state, flat_commit, layout
from tfpreempt.checkpoint.directory.catalog import (
    Condition,
    Entry,
    Kind,
    damaged,
    in_order,
    reader,
)
from tfpreempt.checkpoint.state import bundle
from tfpreempt.storage import checksum, paths, reading

_log = logging.getLogger(__name__)
INDEX = ".index"
_TEMPORARY = re.compile(r"_temp(/|$)")
_HALF = "half-written: this save is under way, or it died; it is never restored"
_OVERWRITTEN = "saved again without tfpreempt after our commit of this name"


def among(directory: str, ours: Sequence[Entry]) -> list[Entry]:
    """Ours and theirs, newest first.

    Args:
        directory: the checkpoint directory; it need not exist.
        ours: what `catalog.scan` found there.

    Raises:
        OSError: the directory, or a state file that may name all that there is, cannot
            be read.
    """
    flat = [entry for entry in ours if entry.kind is Kind.FLAT]
    overwritten = {entry.name for entry in flat if is_overwritten(entry)}
    current = [entry for entry in ours if entry.name not in overwritten]
    has_commit = any(entry.is_committed for entry in current)
    names = reading.names(directory)
    found = _prefixes(directory, names, needs_pointer=not has_commit)
    found.update(flat_commit.intents(directory, names))
    known = {
        entry.path
        for entry in current
        if entry.is_committed or entry.condition is Condition.DAMAGED
    }
    theirs = [
        entry
        for prefix in sorted(found)
        if known.isdisjoint((prefix, os.path.dirname(prefix)))
        and (entry := _entry(directory, prefix, overwritten)) is not None
    ]
    return in_order([*current, *theirs])


def is_overwritten(entry: Entry) -> bool:
    """Whether the user's manager wrote a flat checkpoint anew after our commit.

    The time alone doesn't tell: copying a directory gives all files new times.
    """
    if entry.condition is Condition.NOT_COMMITTED or entry.prefix is None:
        return False
    index, manifest = entry.path + INDEX, entry.manifest
    files = manifest.files if manifest else ()
    known = {entry.file(each.name): (each.size, each.crc32c) for each in files}
    try:
        found, (size, crc) = os.stat(index), known.get(index, (-1, 0))
        is_newer = found.st_mtime_ns / 1e9 > (entry.time or 0.0)
        return is_newer and (
            found.st_size != size or checksum.of_file(index) != (size, crc)
        )
    except OSError:
        return False


def _prefixes(directory: str, names: Sequence[str], *, needs_pointer: bool) -> set[str]:
    """Prefixes of flat checkpoints, and of those that the state file names.

    Not of what it names outside of the directory, or inside a commit of ours.

    Args:
        directory: the checkpoint directory.
        names: the names in it.
        needs_pointer: whether the state file may name all that there is; otherwise one
            that cannot be read is only said.

    Raises:
        OSError: the state file cannot be read.
    """
    found = {
        os.path.join(directory, name.removesuffix(INDEX))
        for name in names
        if name.endswith(INDEX) and name != INDEX
    }
    try:
        listed = checkpoint_state.read(directory)
        for name in (listed.latest, *listed.paths) if listed else ():
            relative = os.path.relpath(os.path.join(directory, name), directory)
            first = os.path.join(directory, relative.split(os.sep)[0])
            if paths.why_unsafe(relative) is None and not any(
                reading.is_there(os.path.join(first, control))
                for control in (layout.MANIFEST, layout.MARKER)
            ):
                found.add(os.path.join(directory, relative))
    except OSError as error:
        if needs_pointer:
            raise
        _log.warning(
            "TensorFlow's state file cannot be read: %s. It is only a pointer; the "
            "commits are found without it.",
            error,
        )
    return {each for each in found if not _TEMPORARY.search(each) and _may_be(each)}


def _may_be(prefix: str) -> bool:
    """Whether an index could be there: what cannot be looked at is damaged, later."""
    try:
        there = reading.is_there(prefix + INDEX)
        return reading.is_file(prefix + INDEX) or not there
    except OSError:
        return True


def _entry(directory: str, prefix: str, overwritten: set[str]) -> Entry | None:
    """One of theirs, or a half-written one of ours; None if it went meanwhile."""
    name = os.path.relpath(prefix, directory)
    entry = Entry(
        store=reader(directory),
        name=name,
        kind=Kind.FOREIGN,
        remarks=(_OVERWRITTEN,) if name in overwritten else (),
    )
    if flat_commit.is_half_written(prefix):
        return dataclasses.replace(entry, kind=Kind.FLAT, remarks=(_HALF,))
    try:
        bundle.check_size(prefix)
        size, crc = checksum.of_file(prefix + INDEX)
        modified = os.stat(prefix + INDEX).st_mtime_ns / 1e9
    except FileNotFoundError as error:
        return damaged(entry, f"{error}") if _is_missed(directory, name) else None
    except OSError as error:
        return damaged(entry, f"{prefix + INDEX!r} cannot be read: {error}")
    return dataclasses.replace(
        entry,
        condition=Condition.FOREIGN,
        prefix=entry.path,
        token=f"foreign-{name}-{size}-{crc:08x}",
        time=modified,
    )


def _is_missed(directory: str, name: str) -> bool:
    """Whether the state file names what lacks its index, and its data are there.

    A manager deletes the oldest first, and that may have been cut short: then it is not
    the newest, and no older one is there.
    """
    try:
        listed = checkpoint_state.named(directory)
    except OSError:  # `_prefixes` told, or raised
        return False
    if name not in listed:
        return False
    newest, *by_age = listed
    older = by_age[: by_age.index(name)] if name in by_age else []
    may_be_deleted = name != newest and not any(
        reading.is_there(os.path.join(directory, each + INDEX)) for each in older
    )
    data = f"{name}.data-"
    return not may_be_deleted and any(
        each.startswith(data) for each in reading.names(directory)
    )
