"""Transfers shards of workers without the chief's disk, through the object store.

If the checkpoint directory is not shared, a worker uploads its shard of a save to
`shards/<attempt>/`, with a manifest of the files last. The worker then reports the save
as done. The chief downloads the shards to its staging directory. The commit then holds
every shard, like a commit on shared storage. Shards are small: they hold only the state
that differs between workers.
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
from tfpreempt.storage.files import Files, remove_if_empty
from tfpreempt.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)

FOLDER = "shards"
# Objects of `ShardTransfer`. Other objects in the folder belong to other programs.
_OURS = re.compile(
    rf"{FOLDER}/(?P<attempt>[0-9a-f]{{12}}-[A-Za-z0-9_.-]+)/{layout.WORKER}[0-9]{{4,}}"
    r"/[A-Za-z0-9_][^/]*"
)
_MAX_MANIFEST_BYTES = 16 << 20
_SECONDS = 20.0  # per request, with its retries


class ShardTransfer:
    """Transfers shards, from the view of one worker.

    Args:
        store: object store for the transfer.
        worker: index of this worker.
        apart: indices of the workers without access to the chief's directory.
        files: file operations on the local directory.
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
        """Moves this worker's shard to the store, if the worker has a disk of its own.

        The local shard is deleted, also after an error.

        Raises:
            CheckpointError: the store or the local disk failed.
        """
        if not self.has_separate_storage:
            return
        try:
            with os_errors.translated("send this worker's part", staged.staging):
                self._send(staged)
        finally:
            self._drop(staged.staging)

    def _send(self, staged: StagedSave) -> None:
        folder = os.path.join(staged.staging, layout.worker_name(self._worker))
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        folder = self._folder(staged.attempt, self._worker)
        entries = []
        for name in names:
            path = os.path.join(folder, name)
            size, crc32c = checksum.of_file(path)
            entries.append(FileEntry(name=name, size=size, crc32c=crc32c))
            with file_reading.open_file(path) as file:
                self._store.put_if_absent(f"{folder}/{name}", file, timeout=_SECONDS)
        manifest = Manifest(
            step=staged.step,
            sequence=1,
            world_size=self._worker + 1,
            workers=(self._worker,),
            files=tuple(entries),
        )
        name, data = f"{folder}/{layout.MANIFEST}", io.BytesIO(to_json(manifest))
        self._store.put_if_absent(name, data, timeout=_SECONDS)

    def _drop(self, directory: str) -> None:
        """Deletes a local staging directory; the chief deletes only its own."""
        try:
            retention.delete_staging(self._files, directory)
            remove_if_empty(self._files, os.path.dirname(directory))
        except OSError as error:
            _log.warning(
                "could not delete %s, which only takes up disk space: %s",
                directory,
                error,
            )

    def collect(
        self,
        staged: StagedSave,
        workers: Iterable[int],
        because: str,
        left: Callable[[], float],
    ) -> list[int]:
        """Downloads the shards of other workers to the staging directory; chief only.

        Args:
            staged: the save.
            workers: indices of the workers that reported the save as done.
            because: reason for the commit.
            left: function that returns the seconds until the commit must be made. A
                shard may take half of them.

        Returns:
            The workers with a shard in the staging directory. A failed transfer is
            logged.

        Raises:
            SaveError: a shard is missing, and no machine is being preempted. The last
                commit, which is intact, is then worth more than a newer commit without
                the shard.
        """
        missing = []
        present = []
        for worker in workers:
            if worker in self._apart:
                try:
                    self._take(staged, worker, min(_SECONDS, max(0.1, left() / 2)))
                except (errors.CheckpointError, OSError) as error:
                    _log.error(
                        "the part of worker %d of this save did not arrive through "
                        "%s: %s",
                        worker,
                        self._store.uri,
                        error,
                    )
                    missing.append(worker)
                    continue
            present.append(worker)
        if missing and because in ("periodic", "save"):
            raise errors.SaveError(
                f"the part of worker(s) {sorted(missing)} did not arrive through "
                f"{self._store.uri}. This save is dropped; the last commit is still "
                "valid. Check the object store, and the logs of those workers."
            )
        return present

    def clear(self, attempt: str) -> None:
        """Deletes the shards of a finished save."""
        _delete(self._store, f"{FOLDER}/{attempt}/", lambda found: True)

    def _take(self, staged: StagedSave, worker: int, seconds: float) -> None:
        folder, target = self._folder(staged.attempt, worker), io.BytesIO()
        name = f"{folder}/{layout.MANIFEST}"
        self._store.get(name, target, length=_MAX_MANIFEST_BYTES, timeout=seconds)
        manifest = from_json(target.getvalue(), f"{self._store.uri}/{name}")
        shard = Entry(
            store=self._store, name=folder, kind=Kind.MIRROR, manifest=manifest
        )
        folder = os.path.join(staged.staging, layout.worker_name(worker))
        try:
            download(shard, folder, timeout=seconds, files=self._files)
        except errors.CheckpointError:
            retention.delete_staging(self._files, folder)  # incomplete
            raise

    @staticmethod
    def _folder(attempt: str, worker: int) -> str:
        return f"{FOLDER}/{attempt}/{layout.worker_name(worker)}"


def clear_others(store: ObjectStore, token: str) -> None:
    """Deletes the shards of earlier starts; keeps objects of other programs.

    Args:
        store: object store for the transfer.
        token: token of this start, the prefix of its saves' names.
    """
    _delete(store, f"{FOLDER}/", lambda found: not found.startswith(f"{token}-"))


def _delete(store: ObjectStore, below: str, is_over: Callable[[str], bool]) -> None:
    """Deletes the shards below a prefix whose attempt is over."""
    for name in list(store.list(below)):
        ours = _OURS.fullmatch(name)
        if ours is not None and is_over(ours["attempt"]):
            store.delete(name)
