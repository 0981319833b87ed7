"""Which checkpoints lie somewhere: one value for each, found by one scan, one order.

A place is a directory of this machine or an object store; both are read as a store. In
an object store a copy is a folder that names its content:

    <step>.<token>/             one commit; the token is its sequence and the checksum
                                of its marker
        <name in the manifest>  its files, put by many threads
        MANIFEST.json           as in the local directory, byte for byte
        COMMITTED               the marker, put last; it alone makes this a commit
    parts/<step>.<token>/       parts of its large files, on their way
    checkpoint                  TensorFlow's state file

Two saves never share a name there, and whoever uploads the same commit again finds what
is there already. Nothing that lies anywhere is trusted: names are parsed, sizes are
bounded, manifest, marker and name must vouch for each other. Nothing is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.directory import checkpoint_state, layout
from tfpreempt.checkpoint.directory.manifest import Manifest, from_json
from tfpreempt.storage import checksum, paths, reading
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore
from tfpreempt.storage.local import LocalStore

MAX_FOLDERS = 100_000
_MAX_CONTROL_BYTES = 64 << 20
_MAX_MARKER_BYTES = 4096
_READS = 2  # of what arrives changed
_COPY = re.compile(
    r"(?P<step>0|[1-9][0-9]{0,18})\.(?P<token>(?P<sequence>[1-9][0-9]{0,18})-[0-9a-f]{8})"
)


class Kind(enum.Enum):
    """Who laid a checkpoint out, and how."""

    OWN = "own"  # a directory of our own
    FLAT = "flat"  # TensorFlow's flat files with our sidecar directory
    FOREIGN = "foreign"  # written without tfpreempt; no marker
    REMOTE = "remote"  # a folder of a mirror
    STAGING = "staging"  # a save that is under way, or died


class Condition(enum.Enum):
    """What a checkpoint is worth."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"  # never restored; under way, or left by a dead save
    DAMAGED = "damaged"
    FOREIGN = "not ours"  # no manifest, so nothing says what its bytes should be


class Checked(enum.Enum):
    """How the files of a checkpoint were checked."""

    NOTHING = "nothing"
    SIZES = "sizes"
    EVERY_BYTE = "every byte"
    LENGTHS = "index and lengths"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint, or what could have become one, and where it lies.

    Attributes:
        store: what reads it.
        name: in the store, of its directory or prefix; "" where the store's root is the
            checkpoint itself. Hostile until it is escaped.
        kind: how it is laid out.
        condition: what it is worth, as far as that was looked at.
        manifest: None if it has none, or none that can be read.
        data: the bytes of MANIFEST.json, where marker and manifest agree.
        marker: the bytes of COMMITTED, likewise.
        prefix: what `tf.train.Checkpoint.restore` takes; None for named States only.
        step: that it carries; None if nothing says.
        sequence: its rank among the commits of its place; None if nothing says.
        token: equal for all who see this very checkpoint; "" if unknown.
        time: when its marker was written, or its index, seconds since the epoch; in
            object storage what its manifest says; None if unknown.
        size: bytes; None if unknown.
        checked: how its files were checked.
        problems: why it is damaged.
        remarks: what else there is to say.
    """

    store: ObjectStore
    name: str
    kind: Kind
    condition: Condition = Condition.NOT_COMMITTED
    manifest: Manifest | None = None
    data: bytes = b""
    marker: bytes = b""
    prefix: str | None = None
    step: int | None = None
    sequence: int | None = None
    token: str = ""
    time: float | None = None
    size: int | None = None
    checked: Checked = Checked.NOTHING
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_committed(self) -> bool:
        """Whether its marker and manifest agree."""
        return self.condition is Condition.COMMITTED

    @property
    def saved_at(self) -> float | None:
        """When its manifest was made, in seconds since the epoch; None if unknown."""
        told = {} if self.manifest is None else self.manifest.metadata
        seconds = told.get("saved_at", -1)
        is_time = isinstance(seconds, int | float) and 0 <= seconds < 1e11
        return float(seconds) if is_time else None

    @property
    def path(self) -> str:
        """Of its directory, or the prefix in the flat forms; a URI in a store."""
        return os.path.join(self.store.uri, self.name) if self.name else self.store.uri

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name or self.path.rpartition("/")[2]

    @property
    def holder(self) -> str:
        """Where in the store its marker and manifest are."""
        return layout.sidecar(self.name) if self.kind is Kind.FLAT else self.name

    @property
    def shards(self) -> str:
        """The path of the directory with `states/` and the workers' shards."""
        if self.kind is not Kind.OWN:
            return layout.sidecar(self.path)
        # A flat commit that was fetched lies in a directory, with its sidecar in it.
        files = self.manifest.files if self.manifest else ()
        first = {entry.name.partition("/")[0] for entry in files}
        inner = [name for name in first if name.endswith(layout.SIDECAR_SUFFIX)]
        return os.path.join(self.path, *inner[:1])

    def object(self, name: str) -> str:
        """The name in the store of a file that the manifest names."""
        is_prefix = self.kind in (Kind.FLAT, Kind.FOREIGN)
        folder = os.path.dirname(self.name) if is_prefix else self.name
        return os.path.join(folder, name)

    def control(self, name: str) -> str:
        """The name in the store of its marker, its manifest or its metadata."""
        return os.path.join(self.holder, name)

    def file(self, name: str) -> str:
        """The path of a file that the manifest names; a URI in a store."""
        return os.path.join(self.store.uri, self.object(name))


def marker_bytes(manifest_bytes: bytes, sequence: int) -> bytes:
    """The marker's content: it vouches for exactly this manifest."""
    record = {
        "format": 1,
        "sequence": sequence,
        "manifest_size": len(manifest_bytes),
        "manifest_crc32c": checksum.of_bytes(manifest_bytes),
    }
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def token_of(marker: bytes, sequence: int | None) -> str:
    """What tells a commit from all others: its marker vouches for all of it."""
    return f"{sequence}-{checksum.of_bytes(marker):08x}"


def folder_name(step: int, token: str) -> str:
    """The folder of a commit in an object store."""
    return f"{step}.{token}"


def reader(directory: str) -> ObjectStore:
    """What reads a checkpoint directory of this machine.

    What cannot be read there is damaged: an older commit beside it is as good. Of a
    mirror nobody can say so, as it may be all there is; it is opened by `open_store`.

    Raises:
        ConfigurationError: it is a file.
    """
    return LocalStore(directory, unreadable=errors.CheckpointDamagedError)


def kind_of(name: str) -> Kind | None:
    """What a directory of this name may be; None if it can be none of ours."""
    if layout.COMMIT.fullmatch(name):
        return Kind.OWN
    if _COPY.fullmatch(name):
        return Kind.REMOTE
    if name.endswith(layout.SIDECAR_SUFFIX) and name != layout.SIDECAR_SUFFIX:
        return Kind.FLAT
    return None


def unread(store: ObjectStore, folder: str = "") -> Entry:
    """A folder of a store, before its marker and manifest are read.

    Args:
        store: the store.
        folder: its name; "" where the store's root is the commit itself.
    """
    if kind_of(folder) is Kind.FLAT:
        name = folder.removesuffix(layout.SIDECAR_SUFFIX)
        return Entry(store=store, name=name, kind=Kind.FLAT)
    last = (folder or store.uri).rstrip("/").rpartition("/")[2]
    if named := _COPY.fullmatch(last):
        return Entry(
            store=store,
            name=folder,
            kind=Kind.REMOTE,
            token=named["token"],
            step=int(named["step"]),
            sequence=int(named["sequence"]),
        )
    return Entry(store=store, name=folder, kind=Kind.OWN)


def read(entry: Entry) -> Entry:
    """The same, with what its marker and manifest say.

    Raises:
        CheckpointError: the store cannot be read.
    """
    marker, problem = control_file(entry, layout.MARKER)
    data, fault = control_file(entry, layout.MANIFEST)
    where = os.path.join(entry.store.uri, entry.control(layout.MANIFEST))
    if data is not None:
        try:
            entry = with_manifest(entry, from_json(data, where))
        except errors.CheckpointDamagedError as error:
            fault = str(error)
    # The time of the marker, or of the manifest; a store is not asked for times.
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
            return damaged(entry, problem)
        return dataclasses.replace(entry, remarks=() if fault is None else (fault,))
    token = token_of(marker, entry.sequence)
    if fault is None and data is None:
        fault = f"{where} is missing, though there is a marker beside it."
    elif fault is None and marker != marker_bytes(data or b"", entry.sequence or 0):
        fault = (
            f"The marker beside {where} was written for another manifest; one of the "
            "two is damaged."
        )
    elif fault is None and entry.token not in ("", token):
        fault = (
            f"{where} belongs to the commit {token}, not to the one that its folder "
            "names; somebody has moved it."
        )
    if fault is not None:
        return damaged(entry, fault)
    return dataclasses.replace(
        entry,
        condition=Condition.COMMITTED,
        token=token,
        data=data or b"",
        marker=marker,
    )


def with_manifest(entry: Entry, manifest: Manifest) -> Entry:
    """The same, with what a manifest says."""
    prefix = manifest.prefix
    return dataclasses.replace(
        entry,
        manifest=manifest,
        size=manifest.bytes,
        prefix=None if prefix is None else entry.file(prefix),
        step=manifest.step,
        sequence=manifest.sequence,
    )


def at(path: str) -> Entry:
    """What lies at a path: a commit's directory, or a flat prefix with a sidecar.

    Raises:
        ConfigurationError: a file lies where a directory should hold it.
    """
    holder = layout.sidecar(path) if reading.is_dir(layout.sidecar(path)) else path
    directory, name = os.path.split(holder)
    return _read_on_disk(reader(directory), name)


def damaged(entry: Entry, problem: str) -> Entry:
    """The same, found damaged."""
    return dataclasses.replace(entry, condition=Condition.DAMAGED, problems=(problem,))


def _read_on_disk(store: ObjectStore, folder: str) -> Entry:
    """A folder of a checkpoint directory, with what its marker and manifest say.

    One without a marker is a save that died, or goes on, unless there is a witness.
    """
    entry = read(unread(store, folder))
    if entry.condition is not Condition.NOT_COMMITTED or not _has_witness(entry):
        return entry
    entry = read(unread(store, folder))  # it may have been marked since
    if entry.condition is not Condition.NOT_COMMITTED:
        return entry
    marker = os.path.join(store.uri, entry.control(layout.MARKER))
    is_flat = entry.kind is Kind.FLAT
    prefix = entry.path if is_flat else os.path.join(entry.path, layout.PAYLOAD)
    what_else = ""
    if reading.is_there(prefix + ".index"):
        what_else = f", or restore {prefix!r} with tf.train.Checkpoint"
    return damaged(
        entry,
        f"{marker!r} is missing, though this was a commit; remove "
        f"{os.path.dirname(marker)!r}{what_else}.",
    )


def _has_witness(entry: Entry) -> bool:
    """Whether it was committed, although it has no marker.

    TensorFlow's state file names one of our own form only while its marker is there,
    and what it cannot name has a witness as long; a flat one has its intent until then.
    """
    root = entry.store.uri
    if entry.kind is Kind.FLAT:
        has_intent = reading.is_there(entry.path + layout.INTENT_SUFFIX)
        may_be = not has_intent and has_payload(entry.path)
    else:
        witness = os.path.join(root, entry.control(layout.WITNESS))
        may_be = reading.is_there(witness) or checkpoint_state.is_listed(
            root, f"{entry.name}/{layout.PAYLOAD}"
        )
    if not may_be or entry.manifest is not None:
        return may_be
    return any(map(layout.is_part, reading.names(os.path.join(root, entry.holder))))


def has_payload(prefix: str) -> bool:
    """Whether there is anything beside the sidecar of a flat checkpoint."""
    return reading.is_there(prefix + ".index") or reading.is_there(prefix)


def _ours(entries: Iterable[Entry]) -> list[Entry]:
    """Those that are ours at all, be they half or damaged."""
    return [
        each
        for each in entries
        if each.kind is Kind.REMOTE or each.manifest or each.problems or each.remarks
    ]


# --- what lies in a place ------------------------------------------------------------


def scan(directory: str) -> list[Entry]:
    """All of ours in a checkpoint directory, whole or not; it need not exist.

    Returns:
        Newest first, see `in_order`.

    Raises:
        OSError: the directory cannot be listed.
    """
    names, found = reading.names(directory), []
    store = reader(directory)
    for name in names:
        if kind_of(name) is None or paths.why_unsafe(name) is not None:
            continue
        with contextlib.suppress(OSError):  # if the disk fails here, it is damaged
            if not reading.is_real_dir(os.path.join(directory, name)):
                continue
        found.append(_read_on_disk(store, name))
    return in_order(_ours(found))


def listing(store: ObjectStore, *, timeout: float | None = None) -> list[Entry]:
    """All that looks like ours in an object store, committed or not; nothing is read.

    Args:
        store: the store.
        timeout: seconds for the listing; None: the store's own limit.

    Returns:
        Copies first, the highest sequence first; what doesn't name its sequence last.

    Raises:
        CheckpointError: the store cannot be listed, or lists too much.
    """
    names = list(itertools.islice(store.folders(timeout=timeout), MAX_FOLDERS + 1))
    if len(names) > MAX_FOLDERS:
        raise errors.CheckpointError(
            f"{store.uri} has more than {MAX_FOLDERS} folders; expected the few of one "
            "run. Give each run a place of its own."
        )
    return in_order(
        unread(store, name)
        for name in sorted(names)
        if kind_of(name) is not None and paths.why_unsafe(name) is None
    )


def contents(store: ObjectStore) -> list[Entry]:
    """All of ours in an object store, whole or not, as `scan` of a directory.

    Raises:
        CheckpointError: the store cannot be listed or read.
    """
    return _ours(map(read, listing(store)))


def copies(store: ObjectStore, *, timeout: float | None = None) -> list[Entry]:
    """The folders of a mirror among `listing`; highest sequence first."""
    found = listing(store, timeout=timeout)
    return [entry for entry in found if entry.kind is Kind.REMOTE]


def commits(store: ObjectStore, on_skip: Callable[[str], None]) -> Iterator[Entry]:
    """The whole copies in an object store, newest first, each read when asked for.

    Args:
        store: the store.
        on_skip: called with a description of each damaged one.

    Raises:
        CheckpointError: the store cannot be listed or read.
    """
    yield from read_commits(copies(store), on_skip)


def read_commits(
    found: Iterable[Entry], on_skip: Callable[[str], None]
) -> Iterator[Entry]:
    """The whole ones of some copies, in their order, each read when asked for.

    Args:
        found: folders of a mirror, from `copies`.
        on_skip: called with a description of each damaged one.

    Raises:
        CheckpointError: the store cannot be read.
    """
    for entry in map(read, found):
        if entry.is_committed:
            yield entry
        elif entry.condition is Condition.DAMAGED:
            on_skip(entry.problems[0])


def highest_sequence(entries: Iterable[Entry]) -> int:
    """The highest sequence that any of them has; 0 without one."""
    return max((entry.sequence or 0 for entry in entries), default=0)


def rank(entry: Entry) -> tuple[int, float, str]:
    """What commits rank by: their sequence, never a clock.

    Only where two machines each made one of the same sequence, because the store did
    not have the first one's, the time of the save decides.
    """
    return entry.sequence or 0, entry.saved_at or 0.0, entry.token


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Newest first, as a restart tries them: ours by `rank`, others put in by time."""
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
    """A small file of a commit, or what is wrong with it; neither where none is."""
    most = _MAX_MARKER_BYTES if name == layout.MARKER else _MAX_CONTROL_BYTES
    name, problem = entry.control(name), None
    for _ in range(_READS):
        target = io.BytesIO()
        try:
            count = entry.store.get(name, target, length=most + 1)
            break
        except ObjectMissingError:
            return None, None
        except errors.CheckpointDamagedError as error:
            problem = str(error)
    else:
        return None, problem
    if count > most:
        return None, (
            f"{os.path.join(entry.store.uri, name)} has more than {most} "
            "bytes, which no manifest or marker of ours has."
        )
    return target.getvalue(), None
