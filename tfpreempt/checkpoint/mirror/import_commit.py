"""Imports a commit of the mirror into a checkpoint directory, as a local commit.

The files are downloaded to a staging directory. If the process is killed, the next
start finds and uses that directory. A rename and the marker then complete the commit,
as in a save. A flat commit (files of a CheckpointManager) becomes a commit with its own
directory, so that the files of the user's CheckpointManager are not touched.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, checkpoint_state, layout, retention
from tfpreempt.checkpoint.directory import commit as committing
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror import resolve
from tfpreempt.checkpoint.mirror.download import download
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.core import contained
from tfpreempt.storage import file_reading, os_errors
from tfpreempt.storage.files import Files, remove_if_empty, write_durably
from tfpreempt.storage.object_store import ObjectStore
from tfpreempt.storage.request_deadline import RETRY_SECONDS

_log = logging.getLogger(__name__)

SILENT_SECONDS = 2.0  # seconds to wait for the store before a warning is logged
# Seconds for retries after the warning, if a local commit can be restored.
LOOK_SECONDS = 8.0
_STAGED = re.compile(rf"{layout.FETCH}\d+-[0-9a-f]{{8}}")  # with the token of a commit
_KEEP_ALL = RetentionPolicy(max_to_keep=None)


def look_for_newer(
    mirror: Mirror,
    local: Entry | None,
    fetch: Callable[[Sequence[Entry]], bool],
    *,
    instead: str,
    copies: Sequence[Entry] | None = None,
) -> bool:
    """Looks for a commit in the mirror that is newer than the local checkpoint, and
    imports that commit.

    If the mirror cannot be read, a warning is logged, and the caller restores the local
    checkpoint. If there is no local checkpoint, or the directory is a scratch
    directory, an unreadable mirror is an error.

    Args:
        mirror: mirror of the checkpoint directory.
        local: newest intact local checkpoint; None without a local checkpoint.
        fetch: function that takes the commits in the store, imports the newest commit
            if newer than `local`, and returns whether a commit was imported.
        instead: last words of an error message: advice for a user who wants to start
            from scratch.
        copies: commits in the store, as returned by `settle`; None lists the store now.

    Returns:
        Whether a newer commit was imported.

    Raises:
        CheckpointError: the store cannot be read, and there is no local checkpoint or
            the directory is a scratch directory.
        DirectoryLockedError: another program uploads to the store.
        SaveError: the local disk failed.
    """
    try:
        if copies is None:
            limit = None if local is None else LOOK_SECONDS
            copies = _look_aloud(mirror, timeout=limit)
        return fetch(copies)
    except (errors.SaveError, errors.DirectoryLockedError):
        raise  # local disk failed, or the mirror is in use: no reason to use `local`
    except errors.CheckpointError as error:
        if local is None or mirror.scratch is not None:
            raise _unknown(mirror, error, instead) from error
        _log.warning(
            "cannot check %s for a newer commit; restoring %s (step %s). If a newer "
            "commit exists, its steps are repeated: %s",
            mirror.store.uri,
            local.path,
            local.step,
            error,
        )
        return False


def settle(
    mirror: Mirror, files: Files, *, adopts: bool = True, instead: str
) -> list[Entry] | None:
    """Deletes the commits of a scratch directory, if another machine or the user has
    changed the mirror.

    A scratch directory is a local cache of a mirror. For any other directory the
    function does nothing. The caller holds the lease of the directory.

    Args:
        mirror: mirror of the directory.
        files: file operations on the directory, guarded by the lease.
        adopts: whether to import a checkpoint in another layout if the mirror has no
            commit: a checkpoint of an earlier version, or made without tfpreempt.
        instead: last words of an error message: advice for a user who wants to start
            from scratch.

    Returns:
        The commits in the mirror; None if the directory is not a scratch directory.

    Raises:
        CheckpointError: the mirror cannot be read.
        CheckpointCorruptedError: the mirror has commits of an earlier version, and none
            of them is intact.
        DirectoryLockedError: another program has the lease of the mirror.
        SaveError: the disk failed, the lease of the mirror cannot be taken, or the
            lease of the scratch directory is lost.
    """
    scratch = mirror.scratch
    if scratch is None:
        return None
    try:
        copies = _look_aloud(mirror, timeout=None)
        is_empty = scratch.settle(copies, files)
    except (errors.SaveError, errors.DirectoryLockedError):
        raise
    except errors.CheckpointError as error:
        raise _unknown(mirror, error, instead) from error
    if is_empty and adopts:
        _adopt(files, mirror.store, scratch.directory)
    return copies


def _unknown(mirror: Mirror, error: Exception, instead: str) -> errors.CheckpointError:
    return errors.CheckpointError(
        f"{error} Training does not start from scratch, because {mirror.store.uri} may "
        "have commits that cannot be read now. Make the storage reachable, or "
        f"{instead}"
    )


def _adopt(files: Files, store: ObjectStore, directory: str) -> None:
    """Imports the newest checkpoint from a store whose objects no mirror has uploaded.

    A checkpoint of an earlier version of tfpreempt, or a copy of a local directory, is
    imported as a commit. A checkpoint written by TensorFlow stays a flat checkpoint.
    """
    found = catalog.contents(store)
    corrupt = [each.problems[0] for each in found if each.problems]
    for commit in (each for each in found if each.is_committed):
        try:
            bring(files, commit, directory)
        except errors.CheckpointCorruptedError as error:
            corrupt.append(str(error))
        else:
            return
    if corrupt:
        raise errors.CheckpointCorruptedError(
            f"no commit in {store.uri} is intact ({'; '.join(corrupt)}). Training does "
            "not start from scratch beside these commits. Put the objects back from a "
            "copy. To start from scratch, move the objects away or pass restore=False"
        )
    if flat := resolve.listed_in_store(store):
        _log.info("downloading %s, written by TensorFlow", flat.path)
        download(flat, directory, progress=True, files=files)
        latest = checkpoint_state.CheckpointStateFile(
            latest=flat.name, paths=(flat.name,)
        )
        path = os.path.join(directory, layout.POINTER)
        with os_errors.translated(f"download {flat.path}", directory):
            write_durably(files, path, checkpoint_state.to_bytes(latest))


def _look_aloud(mirror: Mirror, *, timeout: float | None) -> list[Entry]:
    """Returns the commits in the store. Logs a warning if the store is slow.

    Args:
        mirror: mirror whose store is listed.
        timeout: seconds for retries after the warning; None: the store's own timeout.
    """
    try:
        return mirror.look(SILENT_SECONDS)
    except errors.CheckpointError as error:
        if error.is_permanent:
            raise
        _log.warning(
            "%s does not respond; retrying for up to %g s: %s",
            mirror.store.uri,
            timeout or RETRY_SECONDS,
            error,
        )
        return mirror.look(timeout)


def newest_first(
    files: Files,
    copies: Iterable[Entry],
    local: Entry | None,
    directory: str,
    on_skip: Callable[[str], None],
    on_lost: Callable[[str], None],
    *,
    policy: RetentionPolicy = _KEEP_ALL,
    needs_prefix: bool = False,
) -> bool:
    """Imports the newest intact commit of the mirror, if newer than the local commit.

    Commits are compared by sequence number. The time of the save decides if the
    sequence numbers of two different commits are equal, or if the local checkpoint was
    written by another program.

    Args:
        files: file operations on the directory.
        copies: commits in the store; highest sequence number first.
        local: newest intact local checkpoint; None without a local checkpoint.
        directory: the checkpoint directory.
        on_skip: function called with a message for each commit that is skipped because
            of `needs_prefix`.
        on_lost: function called with a message for each corrupt commit.
        policy: the rules by which commits stay in the directory.
        needs_prefix: whether to skip commits without a TensorFlow checkpoint, which
            contain only named States.

    Returns:
        Whether a commit was imported.

    Raises:
        CheckpointError: the store cannot be read.
        SaveError: the local disk failed.
    """
    newer = []
    for commit in catalog.read_commits(copies, on_lost):
        if local is None or _is_newer(commit, local):
            newer.append(commit)
        elif commit.sequence != local.sequence:
            break
    for commit in catalog.in_order(newer):
        if needs_prefix and commit.prefix is None:
            on_skip(
                f"{commit.path} has no TensorFlow checkpoint, only named States, so a "
                "restore would leave the weights unchanged"
            )
            continue
        try:
            bring(files, commit, directory, policy=policy)
        except errors.CheckpointCorruptedError as error:
            on_lost(str(error))
        else:
            return True
    return False


def bring(
    files: Files,
    commit: Entry,
    directory: str,
    *,
    policy: RetentionPolicy = _KEEP_ALL,
) -> None:
    """Downloads a commit, and makes it a commit of a directory.

    Args:
        files: file operations on the directory.
        commit: commit in the store of the mirror.
        directory: the checkpoint directory.
        policy: the rules by which commits stay in the directory; the imported commit
            stays in any case.

    Raises:
        CheckpointCorruptedError: a file does not match the manifest.
        CheckpointError: the store failed.
        SaveError: the local disk failed.
    """
    step, sequence = commit.step or 0, commit.sequence or 0
    staged = layout.staging_directory(directory, layout.FETCH + commit.token)
    _log.info(
        "downloading step %d (%d bytes) from %s",
        step,
        commit.size,
        commit.store.uri,
    )
    with os_errors.translated(f"download step {step}", directory):
        _drop_others(files, staged)
        download(commit, staged, progress=True, files=files, root=directory)
        for entry in catalog.scan(directory):
            if entry.token == commit.token and entry.kind is Kind.OWN:
                # Delete a corrupt copy of the same commit.
                retention.delete(files, entry)
        target = committing.put_in_place(
            files, directory, staged, step, commit.data, sequence
        )
        # Give the marker the time of the save, which is compared with the times of
        # checkpoints by other programs.
        if commit.saved_at is not None:
            times = commit.saved_at, commit.saved_at
            marker = os.path.join(target, layout.MARKER)
            with contained.parent(marker, directory) as (folder, name):
                os.utime(name, times, dir_fd=folder, follow_symlinks=False)
        with committing.tidying(directory):
            found = catalog.scan(directory)
            committing.finish(files, directory, found, policy, is_pinned=target.__eq__)
            remove_if_empty(files, os.path.join(directory, layout.STAGING))


def find(store: ObjectStore, token: str) -> Entry | None:
    """Returns the commit with this token in a store; None if there is no such commit.

    Raises:
        CheckpointError: the store cannot be read, or the commit is corrupt.
    """
    for copy in catalog.copies(store):
        if copy.token == token:
            found = catalog.read(copy)
            if found.condition is CommitStatus.CORRUPT:
                raise errors.CheckpointCorruptedError(found.problems[0])
            return found if found.is_committed else None
    return None


def _is_newer(commit: Entry, local: Entry) -> bool:
    if local.token == commit.token:
        return False
    if local.manifest is not None:
        return catalog.rank(commit) > catalog.rank(local)
    return (commit.saved_at or 0.0) > (local.time or 0.0)


def _drop_others(files: Files, staged: str) -> None:
    """Removes incomplete downloads of commits other than the commit of `staged`."""
    parent = os.path.dirname(staged)
    names = file_reading.names(parent) if file_reading.is_real_dir(parent) else []
    for path in (os.path.join(parent, n) for n in names if _STAGED.fullmatch(n)):
        if path != staged:
            retention.delete_staging(files, path)
