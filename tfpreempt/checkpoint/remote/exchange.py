"""Shards of workers that have another disk than the chief, by way of the object store.

Where the checkpoint directory is not shared, a worker puts its shard of a save below
`shards/<attempt>/` before it says that it is done, a list of its files last; the chief
takes them from there into its staging directory, so that the commit holds all of them,
like one on shared storage. They are small: what differs between workers.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable

from tfpreempt import errors
from tfpreempt.checkpoint import claims, layout, retention
from tfpreempt.checkpoint.payload import Staged
from tfpreempt.storage import checksum, failure, paths
from tfpreempt.storage.files import Files
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore

_log = logging.getLogger(__name__)

FOLDER = "shards"
LIST = "FILES.json"
_MAX_LIST_BYTES = 16 << 20
_SECONDS = 20.0  # for one request, however often it is tried again


class ShardExchange:
    """One worker's side of it.

    Args:
        store: the store.
        worker: index of this worker.
        apart: the workers that do not see the chief's directory.
        files: the file operations.
    """

    def __init__(
        self, store: ObjectStore, worker: int, apart: Collection[int], files: Files
    ) -> None:
        self._store = store
        self._worker = worker
        self._apart = frozenset(apart)
        self._files = files

    @property
    def is_apart(self) -> bool:
        """Whether this worker does not see the chief's directory."""
        return self._worker in self._apart

    def send(self, staged: Staged) -> None:
        """Moves this worker's shard into the store; does nothing on the others.

        Raises:
            CheckpointError: the store, or the disk. Here nothing is left of it.
        """
        if not self.is_apart:
            return
        try:
            with failure.translated("send this worker's part", staged.directory):
                self._send(staged)
        finally:
            self._drop(staged.directory)

    def _send(self, staged: Staged) -> None:
        folder = os.path.join(staged.directory, layout.worker_name(self._worker))
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        place = self._place(staged.attempt, self._worker)
        sums: dict[str, list[int]] = {}
        for name in names:
            path = os.path.join(folder, name)
            sums[name] = list(checksum.of_file(path))
            with open(path, "rb") as file:
                self._store.put_if_absent(f"{place}/{name}", file, timeout=_SECONDS)
        data = json.dumps(sums).encode()
        self._store.put_if_absent(f"{place}/{LIST}", io.BytesIO(data), timeout=_SECONDS)

    def _drop(self, directory: str) -> None:
        """The chief commits elsewhere, and clears up only there."""
        try:
            retention.delete_staging(self._files, directory)
            claims.forget(self._files, directory)
        except OSError as error:
            _log.warning("Could not remove %s: %s", directory, error)

    def collect(
        self,
        staged: Staged,
        workers: Iterable[int],
        because: str,
        left: Callable[[], float],
    ) -> list[int]:
        """Takes the others' shards into the staging directory; on the chief.

        Args:
            staged: the save.
            workers: those that say that they have staged.
            because: of the commit.
            left: seconds until the commit must be made; half of them are for this.

        Returns:
            The workers whose shards are there now; what fails is logged.

        Raises:
            SaveError: one is missing, and nobody has to leave: then the last commit,
                which is whole, is worth more than a newer one without that part.
        """
        missing = []
        present = []
        for worker in workers:
            if worker in self._apart:
                try:
                    self._take(staged, worker, min(_SECONDS, max(0.1, left() / 2)))
                except (errors.CheckpointError, OSError) as error:
                    _log.error(
                        "tfpreempt: the shard of worker %d did not come by way of %s: "
                        "%s",
                        worker,
                        self._store.uri,
                        error,
                    )
                    missing.append(worker)
                    continue
            present.append(worker)
        if missing and because in ("periodic", "save"):
            raise errors.SaveError(
                f"the part of worker(s) {sorted(missing)} did not come by way of "
                f"{self._store.uri}; this save is dropped, the last commit stands. "
                "Look at the store, and at the logs of those workers."
            )
        return present

    def clear(self, attempt: str) -> None:
        """Removes the shards of one save, once it is over."""
        for name in list(self._store.list(f"{FOLDER}/{attempt}/")):
            self._store.delete(name)

    def _take(self, staged: Staged, worker: int, seconds: float) -> None:
        place = self._place(staged.attempt, worker)
        folder = os.path.join(staged.directory, layout.worker_name(worker))
        sums = self._sums(f"{place}/{LIST}", seconds)
        self._files.make_dirs(folder)
        for name, (size, crc) in sums.items():
            path = os.path.join(folder, name)
            with open(path, "xb") as file:
                self._store.get(
                    f"{place}/{name}", file, length=size + 1, timeout=seconds
                )
            if checksum.of_file(path) != (size, crc):
                raise errors.CheckpointDamagedError(
                    f"{self._store.uri}/{place}/{name} is not what worker {worker} "
                    "sent: size or checksum differ."
                )

    def _sums(self, name: str, seconds: float) -> dict[str, tuple[int, int]]:
        """The list of a shard's files, checked: names become paths here."""
        target = io.BytesIO()
        try:
            self._store.get(name, target, length=_MAX_LIST_BYTES, timeout=seconds)
            found = json.loads(target.getvalue())
            sums = {
                str(key): (int(size), int(crc)) for key, (size, crc) in found.items()
            }
        except ObjectMissingError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise errors.CheckpointDamagedError(
                f"{self._store.uri}/{name} is no list of files: {error}"
            ) from error
        for key in sums:
            if "/" in key or paths.why_unsafe(key):
                raise errors.CheckpointDamagedError(
                    f"{self._store.uri}/{name} names the file {key!r}; expected the "
                    "plain name of a State's file."
                )
        return sums

    @staticmethod
    def _place(attempt: str, worker: int) -> str:
        return f"{FOLDER}/{attempt}/{layout.worker_name(worker)}"


def clear_others(store: ObjectStore, token: str) -> None:
    """Removes what earlier starts left; this one's saves begin with its token."""
    for name in list(store.list(f"{FOLDER}/")):
        if not name.startswith(f"{FOLDER}/{token}-"):
            store.delete(name)
