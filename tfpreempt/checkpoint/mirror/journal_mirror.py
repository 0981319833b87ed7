"""Uploads a run's journals to the object store, so that every machine can read them.

    journals/worker-0-1a2b3c4d.jsonl

The chief uploads every file of the journal directory whenever the file has grown. Full
files of a worker (see `core/journal.py`) do not grow, and are uploaded once. The
object's name contains the checksum of the file's first line, which does not change as
the file grows. If the run moves to a machine with an empty disk, a new journal begins,
with another first line and so another object. Readers merge the objects of a worker.
"""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from pathlib import Path

from tfpreempt import errors
from tfpreempt.core.journal import SEGMENT, open_file, parse_record
from tfpreempt.core.threads import CallTimeoutError, ManagedThread, call_within
from tfpreempt.storage import checksum
from tfpreempt.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)

FOLDER = "journals"
_NAME = re.compile(
    FOLDER
    + r"/(?P<of>worker-\d{1,9}|supervisor(?:-[\w-]{1,99})?)"
    + SEGMENT
    + r"-\w{8}\.jsonl"
)
_MOST_BYTES = 64 << 20  # largest size of one file
_MOST_READ = 256 << 20  # bytes of all files that `fetch` reads
_MOST_FILES = 10_000
EVERY = 15.0  # seconds between uploads
_SECONDS = 5.0  # timeout of a request, with its retries


class JournalMirror:
    """Uploads the files of a journal directory, in a background thread.

    Args:
        store: object store that receives the files.
        directory: the journal directory.
    """

    def __init__(self, store: ObjectStore, directory: Path) -> None:
        self._store = store
        self._directory = directory
        self._sizes: dict[Path, int] = {}  # bytes of every file at its last upload
        self._lock = threading.Lock()
        self._has_warned = False
        self._thread = ManagedThread("tfpreempt-journal", self._run)

    def start(self) -> None:
        """Starts the thread, which uploads a file whenever the file has grown."""
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end after the current request; does not wait."""
        self._thread.stop_event.set()

    def put_within(self, seconds: float) -> None:
        """Uploads the files that have grown. Waits at most `seconds` for the upload.

        Called on any thread.
        """
        try:
            call_within(seconds, self._put_all)
        except CallTimeoutError:
            _log.warning(
                "the journal in the mirror %s may lack the last events: the upload "
                "did not finish within %.1f s",
                self._store.uri,
                seconds,
            )

    def _run(self) -> None:
        while not self._thread.stop_event.wait(EVERY):
            self._put_all()

    def _put_all(self) -> None:
        """Uploads the files that have grown. Logs the first error; raises no error."""
        with self._lock:
            for path in sorted(self._directory.glob("*.jsonl")):
                try:
                    self._put(path)
                except Exception as error:  # noqa: BLE001 - training continues
                    if not self._has_warned:
                        self._has_warned = True
                        _log.warning(
                            "could not upload the journal %s to %s (%s). Commits are "
                            "still uploaded; `tfpreempt report` of the mirror will "
                            "lack events.",
                            path,
                            self._store.uri,
                            error,
                        )

    def _put(self, path: Path) -> None:
        size = path.stat().st_size
        if size == self._sizes.get(path):
            return
        if size > _MOST_BYTES:
            raise errors.SaveError(
                f"the journal has {size} bytes; expected at most {_MOST_BYTES >> 20} "
                "MiB"
            )
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MOST_BYTES)
        first, end, _ = data.partition(b"\n")
        if end:
            mark = checksum.of_bytes(first)
            name = f"{FOLDER}/{path.stem}-{mark:08x}.jsonl"
            copy = None
            if path not in self._sizes:  # an earlier process may have uploaded the file
                copy = self._store.stat(name, timeout=_SECONDS)
            if copy is None or copy.size != len(data):
                self._store.replace(name, data, timeout=_SECONDS)
            self._sizes[path] = len(data)


def fetch(store: ObjectStore, target: Path, local: Path | None = None) -> None:
    """Downloads the journals of a store to an empty directory, and joins the journals
    of each worker.

    Args:
        store: object store with or without journals.
        target: directory that gets one file per worker and supervisor.
        local: journal directory of this machine, whose journals are added; None if
            there is none.

    Raises:
        CheckpointError: the store failed, or the journals are too large for a run.
        OSError: the directory cannot be written.
    """
    found: dict[str, list[bytes]] = {}
    left = _MOST_READ
    for count, name in enumerate(store.list(f"{FOLDER}/")):
        match = _NAME.fullmatch(name)
        stat = None if match is None else store.stat(name, timeout=_SECONDS)
        if match is None or stat is None:
            continue
        left -= stat.size
        if stat.size > _MOST_BYTES or left < 0 or count >= _MOST_FILES:
            raise errors.CheckpointError(
                f"The journals in {store.uri}/{FOLDER} are too large for a run: {name} "
                f"has {stat.size} bytes. Find the program that wrote this object."
            )
        data = io.BytesIO()
        store.get(name, data, length=stat.size)
        found.setdefault(match["of"], []).append(data.getvalue())
    for path in () if local is None else sorted(local.glob("*.jsonl")):
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            text = file.read(_MOST_BYTES)
        of = path.stem.partition(".")[0]
        first, of_others = text.partition(b"\n")[0], found.get(of, [])
        kept = [each for each in of_others if each.partition(b"\n")[0] != first]
        found[of] = [*kept, text]
    for stem, texts in found.items():
        texts.sort(key=_began)
        whole = b"".join(text if text[-1:] == b"\n" else text + b"\n" for text in texts)
        (target / f"{stem}.jsonl").write_bytes(whole)


def _began(text: bytes) -> float:
    record = parse_record(text.partition(b"\n")[0])
    return 0.0 if record is None else float(record["wall"])
