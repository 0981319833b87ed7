"""From a URI to its ObjectStore."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.storage.interface import ObjectStore
from tfpreempt.checkpoint.storage.local import LocalStore

SCHEMES = ("file", "gs", "s3")


def is_uri(text: str) -> bool:
    """Whether a place is named by a URI; a local path otherwise."""
    return "://" in text


def local_path(place: str) -> str | None:
    """The absolute local path of a path or a file:// URI; None for other URIs.

    Raises:
        ConfigurationError: a file:// URI of another host.
    """
    if not is_uri(place):
        return os.path.abspath(place)
    parts = urllib.parse.urlsplit(place)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise errors.ConfigurationError(
            f"{place!r} names the host {parts.netloc!r}; expected file:///path of this "
            "machine."
        )
    return os.path.abspath(urllib.parse.unquote(parts.path))


def open_store(place: str, filesystem: Any = None) -> ObjectStore:
    """The store at a place.

    Args:
        place: a local path, file://, gs://bucket/prefix or s3://bucket/prefix; with a
            `filesystem`, a path in it.
        filesystem: one of our stores, or a file system of pyarrow or fsspec.

    Raises:
        ConfigurationError: the place cannot be one; says what can.
    """
    del filesystem
    path = local_path(place)
    if path is not None:
        return LocalStore(path)
    raise errors.ConfigurationError(
        f"{place!r} cannot be opened; expected a local path, or a URI of one of "
        f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}."
    )
