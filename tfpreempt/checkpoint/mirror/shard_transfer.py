"""Transfers the workers' shards of a save through the object store.

A shard is the set of files that one worker writes in a save: the state that differs
between workers, so a shard is small. A worker without access to the chief's disk
uploads its shard to `shards/<attempt>/`, with a manifest of the files as the last
object, and then reports the save as done. The chief downloads the shards to its staging
directory, and commits them like shards that workers write to shared storage.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout, retention
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.directory.manifest import (
    FileEntry,
    Manifest,
    from_json,
    to_json,
)
from tfpreempt.checkpoint.mirror.download import download
from tfpreempt.checkpoint.state.contents import StagedSave
from tfpreempt.storage import checksum, file_reading, os_errors
from tfpreempt.storage.files import Files
from tfpreempt.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)

FOLDER = "shards"
# Names of objects written by `ShardTransfer`. Other objects in the folder are kept.
_OURS = re.compile(
    rf"{FOLDER}/(?P<attempt>[0-9a-f]{{12}}-[A-Za-z0-9_.-]+)/{layout.WORKER}[0-9]{{4,}}"
    r"/[A-Za-z0-9_][A-Za-z0-9_. -]*"
)
_MAX_MANIFEST_BYTES = 16 << 20
_SECONDS = 20.0  # timeout of a request, with its retries


class ShardTransfer:
    """Uploads this worker's shard; on the chief, downloads the shards of the workers.

    Args:
        store: object store for the transfer.
        worker: index of this worker.
        apart: indices of the workers without access to the chief's directory.
        files: file operations on this worker's checkpoint directory.
    """

    def __init__(
        self, store: ObjectStore, worker: int, apart: Collection[int], files: Files
    ) -> None:
        self._store = store
        self._worker = worker
        self._apart = frozenset(apart)
        self._files = files

    @property
    def has_separate_storage(self) -> bool:
        """Whether this worker has no access to the chief's directory."""
        return self._worker in self._apart

    def send(self, staged: StagedSave) -> None:
        """Uploads this worker's shard, and then deletes the local files.

        The files are deleted also after an error. Does nothing if the worker writes
        to the chief's directory.

        Raises:
            CheckpointError: the store or the local disk failed.
        """
        if not self.has_separate_storage:
            return
        try:
            with os_errors.translated("upload this worker's part", staged.staging):
                self._send(staged)
        finally:
            retention.try_delete_staging(self._files, staged.staging)

    def _send(self, staged: StagedSave) -> None:
        folder = os.path.join(staged.staging, layout.worker_name(self._worker))
        names, root = file_reading.names(folder), _directory(staged)
        remote = self._folder(staged.attempt, self._worker)
        entries = []
        for name in names:
            path = os.path.join(folder, name)
            with file_reading.open_inside(path, root) as file:
                found = checksum.of_source(file)
                entry = FileEntry(name=name, size=found.size, crc32c=found.crc32c)
                entries.append(entry)
                file.seek(0)
                self._store.put_if_absent(f"{remote}/{name}", file, timeout=_SECONDS)
        manifest = Manifest(
            step=staged.step,
            sequence=1,
            world_size=self._worker + 1,
            workers=(self._worker,),
            files=tuple(entries),
        )
        name, data = f"{remote}/{layout.MANIFEST}", io.BytesIO(to_json(manifest))
        self._store.put_if_absent(name, data, timeout=_SECONDS)

    def collect(
        self,
        staged: StagedSave,
        workers: Iterable[int],
        because: str,
        left: Callable[[], float],
    ) -> list[int]:
        """Downloads the shards of a save to the staging directory. Called on the chief.

        Args:
            staged: the save.
            workers: indices of the workers that reported the save as done.
            because: reason of the save, see `Manifest`.
            left: function that returns the seconds until the commit must be made. Each
                download may take half of that time.

        Returns:
            The workers with a shard in the staging directory. A failed download is
            logged.

        Raises:
            SaveError: a shard is missing, and the reason is "periodic" or "save".
                Training continues, so the last commit, which is complete, is worth more
                than a newer commit without a shard.
        """
        missing = []
        present = []
        for worker in workers:
            if worker in self._apart:
                try:
                    self._take(staged, worker, min(_SECONDS, max(0.1, left() / 2)))
                except (errors.CheckpointError, OSError) as error:
                    _log.error(
                        "worker 0 could not download the part of worker %d of this "
                        "save from %s: %s",
                        worker,
                        self._store.uri,
                        error,
                    )
                    missing.append(worker)
                    continue
            present.append(worker)
        if missing and because in ("periodic", "save"):
            raise errors.SaveError(
                f"worker 0 did not receive the part of worker(s) {sorted(missing)} "
                f"from {self._store.uri}, so this save is discarded; the last commit "
                "is still valid. Check the object store, and the logs of these workers."
            )
        return present

    def clear(self, attempt: str) -> None:
        """Deletes the shards of a finished save from the store."""
        _delete(self._store, f"{FOLDER}/{attempt}/", lambda found: True)

    def _take(self, staged: StagedSave, worker: int, seconds: float) -> None:
        remote, target = self._folder(staged.attempt, worker), io.BytesIO()
        name = f"{remote}/{layout.MANIFEST}"
        self._store.get(name, target, length=_MAX_MANIFEST_BYTES, timeout=seconds)
        manifest = from_json(target.getvalue(), f"{self._store.uri}/{name}")
        shard = Entry(
            store=self._store, name=remote, kind=Kind.MIRROR, manifest=manifest
        )
        folder = os.path.join(staged.staging, layout.worker_name(worker))
        try:
            root = _directory(staged)
            download(shard, folder, timeout=seconds, files=self._files, root=root)
        except errors.CheckpointError:
            retention.delete_staging(self._files, folder)  # delete the incomplete shard
            raise

    @staticmethod
    def _folder(attempt: str, worker: int) -> str:
        return f"{FOLDER}/{attempt}/{layout.worker_name(worker)}"


def _directory(staged: StagedSave) -> str:
    """Returns the checkpoint directory of a save, inside which no link is followed."""
    return os.path.dirname(os.path.dirname(staged.staging))


def clear_others(store: ObjectStore, token: str) -> None:
    """Deletes the shards that earlier processes of the run left in the store.

    Args:
        store: object store for the transfer.
        token: token of this process. The shards of saves whose name begins with the
            token are kept.
    """
    _delete(store, f"{FOLDER}/", lambda found: not found.startswith(f"{token}-"))


def _delete(store: ObjectStore, below: str, is_over: Callable[[str], bool]) -> None:
    """Deletes the shards of finished saves from the store.

    Args:
        store: object store for the transfer.
        below: prefix of the objects to look at.
        is_over: function that returns whether the save of this name is finished.
    """
    for name in list(store.list(below)):
        ours = _OURS.fullmatch(name)
        if ours is not None and is_over(ours["attempt"]):
            store.delete(name)
