"""Commits of flat checkpoints, as a user's CheckpointManager writes them.

TensorFlow writes `ckpt-5.index` and its data files under their final names, so an
interrupted save looks like a finished save. To tell them apart, tfpreempt writes an
*intent*: a file `ckpt-5.tfpreempt-intent`, durable before TensorFlow starts to write,
removed after the marker is written. (For a save_fn the intent is written when the files
are complete, before the sidecar.)

The *sidecar* is a directory `ckpt-5.tfpreempt/` with the shards of the workers, States,
MANIFEST.json and the marker COMMITTED. A sidecar is removed at the next commit after
its checkpoint was deleted.

- With an intent and no marker, a checkpoint is incomplete, and ignored. Exception: if
  `ckpt-5.index` is the same file as before the intent, TensorFlow has written nothing,
  and the older checkpoint of this name is complete.
- Without intent and sidecar, a checkpoint was saved by the user's own `manager.save()`.
- Without intent and marker, a sidecar belongs to a commit that lost its marker.

Flat checkpoints exist on disks only: `os_errors.check_directory` refuses URLs, because
an object store cannot replace the sidecar of an older save atomically.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, commit, layout, retention
from tfpreempt.checkpoint.directory.manifest import Manifest
from tfpreempt.core import contained
from tfpreempt.core.clock import Clock
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files, write_durably

_log = logging.getLogger(__name__)

_MAX_BYTES = 4096  # largest size of an intent file
# Names of TensorFlow's files before the final rename.
_IN_TEMPORARY = re.compile(r"part(-\d{5}-of-\d{5})?\.(index|data-\d{5}-of-\d{5}).*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The intent of a save: the flat checkpoint that the save is about to write.

    Attributes:
        prefix: TensorFlow's prefix of the flat checkpoint.
        attempt: name of the save.
        before: size in bytes and modification time in nanoseconds of the `.index` file,
            if a complete checkpoint has the prefix already; otherwise None.
    """

    prefix: str
    attempt: str
    before: list[int] | None


def intent_of(attempt: str, prefix: str) -> Intent:
    """Returns the intent of a save that is about to begin.

    Args:
        attempt: name of the save.
        prefix: TensorFlow's prefix.
    """
    before = None if is_incomplete(prefix) else _stamp(prefix)
    return Intent(prefix=prefix, attempt=attempt, before=before)


def write_intent(files: Files, intent: Intent) -> None:
    """Writes the intent file. Called before TensorFlow writes anything under the
    prefix.

    A complete checkpoint that already has the prefix still counts as complete, until
    TensorFlow replaces the checkpoint's `.index` file.

    Raises:
        LinkError: TensorFlow's temporary directory is a link to another directory.
        OSError: error of the file system.
    """
    prefix = intent.prefix
    if file_reading.is_link(_temporary(prefix)):
        raise contained.LinkError(_temporary(prefix))
    known = {} if is_incomplete(prefix) else {"before": intent.before}
    _write(files, prefix, attempt=intent.attempt, **known)


def abandon(files: Files, intent: Intent) -> None:
    """Cleans up after a save that failed: removes the intent file, or records in the
    intent file that the checkpoint is incomplete. Called on the chief.

    TensorFlow writes its files even if this process has lost the lease. The next holder
    of the lease may have removed the intent file before TensorFlow wrote the files; so
    this function writes the intent file again.

    Raises:
        OSError: error of the file system.
    """
    prefix, record = intent.prefix, _intent(intent.prefix) or {}
    if record.get("attempt", intent.attempt) != intent.attempt:
        return  # the next owner of the lease is saving under this prefix
    if not _has_marker(prefix) and _stamp(prefix) not in (None, intent.before):
        _write(files, prefix, half=_stamp(prefix))
    _close(files, prefix)
    files.remove(prefix + layout.INTENT_SUFFIX + ".tmp")


def is_incomplete(prefix: str) -> bool:
    """Returns whether an intent file shows that a save of tfpreempt has not completed
    the flat checkpoint with this prefix."""
    record = _intent(prefix)
    if record is None:
        return False
    now = _stamp(prefix)
    if "half" in record:
        return bool(record["half"] == now)
    return "before" not in record or bool(record["before"] != now)


def publish(
    files: Files,
    clock: Clock,
    directory: str,
    staged: commit.StagedFiles,
    draft: Manifest,
) -> catalog.Entry:
    """Commits a flat checkpoint: TensorFlow's files, and a sidecar, made of the staging
    directory with the shards.

    Args:
        files: file system operations that make the changes.
        clock: time source that measures the duration of the save.
        directory: the checkpoint directory.
        staged: the staged save. `prefix` is TensorFlow's prefix, or a file or directory
            returned by a save_fn. The staging directory, with shards and States, may be
            missing.
        draft: the manifest without its list of files.

    Returns:
        The commit.

    Raises:
        OSError: the file system failed before the marker.
        SaveError: no file has the prefix.
        CheckpointError: the sequence of a checkpoint is above the limit.
    """
    prefix, staging = staged.prefix, staged.staging
    assert prefix is not None
    base, stem = os.path.split(prefix)
    payload = payload_files(prefix)
    if not payload:
        raise errors.SaveError(
            f"save_fn returned {prefix!r}, but no checkpoint has this path: expected a "
            f"file, a directory with files, or {stem + '.index'!r}. Return the path of "
            "the checkpoint that save_fn wrote."
        )
    if os.path.realpath(base) != os.path.realpath(directory):
        _log.warning(
            "save_fn wrote %r, which is not in the checkpoint directory %r but in %r. "
            "The checkpoint is committed there, but a restart searches only the "
            "checkpoint directory. Let save_fn write into the checkpoint directory.",
            prefix,
            directory,
            base,
        )
    files.make_dirs(staging)
    contents = {os.path.relpath(path, base): path for path in payload}
    for name in file_reading.tree(staging):
        inside = f"{stem}{layout.SIDECAR_SUFFIX}/{name}"
        contents[inside] = os.path.join(staging, name)
    roots = [staging, *([prefix] if file_reading.is_dir(prefix) else [])]
    folders = [folder for root in roots for folder, _, _ in file_reading.walk(root)]
    is_tensorflow = file_reading.is_there(prefix + ".index")
    draft = dataclasses.replace(
        draft,
        sequence=max(draft.sequence, catalog.highest_sequence(catalog.scan(base)) + 1),
        prefix=stem if is_tensorflow else None,
    )
    manifest = commit.seal(files, clock, staged, contents, folders, draft)
    files.sync_dir(base)  # the sync makes the names of TensorFlow's files durable
    if not file_reading.is_there(prefix + layout.INTENT_SUFFIX):
        # The files of a save_fn are complete: the intent must not make them count as
        # incomplete.
        write_intent(files, intent_of(staged.attempt, prefix))
    _make_room(files, prefix)
    files.rename(staging, layout.sidecar(prefix))
    files.sync_dir(base)
    made = catalog.made(prefix, manifest, catalog.Kind.FLAT)
    files.publish(os.path.join(layout.sidecar(prefix), layout.MARKER), made.marker)
    files.remove(prefix + layout.INTENT_SUFFIX)
    files.sync_dir(base)
    return made


def payload_files(prefix: str) -> list[str]:
    """Returns the paths of a flat checkpoint's files, without the sidecar.

    `prefix` is TensorFlow's prefix, or a file or directory written by a save_fn. Of a
    directory, all files in it are returned.
    """
    if file_reading.is_dir(prefix):
        return [os.path.join(prefix, name) for name in file_reading.tree(prefix)]
    found = [prefix, prefix + ".index", *data_files(prefix)]
    return [path for path in found if file_reading.is_file(path)]


def data_files(prefix: str) -> list[str]:
    """Returns all paths with the names of TensorFlow's data files of the prefix,
    including links and pipes."""
    base, stem = os.path.split(prefix)
    data = re.compile(re.escape(stem) + r"\.data-\d{5,}-of-\d{5,}")
    found = filter(data.fullmatch, file_reading.names(base))
    return [os.path.join(base, each) for each in found]


def sweep(files: Files, directory: str) -> None:
    """Removes sidecars and intent files whose checkpoint was deleted. Called on the
    chief.

    If only the `.index` file of a checkpoint is missing, the checkpoint is corrupt, and
    the sidecar stays. The oldest checkpoint is an exception: a CheckpointManager, which
    deletes the `.index` file first, may have been interrupted during the deletion.

    Args:
        files: file system operations that make the changes.
        directory: the checkpoint directory.

    Raises:
        OSError: error of the file system.
    """
    found = [e for e in catalog.scan(directory) if e.kind is catalog.Kind.FLAT]
    there = [catalog.has_payload(each.path) for each in found]
    for number, entry in enumerate(found):
        if there[number]:
            continue
        # A manager deletes the oldest checkpoint first, and the `.index` file before
        # the data files; the deletion may have been interrupted.
        is_oldest = any(there[:number]) and not any(there[number:])
        if is_oldest or not payload_files(entry.path):
            retention.delete(files, entry)
    for prefix in intents(directory, file_reading.names(directory)):
        if not catalog.has_payload(prefix):
            files.remove(prefix + layout.INTENT_SUFFIX)


def resolve_intents(files: Files, directory: str) -> None:
    """Removes or updates the intent files of interrupted saves. Called on the chief,
    before its first save.

    For an incomplete checkpoint, the size and time of its `.index` file are written
    into the intent file. If the user later saves under the same name, the new `.index`
    file has another time, so the checkpoint counts as complete.

    Raises:
        OSError: error of the file system.
    """
    names = file_reading.names(directory)
    suffixes = (layout.SIDECAR_SUFFIX, layout.INTENT_SUFFIX)
    if any(name.endswith(suffixes) for name in names):
        for prefix in intents(directory, file_reading.names(directory)):
            _close(files, prefix)
        sweep(files, directory)
    for name in names:
        # Delete the temporary file of an intent file, left by a killed process.
        if name.endswith(layout.INTENT_SUFFIX + ".tmp"):
            files.remove(os.path.join(directory, name))


def _close(files: Files, prefix: str) -> None:
    temporary = _temporary(prefix)
    if file_reading.is_real_dir(temporary) and all(
        map(_IN_TEMPORARY.fullmatch, file_reading.tree(temporary))
    ):
        retention.delete_staging(files, temporary)
    holder = layout.sidecar(prefix)
    has_marker = _has_marker(prefix)
    if file_reading.is_real_dir(holder) and not has_marker:
        # Delete the sidecar before the intent file: without the intent file, the
        # sidecar would look like a commit that lost its marker.
        retention.delete(files, catalog.read_at(prefix))
    if is_incomplete(prefix) and not has_marker:
        _write(files, prefix, half=_stamp(prefix))
    else:
        files.remove(prefix + layout.INTENT_SUFFIX)


def _has_marker(prefix: str) -> bool:
    """Returns whether a flat checkpoint is committed."""
    return file_reading.is_there(os.path.join(layout.sidecar(prefix), layout.MARKER))


def _temporary(prefix: str) -> str:
    """Returns the directory where TensorFlow writes files before it renames them."""
    return prefix + "_temp"


def _write(files: Files, prefix: str, **fields: Any) -> None:
    data = json.dumps({"format": 1, **fields}).encode()
    write_durably(files, prefix + layout.INTENT_SUFFIX, data)


def _intent(prefix: str) -> dict[str, Any] | None:
    """Returns the fields of the intent file of a prefix; {} if the file is unreadable;
    None if there is no intent file."""
    try:
        record = json.loads(
            file_reading.read(prefix + layout.INTENT_SUFFIX, _MAX_BYTES)
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _make_room(files: Files, prefix: str) -> None:
    holder = layout.sidecar(prefix)
    if file_reading.is_real_dir(holder):
        retention.delete(files, catalog.read_at(prefix))
    if file_reading.is_there(holder):
        # Another program wrote the directory: rename it, do not delete it.
        number = 1
        while file_reading.is_there(f"{holder}-{number}"):
            number += 1
        files.rename(holder, f"{holder}-{number}")


def intents(directory: str, names: Iterable[str]) -> list[str]:
    """Returns the prefixes of the intent files in a directory. An intent file exists
    while a save runs, and after a save was interrupted.

    Args:
        directory: path of the checkpoint directory.
        names: names of all files in the directory.
    """
    suffix = layout.INTENT_SUFFIX
    return [
        os.path.join(directory, name.removesuffix(suffix))
        for name in names
        if name.endswith(suffix) and name != suffix
    ]


def _stamp(prefix: str) -> list[int] | None:
    try:
        status = os.stat(prefix + ".index")
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]
