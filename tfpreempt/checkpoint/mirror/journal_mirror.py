"""Uploads a run's journals to the object store, so that every machine can read them.

    journals/worker-0-1a2b3c4d.jsonl

The chief uploads every file of the journal directory whenever the file has grown. Full
files of a worker (see `core/journal.py`) do not grow, and are uploaded once. The
object's name contains the checksum of the file's first line, which does not change as
the file grows. If the run moves to a machine with an empty disk, a new journal begins,
with another first line and so another object. Readers merge the objects of a worker.

Each such machine adds a small object. If a worker or a supervisor has MOST_SMALL small
objects, the chief joins them into a new object, separated by empty lines, and then
deletes them. A crash in between leaves the same file in two objects; readers recognize
the file by its first line. The joined object is named by its own checksum, so a machine
that still uploads its file, after it has lost the lease, cannot overwrite the object.
If the machine has uploaded more records since the chief read the file, the chief keeps
the machine's object.
"""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from tfpreempt import errors
from tfpreempt.core.journal import (
    MAX_LINE_BYTES,
    SEGMENT,
    SEGMENT_BYTES,
    journal_files,
    open_file,
    parse_record,
)
from tfpreempt.core.threads import CallTimeoutError, ManagedThread, call_within
from tfpreempt.storage import checksum
from tfpreempt.storage.object_store import (
    ObjectNotFoundError,
    ObjectStat,
    ObjectStore,
)

_log = logging.getLogger(__name__)

FOLDER = "journals"
_NAME = re.compile(
    FOLDER
    + r"/(?P<of>worker-\d{1,9}|supervisor(?:-[\w-]{1,99})?)"
    + SEGMENT
    + r"-\w{8}\.jsonl",
    re.ASCII,
)
_MOST_BYTES = 64 << 20  # largest size of one file
_MOST_READ = 256 << 20  # bytes that `fetch` reads, of a store and of a directory
_MOST_FILES = 10_000
_MOST_PARTS = 100_000  # files in all objects; a file is a start of a worker, or 1 MiB
_Files: TypeAlias = dict[bytes, bytes]  # texts of files, by their first lines

MOST_SMALL = 16
"""Number of objects below SEGMENT_BYTES from which on they are joined."""

MOST_JOINED = 64
"""Largest number of objects that a start reads and joins, per worker or supervisor."""

# Total size of these objects. MOST_SMALL small objects are always smaller.
_MOST_JOINED_BYTES = 16 << 20

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
        try:
            self.join_small()
        except Exception as error:  # noqa: BLE001 - the next start tries again
            _log.debug("could not join the journals in %s: %s", self._store.uri, error)
        while not self._thread.stop_event.wait(EVERY):
            self._put_all()

    def _put_all(self) -> None:
        """Uploads the files that have grown. Logs the first error; raises no error."""
        with self._lock:
            for path in journal_files(self._directory):
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
            name = _name(path.stem, first)
            copy = None
            if path not in self._sizes:  # an earlier process may have uploaded the file
                copy = self._store.stat(name, timeout=_SECONDS)
            if copy is None or copy.size != len(data):
                self._store.replace(name, data, timeout=_SECONDS)
            self._sizes[path] = len(data)

    def join_small(self) -> None:
        """Joins the small objects of earlier machines, see the head of this module.

        The objects of this machine's files are left out. The method returns early
        after a call of `stop`.
        """
        own = set()
        for path in journal_files(self._directory):
            with open(open_file(path, os.O_RDONLY), "rb") as file:
                first = file.readline(MAX_LINE_BYTES).rstrip(b"\n")
                own.add(_name(path.stem, first))
        names: dict[str, list[str]] = defaultdict(list)
        for name in self._store.list(f"{FOLDER}/"):
            if name not in own and (match := _NAME.fullmatch(name)):
                names[match["of"]].append(name)
        for of, mine in names.items():
            if len(mine) >= MOST_SMALL:
                self._join(of, mine)

    def _join(self, of: str, names: Iterable[str]) -> None:
        """Joins those of a worker's or a supervisor's objects that are small.

        The next start joins the objects that exceed the limits.
        """
        small: dict[str, _Files] = {}
        stats: dict[str, ObjectStat] = {}
        size = 0
        for name in names:
            if self._thread.stop_event.is_set():
                return
            stat = self._store.stat(name, timeout=_SECONDS)
            if stat is None or stat.size >= SEGMENT_BYTES:
                continue
            size += stat.size
            if len(small) == MOST_JOINED or size > _MOST_JOINED_BYTES:
                break
            small[name] = _files_in(_read(self._store, name, stat.size))
            stats[name] = stat
        # The object with the longest copy of each file; of equal copies, the copy in
        # the object with the most files.
        longest: dict[bytes, str] = {}
        for name in sorted(small, key=lambda each: -len(small[each])):
            for first, text in small[name].items():
                best = longest.get(first)
                if best is None or len(text) > len(small[best][first]):
                    longest[first] = name
        needed = set(longest.values())
        # Left by a crash, or by a store that refuses to delete. In the second case do
        # not join again: each start would add an object.
        for name in small.keys() - needed:
            self._delete_unchanged(name, stats[name])
        if len(needed) >= MOST_SMALL:
            files = {first: small[name][first] for first, name in longest.items()}
            whole = b"\n".join(_in_order(files))
            self._store.replace(_name(of, whole), whole, timeout=_SECONDS)
            for name in needed:
                self._delete_unchanged(name, stats[name])

    def _delete_unchanged(self, name: str, read: ObjectStat) -> None:
        """Deletes an object, unless a machine has added records since the object was
        read.

        A machine uploads its last records after it has released the lease.

        Args:
            name: name of the object.
            read: size and checksum of the object before it was read.
        """
        if self._store.stat(name, timeout=_SECONDS) == read:
            self._store.delete(name, timeout=_SECONDS)


def _files_in(text: bytes) -> _Files:
    """Returns the files of an object, by their first lines; each has a line end.

    After `_MOST_PARTS` files, the rest counts as one file: another user may have
    written millions of empty lines, and a file takes much memory for each.
    """
    files = (each.strip(b"\n") for each in text.split(b"\n\n", _MOST_PARTS))
    return {each.partition(b"\n")[0]: each + b"\n" for each in files if each}


def _add(found: _Files, more: _Files) -> None:
    """Adds the files of an object; of the copies of a file, keeps the longest."""
    for first, text in more.items():
        found[first] = max(found.get(first, b""), text, key=len)


def _in_order(files: _Files) -> list[bytes]:
    """Returns the texts of files, oldest first."""
    return sorted(files.values(), key=_began)


def _name(of: str, marked: bytes) -> str:
    """Returns the name of an object.

    Args:
        of: name of the journal file, without the extension.
        marked: bytes whose checksum is part of the name.
    """
    return f"{FOLDER}/{of}-{checksum.of_bytes(marked):08x}.jsonl"


def _read(store: ObjectStore, name: str, size: int) -> bytes:
    data = io.BytesIO()
    store.get(name, data, length=size)
    return data.getvalue()


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
    try:
        found = _download(store)
    except ObjectNotFoundError:  # a starting machine has joined objects meanwhile
        found = _download(store)
    left = _MOST_READ
    for path in () if local is None else journal_files(local):
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            stem, text = path.stem.partition(".")[0], file.read(_MOST_BYTES)
        left -= len(text)
        if left < 0:
            raise errors.CheckpointError(
                f"The journals in {local} are too large for a run: more than "
                f"{_MOST_READ >> 20} MiB. Find the program that wrote {path}."
            )
        _add(found[stem], _files_in(text))
    for stem, files in found.items():
        (target / f"{stem}.jsonl").write_bytes(b"".join(_in_order(files)))


def _download(store: ObjectStore) -> defaultdict[str, _Files]:
    """Returns the journals of a store, by worker or supervisor.

    Raises:
        ObjectNotFoundError: an object was deleted meanwhile.
    """
    found: defaultdict[str, _Files] = defaultdict(dict)
    left = _MOST_READ
    for count, name in enumerate(store.list(f"{FOLDER}/")):
        if (match := _NAME.fullmatch(name)) is None:
            continue
        stat = store.stat(name, timeout=_SECONDS)
        if stat is None:
            raise ObjectNotFoundError(f"{store.uri}/{name} was deleted; try again")
        left -= stat.size
        if stat.size > _MOST_BYTES or left < 0 or count >= _MOST_FILES:
            raise errors.CheckpointError(
                f"The journals in {store.uri}/{FOLDER} are too large for a run: {name} "
                f"has {stat.size} bytes. Find the program that wrote this object."
            )
        _add(found[match["of"]], _files_in(_read(store, name, stat.size)))
        if sum(map(len, found.values())) > _MOST_PARTS:
            raise errors.CheckpointError(
                f"The journals in {store.uri}/{FOLDER} are too large for a run: more "
                f"than {_MOST_PARTS} files. Find the program that wrote {name}."
            )
    return found


def _began(text: bytes) -> float:
    record = parse_record(text.partition(b"\n")[0])
    return 0.0 if record is None else float(record["wall"])
