"""Keeps order in an object store: retention, and what dead uploads left.

Only folders whose names are ours are touched, and in a commit only what its manifest
names. The marker goes first and the manifest last, so that a deletion that is cut short
leaves what the next one takes for a dead upload. A folder without a marker is one only
if a newer commit is there: until then somebody may still be uploading it.
"""

from __future__ import annotations

from tfpreempt.checkpoint import catalog, layout
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.storage.interface import ObjectStore


class Tidy:
    """Deletes what is no longer wanted; used by one thread.

    Args:
        store: the store.
        max_to_keep: commits to keep; None keeps all.

    Attributes:
        highest_sequence: of any folder of ours that was seen.
        found: the highest sequence at the first look, and the folders; None before.
    """

    def __init__(self, store: ObjectStore, max_to_keep: int | None) -> None:
        self.highest_sequence = 0
        self.found: tuple[int, frozenset[str]] | None = None
        self._store = store
        self._max_to_keep = max_to_keep
        self._committed: set[str] = set()  # a marker is never taken back but by us

    def look(self) -> list[Entry]:
        """Finds out what is there; highest sequence first.

        Raises:
            CheckpointError: the store.
        """
        folders = catalog.copies(self._store)
        self.highest_sequence = highest(folders)
        if self.found is None:
            names = frozenset(each.name for each in folders)
            self.found = self.highest_sequence, names
        return folders

    def run(self) -> list[str]:
        """Deletes; returns the folders that went.

        Raises:
            CheckpointError: the store.
        """
        folders = self.look()
        committed = [each for each in folders if self._is_committed(each)]
        if not committed:
            return []
        kept = (
            committed if self._max_to_keep is None else committed[: self._max_to_keep]
        )
        gone = [each for each in committed if each not in kept]
        newest = highest(committed)
        newest = highest(committed)
        dead = [
            each
            for each in folders
            if each not in committed and (each.sequence or 0) < newest
        ]
        for each in (*gone, *dead):
            self._committed.discard(each.name)
            delete(each)
        return [each.name for each in (*gone, *dead)]

    def _is_committed(self, folder: Entry) -> bool:
        if folder.name not in self._committed:
            # A marker alone is of an upload that was robbed, late, by a newer run.
            for name in (layout.MARKER, layout.MANIFEST):
                if self._store.stat(folder.control(name)) is None:
                    return False
            self._committed.add(folder.name)
        return True


def highest(copies: list[Entry]) -> int:
    """The highest sequence that the names of copies say; 0 without one."""
    return max([0, *(each.sequence or 0 for each in copies)])


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
    for name in sorted(names - {manifest, marker}):
        store.delete(name)
    store.delete(manifest)
