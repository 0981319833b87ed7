"""Deletes old commits, and the remains of crashed uploads, from an object store.

Only folders with a name made by tfpreempt are deleted, and in the folder of a commit
only the files named in the manifest. The marker is deleted first and the manifest last,
so that the next run treats an interrupted deletion as a crashed upload. A folder
without a marker counts as a crashed upload only if a newer commit exists; without a
newer commit, a program may be uploading the folder. The parts of large files
(`upload.py`) are deleted once the upload is over.

The rules are those of the directory (`directory/retention.py`), on the commits that are
in the store.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, checkpoint_state, layout
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.directory.manifest import Manifest
from tfpreempt.checkpoint.directory.retention import NEWEST, RetentionPolicy, reasons
from tfpreempt.checkpoint.mirror.upload import PARTS
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import paths
from tfpreempt.storage.object_store import ComposingStore, ObjectStore

_log = logging.getLogger(__name__)

_THREADS = 8


class Naming(enum.Enum):
    """Whether TensorFlow's state file names the newest commit of a mirror."""

    DONE = "done"
    DUE = "due"  # to be written at once
    LATE = "late"  # the write failed, and is retried


class Retention:
    """Deletes old commits, and the remains of crashed uploads, from a mirror.

    Used by one thread at a time.

    Args:
        store: object store of the mirror.
        policy: the rules by which commits stay.
        taken: highest sequence number known to be in the store.

    Attributes:
        highest_sequence: highest sequence number of the folders seen in the store.
        naming: whether TensorFlow's state file names the newest commit.
    """

    def __init__(self, store: ObjectStore, policy: RetentionPolicy, taken: int) -> None:
        self.highest_sequence = taken
        self._store = store
        self._policy = policy
        # Highest sequence number and folder names in the store at the first upload.
        self._found: tuple[int, frozenset[str]] | None = None
        # Names of folders with a marker. They need no second check, because only this
        # object deletes markers.
        self._committed: set[str] = set()
        # Key: name of a folder. Value: manifest of a commit that stays, without its
        # list of files.
        self._kept: dict[str, Manifest] = {}
        self._are_parts_logged = False
        self.naming = Naming.DONE
        self._is_naming_logged = False
        # Held from the listing of commits to the write of TensorFlow's state file.
        self._naming_lock = threading.Lock()

    def look(self, timeout: float | None = None) -> list[Entry]:
        """Returns the folders of commits in the store, highest sequence number first.

        Args:
            timeout: timeout of the listing in seconds; None: the store's own timeout.

        Raises:
            CheckpointError: the store cannot be listed, or a sequence is above the
                limit.
        """
        folders = catalog.copies(self._store, timeout=timeout)
        self.highest_sequence = max(
            self.highest_sequence, catalog.highest_sequence(folders)
        )
        return folders

    def outranks(self, commit: Entry) -> bool:
        """Returns whether the store had commits newer than `commit` before the first
        upload of this process.

        Returns False if `commit` itself was in the store before that upload, or if a
        rule keeps `commit` although newer commits exist.

        Raises:
            CheckpointError: the store cannot be listed, or a sequence is above the
                limit.
        """
        if self._found is None:
            folders = self.look()
            names = frozenset(each.name for each in folders)
            self._found = catalog.highest_sequence(folders), names
        highest, names = self._found
        name = catalog.folder_name(commit.step or 0, commit.token)
        is_older = (commit.sequence or 0) < highest and name not in names
        return is_older and not self.keeps_older([commit])

    def keeps(self, entry: Entry, newest: Entry | None, pending: list[Entry]) -> bool:
        """Returns whether a commit would stay in the store after its upload.

        The result assumes that every commit that waits for its upload is uploaded
        already.

        Args:
            entry: a local commit to be uploaded.
            newest: the newest local commit.
            pending: the local commits to be uploaded.
        """
        most = self._policy.num_newest
        if most is None or newest is None:
            return True
        distance = (newest.sequence or 0) - (entry.sequence or 0)
        return distance < most or entry in self.keeps_older(pending)

    def keeps_older(self, entries: Iterable[Entry]) -> list[Entry]:
        """Returns the local commits that would stay even if newer commits exist."""
        found = [each for each in entries if each.manifest is not None]
        manifests = [*self._kept.values(), *(each.manifest for each in found)]
        manifests.sort(key=lambda each: -each.sequence if each else 0)
        why = zip(manifests, reasons(manifests, self._policy), strict=True)
        kept = {each.sequence for each, texts in why if each and {*texts} - {NEWEST}}
        return [each for each in found if each.sequence in kept]

    @property
    def is_naming_due(self) -> bool:
        """Whether the newest commit must now be written to TensorFlow's state file,
        the file `checkpoint`."""
        return self.naming is Naming.DUE

    def try_to_name_newest(self, hold: Callable[[], object]) -> bool:
        """Writes the name of the newest commit to TensorFlow's state file; logs a
        failure once.

        Args:
            hold: function called before the write; raises an error if another program
                holds the lease.

        Returns:
            Whether the state file was written.
        """
        try:
            hold()
            self.name_newest()
        except (OSError, errors.CheckpointError) as error:
            if not self._is_naming_logged:
                self._is_naming_logged = True
                _log.warning(
                    "the state file %s/%s cannot be written; the write is retried. The "
                    "commits of the mirror are intact, but tf.train.latest_checkpoint "
                    "may return an older commit, and no commit is deleted from the "
                    "mirror until the write succeeds: %s",
                    self._store.uri,
                    layout.POINTER,
                    error,
                )
            return False
        self._is_naming_logged = False
        return True

    def name_newest(self, but: Collection[str] = ()) -> None:
        """Writes the name of the newest commit of the store to TensorFlow's state file.

        The state file is deleted if the newest commit has no TensorFlow checkpoint.
        Called on any thread.

        Args:
            but: names of folders that are about to be deleted, and so are not named.

        Raises:
            CheckpointError: the store failed.
        """
        with self._naming_lock:
            found = catalog.commits(self._store, lambda problem: None)
            newest = next((each for each in found if each.name not in but), None)
            prefix = newest.manifest.prefix if newest and newest.manifest else None
            if newest is not None and prefix is not None:
                latest = os.path.join(newest.name, prefix)
                named = checkpoint_state.CheckpointStateFile(
                    latest=latest, paths=(latest,)
                )
                data = checkpoint_state.to_bytes(named)
                self._store.replace(layout.POINTER, data)
            elif self._store.stat(layout.POINTER) is not None:
                self._store.delete(layout.POINTER)

    def run(self) -> None:
        """Deletes old commits, and the remains of crashed uploads.

        Does nothing while TensorFlow's state file is out of date, because the file
        could name a commit that would be deleted.

        Raises:
            CheckpointError: the store failed, or a sequence is above the limit.
        """
        if self.naming is not Naming.DONE:
            return  # the next write of the state file queues a new call
        folders = self.look()
        committed = [each for each in folders if self._is_committed(each)]
        newest = catalog.highest_sequence(committed)
        if isinstance(self._store, ComposingStore):
            self._delete_parts(committed)
        dead = [
            each
            for each in folders
            if each.name not in self._committed and (each.sequence or 0) < newest
        ]
        for each in self._beyond(committed) + dead:
            self._committed.discard(each.name)
            self._kept.pop(each.name, None)
            delete(each)

    def _beyond(self, committed: list[Entry]) -> list[Entry]:
        """Returns the commits among the folders with a marker that no rule keeps.

        Reads only manifests on which the result depends, each once.
        """
        most = self._policy.num_newest
        if most is None:
            return []
        names, read = {each.name for each in committed}, dict[str, Entry]()
        self._kept = {n: each for n, each in self._kept.items() if n in names}
        for each in committed[0 if self._policy.best_by else most :]:
            if each.name not in self._kept:
                found = read[each.name] = catalog.read(each)
                if found.is_committed and found.manifest is not None:
                    manifest = dataclasses.replace(found.manifest, files=())
                    self._kept[each.name] = manifest
        manifests = [self._kept.get(each.name) for each in committed]
        why = reasons(manifests, self._policy)
        beyond = [e for e, texts in zip(committed, why, strict=True) if not texts]
        return [read.get(each.name, each) for each in beyond]

    def _delete_parts(self, committed: list[Entry]) -> None:
        """Deletes the parts of large files whose upload is over: the folder is
        committed, or older than a committed folder.

        If the account may not delete objects, or if the bucket has a retention policy,
        the parts stay. Such an error is only logged, once, because the parts only take
        up space.

        Args:
            committed: entries for the folders with a marker.

        Raises:
            CheckpointError: the store failed.
        """
        names = {each.name for each in committed}
        newest = catalog.highest_sequence(committed)
        unneeded = []
        for name in self._store.list(f"{PARTS}/"):
            folder = name.split("/")[1]
            if catalog.kind_of(folder) is not Kind.MIRROR or paths.why_unsafe(name):
                continue  # the object belongs to another program
            sequence = catalog.unread_entry(self._store, folder).sequence or 0
            if folder in names or sequence < newest:
                unneeded.append(name)
        try:
            map_in_threads(
                self._store.delete, unneeded, threads=_THREADS, name="tfpreempt-sweep"
            )
        except errors.CheckpointError as error:
            if not error.is_permanent:
                raise
            if self._are_parts_logged:
                return
            self._are_parts_logged = True
            _log.warning(
                "could not delete %d objects of incomplete uploads in %s, which only "
                "take up space (the commits there are intact): %s",
                len(unneeded),
                os.path.join(self._store.uri, PARTS),
                error,
            )

    def _is_committed(self, folder: Entry) -> bool:
        if folder.name not in self._committed:
            # A marker without a manifest: a newer run treated the upload as crashed,
            # and deleted the files of the upload before the marker was written.
            for name in (layout.MARKER, layout.MANIFEST):
                if self._store.stat(folder.control(name)) is None:
                    return False
            self._committed.add(folder.name)
        return True


def delete(copy: Entry) -> None:
    """Deletes the folder of a commit in a mirror, also if the folder is incomplete.

    An object whose name no store of tfpreempt writes stays, such as the object that the
    web page of a cloud creates for an empty folder.

    Raises:
        CheckpointError: the store failed.
    """
    store, found = copy.store, copy if copy.is_committed else catalog.read(copy)
    manifest, marker = copy.control(layout.MANIFEST), copy.control(layout.MARKER)
    listed = store.list(copy.name + "/")
    names = {name for name in listed if paths.why_unsafe(name) is None}
    if found.is_committed and found.manifest is not None:
        ours = {copy.object(entry.name) for entry in found.files}
        names &= ours | {copy.control(layout.METADATA)}
    store.delete(marker)
    # Delete the `.index` file first: without it, TensorFlow finds no checkpoint.
    for name in sorted(names - {manifest, marker}, key=_comes_after_index):
        store.delete(name)
    store.delete(manifest)


def _comes_after_index(name: str) -> tuple[bool, str]:
    return not name.endswith(".index"), name
