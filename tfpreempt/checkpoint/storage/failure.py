"""Translates what the operating system says into what the user can do."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from tfpreempt import errors

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space, or lower max_to_keep",
    errno.EDQUOT: "the quota is used up: free space, or lower max_to_keep",
    errno.EROFS: "the file system is mounted read-only: choose another directory",
    errno.EACCES: "permission denied: make it writable for this user",
    errno.EPERM: "not permitted: make it writable for this user",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.EIO: "the device reports an I/O error: use another disk",
    errno.ESTALE: "the network file system lost the file: check the mount",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib makes "gs://a" "gs:/a"


@contextlib.contextmanager
def translated(doing: str, directory: str) -> Iterator[None]:
    """Turns an OSError of the body into a SaveError.

    Args:
        doing: what the body does, such as "commit step 5".
        directory: the checkpoint directory, for the message.

    Raises:
        SaveError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the directory and the disk")
        raise errors.SaveError(
            f"Could not {doing} in {directory!r}: {error}; {advice}. "
            "No older checkpoint was touched."
        ) from error


def check_directory(directory: object) -> str:
    """Makes the checkpoint directory if need be and checks that it can be written.

    Args:
        directory: what the user gave as checkpoint directory.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: it is missing, not a local path, a file, or not writable.
    """
    if directory is None or directory == "":
        raise errors.ConfigurationError(
            "A tf.train.Checkpoint needs a directory to be saved in; got "
            f"checkpoint_dir={directory!r}. Pass checkpoint_dir=, or a "
            "tf.train.CheckpointManager in place of the checkpoint."
        )
    if not isinstance(directory, str | os.PathLike):
        raise errors.ConfigurationError(
            f"checkpoint_dir must be a path (str or os.PathLike); got {directory!r}."
        )
    text = os.fsdecode(os.fspath(directory))
    if "://" in text or _URL.match(text):
        raise errors.ConfigurationError(
            f"Got the checkpoint directory {text!r}; expected a local path. Mount the "
            "bucket, or use a local directory; object storage comes with a later "
            "version."
        )
    path = os.path.abspath(text)
    if os.path.exists(path) and not os.path.isdir(path):
        raise errors.ConfigurationError(
            f"checkpoint_dir={path!r} is a file; expected a directory. Remove the "
            "file or choose another directory."
        )
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another directory")
        raise errors.ConfigurationError(
            f"checkpoint_dir={path!r} cannot be made: {error}; {advice}."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK | os.R_OK):
        raise errors.ConfigurationError(
            f"checkpoint_dir={path!r} is not writable for this user (uid "
            f"{os.getuid()}). Change its permissions or choose another directory."
        )
    return path
