"""Metadata that users attach to a checkpoint: a JSON object beside the manifest.

The metadata may change at any time. The manifest must not change, because the marker
contains its checksum. So the metadata is in a separate file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.storage.object_store import read_object

_MAX_BYTES = 4 << 20


def encoded(metadata: object) -> bytes:
    """Returns the metadata as JSON bytes, the content of the metadata file.

    Raises:
        ConfigurationError: the metadata is not a mapping of strings to JSON values, or
            is too large.
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
            f"Metadata cannot be written as JSON: {error}; expected a dict of strings, "
            "numbers, booleans, None, lists and dicts. Convert the value, for example "
            "with float() or str()."
        ) from error
    if len(text) > _MAX_BYTES:
        raise errors.ConfigurationError(
            f"Got metadata of {len(text)} bytes; expected at most {_MAX_BYTES} bytes. "
            "Save large values in a State."
        )
    return text.encode()


def read(checkpoint: Entry) -> dict[str, Any]:
    """Returns the metadata of a checkpoint; an empty dict if no metadata was written.

    Raises:
        CheckpointCorruptedError: the file is not a JSON object, or is too large.
        CheckpointError: the file cannot be read.
    """
    name = checkpoint.control(layout.METADATA)
    data = read_object(checkpoint.store, name, _MAX_BYTES + 1)
    if data is None:
        return {}
    try:
        found = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise errors.CheckpointCorruptedError(
            f"The metadata of {checkpoint.path} is not a JSON object of at most "
            f"{_MAX_BYTES} bytes. Set the metadata again."
        )
    return found


def write(checkpoint: Entry, values: Mapping[str, Any]) -> None:
    """Replaces the metadata of a checkpoint atomically. If two processes write at the
    same time, the values of the last write remain.

    Raises:
        ConfigurationError: JSON cannot hold the values.
        SaveError: the file cannot be written.
    """
    checkpoint.store.replace(checkpoint.control(layout.METADATA), encoded(values))
