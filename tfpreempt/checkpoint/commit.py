"""The commit: files made durable, manifest, one rename, and the marker last.

The marker is the commit, not the rename: object storage has no rename, and a directory
that was renamed is complete only if its files were synced before. Whoever dies at any
line of `publish` leaves either the old newest commit or the new one, each whole.

The steps, on the chief, after all workers are known to be done:

    1. sync every file and directory that was staged, and checksum the files
    2. write and sync the manifest
    3. rename the staging directory to its place; sync the checkpoint directory
    4. write, sync and rename the marker; sync               <- committed from here on
    5. point TensorFlow's `checkpoint` file at it            (a failure is a warning)
    6. delete what retention no longer wants                 (a failure is a warning)

In a directory that is a URL the files were staged in their place, and an object is
durable as soon as it is there: steps 1 and 4 sync and rename nothing, 3 falls away.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from tfpreempt.checkpoint import catalog, layout, pointer, retention
from tfpreempt.checkpoint.manifest import FileEntry, Manifest, to_json
from tfpreempt.core.clock import Clock
from tfpreempt.storage import checksum, reading
from tfpreempt.storage.files import Files, write_durably

_log = logging.getLogger(__name__)


def publish(
    files: Files,
    clock: Clock,
    directory: str,
    staged: str,
    number: int,
    draft: Manifest,
    started_at: float,
) -> tuple[str, Manifest]:
    """Commits a staging directory in the own form.

    Args:
        files: the file operations.
        clock: for the measured time.
        directory: the checkpoint directory.
        staged: the staging directory, complete.
        number: the directory number wanted.
        draft: what the commit says of itself; nothing of its files yet.
        started_at: monotonic seconds at which writing started.

    Returns:
        Where the commit is, and its manifest.

    Raises:
        OSError: before the marker; nothing older was touched.
    """

    def place(manifest: Manifest) -> str:
        if os.path.dirname(staged) == directory:
            return staged  # under its last name already
        target = free_target(files, clock, directory, number, manifest.sequence)
        files.rename(staged, target)
        files.sync_dir(directory)
        return target

    contents = {name: os.path.join(staged, name) for name in reading.tree(staged)}
    prefix = layout.PAYLOAD if f"{layout.PAYLOAD}.index" in contents else None
    draft = dataclasses.replace(draft, prefix=prefix)
    return seal(files, clock, staged, contents, [staged], draft, started_at, place)


def seal(
    files: Files,
    clock: Clock,
    staged: str,
    contents: Mapping[str, str],
    roots: Sequence[str],
    draft: Manifest,
    started_at: float,
    place: Callable[[Manifest], str],
) -> tuple[str, Manifest]:
    """Steps 1 to 4, in whatever form.

    Args:
        files: the file operations.
        clock: for the measured time.
        staged: the staging directory.
        contents: the path of each file, by its name in the manifest.
        roots: the directories with all of them.
        draft: what the commit says of itself; nothing of its files yet.
        started_at: monotonic seconds at which writing started.
        place: gives what was staged, with the manifest in it, its last name.

    Returns:
        That name, and the manifest.

    Raises:
        OSError: before the marker.
    """
    sums = make_durable(files, list(contents.values()), roots)
    entries = {
        name: FileEntry(name=name, size=sums[path][0], crc32c=sums[path][1])
        for name, path in contents.items()
    }
    manifest = dataclasses.replace(
        draft,
        files=tuple(entries[name] for name in sorted(entries)),
        save_seconds=max(0.0, clock.monotonic() - started_at),
        metadata={"saved_at": clock.wall(), **draft.metadata},
    )
    data = to_json(manifest)
    write_durably(files, os.path.join(staged, layout.MANIFEST), data)
    holder = place(manifest)
    mark(files, holder, data, manifest.sequence)
    return holder, manifest


def make_durable(
    files: Files, paths: list[str], roots: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Syncs files and all directories below the roots; checksums files meanwhile.

    Returns:
        Size and crc32c by path.

    Raises:
        OSError: as the file system says.
    """

    def sync_all() -> None:
        for path in paths:
            files.sync_file(path)
        for root in roots:
            for folder, _, _ in reversed(list(reading.walk(root))):
                files.sync_dir(folder)

    # One thread syncs while this one checksums: the disk and the memory bus differ.
    with concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix="tfpreempt-sync"
    ) as pool:
        syncing = pool.submit(sync_all)
        sums = checksum.of_files(paths)
        syncing.result()
    return sums


def mark(files: Files, holder: str, manifest_bytes: bytes, sequence: int) -> None:
    """Writes the marker: from its rename on, this is a commit."""
    data = catalog.marker_bytes(manifest_bytes, sequence)
    write_durably(files, os.path.join(holder, layout.MARKER), data)


def finish(
    files: Files,
    directory: str,
    max_to_keep: int | None,
    damaged: Collection[str] = (),
    is_pinned: Callable[[str], bool] = lambda path: False,
) -> None:
    """Points the state file at the newest commit and applies retention.

    The commit stands already, so what fails here is logged, not raised.
    """
    try:
        kept, dropped = retention.plan(directory, max_to_keep, damaged)
        point(files, directory, kept, dropped)
        for path in dropped:
            if not is_pinned(path):
                retention.delete(files, path)
    except OSError as error:
        _log.warning("Tidying %s after a commit failed: %s", directory, error)


def point(files: Files, directory: str, kept: list[str], dropped: list[str]) -> None:
    """Updates TensorFlow's `checkpoint` file; keeps what others listed there.

    Args:
        files: the file operations.
        directory: the checkpoint directory.
        kept: our commits with a TensorFlow prefix, oldest first.
        dropped: our commits that are about to be deleted.
    """

    def names(paths: list[str]) -> list[str]:
        return [f"{os.path.basename(path)}/{layout.PAYLOAD}" for path in paths]

    def index(name: str) -> str:
        return os.path.join(directory, name + ".index")

    ours = [name for name in names(kept) if reading.is_file(index(name))]
    if not ours:
        return
    old = _listed(directory) or pointer.Pointer(latest="")
    taken = {*ours, *names(dropped)}
    foreign = [
        name
        for name in dict.fromkeys(old.paths)
        if name not in taken and reading.is_file(index(name))
    ]
    times: list[float] = []
    if old.timestamps:
        known = dict(zip(old.paths, old.timestamps, strict=True))
        times = [known[name] for name in foreign]
        times += [reading.stat(index(name)).modified_ns / 1e9 for name in ours]
    pointer.write(
        files,
        directory,
        pointer.Pointer(
            latest=ours[-1],
            paths=(*foreign, *ours),
            timestamps=tuple(times),
            last_preserved=old.last_preserved,
        ),
    )


def free_target(
    files: Files, clock: Clock, directory: str, number: int, sequence: int
) -> str:
    """Where a commit goes: an older commit of this number stays until retention.

    Raises:
        OSError: as the file system says.
    """
    plain = os.path.join(directory, layout.step_name(number))
    if not reading.is_there(plain):
        return plain
    retention.delete_uncommitted(files, catalog.at(plain), clock)
    if not reading.is_there(plain):
        return plain
    return f"{plain}.{sequence}"


def _listed(directory: str) -> pointer.Pointer | None:
    """What the state file says; nothing where it is a pipe or a device."""
    try:
        return pointer.read(directory)
    except OSError:
        if reading.is_file(os.path.join(directory, layout.POINTER)):
            raise
        return None


def versions() -> dict[str, str]:
    """What is running now, by name; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in ("tensorflow", "keras", "tf_keras", "numpy"):
        if module := sys.modules.get(name):
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found
