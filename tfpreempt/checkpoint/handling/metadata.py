"""What users note about a checkpoint: a JSON object beside its manifest, never in it.

The manifest is vouched for by the marker and never changes; this may, at any time.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, layout
from tfpreempt.storage import failure
from tfpreempt.storage.files import LocalFiles, write_durably
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore

_MAX_BYTES = 4 << 20


def encoded(metadata: object) -> bytes:
    """Metadata as bytes.

    Raises:
        ConfigurationError: it is no mapping of strings to what JSON can hold.
    """
    if not isinstance(metadata, Mapping) or not all(
        isinstance(name, str) for name in metadata
    ):
        raise errors.ConfigurationError(
            f"Metadata must be a dict with strings as keys; got {metadata!r:.120}."
        )
    try:
        text = json.dumps(dict(metadata), indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ConfigurationError(
            f"Metadata must be what JSON can hold: {error}. Convert the value, such as "
            "by float() or str()."
        ) from error
    if len(text) > _MAX_BYTES:
        raise errors.ConfigurationError(
            f"Metadata of {len(text)} bytes; expected at most {_MAX_BYTES}. Put large "
            "things into a State."
        )
    return text.encode()


def decoded(data: bytes, where: str) -> dict[str, Any]:
    """Metadata from bytes of unknown origin.

    Raises:
        CheckpointDamagedError: they are no JSON object, or too many.
    """
    try:
        found = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise errors.CheckpointDamagedError(
            f"{where} is no JSON object of at most {_MAX_BYTES} bytes. Set the "
            "metadata anew."
        )
    return found


def read_local(holder: str) -> bytes | None:
    """The bytes in a directory; None if there are none.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = os.path.join(holder, layout.METADATA)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.CheckpointError(f"{path!r} cannot be read: {error}") from error
    with open(descriptor, "rb") as file:
        return file.read(_MAX_BYTES + 1)


def write_local(holder: str, data: bytes) -> None:
    """Writes them, all or nothing; whoever does is `turns.alone_in` the directory.

    Raises:
        SaveError: the directory cannot be written.
    """
    path = os.path.join(holder, layout.METADATA)
    with failure.translated("write metadata", holder):
        write_durably(LocalFiles(), path, data)


def read_remote(store: ObjectStore, folder: str) -> bytes | None:
    """The bytes in a store's folder; None if there are none."""
    target = io.BytesIO()
    name = catalog.joined(folder, layout.METADATA)
    try:
        store.get(name, target, length=_MAX_BYTES + 1)
    except ObjectMissingError:
        return None
    return target.getvalue()


def write_remote(store: ObjectStore, folder: str, data: bytes) -> None:
    """Writes them, all or nothing; whoever is last wins."""
    store.replace(catalog.joined(folder, layout.METADATA), data)
