"""Commits in an object store: what lies where, which are whole, what they hold.

Below the store's root:

    <step>.<token>/             one commit; the token is its sequence and the checksum
                                of its marker, so the name stands for its content
        <name in the manifest>  its files, put by many threads
        MANIFEST.json           as in the local directory, byte for byte
        COMMITTED               the marker, put last; it alone makes this a commit
    checkpoint                  TensorFlow's state file; a convenience

Two saves never share a name, however they came to be, and whoever uploads the same
commit again finds what is there already. Nothing that a store says is trusted: names of
folders are parsed, sizes are bounded, manifest and marker must vouch for each other and
for the folder's name.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, layout
from tfpreempt.checkpoint.manifest import Manifest, from_json
from tfpreempt.storage import checksum
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore

MAX_FOLDERS = 100_000
_MAX_CONTROL_BYTES = 64 << 20
_FOLDER = re.compile(
    r"(?P<step>0|[1-9][0-9]{0,18})\.(?P<token>(?P<sequence>[1-9][0-9]{0,18})-[0-9a-f]{8})"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that is, or is to become, a commit.

    Attributes:
        name: of the folder.
        step: that its name says.
        sequence: that its name says.
        token: equal for all who see this very commit, here or in a local directory.
    """

    name: str
    step: int
    sequence: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCommit:
    """A commit whose marker, manifest and name agree; its files aren't verified yet.

    Attributes:
        folder: where in the store; "" where the store's root is the commit itself.
        token: equal for all who see this very commit.
        manifest: what it holds.
        manifest_data: the bytes of MANIFEST.json.
        marker_data: the bytes of COMMITTED.
    """

    folder: str
    token: str
    manifest: Manifest
    manifest_data: bytes
    marker_data: bytes


def folder_name(step: int, token: str) -> str:
    """The folder of a commit."""
    return f"{step}.{token}"


def parse(name: str) -> Folder | None:
    """A folder's name taken apart; None if it is none of ours."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    return Folder(
        name=name,
        step=int(match["step"]),
        sequence=int(match["sequence"]),
        token=match["token"],
    )


def joined(folder: str, name: str) -> str:
    """The name of an object in a folder."""
    return f"{folder}/{name}" if folder else name


def scan(store: ObjectStore, timeout: float | None = None) -> list[Folder]:
    """All folders that look like ours, committed or not, highest sequence first.

    Args:
        store: the store.
        timeout: seconds for the listing; None: the store's own limit.

    Raises:
        CheckpointError: the store cannot be listed, or lists too much.
    """
    names = list(itertools.islice(store.folders(timeout=timeout), MAX_FOLDERS + 1))
    if len(names) > MAX_FOLDERS:
        raise errors.CheckpointError(
            f"{store.uri} has more than {MAX_FOLDERS} folders; expected the few of one "
            "run. Give each run a place of its own."
        )
    found = [folder for name in names if (folder := parse(name)) is not None]
    found.sort(key=lambda each: (each.sequence, each.step, each.token), reverse=True)
    return found


def read(store: ObjectStore, folder: str = "") -> RemoteCommit | None:
    """Marker and manifest of a folder.

    Args:
        store: the store.
        folder: its name; "" where the store's root is the commit itself.

    Returns:
        The commit; None if there is no marker.

    Raises:
        CheckpointDamagedError: marker, manifest and name don't agree.
        CheckpointError: the store cannot be read.
    """
    marker = _small(store, joined(folder, layout.MARKER))
    if marker is None:
        return None
    where = f"{store.uri}/{joined(folder, layout.MANIFEST)}"
    data = _small(store, joined(folder, layout.MANIFEST))
    if data is None:
        raise errors.CheckpointDamagedError(
            f"{where} is missing, though there is a marker beside it."
        )
    manifest = from_json(data, where)
    if marker != catalog.marker_bytes(data, manifest.sequence):
        raise errors.CheckpointDamagedError(
            f"The marker beside {where} was written for another manifest; one of the "
            "two is damaged."
        )
    token = f"{manifest.sequence}-{checksum.of_bytes(marker):08x}"
    named = parse(folder)
    if named is not None and named.token != token:
        raise errors.CheckpointDamagedError(
            f"{where} belongs to the commit {token}, not to the one that its folder "
            "names; somebody has moved it."
        )
    return RemoteCommit(
        folder=folder,
        token=token,
        manifest=manifest,
        manifest_data=data,
        marker_data=marker,
    )


def commits(
    store: ObjectStore, on_skip: Callable[[str], None]
) -> Iterator[RemoteCommit]:
    """The commits of a store, newest first, each read when it is asked for.

    Args:
        store: the store.
        on_skip: called with a description of each damaged one.

    Raises:
        CheckpointError: the store cannot be listed or read.
    """
    for folder in scan(store):
        try:
            found = read(store, folder.name)
        except errors.CheckpointDamagedError as error:
            on_skip(str(error))
            continue
        if found is not None:
            yield found


def _small(store: ObjectStore, name: str) -> bytes | None:
    """An object that must be small; None if there is none."""
    target = io.BytesIO()
    try:
        count = store.get(name, target, length=_MAX_CONTROL_BYTES + 1)
    except ObjectMissingError:
        return None
    if count > _MAX_CONTROL_BYTES:
        raise errors.CheckpointDamagedError(
            f"{store.uri}/{name} has more than {_MAX_CONTROL_BYTES} bytes, which no "
            "manifest or marker of ours has."
        )
    return target.getvalue()
