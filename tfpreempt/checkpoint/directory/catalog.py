"""Lists the checkpoints of a directory or an object store, newest first.

"Store" means an `ObjectStore`; a directory is also read as a store (`LocalStore`). In
the store of a mirror, each commit is a folder, named after the content of the commit:

    <step>.<token>/             one commit; the token is the commit's sequence and the
                                checksum of its marker
        <name in the manifest>  the files of the commit, uploaded by many threads
        MANIFEST.json           as in the local directory, byte for byte
        COMMITTED               the marker, uploaded last; makes the folder a commit
    parts/<step>.<token>/       parts of large files during an upload
    checkpoint                  TensorFlow's state file

Two saves never share a folder name, and a repeated upload of a commit finds the files
of the earlier upload. No content is trusted: names are parsed, sizes are limited, and
manifest, marker and folder name must match. This module changes no file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.directory import checkpoint_state, layout
from tfpreempt.checkpoint.directory.manifest import (
    FileEntry,
    Manifest,
    from_json,
    to_json,
)
from tfpreempt.storage import checksum, file_reading, paths
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectStore, read_object

MAX_FOLDERS = 100_000
_MAX_SEQUENCE = 1 << 62  # far more commits than a run makes
_MAX_CONTROL_BYTES = 64 << 20
_MAX_MARKER_BYTES = 4096
_READS = 2  # a file that looks corrupt is read once more
_COPY = re.compile(
    r"(?P<step>0|[1-9][0-9]{0,18})\.(?P<token>(?P<sequence>[1-9][0-9]{0,18})-[0-9a-f]{8})"
)


class Kind(enum.Enum):
    """The layout of a checkpoint's files, and whether tfpreempt wrote the files."""

    OWN = "own"  # a directory written by tfpreempt
    FLAT = "flat"  # TensorFlow's flat files, and tfpreempt's sidecar directory
    EXTERNAL = "external"  # written without tfpreempt; no marker
    MIRROR = "mirror"  # a folder of a mirror
    STAGING = "staging"  # a save that is running or was interrupted


class CommitStatus(enum.Enum):
    """Whether a checkpoint is committed, and whether the checks so far found it
    intact."""

    COMMITTED = "committed"
    # Never restored: the save is running or was interrupted.
    NOT_COMMITTED = "not committed"
    CORRUPT = "corrupt"
    EXTERNAL = "external"  # cannot be verified: there is no manifest


class VerificationLevel(enum.Enum):
    """How thoroughly the files of a checkpoint were verified."""

    NOTHING = "nothing"
    SIZES = "sizes"
    EVERY_BYTE = "every byte"
    LENGTHS = "index and lengths"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint found by a listing, committed or not, and its location.

    Attributes:
        store: store that reads the files.
        name: name of the directory or prefix in the store; "" if the store's root is
            the checkpoint itself. Not trusted: escape the name before showing it.
        kind: layout of the checkpoint.
        condition: whether the checkpoint is committed, and intact as far as it was
            checked.
        manifest: the manifest; None if missing or unreadable.
        data: the bytes of MANIFEST.json; empty unless the marker matches the manifest.
        marker: the bytes of COMMITTED; empty unless the marker matches the manifest.
        prefix: argument for `tf.train.Checkpoint.restore`; None if the checkpoint has
            only named States.
        step: step of the checkpoint; None if unknown.
        sequence: position in the order of the commits of the same directory or store;
            None if unknown.
        token: identity of the checkpoint, equal for every reader; "" if unknown.
        time: seconds since the epoch; None if unknown. On a disk, the modification time
            of the marker (if missing: of the manifest), or of TensorFlow's `.index`
            file for an external checkpoint. In other storage, the time in the manifest.
        size: total size of the files in bytes; None if unknown.
        checked: how thoroughly the files were verified.
        problems: reasons why the checkpoint is corrupt.
        remarks: further information for the user.
    """

    store: ObjectStore
    name: str
    kind: Kind
    condition: CommitStatus = CommitStatus.NOT_COMMITTED
    manifest: Manifest | None = None
    data: bytes = b""
    marker: bytes = b""
    prefix: str | None = None
    step: int | None = None
    sequence: int | None = None
    token: str = ""
    time: float | None = None
    size: int | None = None
    checked: VerificationLevel = VerificationLevel.NOTHING
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is a commit, and intact as far as it was checked."""
        return self.condition is CommitStatus.COMMITTED

    @property
    def because(self) -> str:
        """Reason for the save, as written in the manifest; "" if unknown."""
        return "" if self.manifest is None else self.manifest.because

    @property
    def saved_at(self) -> float | None:
        """Time of the save, as written in the manifest, in seconds since the epoch;
        None if unknown."""
        metadata = {} if self.manifest is None else self.manifest.metadata
        seconds = metadata.get("saved_at", -1)
        is_time = isinstance(seconds, int | float) and 0 <= seconds < 1e11
        return float(seconds) if is_time else None

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files that the manifest names; empty without a manifest."""
        return () if self.manifest is None else self.manifest.files

    @property
    def path(self) -> str:
        """Path of the checkpoint's directory, or prefix of a flat or external
        checkpoint. A URI if the store is not local."""
        return os.path.join(self.store.uri, self.name) if self.name else self.store.uri

    @property
    def label(self) -> str:
        """Name of the checkpoint for users."""
        return self.name or self.path.rpartition("/")[2]

    @property
    def holder(self) -> str:
        """The store's name for the directory that contains marker and manifest."""
        return layout.sidecar(self.name) if self.kind is Kind.FLAT else self.name

    @property
    def shards(self) -> str:
        """Path of the directory that contains `states/` and the shards (every worker's
        own files)."""
        if self.kind is not Kind.OWN:
            return layout.sidecar(self.path)
        # A flat commit that was downloaded is a directory that contains the sidecar.
        first = {entry.name.partition("/")[0] for entry in self.files}
        inner = [name for name in first if name.endswith(layout.SIDECAR_SUFFIX)]
        return os.path.join(self.path, *inner[:1])

    def object(self, name: str) -> str:
        """Returns the name in the store for one of the checkpoint's files.

        Args:
            name: name of the file in the manifest.
        """
        is_prefix = self.kind in (Kind.FLAT, Kind.EXTERNAL)
        folder = os.path.dirname(self.name) if is_prefix else self.name
        return os.path.join(folder, name)

    def control(self, name: str) -> str:
        """Returns the name in the store for the marker, the manifest or the metadata.

        Args:
            name: file name of the marker, the manifest or the metadata.
        """
        return os.path.join(self.holder, name)

    def file(self, name: str) -> str:
        """Returns the path of a file of the checkpoint; a URI if the store is not
        local.

        Args:
            name: name of the file in the manifest.
        """
        return os.path.join(self.store.uri, self.object(name))


def marker_bytes(manifest_bytes: bytes, sequence: int) -> bytes:
    """Returns the content of a commit's marker: the size and the checksum of the
    manifest file, and the sequence of the commit."""
    record = {
        "format": 1,
        "sequence": sequence,
        "manifest_size": len(manifest_bytes),
        "manifest_crc32c": checksum.of_bytes(manifest_bytes),
    }
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def token_of(marker: bytes, sequence: int | None) -> str:
    """Returns the token of a commit: its sequence, and the checksum of its marker,
    which makes the token unique."""
    return f"{sequence}-{checksum.of_bytes(marker):08x}"


def folder_name(step: int, token: str) -> str:
    """Returns the name of a commit's folder in an object store."""
    return f"{step}.{token}"


def reader(directory: str) -> ObjectStore:
    """Returns a store that reads a checkpoint directory on this machine.

    An unreadable file in the directory counts as corrupt, so that an older commit of
    the directory is restored. Do not use this function for a mirror, but `open_store`:
    the mirror may be the only copy, so an unreadable file does not count as corrupt.

    Raises:
        ConfigurationError: the path is a file.
    """
    return LocalStore(directory, unreadable=errors.CheckpointCorruptedError)


def kind_of(name: str) -> Kind | None:
    """Returns the kind of checkpoint to which a directory with this name would belong.
    None if tfpreempt gives no directory a name of this form."""
    if layout.COMMIT.fullmatch(name):
        return Kind.OWN
    if _COPY.fullmatch(name):
        return Kind.MIRROR
    if name.endswith(layout.SIDECAR_SUFFIX) and name != layout.SIDECAR_SUFFIX:
        return Kind.FLAT
    return None


def unread_entry(store: ObjectStore, folder: str = "") -> Entry:
    """Returns an entry for a folder of a store, from the name of the folder only.

    `read` completes the entry.

    Args:
        store: the store.
        folder: name of the folder; "" if the store's root is the commit.
    """
    if kind_of(folder) is Kind.FLAT:
        name = folder.removesuffix(layout.SIDECAR_SUFFIX)
        return Entry(store=store, name=name, kind=Kind.FLAT)
    last = (folder or store.uri).rstrip("/").rpartition("/")[2]
    if named := _COPY.fullmatch(last):
        return Entry(
            store=store,
            name=folder,
            kind=Kind.MIRROR,
            token=named["token"],
            step=int(named["step"]),
            sequence=int(named["sequence"]),
        )
    return Entry(store=store, name=folder, kind=Kind.OWN)


def read(entry: Entry) -> Entry:
    """Reads the marker and the manifest of an entry. Returns the completed entry.

    Raises:
        CheckpointError: the store cannot be read.
    """
    marker, problem = control_file(entry, layout.MARKER)
    data, fault = control_file(entry, layout.MANIFEST)
    where = os.path.join(entry.store.uri, entry.control(layout.MANIFEST))
    if data is not None:
        try:
            entry = with_manifest(entry, from_json(data, where))
        except errors.CheckpointCorruptedError as error:
            fault = str(error)
    # On a disk, take the time of the marker, or else of the manifest. In other storage,
    # take the time in the manifest, which needs no further request.
    is_local = isinstance(entry.store, LocalStore)
    written = None if is_local else entry.saved_at
    for name in (layout.MARKER, layout.MANIFEST) if is_local else ():
        with contextlib.suppress(OSError):
            path = os.path.join(entry.store.uri, entry.control(name))
            written = os.stat(path).st_mtime_ns / 1e9
            break
    entry = dataclasses.replace(entry, time=written)
    if marker is None:
        if problem is not None:
            return corrupt(entry, problem)
        return dataclasses.replace(entry, remarks=() if fault is None else (fault,))
    token = token_of(marker, entry.sequence)
    if fault is None and data is None:
        fault = f"{where} is missing, but its marker exists."
    elif fault is None and marker != marker_bytes(data or b"", entry.sequence or 0):
        fault = f"{where} and its marker do not match, so one of them is corrupt."
    elif fault is None and entry.token not in ("", token):
        fault = (
            f"{where} belongs to the commit {token}; expected the commit "
            f"{entry.token}, named by its folder. Files were moved between commits: "
            "move the files back."
        )
    if fault is not None:
        return corrupt(entry, fault)
    return dataclasses.replace(
        entry,
        condition=CommitStatus.COMMITTED,
        token=token,
        data=data or b"",
        marker=marker,
    )


def with_manifest(entry: Entry, manifest: Manifest) -> Entry:
    """Returns the entry with the values of a manifest: size, prefix, step, sequence."""
    prefix = manifest.prefix
    return dataclasses.replace(
        entry,
        manifest=manifest,
        size=manifest.bytes,
        prefix=None if prefix is None else entry.file(prefix),
        step=manifest.step,
        sequence=manifest.sequence,
    )


def made(path: str, manifest: Manifest, kind: Kind = Kind.OWN) -> Entry:
    """Returns the entry of a commit that was just made, without its time; reads no
    file.

    Args:
        path: directory of the commit, or prefix of a flat checkpoint.
        manifest: manifest of the commit.
        kind: layout of the commit.
    """
    directory, name = os.path.split(path)
    data = to_json(manifest)
    marker = marker_bytes(data, manifest.sequence)
    entry = Entry(
        store=reader(directory),
        name=name,
        kind=kind,
        condition=CommitStatus.COMMITTED,
        token=token_of(marker, manifest.sequence),
        data=data,
        marker=marker,
    )
    return with_manifest(entry, manifest)


def read_at(path: str) -> Entry:
    """Returns the entry for the checkpoint at a path, with marker and manifest read.

    Args:
        path: directory of a commit, or prefix of a flat checkpoint with a sidecar.

    Raises:
        ConfigurationError: the path of the containing directory is a file.
    """
    holder = layout.sidecar(path) if file_reading.is_dir(layout.sidecar(path)) else path
    directory, name = os.path.split(holder)
    return _read_on_disk(reader(directory), name)


def corrupt(entry: Entry, problem: str) -> Entry:
    """Returns the entry marked as corrupt, for the reason `problem`."""
    return dataclasses.replace(
        entry, condition=CommitStatus.CORRUPT, problems=(problem,)
    )


def _read_on_disk(store: ObjectStore, folder: str) -> Entry:
    """Returns the entry for a folder of a checkpoint directory, with marker and
    manifest read.

    A folder without a marker counts as a save that is running or was interrupted. If
    there is evidence that the folder was committed, it counts as a corrupt commit.
    """
    entry = read(unread_entry(store, folder))
    if entry.condition is not CommitStatus.NOT_COMMITTED or not _has_witness(entry):
        return entry
    # Read again: the marker may have been written since the first read.
    entry = read(unread_entry(store, folder))
    if entry.condition is not CommitStatus.NOT_COMMITTED:
        return entry
    marker = os.path.join(store.uri, entry.control(layout.MARKER))
    is_flat = entry.kind is Kind.FLAT
    prefix = entry.path if is_flat else os.path.join(entry.path, layout.PAYLOAD)
    what_else = ""
    if file_reading.is_there(prefix + ".index"):
        what_else = f", or restore {prefix!r} with tf.train.Checkpoint"
    return corrupt(
        entry,
        f"{marker!r} is missing from a commit, so the commit cannot be verified. "
        f"Delete {os.path.dirname(marker)!r}{what_else}.",
    )


def _has_witness(entry: Entry) -> bool:
    """Returns whether there is evidence that a checkpoint without a marker was
    committed.

    For a directory that tfpreempt wrote, the evidence is an entry in TensorFlow's state
    file, or the witness file if the state file cannot name the commit. Both are written
    after the marker, and removed before the marker. For a flat checkpoint, the evidence
    is that the intent file (see `flat_commit.py`) is missing, because it is removed
    only after the marker was written.
    """
    root = entry.store.uri
    if entry.kind is Kind.FLAT:
        has_intent = file_reading.is_there(entry.path + layout.INTENT_SUFFIX)
        may_be = not has_intent and has_payload(entry.path)
    else:
        witness = os.path.join(root, entry.control(layout.WITNESS))
        may_be = file_reading.is_there(witness) or checkpoint_state.is_listed(
            root, f"{entry.name}/{layout.PAYLOAD}"
        )
    if not may_be or entry.manifest is not None:
        return may_be
    return any(
        map(layout.is_part, file_reading.names(os.path.join(root, entry.holder)))
    )


def has_payload(prefix: str) -> bool:
    """Returns whether TensorFlow's files of a flat checkpoint exist.

    Args:
        prefix: prefix of the checkpoint, or the path returned by a save_fn.
    """
    return file_reading.is_there(prefix + ".index") or file_reading.is_there(prefix)


def _ours(entries: Iterable[Entry]) -> list[Entry]:
    """Returns the entries of checkpoints that tfpreempt wrote, including incomplete and
    corrupt checkpoints."""
    return [
        each
        for each in entries
        if each.kind is Kind.MIRROR or each.manifest or each.problems or each.remarks
    ]


# --- listing -------------------------------------------------------------------------


def scan(directory: str) -> list[Entry]:
    """Returns the checkpoints that tfpreempt wrote in a directory, intact or not.

    Reads the marker and the manifest of each checkpoint.

    Args:
        directory: the checkpoint directory; may be missing.

    Returns:
        The entries, newest first (see `in_order`).

    Raises:
        OSError: the directory cannot be listed.
    """
    names, found = file_reading.names(directory), []
    store = reader(directory)
    for name in names:
        if kind_of(name) is None or paths.why_unsafe(name) is not None:
            continue
        with contextlib.suppress(OSError):  # `_read_on_disk` reports errors of the disk
            if not file_reading.is_real_dir(os.path.join(directory, name)):
                continue
        found.append(_read_on_disk(store, name))
    return in_order(_ours(found))


def listing(store: ObjectStore, *, timeout: float | None = None) -> list[Entry]:
    """Returns entries for those folders of an object store whose names have a form of
    tfpreempt (see `kind_of`). Reads no file.

    Args:
        store: the store.
        timeout: timeout of the listing in seconds; None: the store's own timeout.

    Returns:
        The entries: commits by descending sequence, then folders without a sequence in
        their name.

    Raises:
        CheckpointError: the store cannot be listed, or has too many folders.
    """
    names = list(itertools.islice(store.folders(timeout=timeout), MAX_FOLDERS + 1))
    if len(names) > MAX_FOLDERS:
        raise errors.CheckpointError(
            f"{store.uri} has more than {MAX_FOLDERS} folders; expected only the "
            "commits of one run. Use a separate directory for each run."
        )
    return in_order(
        unread_entry(store, name)
        for name in sorted(names)
        if kind_of(name) is not None and paths.why_unsafe(name) is None
    )


def contents(store: ObjectStore) -> list[Entry]:
    """Returns the checkpoints that tfpreempt wrote in an object store, intact or not.

    Like `scan` for a directory, reads marker and manifest of each checkpoint.

    Raises:
        CheckpointError: the store cannot be listed or read.
    """
    return _ours(map(read, listing(store)))


def copies(store: ObjectStore, *, timeout: float | None = None) -> list[Entry]:
    """Returns entries for the mirrored commits in a store, highest sequence first.
    Reads no file."""
    found = listing(store, timeout=timeout)
    return [entry for entry in found if entry.kind is Kind.MIRROR]


def commits(store: ObjectStore, on_skip: Callable[[str], None]) -> Iterator[Entry]:
    """Yields the intact commits of a mirror, newest first. Each commit is read when the
    iteration reaches the commit.

    Args:
        store: the object store of the mirror.
        on_skip: function called with a description of each corrupt commit.

    Raises:
        CheckpointError: the store cannot be listed or read.
    """
    yield from read_commits(copies(store), on_skip)


def read_commits(
    found: Iterable[Entry], on_skip: Callable[[str], None]
) -> Iterator[Entry]:
    """Yields the intact commits among the folders of a mirror, in the given order. Each
    commit is read when the iteration reaches the commit.

    Args:
        found: folders of a mirror, from `copies`.
        on_skip: function called with a description of each corrupt commit.

    Raises:
        CheckpointError: the store cannot be read.
    """
    for entry in map(read, found):
        if entry.is_committed:
            yield entry
        elif entry.condition is CommitStatus.CORRUPT:
            on_skip(entry.problems[0])


def highest_sequence(entries: Iterable[Entry]) -> int:
    """Returns the highest sequence of the entries; 0 if no entry has a sequence.

    A new commit gets a higher sequence than the result. So the result is limited: the
    manifest of a commit with a sequence above the limit would be invalid, and the next
    start would restore an older commit.

    Raises:
        CheckpointError: a sequence is above the limit.
    """
    found = sorted(entries, key=lambda entry: entry.sequence or 0)
    sequence = (found[-1].sequence or 0) if found else 0
    if sequence <= _MAX_SEQUENCE:
        return sequence
    # The last commits may be of a run that continued from a planted sequence just below
    # the limit. So only the lowest of the high sequences is certainly planted.
    planted = next(each for each in found if (each.sequence or 0) > _MAX_SEQUENCE // 2)
    message = (
        f"{found[-1].path!r} has the sequence {sequence}; expected at most "
        f"{_MAX_SEQUENCE}, so no commit can follow. Delete the directory "
        f"{planted.path!r}, which was not written by tfpreempt."
    )
    if planted is not found[-1]:
        message += (
            " Move away all directories with a higher sequence than this directory, "
            "which may be intact commits of the run."
        )
    error = errors.CheckpointError(message)
    error.is_permanent = True
    raise error


def rank(entry: Entry) -> tuple[int, float, str]:
    """Returns the sort key of a commit: mainly its sequence, which does not depend on a
    clock.

    Two machines can make commits with the same sequence, if the second machine cannot
    see the first commit yet. The time of the save decides between such commits.
    """
    return entry.sequence or 0, entry.saved_at or 0.0, entry.token


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Returns the entries, newest first: the order in which a restart tries to restore.

    Commits of tfpreempt are sorted by `rank`. Checkpoints of other programs are
    inserted by time.
    """
    ours: list[Entry] = []
    others: list[Entry] = []
    for entry in entries:
        (others if entry.sequence is None else ours).append(entry)
    ours.sort(key=rank, reverse=True)
    others.sort(key=lambda entry: entry.time or 0.0)
    merged = []
    for entry in ours:
        while others and (others[-1].time or 0.0) > (entry.time or 0.0):
            merged.append(others.pop())
        merged.append(entry)
    return merged + others[::-1]


# --- reading -------------------------------------------------------------------------


def control_file(entry: Entry, name: str) -> tuple[bytes | None, str | None]:
    """Reads a commit's marker, manifest or metadata.

    Args:
        entry: the commit.
        name: name of the file.

    Returns:
        Content and problem. The problem is None if the file was read; the content is
        None if the file cannot be read. Both are None if the file is missing.
    """
    most = _MAX_MARKER_BYTES if name == layout.MARKER else _MAX_CONTROL_BYTES
    name, problem = entry.control(name), None
    for _ in range(_READS):
        try:
            data = read_object(entry.store, name, most + 1)
            break
        except errors.CheckpointCorruptedError as error:
            problem = str(error)
    else:
        return None, problem
    if data is not None and len(data) > most:
        return None, (
            f"{os.path.join(entry.store.uri, name)} is larger than {most} bytes; "
            "expected a marker or manifest of at most this size."
        )
    return data, None
