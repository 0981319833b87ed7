"""Keeps order in an object store: retention, and what dead uploads left.

Only folders whose names are ours are touched, and in a commit only what its manifest
names; and parts of files whose upload is over. The marker goes first and the manifest
last, so that a deletion that is cut short leaves what the next one takes for a dead
upload. A folder without a marker is one only if a newer commit is there: until then
somebody may still be uploading it.
"""

from __future__ import annotations

from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.mirror.multipart import Sweeper
from tfpreempt.checkpoint.mirror.upload import point
from tfpreempt.storage.interface import ObjectStore, composing


class Retention:
    """Deletes what is no longer wanted; used by one thread after the other.

    Args:
        store: the store.
        max_to_keep: commits to keep; None keeps all.
        taken: the highest sequence there, as far as is known.

    Attributes:
        highest_sequence: of any folder of ours that was seen.
    """

    def __init__(self, store: ObjectStore, max_to_keep: int | None, taken: int) -> None:
        self.highest_sequence = taken
        self._store = store
        self._max_to_keep = max_to_keep
        self._found: tuple[int, frozenset[str]] | None = None  # before the first copy
        self._committed: set[str] = set()  # a marker is never taken back but by us
        self._parts = Sweeper(store)
        self._pointed_at = 0  # the sequence that TensorFlow's state file names

    def look(self, timeout: float | None = None) -> list[Entry]:
        """Finds out what is there; highest sequence first.

        Args:
            timeout: seconds; None: the store's own limit.

        Raises:
            CheckpointError: the store cannot be listed.
        """
        folders = catalog.copies(self._store, timeout=timeout)
        self.highest_sequence = max(
            self.highest_sequence, catalog.highest_sequence(folders)
        )
        return folders

    def outranks(self, commit: Entry) -> bool:
        """Whether what was there before the first copy outranks a commit that wasn't.

        Raises:
            CheckpointError: the store cannot be listed.
        """
        if self._found is None:
            folders = self.look()
            names = frozenset(each.name for each in folders)
            self._found = catalog.highest_sequence(folders), names
        highest, names = self._found
        name = catalog.folder_name(commit.step or 0, commit.token)
        return (commit.sequence or 0) < highest and name not in names

    def keeps(self, entry: Entry, newest: Entry | None) -> bool:
        """Returns whether a commit is to stay once the store has all up to the newest.

        Args:
            entry: a local commit that is still to be copied.
            newest: the newest local commit.
        """
        if self._max_to_keep is None or newest is None:
            return True
        return (newest.sequence or 0) - (entry.sequence or 0) < self._max_to_keep

    def point_to(self, commit: Entry) -> None:
        """Names a commit in TensorFlow's state file, behind the marker.

        Raises:
            CheckpointError: the store.
        """
        sequence = commit.sequence or 0
        if sequence >= self._pointed_at:  # not of what comes late
            point(self._store, commit)
            self._pointed_at = sequence

    def point_past(self, deleted: list[Entry]) -> None:
        """Names the newest commit that stays in TensorFlow's state file.

        Args:
            deleted: commits that are about to be deleted.

        Raises:
            CheckpointError: the store.
        """
        names = {each.name for each in deleted}
        stays = catalog.commits(self._store, lambda problem: None)
        newest = next((each for each in stays if each.name not in names), None)
        if newest is None:
            self._store.delete(layout.POINTER)
        else:
            point(self._store, newest)

    def run(self) -> None:
        """Deletes.

        Raises:
            CheckpointError: the store.
        """
        folders = self.look()
        committed = [each for each in folders if self._is_committed(each)]
        keep = len(committed) if self._max_to_keep is None else self._max_to_keep
        newest = catalog.highest_sequence(committed)
        if composing(self._store) is not None:
            self._parts.run(committed)
        dead = [
            each
            for each in folders
            if each not in committed and (each.sequence or 0) < newest
        ]
        for each in committed[keep:] + dead:
            self._committed.discard(each.name)
            delete(each)

    def _is_committed(self, folder: Entry) -> bool:
        if folder.name not in self._committed:
            # A marker alone is of an upload that was robbed, late, by a newer run.
            for name in (layout.MARKER, layout.MANIFEST):
                if self._store.stat(folder.control(name)) is None:
                    return False
            self._committed.add(folder.name)
        return True


def delete(copy: Entry) -> None:
    """Deletes a folder of ours, committed or half.

    Raises:
        CheckpointError: the store.
    """
    store, found = copy.store, catalog.read(copy)
    manifest, marker = copy.control(layout.MANIFEST), copy.control(layout.MARKER)
    names = set(store.list(copy.name + "/"))
    if found.is_committed and found.manifest is not None:
        ours = {copy.object(entry.name) for entry in found.manifest.files}
        names &= ours | {copy.control(layout.METADATA)}
    store.delete(marker)
    # TensorFlow takes what has an index for a checkpoint.
    for name in sorted(names - {manifest, marker}, key=_comes_after_index):
        store.delete(name)
    store.delete(manifest)


def _comes_after_index(name: str) -> tuple[bool, str]:
    return not name.endswith(".index"), name
