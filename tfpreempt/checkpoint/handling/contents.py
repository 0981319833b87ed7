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
from collections.abc import Iterable

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, flat, layout, pointer
from tfpreempt.checkpoint.catalog import Committed, Kind
from tfpreempt.checkpoint.manifest import MAX_FILES, FileEntry, Manifest
from tfpreempt.checkpoint.remote import commits, landing
from tfpreempt.checkpoint.remote.download import Source
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.crew import Crew
from tfpreempt.storage.interface import ObjectStore, summed
from tfpreempt.storage.local import LocalStore

_log = logging.getLogger(__name__)
_THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of one checkpoint, wherever they are.

    Attributes:
        source: what reads them.
        folder: before the names in the source; "" if none is.
        manifest: the commit's; where there is none, made of what was found.
        token: stands for this very content.
        base: the local directory to which the names are relative; None: not local.
        holder: the local directory of manifest and metadata; None: not local, or there
            is none.
        controls: content of MANIFEST.json and COMMITTED; None if this is no commit.
    """

    source: Source
    folder: str
    manifest: Manifest
    token: str
    base: str | None = None
    holder: str | None = None
    controls: tuple[bytes, bytes] | None = None

    @property
    def step(self) -> int | None:
        """The step that it carries; None if nobody said."""
        return None if self.controls is None else self.manifest.step


def of_path(path: str, *, with_sums: bool = False) -> Contents:
    """What lies at a local path: a directory, or the prefix of a flat checkpoint.

    Args:
        path: absolute.
        with_sums: of what is no commit, too; all its bytes are read for them.

    Raises:
        CheckpointError: nothing that could be a checkpoint; says what there is.
    """
    if path.endswith(layout.SIDECAR_SUFFIX) and os.path.isdir(path):
        path = path.removesuffix(layout.SIDECAR_SUFFIX)
    try:
        return (
            _commit_at(path)
            or _directory_at(path, with_sums)
            or _prefix_at(path, with_sums)
        )
    except OSError as error:
        raise errors.CheckpointError(
            f"{path!r} cannot be read: {error}. Check the path and its permissions."
        ) from error


def of_store(store: ObjectStore, folder: str, *, with_sums: bool = False) -> Contents:
    """What a store holds in a folder; "" for all that it holds.

    Args:
        store: the store.
        folder: in it.
        with_sums: of what is no commit, too; each object is asked for.

    Raises:
        CheckpointError: nothing that could be a checkpoint; says what there is.
    """
    found = commits.read(store, folder)
    if found is not None:
        return Contents(
            source=store,
            folder=folder,
            manifest=found.manifest,
            token=found.token,
            controls=(found.manifest_data, found.marker_data),
        )
    where = f"{store.uri}/{folder}" if folder else store.uri
    if not folder:
        _refuse_root(where, _newest_in(store))
    prefix = f"{folder}/" if folder else ""
    listed = (name[len(prefix) :] for name in store.list(prefix))
    names = _checked(listed, where)
    _refuse_root(where, _newest_of(store, folder, names))
    if not names:
        raise _nothing(where)
    if layout.MANIFEST in names or commits.parse(where.rpartition("/")[2]):
        raise _unfinished(where)
    manifest = _made_of(_stats(store, folder, names) if with_sums else _bare(names))
    return Contents(
        source=store, folder=folder, manifest=manifest, token=_token_of(manifest)
    )


def tensorflow_prefix(contents: Contents) -> str | None:
    """TensorFlow's prefix relative to the base; None without a tf.train.Checkpoint."""
    if contents.controls is not None:
        return contents.manifest.prefix
    names = [entry.name for entry in contents.manifest.files]
    indices = [name.removesuffix(".index") for name in names if name.endswith(".index")]
    listed = None if contents.base is None else pointer.read(contents.base)
    if listed is not None and listed.latest in indices:
        return listed.latest
    return indices[0] if len(indices) == 1 else None


def _commit_at(path: str) -> Contents | None:
    for kind, base, holder in (
        (Kind.OWN, path, path),
        (Kind.FLAT, os.path.dirname(path), layout.sidecar(path)),
    ):
        control = catalog.read_control(holder)
        if control is not None:
            manifest, token, marked_at = control
            entry = Committed(
                kind=kind,
                path=path,
                base=base,
                manifest=manifest,
                token=token,
                marked_at=marked_at,
            )
            return _from_commit(entry, holder)
        if os.path.lexists(os.path.join(holder, layout.MANIFEST)):
            raise _unfinished(holder)
    return None


def _from_commit(entry: Committed, holder: str) -> Contents:
    with open(os.path.join(holder, layout.MANIFEST), "rb") as file:
        data = file.read()
    return Contents(
        source=LocalStore(entry.base),
        folder="",
        manifest=entry.manifest,
        token=entry.token,
        base=entry.base,
        holder=holder,
        controls=(data, catalog.marker_bytes(data, entry.manifest.sequence)),
    )


def _directory_at(path: str, with_sums: bool) -> Contents | None:
    if not os.path.isdir(path):
        return None
    committed, _ = catalog.scan(path)
    _refuse_root(path, committed[0].path if committed else None)
    folders = [found for name in os.listdir(path) if (found := commits.parse(name))]
    newest = max(folders, key=lambda each: each.sequence, default=None)
    _refuse_root(path, os.path.join(path, newest.name) if newest else None)
    is_upload = commits.parse(os.path.basename(path)) is not None
    if is_upload or os.path.lexists(os.path.join(path, landing.PROGRESS)):
        raise _unfinished(path)
    return _plain(path, path, _files_below(path), with_sums)


def _prefix_at(path: str, with_sums: bool) -> Contents:
    """A checkpoint that somebody else wrote, by TensorFlow's prefix."""
    if not os.path.isfile(path + ".index"):
        raise _nothing(path)
    base = os.path.dirname(path)
    found = [name for name in flat.payload_files(path) if name != path]
    names = [os.path.relpath(name, base) for name in found]
    return _plain(base, None, names, with_sums)


def _plain(
    base: str, holder: str | None, names: Iterable[str], with_sums: bool
) -> Contents:
    checked = _checked(names, base)
    entries = _bare(checked)
    if with_sums:
        sums = checksum.of_files(os.path.join(base, name) for name in checked)
        found = [(name, *sums[os.path.join(base, name)]) for name in checked]
        entries = [FileEntry(name=n, size=size, crc32c=crc) for n, size, crc in found]
    manifest = _made_of(entries)
    return Contents(
        source=LocalStore(base),
        folder="",
        manifest=manifest,
        token=_token_of(manifest),
        base=base,
        holder=holder,
    )


def _bare(names: list[str]) -> list[FileEntry]:
    return [FileEntry(name=name, size=0, crc32c=0) for name in names]


def _files_below(root: str) -> Iterable[str]:
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


def _checked(names: Iterable[str], where: str) -> list[str]:
    """Names that may become paths, without those of a handle's metadata.

    Raises:
        CheckpointDamagedError: one may not, or there are too many.
    """
    found = list(itertools.islice(names, MAX_FILES + 1))
    if len(found) > MAX_FILES:
        raise errors.CheckpointDamagedError(
            f"{where} has more than {MAX_FILES} files; expected the few of a "
            "checkpoint. Name a directory further down."
        )
    for name in found:
        if reason := paths.why_unsafe(name):
            raise errors.CheckpointDamagedError(
                f"{where} has a file {name[:120]!r}, which {reason}. Rename it, or use "
                "another directory."
            )
    ours = {layout.METADATA, layout.METADATA + ".tmp"}
    return sorted(name for name in found if name not in ours)


def _stats(store: ObjectStore, folder: str, names: list[str]) -> list[FileEntry]:
    """Size and checksum of many objects, several at a time."""
    found: dict[str, FileEntry] = {}

    def look(name: str) -> None:
        status = summed(store, commits.joined(folder, name))
        if status is not None and status.crc32c is not None:
            found[name] = FileEntry(name=name, size=status.size, crc32c=status.crc32c)

    crew = Crew("tfpreempt-stat", min(_THREADS, len(names)))
    crew.add(functools.partial(look, name) for name in names)
    crew.run(lambda: None)
    return [found[name] for name in names if name in found]


def _made_of(entries: Iterable[FileEntry]) -> Manifest:
    """A manifest for what has none; only its files mean something."""
    return Manifest(step=0, sequence=1, world_size=1, workers=(), files=tuple(entries))


def _token_of(manifest: Manifest) -> str:
    text = io.StringIO()
    for entry in manifest.files:
        text.write(f"{entry.name}\0{entry.size}\0{entry.crc32c}\0")
    data = text.getvalue().encode("utf-8", "surrogatepass")
    return f"plain-{checksum.of_bytes(data):08x}-{manifest.bytes}"


def _newest_in(store: ObjectStore) -> str | None:
    for commit in commits.commits(store, _log.warning):
        return f"{store.uri}/{commit.folder}"
    return None


def _newest_of(store: ObjectStore, folder: str, names: list[str]) -> str | None:
    heads = {name.split("/")[0] for name in names if "/" in name}
    found = [each for head in heads if (each := commits.parse(head))]
    newest = max(found, key=lambda each: each.sequence, default=None)
    return f"{store.uri}/{commits.joined(folder, newest.name)}" if newest else None


def _refuse_root(where: str, newest: str | None) -> None:
    if newest is not None:
        raise errors.CheckpointError(
            f"{where} holds the commits of a run; expected one of them. Use the "
            f"newest: Checkpoint({newest!r})."
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
