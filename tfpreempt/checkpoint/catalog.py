"""What of ours lies in a checkpoint directory: commits, and leftovers of dead saves.

Reading only; nothing here changes a file.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Iterator

from tfpreempt import errors
from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.manifest import Manifest, from_json
from tfpreempt.storage import checksum, reading

_MAX_CONTROL_BYTES = 512 << 20


class Kind(enum.Enum):
    """Who laid a checkpoint out, and how."""

    OWN = "own"  # a directory of our own
    FLAT = "flat"  # TensorFlow's flat files with our sidecar directory
    FOREIGN = "foreign"  # written without tfpreempt; no marker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit whose marker and manifest agree; its files aren't verified yet.

    Attributes:
        kind: OWN or FLAT.
        path: the directory in the own form, the prefix in the flat form.
        base: the directory to which the manifest's names are relative.
        manifest: its manifest.
        token: equal for all who see this very commit.
        marked_at: mtime of the marker, seconds since the epoch.
    """

    kind: Kind
    path: str
    base: str
    manifest: Manifest
    token: str
    marked_at: float


def marker_bytes(manifest_bytes: bytes, sequence: int) -> bytes:
    """The marker's content: it vouches for exactly this manifest."""
    record = {
        "format": 1,
        "sequence": sequence,
        "manifest_size": len(manifest_bytes),
        "manifest_crc32c": checksum.of_bytes(manifest_bytes),
    }
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def read_control(holder: str) -> tuple[Manifest, str, float] | None:
    """Reads the marker and the manifest in a directory.

    Args:
        holder: the commit's own directory, or the sidecar directory.

    Returns:
        Manifest, token and mtime of the marker; None if there is no marker.

    Raises:
        CheckpointDamagedError: the marker or the manifest is damaged.
    """
    marker = os.path.join(holder, layout.MARKER)
    try:
        data, marked_at = _read(marker)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest_data, _ = _read(os.path.join(holder, layout.MANIFEST))
    except OSError as error:
        raise errors.CheckpointDamagedError(
            f"{holder!r} has a marker but its manifest cannot be read: {error}"
        ) from error
    manifest = from_json(manifest_data, os.path.join(holder, layout.MANIFEST))
    if data != marker_bytes(manifest_data, manifest.sequence):
        raise errors.CheckpointDamagedError(
            f"The marker {marker!r} was written for another manifest than the one "
            "beside it; one of the two is damaged."
        )
    return manifest, f"{manifest.sequence}-{checksum.of_bytes(data):08x}", marked_at


def load(path: str) -> Committed | None:
    """The commit at a path as `Committed.path` gives it; None if there is none.

    Raises:
        CheckpointDamagedError: its marker or manifest is damaged.
    """
    sidecar = layout.sidecar(path)
    kind = Kind.FLAT if reading.is_dir(sidecar) else Kind.OWN
    control = read_control(path if kind is Kind.OWN else sidecar)
    if control is None:
        return None
    manifest, token, marked_at = control
    return Committed(
        kind=kind,
        path=path,
        base=path if kind is Kind.OWN else os.path.dirname(path),
        manifest=manifest,
        token=token,
        marked_at=marked_at,
    )


def read_manifest(holder: str) -> Manifest | None:
    """The manifest of a directory, with or without a marker; None if there is none."""
    path = os.path.join(holder, layout.MANIFEST)
    try:
        return from_json(_read(path)[0], path)
    except (OSError, errors.CheckpointDamagedError):
        return None


def scan(directory: str) -> tuple[list[Committed], list[str]]:
    """All commits in a directory.

    Returns:
        The commits, newest first (see `rank`), and a description of each damaged one.

    Raises:
        OSError: the directory cannot be listed.
    """
    found: list[Committed] = []
    problems: list[str] = []
    for kind, path, holder in _holders(directory):
        try:
            control = read_control(holder)
        except (errors.CheckpointDamagedError, OSError) as error:
            problems.append(str(error))
            continue
        if control is not None:
            manifest, token, marked_at = control
            base = path if kind is Kind.OWN else directory
            found.append(
                Committed(
                    kind=kind,
                    path=path,
                    base=base,
                    manifest=manifest,
                    token=token,
                    marked_at=marked_at,
                )
            )
    found.sort(key=lambda entry: rank(entry.manifest), reverse=True)
    return found, problems


def rank(manifest: Manifest) -> tuple[int, float]:
    """What commits rank by: their sequence, never a clock.

    Only where two machines each made one of the same sequence, because the store did
    not have the first one's, the time of the save decides.
    """
    return manifest.sequence, saved_at(manifest) or 0.0


def saved_at(manifest: Manifest) -> float | None:
    """When it was saved, in seconds since the epoch; None if it doesn't say."""
    value = manifest.metadata.get("saved_at")
    if isinstance(value, int | float) and 0 <= value < 1e11:
        return float(value)
    return None


def highest_sequence(directory: str) -> int:
    """The highest sequence that any manifest in the directory has; 0 without one."""
    sequences = [0]
    for _, _, holder in _holders(directory):
        manifest = read_manifest(holder)
        if manifest is not None:
            sequences.append(manifest.sequence)
    return max(sequences)


def uncommitted(directory: str) -> dict[str, str]:
    """Directories of the own form that have a manifest of ours and no marker.

    Returns:
        By path where each was staged.
    """
    found = {}
    for kind, path, holder in _holders(directory):
        is_marked = reading.is_there(os.path.join(holder, layout.MARKER))
        manifest = read_manifest(holder)
        if kind is Kind.OWN and not is_marked and manifest is not None:
            attempt = manifest.metadata.get("attempt")
            is_named = isinstance(attempt, str) and layout.ATTEMPT.fullmatch(attempt)
            found[path] = (
                layout.staging_directory(directory, str(attempt)) if is_named else path
            )
    return found


def staged(directory: str) -> dict[str, list[str]]:
    """What saves staged and have not committed, and that has no manifest.

    A staging directory is ours whole. One that was staged under its last name is taken
    for ours if every file in it is one that a save of ours writes: the name alone could
    be somebody else's.

    Returns:
        By the path where a save stages, the directories of it that are there.
    """
    staging = os.path.join(directory, layout.STAGING)
    found: dict[str, list[str]] = {}
    if _is_real_directory(staging):
        for name in sorted(_names(staging)):
            path = os.path.join(staging, name)
            if name.startswith(layout.FETCH):
                continue  # a download that goes on; `fetch` removes old ones
            if layout.ATTEMPT.fullmatch(name) and not reading.is_link(path):
                stem = path.removesuffix(layout.DONE_SUFFIX)
                parts = found.setdefault(stem.removesuffix(layout.CLAIM_SUFFIX), [])
                parts += [path] if reading.is_dir(path) else []
    for name in sorted(_names(directory)):
        path = os.path.join(directory, name)
        if (
            layout.is_in_place_name(name)
            and _is_real_directory(path)
            and not reading.is_there(os.path.join(path, layout.MARKER))
            and all(map(layout.is_saved_name, reading.tree(path)))
        ):
            found[path] = [path]
    return found


def sidecars(directory: str) -> list[tuple[str, str]]:
    """Prefix and path of each sidecar directory."""
    return [(p, h) for kind, p, h in _holders(directory) if kind is Kind.FLAT]


def _holders(directory: str) -> Iterator[tuple[Kind, str, str]]:
    for name in sorted(_names(directory)):
        path = os.path.join(directory, name)
        is_own = layout.is_commit_name(name)
        is_flat = name.endswith(layout.SIDECAR_SUFFIX) and name != layout.SIDECAR_SUFFIX
        if not (is_own or is_flat) or not _is_real_directory(path):
            continue
        if is_own:
            yield Kind.OWN, path, path
        else:
            yield Kind.FLAT, path[: -len(layout.SIDECAR_SUFFIX)], path


def _is_real_directory(path: str) -> bool:
    return reading.is_dir(path) and not reading.is_link(path)


def _names(directory: str) -> list[str]:
    try:
        return reading.names(directory)
    except FileNotFoundError:
        return []


def _read(path: str) -> tuple[bytes, float]:
    status = reading.stat(path)
    if status.size > _MAX_CONTROL_BYTES:
        raise errors.CheckpointDamagedError(
            f"{path!r} has {status.size} bytes, more than a manifest can have."
        )
    with reading.open_file(path) as file:
        return file.read(), status.modified_ns / 1e9
