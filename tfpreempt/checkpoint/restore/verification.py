"""Compares the files of a commit with its manifest: sizes first, then every byte.

A restore reads no file that the manifest does not name, because such a file cannot be
compared: in the directory of another user, the file may be a link to a file elsewhere.

Several threads read the files. A large file is read in ranges, and the checksums of the
ranges are combined; a thread has one piece of a range in memory at a time. If a file
has another size than in the manifest, the file is not read: a hostile manifest may name
a size of terabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.directory import flat_commit
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import FileEntry
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, file_reading
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectNotFoundError

THREADS = 8
_RANGE = 64 << 20


def faults(
    commit: Entry,
    *,
    every_byte: bool,
    threads: int = THREADS,
    watch: Callable[[int], None] = lambda done: None,
    sums: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> dict[str, str]:
    """Checks the files of a commit. Returns the names of the files that differ from the
    manifest, each with a description of the problem.

    Args:
        commit: the commit, with its manifest.
        every_byte: whether to read all bytes. If not, the sizes are compared, and those
            checksums that the object store knows.
        threads: number of threads that read at the same time.
        watch: function called on the caller's thread about ten times a second, with the
            number of bytes read so far; if the function raises, the check ends.
        sums: size and crc32c, by path, of files that were just read; these files are
            not read again.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    files = commit.files
    # Checksums of the ranges; the list grows during the read.
    parts: list[checksum.ChecksumWriter] = []

    def look(file: FileEntry) -> str | None:
        try:
            known = commit.store.stat(commit.object(file.name))
        except errors.CheckpointCorruptedError as error:
            return str(error)
        if known is None:
            return _compare(commit, file, None, 0)
        crc = file.crc32c if known.crc32c is None else known.crc32c
        return _compare(commit, file, known.size, crc)

    def read(part: tuple[FileEntry, int]) -> checksum.ChecksumWriter | str:
        file, offset = part
        parts.append(summed := checksum.ChecksumWriter())
        length = min(_RANGE, file.size - offset)
        name = commit.object(file.name)
        try:
            commit.store.get(name, summed, offset=offset, length=length)
        except (ObjectNotFoundError, errors.CheckpointCorruptedError) as error:
            return str(error)
        return summed

    in_threads = functools.partial(
        map_in_threads,
        threads=threads,
        name="tfpreempt-verify",
        watch=lambda: watch(sum(each.size for each in parts)),
    )
    found = dict(zip(files, in_threads(look, files), strict=True))
    of_size = {  # files of the right size, with checksums from `sums`
        file: sums.get(commit.file(file.name))
        for file in files
        if every_byte and found[file] is None
    }
    ranges = [
        (file, offset)
        for file, known in of_size.items()
        if known is None
        for offset in range(0, file.size or 1, _RANGE)
    ]
    # Size and checksum of the ranges joined so far.
    whole = {file: known or (0, 0) for file, known in of_size.items()}
    for (file, _), part in zip(ranges, in_threads(read, ranges), strict=True):
        if isinstance(part, str):
            found[file] = found[file] or part
        else:
            size, crc = whole[file]
            if size:  # only from the second range of a file on
                crc = checksum.joined(crc, part.crc32c, part.size)
            whole[file] = size + part.size, crc if size else part.crc32c
    watch(sum(each.size for each in parts))
    for file, (size, crc) in whole.items():
        found[file] = found[file] or _compare(commit, file, size, crc)
    faulty = {file.name: text for file, text in found.items() if text is not None}
    prefix = commit.manifest.prefix if commit.manifest else None
    if prefix is not None:
        faulty |= _unnamed(commit, prefix)
    return faulty


def _unnamed(commit: Entry, prefix: str) -> dict[str, str]:
    """Returns the names of files that TensorFlow would read although the manifest does
    not name the files, with the problem.

    In a store that is not local, only the index is checked, because a download contains
    only files of the manifest. Beside a flat checkpoint, an interrupted save of the
    same name may have left further data files. TensorFlow reads the data files whose
    names end with the number of files in the index.
    """
    index, path = f"{prefix}.index", commit.file(prefix)
    named, data = {commit.file(file.name) for file in commit.files}, list[str]()
    if isinstance(commit.store, LocalStore):
        try:
            data = [each for each in flat_commit.data_files(path) if each not in named]
        except OSError as error:
            file_reading.check_shortage(error, path)
            return {index: f"The directory of {path!r} cannot be listed: {error}"}
    if data and (number := bundle.num_data_files(path)):
        data = [each for each in data if each.endswith(f"-of-{number:05d}")]
    read = [f"{path}.index", *data]
    names = [prefix + each.removeprefix(path) for each in read if each not in named]
    return {name: f"{commit.object(name)!r} is not in the manifest." for name in names}


def _compare(commit: Entry, file: FileEntry, size: int | None, crc: int) -> str | None:
    if size is None:
        text = "is missing"
    elif size != file.size:
        text = f"has {size} bytes; expected {file.size}"
    elif crc != file.crc32c:
        text = f"has crc32c {crc:08x}; expected {file.crc32c:08x}"
    else:
        return None
    return f"{commit.object(file.name)!r} {text}."
