"""Opens the ObjectStore at a path or URI given by the user."""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import Any

from tfpreempt import errors
from tfpreempt.core.lazy_import import to_install
from tfpreempt.core.scratch import is_url
from tfpreempt.storage import paths
from tfpreempt.storage.fsspec_store import FsspecStore, as_fsspec
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectStore

BUCKET_SCHEMES = ("gs", "s3", "az")
SCHEMES = ("file", *BUCKET_SCHEMES)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_CONTAINER = re.compile(r"(?=.{3,63}\Z)[a-z0-9]+(?:-[a-z0-9]+)*")


def local_path(location: str) -> str | None:
    """Returns the absolute path for a local path or file:// URI; None for other URIs.

    Raises:
        ConfigurationError: a file:// URI names another host or has a query; a URI has
            only one "/" after the colon, because `pathlib.Path` removed the other "/";
            or the URI is malformed.
    """
    paths.check_no_user_info(location)
    match = _SCHEME.match(location)
    if match and match[2] == "/" and not os.path.exists(location):
        raise errors.ConfigurationError(
            f"{paths.without_secrets(location)!r} is neither a path nor a URI; "
            f"expected two slashes, as in '{match[1]}://...'. pathlib.Path replaces "
            "two slashes by a single slash: pass a str."
        )
    if not is_url(location):
        return os.path.abspath(location)
    try:
        parts = urllib.parse.urlsplit(location)
    except ValueError as error:
        raise errors.ConfigurationError(
            f"{location!r} is not a valid URI: {error}; expected a path or a URI that "
            f"begins with {_schemes()}."
        ) from error
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise errors.ConfigurationError(
            f"{location!r} names the host {parts.netloc!r}; expected a path of this "
            "machine, file:///path with three slashes."
        )
    if parts.query or parts.fragment:
        raise errors.ConfigurationError(
            f"{paths.without_secrets(location)!r} contains a '?' or '#'; expected "
            "file:///path. In a file name, write %3F for a question mark and %23 for a "
            "hash."
        )
    return os.path.abspath(urllib.parse.unquote(parts.path))


def check_apart(mirror: str, checkpoint_dir: str) -> None:
    """Checks that a local mirror and the checkpoint directory are separate directories.

    Args:
        mirror: path or URI of the mirror.
        checkpoint_dir: path or URI of the checkpoint directory.

    Raises:
        ConfigurationError: both are the same directory, or one contains the other.
    """
    local_paths = [local_path(mirror), local_path(checkpoint_dir)]
    real = [
        os.path.realpath(location) for location in local_paths if location is not None
    ]
    if len(real) == 2 and os.path.commonpath(real) in real:
        raise errors.ConfigurationError(
            f"Commits in {checkpoint_dir!r} cannot be mirrored to {mirror!r}: the two "
            "are the same directory, or one contains the other, so a cleanup would "
            "delete mirrored commits. Use a mirror outside of the checkpoint "
            "directory, preferably on another disk."
        )


def open_store(location: str | os.PathLike[str], filesystem: Any = None) -> ObjectStore:
    """Returns the store at a path or URI; sends no request.

    Args:
        location: a local path, or a URI: file:///path, gs://bucket/prefix,
            s3://bucket/prefix or az://container/prefix. With a `filesystem`, a path in
            the file system.
        filesystem: a file system object of pyarrow or fsspec. None: the location alone
            determines the kind of store.

    Raises:
        ConfigurationError: the location is invalid; the message names valid locations.
            Or the file system has an unsupported type.
    """
    location = os.fspath(location)
    if not isinstance(location, str) or not location:
        raise errors.ConfigurationError(
            f"Got the location {location!r}; expected a path, or a URI that begins "
            f"with {_schemes()}."
        )
    paths.check_no_user_info(location)
    if filesystem is not None:
        if (theirs := as_fsspec(filesystem)) is None:
            raise errors.ConfigurationError(
                f"Got filesystem={filesystem!r}; expected a file system object of "
                "pyarrow or fsspec."
            )
        _checked(location, location)
        return FsspecStore(theirs, location)
    path = local_path(location)
    if path is not None:
        return LocalStore(path)
    scheme, bucket, prefix = split(location)
    if scheme == "gs":
        from tfpreempt.storage.gcs import GcsStore  # the import takes a second

        return GcsStore(bucket, prefix)
    extra = "azure" if scheme == "az" else "s3"
    try:
        import obstore  # noqa: F401  (the modules below need this package)
    except ImportError as error:
        raise errors.ConfigurationError(
            f"{location!r} needs obstore, which is not installed: {to_install(extra)} "
            f"({error})."
        ) from error
    if scheme == "az":
        from tfpreempt.storage.azure import AzureStore

        return AzureStore(bucket, prefix)
    from tfpreempt.storage.s3 import S3Store

    return S3Store(bucket, prefix)


def split(uri: str) -> tuple[str, str, str]:
    """Returns scheme, bucket (or container) and prefix of a gs://, s3:// or az:// URI.

    Raises:
        ConfigurationError: the URI has another scheme, or is malformed.
    """
    scheme, _, rest = uri.partition("://")
    if scheme not in BUCKET_SCHEMES:
        raise errors.ConfigurationError(
            f"{paths.without_secrets(uri)!r} cannot be opened; expected a local path, "
            f"or a URI that begins with {_schemes()}. Mount other storage. Only "
            "tfpreempt.Checkpoint takes filesystem= (an fsspec or pyarrow file system) "
            "with a path in that file system."
        )
    if "?" in rest or "#" in rest:
        raise errors.ConfigurationError(
            f"{paths.without_secrets(uri)!r} contains a '?' or '#'; expected "
            f"{scheme}://bucket/prefix without options. Set endpoint and credentials "
            "by environment variables."
        )
    bucket, _, prefix = rest.partition("/")
    if scheme == "az" and not _CONTAINER.fullmatch(bucket):
        raise errors.ConfigurationError(
            f"{uri!r} names the container {bucket!r}; expected az://container/prefix. "
            "The name of a container has 3 to 63 lower-case letters, digits and single "
            "'-', and begins and ends with a letter or digit. The environment variable "
            "AZURE_STORAGE_ACCOUNT_NAME names the account."
        )
    if not _BUCKET.fullmatch(bucket):
        raise errors.ConfigurationError(
            f"{uri!r} names the bucket {bucket!r}; expected {scheme}://bucket/prefix. "
            "The name of a bucket has 3 to 222 lower-case letters, digits, '-', '_' "
            "and '.', and begins and ends with a letter or digit."
        )
    return scheme, bucket, _checked(prefix, uri)


def _checked(prefix: str, location: str) -> str:
    """Returns a prefix without "/" at both ends, after a check that it is a safe path.

    Args:
        prefix: the part of the location that the names of all objects begin with.
        location: the user's argument, for the message.

    Raises:
        ConfigurationError: the prefix is unsafe.
    """
    trimmed = prefix.strip("/")
    reason = paths.why_unsafe(trimmed) if trimmed else None
    if reason:
        raise errors.ConfigurationError(
            f"The path {trimmed!r} in {location!r} {reason}; expected parts separated "
            "by one '/'."
        )
    return trimmed


def _schemes() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)
