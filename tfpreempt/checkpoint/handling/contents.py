"""What a place holds that a handle refers to: a commit, or any directory with files.

Asked anew at each use, since a handle is only a reference. Names in a listing are
checked before they are used for anything.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import logging
import os
from collections.abc import Iterable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, flat, layout, pointer
from tfpreempt.checkpoint.catalog import Condition, Entry, Kind
from tfpreempt.checkpoint.manifest import MAX_FILES, FileEntry, Manifest
from tfpreempt.checkpoint.remote import landing
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.crew import Crew
from tfpreempt.storage.interface import ObjectStore, summed
from tfpreempt.storage.local import LocalStore

_log = logging.getLogger(__name__)
_THREADS = 8


def of_path(path: str, *, with_sums: bool = False) -> Entry:
    """What lies at a local path: a directory, or the prefix of a flat checkpoint.

    Args:
        path: absolute.
        with_sums: of what is no commit, too; all its bytes are read for them.

    Raises:
        CheckpointError: nothing that could be a checkpoint; says what there is.
    """
    path = path.removesuffix(layout.SIDECAR_SUFFIX)
    directory, name = os.path.split(path)
    try:
        if os.path.isdir(path):
            found = _commit(catalog.unread(LocalStore(path)))
            if found is not None:
                return found
        if os.path.isdir(layout.sidecar(path)):
            sidecar = layout.sidecar(name)
            found = _commit(catalog.unread(LocalStore(directory), sidecar))
            if found is not None:
                return found
        if os.path.isdir(path):
            return _directory_at(path, with_sums)
        return _prefix_at(path, with_sums)
    except OSError as error:
        raise errors.CheckpointError(
            f"{path!r} cannot be read: {error}. Check the path and its permissions."
        ) from error


def of_store(store: ObjectStore, folder: str, *, with_sums: bool = False) -> Entry:
    """What a store holds in a folder; "" for all that it holds.

    Args:
        store: the store.
        folder: in it.
        with_sums: of what is no commit, too; each object is asked for.

    Raises:
        CheckpointError: nothing that could be a checkpoint; says what there is.
    """
    unread = catalog.unread(store, folder)
    found = _commit(unread)
    if found is not None:
        return found
    if not folder:
        _refuse_root(unread, next(catalog.commits(store, _log.warning), None))
    prefix = catalog.joined(folder, "")
    listed = (name[len(prefix) :] for name in store.list(prefix))
    names = _checked(listed, unread)
    heads = sorted({name.split("/")[0] for name in names if "/" in name})
    inner = [catalog.unread(store, catalog.joined(folder, head)) for head in heads]
    _refuse_root(unread, _newest(inner))
    if not names:
        raise _nothing(unread.path)
    if unread.kind is Kind.REMOTE:
        raise _unfinished(unread.path)
    return _plain(unread, _stats(unread, names) if with_sums else _bare(names))


def tensorflow_prefix(found: Entry) -> str | None:
    """TensorFlow's prefix of a local checkpoint; None without a tf.train.Checkpoint."""
    if found.is_committed:
        return found.prefix
    files = found.manifest.files if found.manifest else ()
    names = [entry.name for entry in files]
    indices = [name.removesuffix(".index") for name in names if name.endswith(".index")]
    listed = pointer.read(found.store.uri)
    if listed is not None and listed.latest in indices:
        return found.file(listed.latest)
    return found.file(indices[0]) if len(indices) == 1 else None


def _commit(unread: Entry) -> Entry | None:
    """A commit with its manifest; None if there is neither manifest nor marker.

    Raises:
        CheckpointError: it is damaged or half.
    """
    found = catalog.read(unread)
    if found.condition is Condition.DAMAGED:
        raise errors.CheckpointDamagedError(found.problems[0])
    if not found.is_committed and (found.manifest is not None or found.remarks):
        raise _unfinished(found.path)
    return found if found.is_committed else None


def _directory_at(path: str, with_sums: bool) -> Entry:
    store = LocalStore(path)
    unread = catalog.unread(store)
    committed = (each for each in catalog.scan(path) if each.is_committed)
    _refuse_root(unread, next(committed, None) or _newest(catalog.copies(store)))
    is_begun = os.path.lexists(os.path.join(path, landing.PROGRESS))
    if unread.kind is Kind.REMOTE or is_begun:
        raise _unfinished(path)
    names = _checked(_files_below(path), unread)
    return _plain(unread, _sums(path, names) if with_sums else _bare(names))


def _prefix_at(path: str, with_sums: bool) -> Entry:
    """A checkpoint that somebody else wrote, by TensorFlow's prefix."""
    if not os.path.isfile(path + ".index"):
        raise _nothing(path)
    directory, name = os.path.split(path)
    prefix = Entry(store=LocalStore(directory), name=name, kind=Kind.FOREIGN)
    found = [os.path.basename(each) for each in flat.payload_files(path)]
    names = _checked((each for each in found if each != name), prefix)
    return _plain(prefix, _sums(directory, names) if with_sums else _bare(names))


def _sums(directory: str, names: list[str]) -> list[FileEntry]:
    sums = checksum.of_files(os.path.join(directory, name) for name in names)
    found = [(name, *sums[os.path.join(directory, name)]) for name in names]
    return [FileEntry(name=name, size=size, crc32c=crc) for name, size, crc in found]


def _bare(names: list[str]) -> list[FileEntry]:
    return [FileEntry(name=name, size=0, crc32c=0) for name in names]


def _stats(folder: Entry, names: list[str]) -> list[FileEntry]:
    """Size and checksum of many objects, several at a time."""
    found: dict[str, FileEntry] = {}

    def look(name: str) -> None:
        status = summed(folder.store, folder.object(name))
        if status is not None and status.crc32c is not None:
            found[name] = FileEntry(name=name, size=status.size, crc32c=status.crc32c)

    crew = Crew("tfpreempt-stat", min(_THREADS, len(names)))
    crew.add(functools.partial(look, name) for name in names)
    crew.run(lambda: None)
    return [found[name] for name in names if name in found]


def _files_below(root: str) -> Iterator[str]:
    """Names of all regular files; links are passed over, said once."""
    is_said = False
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*links, *names):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield os.path.relpath(path, root)
            elif not is_said:
                is_said = True
                _log.warning("%s is no file; a checkpoint's links are left out", path)


def _checked(names: Iterable[str], place: Entry) -> list[str]:
    """Names that may become paths, without those of a handle's metadata.

    Raises:
        CheckpointDamagedError: one may not, or there are too many.
    """
    found = list(itertools.islice(names, MAX_FILES + 1))
    if len(found) > MAX_FILES:
        raise errors.CheckpointDamagedError(
            f"{place.path} has more than {MAX_FILES} files; expected the few of a "
            "checkpoint. Name a directory further down."
        )
    for name in found:
        if reason := paths.why_unsafe(name):
            raise errors.CheckpointDamagedError(
                f"{place.path} has a file {name[:120]!r}, which {reason}. Rename it, "
                "or use another directory."
            )
    ours = {layout.METADATA, layout.METADATA + ".tmp"}
    return sorted(name for name in found if name not in ours)


def _plain(place: Entry, files: list[FileEntry]) -> Entry:
    """What has no manifest, with one made of its files; only those mean something."""
    manifest = Manifest(
        step=0, sequence=1, world_size=1, workers=(), files=tuple(files)
    )
    text = io.StringIO()
    for entry in files:
        text.write(f"{entry.name}\0{entry.size}\0{entry.crc32c}\0")
    data = text.getvalue().encode("utf-8", "surrogatepass")
    return dataclasses.replace(
        place,
        condition=Condition.FOREIGN,
        manifest=manifest,
        token=f"plain-{checksum.of_bytes(data):08x}-{manifest.bytes}",
    )


def _newest(entries: Iterable[Entry]) -> Entry | None:
    """Of folders whose names are those of a mirror's."""
    named = [entry for entry in entries if entry.kind is Kind.REMOTE]
    return max(named, key=catalog.rank, default=None)


def _refuse_root(place: Entry, newest: Entry | None) -> None:
    if newest is not None:
        raise errors.CheckpointError(
            f"{place.path} holds the commits of a run; expected one of them. Use the "
            f"newest: Checkpoint({newest.path!r})."
        )


def _unfinished(where: str) -> Exception:
    return errors.CheckpointError(
        f"{where!r} has no marker: it is a save, a copy, an upload or a deletion that "
        "did not come to its end. Use another checkpoint; a to_directory() that was "
        "killed goes on if it is called again."
    )


def _nothing(where: str) -> Exception:
    return errors.CheckpointError(
        f"There is no checkpoint at {where!r}; expected a commit's directory, "
        "TensorFlow's prefix, or a directory with files. Check the name, and whether "
        "it was deleted since."
    )
