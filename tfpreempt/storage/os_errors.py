"""Translates errors of the operating system into advice for the user."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from tfpreempt import errors
from tfpreempt.core.scratch import is_url
from tfpreempt.storage import file_reading, paths
from tfpreempt.storage.files import LocalFiles, make_lasting_dirs, sync_names

ADVICE = {
    errno.ENOSPC: "the disk is full: free space, or lower max_to_keep",
    errno.EDQUOT: "the quota is used up: free space, or lower max_to_keep",
    errno.EROFS: "the file system is mounted read-only: choose another directory",
    errno.EACCES: "permission denied: make the directory writable for this user",
    errno.EPERM: "not permitted: make the directory writable for this user",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.ELOOP: "links inside of this directory are not followed: remove the link",
    errno.EIO: "the device reports an I/O error: use another disk",
    errno.ESTALE: "the network file system lost the file: check the mount",
    errno.EREMOTEIO: "the storage service refuses the request: check the URI, the "
    "network and the credentials",
    errno.ETIMEDOUT: "the storage service does not answer: check the network",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.ENFILE: "too many open files on this machine: raise fs.file-max",
}
_MALFORMED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def advice_on(text: str) -> str | None:
    """Returns advice for an error text of TensorFlow; None if there is no advice.

    The advice is found by the system's message inside the text, such as "No space left
    on device". TensorFlow's error code is not enough: RESOURCE_EXHAUSTED means a full
    disk, a quota, too many open files, or memory.

    Args:
        text: text of the error.
    """
    found = [number for number in ADVICE if os.strerror(number) in text]
    longest = max(found, key=lambda number: len(os.strerror(number)), default=None)
    return None if longest is None else ADVICE[longest]


@contextlib.contextmanager
def translated(doing: str, directory: str) -> Iterator[None]:
    """Context that turns an OSError of the body into a SaveError with advice.

    Args:
        doing: action of the body for the message, such as "commit step 5".
        directory: the checkpoint directory, for the message.

    Raises:
        SaveError: the body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "check the directory and the disk")
        raise errors.SaveError(
            f"Could not {doing} in {directory!r}: {error}; {advice}. Older checkpoints "
            "are unchanged."
        ) from error


def check_directory(directory: object, *, name: str | None = None) -> str:
    """Makes the checkpoint directory if needed, and checks that it is writable.

    Args:
        directory: the user's argument `checkpoint_dir`.
        name: prefix of TensorFlow's files in the directory; None if TensorFlow writes
            no files.

    Returns:
        The absolute path of the directory.

    Raises:
        ConfigurationError: the argument is None or empty, is no valid text, begins with
            ~, or is a URL; the path is a file, or cannot be created or written to; or
            TensorFlow would not find a checkpoint at the path.
    """
    if directory is None or directory == "":
        raise errors.ConfigurationError(
            f"Got checkpoint_dir={directory!r}; expected the path of the directory for "
            "the commits. Pass checkpoint_dir=, or a tf.train.CheckpointManager, which "
            "has a directory."
        )
    if not isinstance(directory, str | os.PathLike):
        raise errors.ConfigurationError(
            f"checkpoint_dir must be a path (str or os.PathLike); got {directory!r}."
        )
    text = os.fsdecode(os.fspath(directory))
    paths.check_no_user_info(text)
    if is_url(text):
        raise errors.ConfigurationError(
            f"{paths.without_secrets(text)!r} is a URL; expected a directory of this "
            "machine, because files written to a URL here would not be uploaded."
        )
    paths.check_text(os.path.abspath(text))
    if name is not None:
        paths.check_restorable(os.path.join(os.path.abspath(text), name))
    if text.startswith("~"):
        raise errors.ConfigurationError(
            f"checkpoint_dir={text!r} would be a directory named '~' in "
            f"{os.getcwd()!r}: only a shell replaces ~ by the home directory. Pass "
            "os.path.expanduser(checkpoint_dir), or './~' if the directory has this "
            "name."
        )
    if "://" in text or _MALFORMED_URL.match(text):
        raise errors.ConfigurationError(
            f"checkpoint_dir={text!r} is neither a local path nor a URL. pathlib and "
            "os.path.abspath change 'gs://bucket' to 'gs:/bucket': pass the URL as a "
            "str."
        )
    path = os.path.abspath(text)
    files = LocalFiles(path)
    try:
        is_file = file_reading.is_file(path)
        if not is_file:
            if not file_reading.is_dir(path):
                make_lasting_dirs(files, path)
            # Ignore errors of the parent directories: saves may work nevertheless.
            with contextlib.suppress(OSError):
                sync_names(files, path)
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "choose another directory")
        raise errors.ConfigurationError(
            f"checkpoint_dir={path!r} cannot be created: {error}; {advice}."
        ) from error
    if is_file:
        raise errors.ConfigurationError(
            f"checkpoint_dir={path!r} is a file; expected a directory. Remove the "
            "file or choose another directory."
        )
    if not os.access(path, os.W_OK | os.X_OK | os.R_OK):
        raise errors.ConfigurationError(
            f"checkpoint_dir={path!r} is not writable for this user (uid "
            f"{os.getuid()}). Change its permissions or choose another directory."
        )
    return path
