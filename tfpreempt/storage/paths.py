"""Recognizes URLs, usable paths, and names that are safe as paths."""

from __future__ import annotations

import os
import re

from tfpreempt import errors
from tfpreempt.core.scratch import is_url

# Matches the scheme and the user information of a URL, such as "gs://user:password@".
# The second alternative is for a password with a slash, as in "gs://user:pass/word@":
# the text before the first slash then has a colon that is not followed by a port
# number.
_USER_INFO = re.compile(
    r"\A((?:[A-Za-z][A-Za-z0-9+.-]*:/+)?)(?:[^/]*@|[^/:@[]*:(?!\d*(?:/|\Z)).*@)"
)


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, or a URL without a "/" at its end."""
    text = os.fspath(path)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)


def without_secrets(url: str) -> str:
    """Returns a URL for messages: user name, password and query are replaced by ***."""
    shown, mark, _ = _USER_INFO.sub(r"\1***@", url, count=1).partition("?")
    return shown + ("?***" if mark else "")


def check_no_user_info(path: str, name: str = "The URL") -> None:
    """Checks that a URL has no user name or password, before the URL is logged.

    Args:
        path: a path or a URL.
        name: subject of the message, such as the variable that holds the URL.

    Raises:
        ConfigurationError: the URL has a user name or password; the message does not
            show them.
    """
    if is_url(path) and _USER_INFO.match(path):
        raise errors.ConfigurationError(
            f"{name} {without_secrets(path)!r} has a user name or password before the "
            "'@'; expected a URL without them, because URLs are written to logs, file "
            "names and metrics. Pass the credentials as the storage's own client "
            "expects them, for example by environment variables."
        )


def check_text(path: str) -> None:
    """Checks that a path is text that can be written to a manifest or a message.

    Raises:
        ConfigurationError: the path has a NUL, or bytes that are not UTF-8.
    """
    try:
        is_text = b"\0" not in path.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise errors.ConfigurationError(
            f"The path {path!r} is not valid text: it contains a NUL, or bytes that "
            "are not UTF-8. Rename the directory or choose another directory."
        )


def check_restorable(prefix: str) -> None:
    """Checks that TensorFlow can restore a checkpoint with this prefix (path of files).

    TensorFlow uses the prefix as a glob pattern to search for the files, so the prefix
    must not contain the special characters of glob patterns.

    Raises:
        ConfigurationError: the prefix has such a character.
    """
    for character in "[*?\\":
        if character in prefix:
            shown = without_secrets(prefix) if is_url(prefix) else prefix
            raise errors.ConfigurationError(
                f"{shown!r} contains the character {character!r}, which TensorFlow "
                "treats as a pattern: TensorFlow writes a checkpoint there and does "
                "not find the checkpoint again. Use a path without [, *, ? and \\. To "
                "keep existing checkpoints, move the files, or copy a checkpoint by "
                "Checkpoint(...).to_directory()."
            )


def why_unsafe(name: object) -> str | None:
    """Returns the reason why a name is unsafe as a relative path; None if it is safe.

    Args:
        name: name with "/" between its parts, from a manifest or a listing, which
            anybody may have written.
    """
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a string"
    if not name:
        return "is empty"
    if len(name) > 1024:
        return f"is {len(name)} characters long, more than 1024"
    if "\0" in name or "\\" in name or any(ord(c) < 32 for c in name):
        return "contains a NUL, a control character or a backslash"
    if name.startswith("/"):
        return "is absolute"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "contains an empty part, '.' or '..'"
    return None
