"""Chooses the directory and the object store of a run, from arguments and environment.

If `checkpoint_dir` is a URL, the run writes its commits to a local scratch directory,
and a mirror uploads the commits to the URL. The commits at the URL count; the scratch
directory is only a cache. The file `.tfpreempt-mirror` in the scratch directory names
the commits that can be the newest commit at the URL. At a start, there are two cases:

- The file names the newest commit at the URL: no other machine has used the URL in the
  meantime. Local commits that were not uploaded yet are used.
- The file names only other commits: the run was continued on another machine, or the
  user deleted commits at the URL. The scratch directory is emptied.

The file is written before each change at the URL. The file then names the commit that
is newest before the change, and the commit that will be newest after the change.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout, retention
from tfpreempt.checkpoint.directory.cache import private_directory
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.head import NONE, newest
from tfpreempt.checkpoint.directory.manifest import Parent
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.core.journal import SEGMENT, journal_directory
from tfpreempt.core.replay import read_replay
from tfpreempt.core.scratch import VARIABLE, is_url, scratch_directory
from tfpreempt.storage import file_reading, os_errors, paths
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectStore
from tfpreempt.storage.open_store import (
    BUCKET_SCHEMES,
    check_apart,
    open_store,
    split,
)

_log = logging.getLogger(__name__)

_EXPECTED = ".tfpreempt-mirror"
# Largest size of `.tfpreempt-mirror`, which grows with each upload that fails before
# the marker.
_MAX_BYTES = 1 << 20
_JOURNAL = "journal"
# A worker's journal or status file, see `core/journal.py` and `handler/status_file.py`.
_OF_JOURNAL = re.compile(rf"worker-\d+(?:{SEGMENT}\.jsonl|\.status)", re.ASCII)
_LEAST_FREE = 16 << 20  # bytes that must be free in a scratch directory


def check_url(url: str) -> str:
    """Checks the URL of a checkpoint directory. Returns the URL without "/" at the end.

    Raises:
        ConfigurationError: no object store of tfpreempt serves the URL.
    """
    paths.check_no_user_info(url)
    shown = paths.without_secrets(url)
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        path = "/" + rest.strip("/")
        raise errors.ConfigurationError(
            f"Got checkpoint_dir={shown!r}; expected a path of this machine without "
            f"file://. Pass {paths.without_secrets(path)!r}."
        )
    if scheme not in BUCKET_SCHEMES:
        raise errors.ConfigurationError(
            f"Got checkpoint_dir={shown!r}, but {scheme}:// is not supported; expected "
            "a local directory, gs://bucket/run, s3://bucket/run or "
            "az://container/run. Mount the storage and pass the path, or copy the "
            "checkpoints to a supported directory or bucket."
        )
    scheme, bucket, prefix = split(url)
    if prefix and (reason := paths.why_unsafe(rest.rstrip("/"))):
        raise errors.ConfigurationError(
            f"Got checkpoint_dir={shown!r}, whose part after {scheme}:// {reason}; "
            f"expected a bucket and a folder, such as {scheme}://bucket/run."
        )
    if not prefix:
        raise errors.ConfigurationError(
            f"checkpoint_dir={shown!r} is a bucket without a folder; expected a bucket "
            f"and a folder, such as {scheme}://bucket/run."
        )
    return f"{scheme}://{bucket}/{prefix}"


@dataclasses.dataclass(frozen=True, slots=True)
class Scratch:
    """The scratch directory of a URL: the local cache of the commits at the URL.

    Args:
        url: URL from `check_url`.
        directory: existing directory of this machine, accessible to this user only.
    """

    url: str
    directory: str
    _noting: threading.Lock = dataclasses.field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, url: str) -> Scratch:
        """Returns the scratch directory of a URL; creates a missing directory.

        Raises:
            ConfigurationError: no object store serves the URL, or the scratch directory
                cannot be created, or other users may write there.
        """
        url = check_url(url)
        directory = scratch_directory(url)
        private_directory(os.path.dirname(directory), VARIABLE)
        return cls(url, private_directory(directory, VARIABLE))

    def settle(self, copies: Iterable[Entry], files: Files) -> bool:
        """Empties the scratch directory, if another machine or the user has changed the
        mirror.

        The caller holds the lease of the scratch directory.

        Args:
            copies: every commit in the mirror, from `catalog.copies`.
            files: file operations on the directory, guarded by the lease.

        Returns:
            Whether neither the mirror nor the scratch directory has a commit.

        Raises:
            CheckpointError: the mirror cannot be read.
            SaveError: the disk failed, or the lease is lost.
        """
        marked = _marked(copies)
        now, expected = newest(marked), self._expected()
        with os_errors.translated("read the scratch directory", self.directory):
            found = catalog.scan(self.directory)
            local = [each for each in found if each.is_committed]
            is_ours = any(now.token == each.token for each in expected)
            if not (local and is_ours):
                there = {each.token for each in marked}
                self._empty(files, [e for e in local if e.token not in there])
                if now == NONE and not is_ours:
                    self._empty_journal(files)
                local = []
            self._note(files, [now])
        return now == NONE and not local

    def note_upload(self, commit: Entry) -> None:
        """Adds to `.tfpreempt-mirror` a commit that will be the mirror's newest.

        Called before the commit's marker is uploaded. If the mirror already has a newer
        commit, the upload does not change the newest commit, and nothing is noted: else
        a start would not find out that the user has deleted the newer commit.
        """
        mine = newest([commit])
        if any(each.sequence <= mine.sequence for each in self._expected()):
            self._expect(mine)

    def note_deletion(self, store: ObjectStore, deleted: Iterable[Entry]) -> None:
        """Adds to `.tfpreempt-mirror` the commit that a deletion will make the newest.

        Args:
            store: object store of the mirror.
            deleted: commits of the mirror about to be deleted.

        Raises:
            CheckpointError: the mirror cannot be read.
        """
        names = {each.name for each in deleted}
        marked = _marked(catalog.copies(store))
        self._expect(newest(e for e in marked if e.name not in names))

    def note_copied(self, commit: Entry) -> None:
        """Removes commits older than an uploaded commit from `.tfpreempt-mirror`.

        Called after the upload: from then on, no older commit can be the newest commit
        of the mirror.
        """
        mine = newest([commit])
        with self._noting:
            expected = self._expected()
            kept = [each for each in expected if each.sequence >= mine.sequence]
            self._try_to_note(kept or [mine])

    def _expect(self, commit: Parent) -> None:
        """Adds to `.tfpreempt-mirror` a commit that may become the mirror's newest."""
        with self._noting:
            expected = self._expected()
            if commit not in expected:
                self._try_to_note([*expected, commit])

    def _try_to_note(self, expected: list[Parent]) -> None:
        """Writes `.tfpreempt-mirror`. A failure is logged, and does not stop the
        upload."""
        try:
            self._note(LocalFiles(self.directory), expected)
        except OSError as error:
            _log.warning(
                "could not write %s in %s. If this process terminates before the next "
                "upload, the next start deletes commits that are only in this "
                "directory: %s",
                _EXPECTED,
                self.directory,
                error,
            )

    def check_room(self, bytes_of_state: int) -> None:
        """Checks that the scratch directory has room for two commits.

        Args:
            bytes_of_state: size in bytes of the state to be saved, as far as known.

        Raises:
            ConfigurationError: the disk has too little room.
        """
        found = [e for e in catalog.scan(self.directory) if e.is_committed]
        largest = max([bytes_of_state, *(each.size or 0 for each in found)])
        need = 2 * largest - sum(each.size or 0 for each in found)
        need = max(need, _LEAST_FREE)
        free = shutil.disk_usage(self.directory).free
        if free < need:
            raise errors.ConfigurationError(
                f"The scratch directory {self.directory!r} of "
                f"checkpoint_dir={self.url!r} has {free:,} bytes free; expected at "
                f"least {need:,} bytes, enough for two commits of {largest:,} bytes. "
                f"Free space, or set {VARIABLE} to a directory with more space."
            )

    def has_room_for(self, path: str, pending: Iterable[Entry], largest: int) -> bool:
        """Returns whether the disk has room to keep a commit until it is uploaded.

        The room suffices if two more commits fit after the deletion of the commits that
        are older than the given commit.

        Args:
            path: path of the commit.
            pending: commits that wait for their upload, oldest first.
            largest: size of the largest commit in bytes.
        """
        free = shutil.disk_usage(self.directory).free
        older = itertools.takewhile(lambda each: each.path != path, pending)
        return free + sum(each.size or 0 for each in older) >= 2 * largest

    def _expected(self) -> list[Parent]:
        """Returns the commits named in `.tfpreempt-mirror`; `[NONE]` if unreadable.

        One of them is the mirror's newest commit, unless another machine or the user
        has changed the mirror.
        """
        try:
            data = file_reading.read(
                os.path.join(self.directory, _EXPECTED), _MAX_BYTES
            )
            return [
                Parent(token=str(each["token"]), sequence=int(each["sequence"]))
                for each in json.loads(data)
            ]
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            OverflowError,
            RecursionError,
        ):
            return [NONE]

    def _note(self, files: Files, expected: list[Parent]) -> None:
        data = json.dumps([dataclasses.asdict(each) for each in expected]).encode()
        files.publish(os.path.join(self.directory, _EXPECTED), data)

    def _empty(self, files: Files, lost: list[Entry]) -> None:
        """Deletes all checkpoints. Lease, journal and unfinished downloads stay.

        Args:
            files: file operations on the scratch directory.
            lost: commits that are not in the mirror; named in a warning.
        """
        if lost:
            steps = ", ".join(str(each.step) for each in lost)
            _log.warning(
                "%s was changed by another program. The commits of step(s) %s, which "
                "are only in the scratch directory %s, are deleted from the scratch "
                "directory",
                self.url,
                steps,
                self.directory,
            )
        for name in file_reading.names(self.directory):
            if not name.startswith(".") and name != _JOURNAL:
                _delete(files, os.path.join(self.directory, name))

    def _empty_journal(self, files: Files) -> None:
        """Deletes the workers' journals. Called if the user has deleted the run.

        Directories stay: in $TFPREEMPT_JOURNAL_DIR, other users may replace a directory
        by a link while its files are deleted. Files with other names stay, such as the
        logs of the workers.
        """
        journal = journal_directory(self.directory)
        for name in file_reading.names(str(journal)):
            path = os.path.join(journal, name)
            if _OF_JOURNAL.fullmatch(name) and not file_reading.is_real_dir(path):
                files.remove(path)


def _marked(copies: Iterable[Entry]) -> list[Entry]:
    """Returns the commits of a mirror that have a marker; reads no manifest.

    Raises:
        CheckpointError: the mirror cannot be read.
    """
    return [
        each
        for each in copies
        if each.store.stat(each.control(layout.MARKER)) is not None
    ]


def _delete(files: Files, path: str) -> None:
    if file_reading.is_real_dir(path):
        retention.delete_staging(files, path)
    else:
        files.remove(path)


REMOTE_VARIABLE = "TFPREEMPT_MIRROR_DIR"
DIRECTORY_VARIABLE = "TFPREEMPT_CHECKPOINT_DIR"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStorage:
    """The directory of a run's commits, and the mirror of the directory.

    Attributes:
        directory: local directory, unchanged as the user passed it; the scratch
            directory if the user passed a URL.
        policy: the rules by which commits stay in the directory.
        store: object store of the mirror; None without a mirror.
        scratch: the scratch directory; None if `checkpoint_dir` is not a URL.
    """

    directory: Any
    policy: RetentionPolicy
    store: ObjectStore | None = None
    scratch: Scratch | None = None


def choose_storage(
    given: Any, checkpoint_dir: Any, policy: RetentionPolicy
) -> RunStorage:
    """Returns the directory of a run's commits, and the mirror of the directory.

    In a replay of the run, returns the copy of the directory, without a mirror.

    Args:
        given: the user's argument `mirror_dir`. With None, the mirror is taken from the
            variable TFPREEMPT_MIRROR_DIR, which `tfpreempt run` sets to its mirror.
        checkpoint_dir: the user's argument `checkpoint_dir`. For a URL, the directory
            is a scratch directory and the URL is its mirror.
        policy: the rules by which commits stay in the directory, or in the mirror if
            `checkpoint_dir` is a URL.

    Raises:
        ConfigurationError: an argument cannot be a directory, or a mirror.
    """
    replay = read_replay()
    if replay is not None and (copy := replay.path_in_copy(checkpoint_dir)):
        return RunStorage(directory=copy, policy=RetentionPolicy(max_to_keep=None))
    location, directory = given, os.fsdecode(checkpoint_dir or "")
    if given is None and directory and (named := os.environ.get(REMOTE_VARIABLE)):
        location = _below(named, directory)
    for each in (location, directory):
        if isinstance(each, str):
            paths.check_no_user_info(each)
    has_mirror = location is not None and location != ""
    if is_url(directory):
        if has_mirror:
            shown = paths.without_secrets(str(location))
            raise errors.ConfigurationError(
                f"checkpoint_dir is the URL {paths.without_secrets(directory)!r}, and "
                f"mirror_dir is {shown!r}; expected only one of these, because a "
                "checkpoint_dir that is a URL is itself a mirror. Remove one of these "
                "arguments."
            )
        scratch = Scratch.of(directory)
        return RunStorage(
            directory=scratch.directory,
            policy=dataclasses.replace(policy, is_cache=True),
            store=open_store(scratch.url),
            scratch=scratch,
        )
    if not has_mirror:
        return RunStorage(directory=checkpoint_dir, policy=policy)
    if not isinstance(location, ObjectStore | str | os.PathLike):
        raise errors.ConfigurationError(
            f'mirror_dir is {location!r}; expected a URI such as "gs://bucket/run", '
            '"s3://bucket/run", "az://container/run" or "file:///disk/run"'
        )
    store = location if isinstance(location, ObjectStore) else open_store(location)
    if directory and isinstance(store, LocalStore):
        check_apart(store.uri, directory)
    return RunStorage(directory=checkpoint_dir, policy=policy, store=store)


def _below(location: str, checkpoint_dir: str) -> str | None:
    """Returns a handler's mirror, derived from the supervisor's mirror.

    A subdirectory of the supervisor's directory is mirrored to the same subdirectory of
    the supervisor's mirror.

    Args:
        location: mirror of the supervisor's directory, from the environment.
        checkpoint_dir: the handler's directory.

    Returns:
        The mirror. None, with a warning, if the handler's directory is not inside the
        supervisor's directory.
    """
    root = os.environ.get(DIRECTORY_VARIABLE, "")
    if not root or is_url(root):
        return location
    below = os.path.relpath(os.path.abspath(checkpoint_dir), os.path.abspath(root))
    if below == os.curdir:
        return location
    if below.split(os.sep)[0] == os.pardir:
        _log.warning(
            "%s=%s applies to %s only; checkpoints in %s are not mirrored. Pass "
            "mirror_dir= to mirror them.",
            REMOTE_VARIABLE,
            location,
            root,
            checkpoint_dir,
        )
        return None
    return f"{location.rstrip('/')}/{below.replace(os.sep, '/')}"
