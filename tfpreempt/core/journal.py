"""The journal: files of JSON lines that record the events of a run, and their reader.

Every worker and every supervisor appends to separate files, so no lock is needed
between processes. Each record is a line, written by a single `write`. If a record
cannot be written, the error is logged once and never raised: a full disk must not end a
run that may still be able to commit elsewhere.

    worker-0.jsonl      the first records of worker 0
    worker-0.2.jsonl    later records: a worker begins a new file after SEGMENT_BYTES

A mirror has a copy of every file, and uploads only files that have grown. So the upload
of a record costs the same at the end of a month as at the beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfpreempt.core import contained, events
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.record_validation import is_time
from tfpreempt.core.scratch import is_scratch, is_url, local_directory

_log = logging.getLogger(__name__)
_PIECE = 1 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DURABLE = (
    events.Commit,
    events.Exit,
    events.CacheWrite,
    events.DataRefused,
    events.BadStep,
)

MAX_LINE_BYTES = 1 << 20
"""Bytes of the longest line that is read as a record."""

SEGMENT_BYTES = 1 << 20
"""Size in bytes from which on a file of a worker's journal gets no further record."""

_MOST_SEGMENTS = 999_999  # highest number in the name of a file

SEGMENT = r"(?:\.(?P<segment>[2-9]|[1-9]\d{1,5}))?"
"""Regular expression for the number in the name of a journal's second and later files,
between the name of the worker and `.jsonl`."""

_NAME = re.compile(
    rf"(?:worker-\d{{1,9}}|supervisor(?:-[\w-]{{1,99}})?){SEGMENT}\.jsonl", re.ASCII
)

DIRECTORY_VARIABLE = "TFPREEMPT_JOURNAL_DIR"
"""Environment variable with the journal directory of a run whose checkpoint directory
is a URL; ignored for other runs."""


def journal_directory(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Returns the directory of a run's journal: `<checkpoint_dir>/journal`.

    Args:
        checkpoint_dir: path or URL as given by the user, or the scratch directory of a
            URL. For a URL the journal is in $TFPREEMPT_JOURNAL_DIR if set, and
            otherwise in the scratch directory.
    """
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen and (is_url(checkpoint_dir) or is_scratch(checkpoint_dir)):
        return Path(chosen).resolve()  # the directory may be a link
    return Path(local_directory(checkpoint_dir), "journal")


def segments(path: Path) -> list[Path]:
    """Returns the files of a journal that exist, oldest first.

    Args:
        path: path of the journal's first file. If no file exists, the result contains
            this path.
    """
    name = re.compile(re.escape(path.stem) + SEGMENT + r"\.jsonl")
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for each in os.listdir(path.parent):
            if match := name.fullmatch(each):
                found[int(match["segment"] or 1)] = path.parent / each
    return [each for _, each in sorted(found.items())] or [path]


def journal_files(directory: Path) -> list[Path]:
    """Returns the files of all journals in a directory, sorted.

    Leaves out files of other programs, because $TFPREEMPT_JOURNAL_DIR may be a
    directory of the user. Empty if the directory cannot be read.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(filter(_NAME.fullmatch, os.listdir(directory)))
    return [directory / each for each in names]


class JsonLines:
    """An append-only file of JSON lines; any thread may append.

    The first record opens the file. A record after `close()` opens the file again, so
    no record of a slow thread is lost. Only the constructor creates the directory of
    the file. If the disk is unmounted later, a new directory would be on another disk,
    in the empty mount point.

    Args:
        path: path of the first file.
        clock: time source for the records.
        segment_bytes: size in bytes from which on a file gets no further record, and a
            new file begins; None: there is a single file.

    Attributes:
        path: path of the newest file.
    """

    def __init__(
        self, path: Path, clock: Clock, segment_bytes: int | None = None
    ) -> None:
        self.path = self._first = path
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._has_warned = False
        try:
            _make_directory(path.parent)
        except OSError as error:
            self._warn(error)

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """Appends a record, with the wall time and the monotonic time as first fields.

        Args:
            record: field values. A NumPy scalar is written as a number, any other value
                that JSON does not have as its `str`.
            durable: whether to sync the file to the disk before the method returns.
        """
        times = {"wall": self._clock.wall(), "monotonic": self._clock.monotonic()}
        with self._lock:
            try:
                text = json.dumps({**times, **record}, default=_to_json)
                line = f"{text}\n".encode()
                if self._descriptor is None:
                    self._descriptor = self._open_newest()
                written = os.write(self._descriptor, line)
                if written != len(line):
                    self._close()  # `_open` will end the incomplete line
                    raise OSError(f"wrote {written} of {len(line)} bytes")
                if durable:
                    os.fdatasync(self._descriptor)
                if self._is_full(self._descriptor):
                    self._close()
                    # Open the next file now: `tfpreempt simulate` finds a worker by
                    # the worker's open journal.
                    self._descriptor = self._open_newest()
            except (OSError, TypeError, ValueError) as error:
                self._warn(error)

    def close(self) -> None:
        """Closes the file; may be called several times."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_newest(self) -> int:
        """Opens the newest file, or a new file if the newest file is full."""
        self.path = segments(self._first)[-1]
        descriptor = _open(self.path)
        stem, _, text = self.path.stem.partition(".")
        number = int(text or 1)
        if number == _MOST_SEGMENTS or not self._is_full(descriptor):
            return descriptor
        os.close(descriptor)
        self.path = self.path.with_name(f"{stem}.{number + 1}.jsonl")
        return _open(self.path)

    def _is_full(self, descriptor: int) -> bool:
        most = self._segment_bytes
        return most is not None and os.fstat(descriptor).st_size >= most

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "cannot write the journal %s (%s). Training continues; records may "
                "be missing. Make room or check the directory's permissions.",
                self.path,
                error,
            )


class Journal(JsonLines):
    """The journal of a worker's events; any thread may record an event.

    Args:
        directory: the run's journal directory, see `journal_directory`.
        worker: index of this worker.
        clock: time source for the records.
        incarnation: name that the supervisor has given to this start of all workers;
            written to every record.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        worker: int,
        clock: Clock | None = None,
        incarnation: str = "",
    ) -> None:
        path = Path(directory) / f"worker-{worker}.jsonl"
        super().__init__(path, clock or SystemClock(), SEGMENT_BYTES)
        self._who: dict[str, Any] = {"worker": worker, "incarnation": incarnation}

    def record(self, event: events.Event) -> None:
        """Appends an event; logs an error of the file, and does not raise the error.

        The file is synced to the disk before the method returns for a Commit, Exit,
        CacheWrite, DataRefused or BadStep.
        """
        kind = {"event": type(event).__name__.lower()}
        # Not asdict(): a value from a user's source may not be copyable.
        values = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
        record = {**self._who, **kind, **values}
        self.append(record, durable=isinstance(event, _DURABLE))

    def read_earlier(self, kind: type[events.Event]) -> list[dict[str, Any]]:
        """Returns this worker's records of one kind of event, oldest first.

        See `read_records`.
        """
        return read_records(self._first, kind, os.geteuid())


class LineReader:
    """Reads the lines of a growing file, with bounded memory.

    A line longer than MAX_LINE_BYTES is cut; no valid record is so long. Holes of a
    sparse file are skipped.

    Args:
        at: byte offset in the file at which reading starts.

    Attributes:
        at: byte offset in the file up to which the file was read.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._incomplete = bytearray()

    @property
    def rest(self) -> bytes:
        """The incomplete last line: the bytes read after the last line end."""
        return bytes(self._incomplete)

    def read_on(self, descriptor: int) -> Iterator[bytes]:
        """Yields the complete lines that earlier calls have not yielded, without "\\n".

        Args:
            descriptor: descriptor of the file, open for reading.

        Raises:
            OSError: the file cannot be read.
        """
        while data := self._piece(descriptor):
            first, *others = data.split(b"\n")
            self._incomplete += first[: MAX_LINE_BYTES - len(self._incomplete)]
            for line in others:
                yield self.rest
                self._incomplete = bytearray(line)

    def _piece(self, descriptor: int) -> bytes:
        start = self.at
        try:
            self.at = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return b""  # the end of the file, or a hole up to the end
            if error.errno != errno.EINVAL:
                raise
        if self.at > start:
            # With the NUL, the line that contains the hole is not read as a record.
            self._incomplete[:] = b"\0"
        data = os.pread(descriptor, _PIECE, self.at)
        self.at += len(data)
        return data


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line of a journal; None if the line has no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and is_time(record.get("wall"))
    return record if is_record else None


def read_records(
    first: Path, kind: type[events.Event], owner: int
) -> list[dict[str, Any]]:
    """Returns the records of one kind of event in a journal, oldest first.

    The records of a file are left out if the file cannot be read, and if other users
    can write to the file, because the caller may delete the files that a record names.

    Args:
        first: path of the journal's first file.
        kind: class of the event.
        owner: id of the user who owns the files.
    """
    name = kind.__name__.lower()
    found: list[dict[str, Any]] = []
    for path in segments(first):
        with (
            contextlib.suppress(OSError),
            open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file,
        ):
            status = os.fstat(file.fileno())
            if status.st_uid == owner and not status.st_mode & _WRITABLE_BY_OTHERS:
                for line in LineReader().read_on(file.fileno()):
                    record = parse_record(line) if name.encode() in line else None
                    if record is not None and record.get("event") == name:
                        found.append(record)
    return found


def open_file(path: Path, flags: int) -> int:
    """Opens a regular file in a journal's directory; refuses a link or a pipe.

    A link could lead to a file of another user.

    Args:
        path: path of the file.
        flags: flags for `os.open`. With O_CREAT the directory is synced, so that a new
            file is found after a crash of the machine.

    Raises:
        OSError: the file is no regular file, or cannot be opened.
    """
    root = os.path.dirname(os.path.abspath(path.parent))
    with contained.directory(str(path.parent), root, reads=True) as folder:
        descriptor = contained.open_at(
            folder, path.name, flags, 0o644, path=str(path), copies=True
        )
        if flags & os.O_CREAT:
            os.fsync(folder)  # else a crash may lose the name, and so the file
    return descriptor


def _make_directory(path: Path) -> None:
    """Creates the directory of a journal, and syncs the parent of every new directory.

    Without the sync, a crash of the machine could lose a new directory, with the synced
    files inside.
    """
    new = [each for each in (path, *path.parents) if not each.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for each in new:
        with contextlib.suppress(OSError):  # some file systems cannot sync a directory
            above = os.open(each.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(above)
            finally:
                os.close(above)


def _open(path: Path) -> int:
    """Opens a file for appending, and ends an incomplete last line with a line end."""
    descriptor = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _to_json(value: Any) -> Any:
    """Returns a numpy scalar as a number, and a value of any other type as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
