"""Rules of paths: what lies where in a checkpoint directory.

Own form, in `<dir>`:

    checkpoint                      TensorFlow's state file, names the newest commit
    <number>/                       one commit; <number>.<sequence>/ where the plain
                                    name is taken by an older commit or somebody else
        ckpt.index, ckpt.data-*     TensorFlow's files
        states/<name>.state         replicated States, written by the chief
        worker-0000/<name>.state    the shard of one worker
        MANIFEST.json               every file above with its size and crc32c
        COMMITTED                   the marker; it alone makes this a checkpoint
        .metadata.json              what a user noted about it with a handle, later
        .was-committed              in a commit that TensorFlow's state file cannot name
    .tfpreempt-staging/<attempt>/   the same before the commit
    .tfpreempt-staging/<attempt>.parts/0001/  TensorFlow's data files that a worker has
                                    written, until the chief moves them to the others
    .tfpreempt-directory            a token: whoever reads it has the same storage
    .tfpreempt-lease/<token>/       who may commit here, and by what way
    .tfpreempt-fetch.lock           held while a plain program fetches a commit

Earlier versions wrote a commit in a URL (gs://bucket/run) under its last name. Such a
directory is a commit wherever it lies, so that a copied bucket can be restored:

    commit-<attempt>/               one commit, files as above, the marker last

Flat form (a user's CheckpointManager, or a path that save_fn returned): TensorFlow's
files as it wrote them, `ckpt-5.index`, `ckpt-5.data-*`, and next to them

    ckpt-5.tfpreempt/               states/, worker-0000/, MANIFEST.json, COMMITTED
    ckpt-5.tfpreempt-intent         only while a save of ours is under way
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
FETCH = "fetch-"  # begins the staging directory of a download
FETCH_LOCK = ".tfpreempt-fetch.lock"
POINTER = "checkpoint"
PAYLOAD = "ckpt"
STATES = "states"
WORKER = "worker-"  # begins the directory name of a shard
SIDECAR_SUFFIX = ".tfpreempt"
INTENT_SUFFIX = ".tfpreempt-intent"
PARTS_SUFFIX = ".parts"

STATE_SUFFIX = ".state"
IN_PLACE = "commit-"  # begins the name of a commit of an earlier version in a URL
ATTEMPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# What a directory is called that may be a commit in the own form.
COMMIT = re.compile(
    rf"(0|[1-9][0-9]{{0,18}})(\.[1-9][0-9]{{0,18}})?|{IN_PLACE}{ATTEMPT.pattern}"
)
_STATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")


def is_same(one: str, other: str) -> bool:
    """Whether two directories are one, by whatever links or mounts they are named."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False  # one of them is not there


def staging_directory(directory: str, attempt: str) -> str:
    """Where the workers of one save put their files before the commit.

    Not named by the step: workers of uneven length save together at different ones.

    Args:
        directory: the checkpoint directory.
        attempt: the same on all workers of one save and different for every save.

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
    """Where a worker writes its share of TensorFlow's data files.

    It is not in the staging directory: nobody who comes too late, frozen or not, can
    put anything there that would be committed.
    """
    return os.path.join(staged + PARTS_SUFFIX, f"{worker:04d}")


def worker_name(worker: int) -> str:
    """The directory name of one worker's shard."""
    return f"{WORKER}{worker:04d}"


def is_part(name: str) -> bool:
    """Whether a commit has a directory of this name, and TensorFlow does not."""
    return name == STATES or name.startswith(WORKER)


def sidecar(prefix: str) -> str:
    """The directory that holds what belongs to a flat checkpoint."""
    return prefix + SIDECAR_SUFFIX


def check_state_name(name: object) -> str:
    """Returns the name if it can safely become a file name.

    Raises:
        ConfigurationError: it cannot.
    """
    if not isinstance(name, str) or not _STATE_NAME.fullmatch(name):
        raise errors.ConfigurationError(
            f"State name {name!r} becomes a file name; expected 1 to 100 letters, "
            "digits, spaces, '_', '.' and '-', beginning with a letter, a digit or "
            "'_'. Rename the State."
        )
    return name
