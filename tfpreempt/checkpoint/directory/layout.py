"""Names and paths of the files in a checkpoint directory.

A checkpoint is usually a directory that tfpreempt writes (the "own form"), in `<dir>`:

    checkpoint                      TensorFlow's state file; names the newest commit
    <number>/                       one commit; <number>.<sequence>/ if an older commit
                                    or another program has the name <number>/
        ckpt.index, ckpt.data-*     TensorFlow's files
        states/<name>.state         States that are equal on all workers, by the chief
        worker-0000/<name>.state    shard: the States of one worker
        MANIFEST.json               list of the files above, with sizes and crc32c
        COMMITTED                   the marker; without a marker there is no commit
        .metadata.json              metadata that a user added to the checkpoint later
        .was-committed              witness: evidence of a commit, if TensorFlow's state
                                    file cannot name the commit
    .tfpreempt-staging/<attempt>/   the files of a save before the commit
    .tfpreempt-staging/<attempt>.parts/0001/  data files with the tensors that a worker
                                    has written; the chief moves the files to the save
    .tfpreempt-directory            a token; equal for processes with the same storage
    .tfpreempt-lease/<token>/       the lease: record of the holder, and files that the
                                    holder is moving
    .tfpreempt-fetch.lock           lock file: in a program without a handler, only one
                                    worker at a time downloads a commit
    .tfpreempt-compiled/            compiled functions of JAX, see jax/compile_cache.py

Earlier versions wrote a commit at a URL (gs://bucket/run) under its final name. Such a
directory is a commit at any path, so a copied bucket can be restored:

    commit-<attempt>/               one commit, files as above, the marker last

In the flat form (a user's CheckpointManager, or a path returned by save_fn),
TensorFlow's files have TensorFlow's names, `ckpt-5.index`, `ckpt-5.data-*`. Beside them
are

    ckpt-5.tfpreempt/               sidecar: states/, worker-0000/, MANIFEST.json,
                                    COMMITTED
    ckpt-5.tfpreempt-intent         exists only while tfpreempt saves under this name
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
COMPILED = ".tfpreempt-compiled"
POINTER = "checkpoint"
PAYLOAD = "ckpt"
STATES = "states"
WORKER = "worker-"  # prefix of a shard's directory name
SIDECAR_SUFFIX = ".tfpreempt"
INTENT_SUFFIX = ".tfpreempt-intent"
PARTS_SUFFIX = ".parts"

STATE_SUFFIX = ".state"
IN_PLACE = "commit-"  # prefix of commits written to a URL by an earlier version
ATTEMPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# Directory names of commits that are not flat.
COMMIT = re.compile(
    rf"(0|[1-9][0-9]{{0,18}})(\.[1-9][0-9]{{0,18}})?|{IN_PLACE}{ATTEMPT.pattern}"
)
_STATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")


def is_same(one: str, other: str) -> bool:
    """Returns whether two paths lead to the same directory, possibly through links or
    mounts."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:
        return False  # a directory is missing, or cannot be accessed


def staging_directory(directory: str, attempt: str) -> str:
    """Returns the directory for the files of a save before the commit.

    The step is not part of the name, because workers with unequal numbers of steps save
    together at different steps.

    Args:
        directory: the checkpoint directory.
        attempt: name of the save: the same on all workers, and different for every
            save.

    Raises:
        ConfigurationError: the attempt cannot be a file name.
    """
    if not ATTEMPT.fullmatch(attempt):
        raise errors.ConfigurationError(
            f"Got the attempt {attempt!r}, which is used as a directory name; expected "
            "at most 100 letters, digits, '_', '.' and '-'."
        )
    return os.path.join(directory, STAGING, attempt)


def parts_directory(staged: str, worker: int) -> str:
    """Returns the directory where a worker writes its share of the tensors of a save.

    The directory is not in the staging directory. So a worker that writes too late, for
    example because the worker was suspended, cannot add a file to the commit.

    Args:
        staged: path of the staging directory of the save.
        worker: index of the worker.
    """
    return os.path.join(staged + PARTS_SUFFIX, f"{worker:04d}")


def worker_name(worker: int) -> str:
    """Returns the name of a worker's shard: the directory with its own States."""
    return f"{WORKER}{worker:04d}"


def is_part(name: str) -> bool:
    """Returns whether a file name in a commit is the name of the directory for States,
    or of a worker's shard."""
    return name == STATES or name.startswith(WORKER)


def name_remark(name: str) -> str:
    """Returns an explanation, for people, of a commit's name like 348.4; "" for any
    other name."""
    step, _, sequence = name.partition(".")
    is_second = step.isdecimal() and sequence.isdecimal()
    if not is_second:
        return ""
    return f"another commit of step {step}; {sequence} is its sequence number"


def sidecar(prefix: str) -> str:
    """Returns the path of the sidecar: the directory with tfpreempt's files beside a
    flat checkpoint."""
    return prefix + SIDECAR_SUFFIX


def check_state_name(name: object) -> str:
    """Returns the name of a State unchanged, after a check that it can be a file name.

    Raises:
        ConfigurationError: the name cannot be a file name.
    """
    if not isinstance(name, str) or not _STATE_NAME.fullmatch(name):
        raise errors.ConfigurationError(
            f"Got the State name {name!r}, which is used as a file name; expected 1 to "
            "100 letters, digits, spaces, '_', '.' and '-', beginning with a letter, a "
            "digit or '_'. Rename the State."
        )
    return name
