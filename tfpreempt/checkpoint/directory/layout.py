"""Names and paths of the files in a checkpoint directory.

Own form, in `<dir>`:

    checkpoint                      TensorFlow's state file, names the newest commit
    <number>/                       one commit; <number>.<sequence>/ if the plain name
                                    belongs to an older commit or another program
        ckpt.index, ckpt.data-*     TensorFlow's files
        states/<name>.state         replicated States, written by the chief
        worker-0000/<name>.state    the shard of one worker
        MANIFEST.json               the files above, with sizes and crc32c
        COMMITTED                   the marker; only the marker makes a checkpoint
        .metadata.json              metadata that a user added later, with a handle
        .was-committed              in a commit that TensorFlow's state file cannot name
    .tfpreempt-staging/<attempt>/   the same files before the commit
    .tfpreempt-staging/<attempt>.parts/0001/  TensorFlow's data files that a worker has
                                    written, until the chief moves them to the others
    .tfpreempt-directory            a token: its readers share the storage
    .tfpreempt-lease/<token>/       the owner of the lease, and its path for writing
    .tfpreempt-fetch.lock           held while a plain program fetches a commit

Earlier versions wrote a commit in a URL (gs://bucket/run) under its final name. Such a
directory is a commit at any path, so a copied bucket can be restored:

    commit-<attempt>/               one commit, files as above, the marker last

Flat form (a user's CheckpointManager, or a path that save_fn returned): TensorFlow's
files as TensorFlow wrote them, `ckpt-5.index`, `ckpt-5.data-*`, and next to them

    ckpt-5.tfpreempt/               states/, worker-0000/, MANIFEST.json, COMMITTED
    ckpt-5.tfpreempt-intent         only while tfpreempt saves under this name
"""

from __future__ import annotations

import os
import re

from tfpreempt import errors

MANIFEST = "MANIFEST.json"
MARKER = "COMMITTED"
METADATA = ".metadata.json"
WITNESS = ".was-committed"
STAGING = ".tfpreempt-staging"
TOKEN = ".tfpreempt-directory"
LEASE = ".tfpreempt-lease"
FETCH = "fetch-"  # prefix of a download's staging directory
FETCH_LOCK = ".tfpreempt-fetch.lock"
POINTER = "checkpoint"
PAYLOAD = "ckpt"
STATES = "states"
WORKER = "worker-"  # prefix of a shard's directory name
SIDECAR_SUFFIX = ".tfpreempt"
INTENT_SUFFIX = ".tfpreempt-intent"
PARTS_SUFFIX = ".parts"

STATE_SUFFIX = ".state"
IN_PLACE = "commit-"  # prefix of a commit that an earlier version wrote to a URL
ATTEMPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# Directory names of commits in the own form.
COMMIT = re.compile(
    rf"(0|[1-9][0-9]{{0,18}})(\.[1-9][0-9]{{0,18}})?|{IN_PLACE}{ATTEMPT.pattern}"
)
_STATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")


def is_same(one: str, other: str) -> bool:
    """Returns whether two paths lead to the same directory, by links or mounts."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False  # a directory is missing


def staging_directory(directory: str, attempt: str) -> str:
    """Returns the directory for the files of one save before the commit.

    The name has no step: workers with unequal numbers of steps save together at
    different steps.

    Args:
        directory: the checkpoint directory.
        attempt: name of the save, the same on all workers and different for every save.

    Raises:
        ConfigurationError: the attempt cannot be a file name.
    """
    if not ATTEMPT.fullmatch(attempt):
        raise errors.ConfigurationError(
            f"The attempt {attempt!r} becomes a directory name; expected letters, "
            "digits, '_', '.' and '-' only, at most 100 of them."
        )
    return os.path.join(directory, STAGING, attempt)


def parts_directory(staged: str, worker: int) -> str:
    """Returns the directory for a worker's share of TensorFlow's data files.

    The directory is outside of the staging directory. A worker that writes too late,
    for example after it was suspended, can therefore add no file to the commit.
    """
    return os.path.join(staged + PARTS_SUFFIX, f"{worker:04d}")


def worker_name(worker: int) -> str:
    """Returns the directory name of one worker's shard."""
    return f"{WORKER}{worker:04d}"


def is_part(name: str) -> bool:
    """Returns whether a name is that of tfpreempt's own directories in a commit."""
    return name == STATES or name.startswith(WORKER)


def sidecar(prefix: str) -> str:
    """Returns the directory with tfpreempt's files for a flat checkpoint."""
    return prefix + SIDECAR_SUFFIX


def check_state_name(name: object) -> str:
    """Returns the name if the name can safely become a file name.

    Raises:
        ConfigurationError: the name cannot.
    """
    if not isinstance(name, str) or not _STATE_NAME.fullmatch(name):
        raise errors.ConfigurationError(
            f"State name {name!r} becomes a file name; expected 1 to 100 letters, "
            "digits, spaces, '_', '.' and '-', beginning with a letter, a digit or "
            "'_'. Rename the State."
        )
    return name
