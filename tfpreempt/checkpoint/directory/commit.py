"""Makes a commit: durable files, the manifest, a rename, and the marker last.

The marker makes the commit, not the rename: object stores have no rename, and a renamed
directory is complete only if its files were synced before. After a crash at any line of
`publish`, the newest commit is either the old commit or the new commit, intact.

The steps, on the chief, after every worker has written its files:

    1. sync every staged file and directory, and compute the checksums of the files
       (unless the code that wrote the file has done both)
    2. write and sync the manifest
    3. rename the staging directory to its final name; sync the checkpoint directory
    4. write, sync and rename the marker; sync               <- committed from here on
    5. name the commit in TensorFlow's `checkpoint` file. If the file cannot name the
       commit (no tf.train.Checkpoint), write a witness: a file beside the marker, as
       evidence of the commit                                (a failure is a warning)
    6. delete the commits that are no longer to be kept      (a failure is a warning)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, checkpoint_state, layout, retention
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import FileEntry, Manifest, to_json
from tfpreempt.core import contained
from tfpreempt.core.clock import Clock
from tfpreempt.storage import checksum, file_reading
from tfpreempt.storage.files import Files, write_durably

_log = logging.getLogger(__name__)

_CHECKSUM_THREADS = 4


class CancellationToken:
    """Decides whether an asynchronous save may still commit: either the save begins its
    commit, or another thread cancels the save. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = self._is_given_up = False

    def check(self) -> None:
        """Raises an error if the save was cancelled. Called between the steps of a
        save.

        Raises:
            SaveError: the save was cancelled.
        """
        if self._is_given_up:
            raise errors.SaveError(
                "an asynchronous save was cancelled, because a newer save has started"
            )

    def begin_commit(self) -> None:
        """Begins the commit, so that later calls of `cancel` have no effect. Called
        before the staging directory is renamed.

        Raises:
            SaveError: the save was cancelled.
        """
        with self._lock:
            self.check()
            self._is_taken = True

    def cancel(self) -> bool:
        """Cancels the save, so that the save does not commit. Returns whether the save
        is cancelled; False if the save has begun its commit already."""
        with self._lock:
            self._is_given_up = not self._is_taken
            return self._is_given_up

    @property
    def is_cancelled(self) -> bool:
        """Whether the save was cancelled, and therefore commits nothing."""
        return self._is_given_up


@dataclasses.dataclass(eq=False, kw_only=True)
class StagedFiles:
    """The files of a save before the commit.

    Attributes:
        step: the saved step; equal on all workers.
        attempt: the name of the save: equal on all workers, and never used again.
        staging: path of the staging directory.
        started_at: monotonic seconds at which the save began.
        cancel_token: cancellation token of an asynchronous save, during which training
            continues; None if training waits for the save.
        number: name of the commit's directory, as a number; unused for a flat
            checkpoint.
        prefix: TensorFlow's prefix of a flat checkpoint; None if the commit is a
            directory of its own.
        sums: size and crc32c of files that are synced already, by path.
    """

    step: int
    attempt: str
    staging: str
    started_at: float
    cancel_token: CancellationToken | None = None
    number: int = 0
    prefix: str | None = None
    sums: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def publish(
    files: Files, clock: Clock, directory: str, staged: StagedFiles, draft: Manifest
) -> Entry:
    """Makes a commit of a staging directory: a directory `<number>/` in the checkpoint
    directory.

    Args:
        files: file system operations that make the changes.
        clock: time source that measures the duration of the save.
        directory: the checkpoint directory.
        staged: the staged files.
        draft: the manifest without its list of files, which `seal` adds.

    Returns:
        The commit.

    Raises:
        OSError: the file system failed before the marker; older commits are unchanged.
        SaveError: an asynchronous save was cancelled; older commits are unchanged.
    """
    staging = staged.staging
    contents: dict[str, str] = {}
    folders: list[str] = []
    for folder, _, names in file_reading.walk(staging):
        folders.append(folder)
        for path in (os.path.join(folder, name) for name in names):
            contents[os.path.relpath(path, staging)] = path
    prefix = layout.PAYLOAD if f"{layout.PAYLOAD}.index" in contents else None
    draft = dataclasses.replace(draft, prefix=prefix)
    manifest = seal(files, clock, staged, contents, folders, draft)
    if staged.cancel_token is not None:
        staged.cancel_token.begin_commit()
    data, number = to_json(manifest), staged.number
    target = put_in_place(files, directory, staging, number, data, manifest.sequence)
    return catalog.made(target, manifest)


def seal(
    files: Files,
    clock: Clock,
    staged: StagedFiles,
    contents: Mapping[str, str],
    folders: Sequence[str],
    draft: Manifest,
) -> Manifest:
    """Makes the files durable and writes the manifest: steps 1 and 2, also for a flat
    checkpoint.

    Args:
        files: file system operations that make the changes.
        clock: time source that measures the duration of the save.
        staged: the staged files; the manifest is written to the staging directory.
        contents: path of every file, by the name of the file in the manifest.
        folders: paths of the directories with the files, parents before children.
        draft: the manifest without its list of files.

    Returns:
        The manifest.

    Raises:
        OSError: error of the file system.
    """
    unknown = [path for path in contents.values() if path not in staged.sums]
    # Other threads compute checksums while this thread syncs: checksums need the memory
    # bus, syncs need the disk.
    threads = min(_CHECKSUM_THREADS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(threads, "tfpreempt-checksum") as pool:
        summing = pool.map(checksum.of_file, unknown)
        with contained.parents_kept_open():
            for path in unknown:
                files.sync_file(path)
        for folder in reversed(folders):
            files.sync_dir(folder)
        sums = {**staged.sums, **dict(zip(unknown, summing, strict=True))}

    entries = [
        FileEntry(name=name, size=sums[path][0], crc32c=sums[path][1])
        for name, path in sorted(contents.items())
    ]
    manifest = dataclasses.replace(
        draft,
        files=tuple(entries),
        save_seconds=max(0.0, clock.monotonic() - staged.started_at),
        metadata={"saved_at": clock.wall(), **draft.metadata},
    )
    path = os.path.join(staged.staging, layout.MANIFEST)
    write_durably(files, path, to_json(manifest))
    return manifest


def put_in_place(
    files: Files,
    directory: str,
    staging: str,
    number: int,
    manifest_bytes: bytes,
    sequence: int,
) -> str:
    """Renames a staging directory after `seal`, and then writes the marker.

    The name of the new commit is `<number>`, or `<number>.<sequence>` if `<number>` is
    not free:

    - If an older commit has the name, that commit stays until retention deletes it.
    - If an uncommitted save has the name, the save is deleted, and the name is free.
      The save is not in progress: the holder of the directory's lease makes only one
      save at a time.
    - If TensorFlow's state file lists the name, the name is not free. An entry is
      evidence of a commit, so the new directory would look like a corrupt commit until
      the marker is written.

    Args:
        files: file system operations that make the changes.
        directory: the checkpoint directory.
        staging: the staging directory, with the manifest.
        number: name of the commit's directory, as a number.
        manifest_bytes: content of the manifest.
        sequence: sequence of the commit.

    Returns:
        The path of the commit.

    Raises:
        ConfigurationError: the number is below 0.
        OSError: error of the file system.
    """
    if number < 0:
        raise errors.ConfigurationError(
            f"A checkpoint number must be 0 or more; got {number!r}."
        )
    target = os.path.join(directory, str(number))
    if file_reading.is_there(target) and retention.is_uncommitted(
        old := catalog.read_at(target)
    ):
        retention.delete(files, old)
    prefix = f"{number}/{layout.PAYLOAD}"
    if file_reading.is_there(target) or checkpoint_state.is_listed(directory, prefix):
        target = f"{target}.{sequence}"
    files.rename(staging, target)
    files.sync_dir(directory)
    marker = catalog.marker_bytes(manifest_bytes, sequence)
    files.publish(os.path.join(target, layout.MARKER), marker)
    return target


def finish(
    files: Files,
    directory: str,
    entries: Iterable[Entry],
    policy: retention.RetentionPolicy,
    corrupt: Collection[str] = (),
    is_pinned: Callable[[str], bool] = lambda path: False,
) -> None:
    """Names the newest commit in TensorFlow's state file, and deletes old commits:
    steps 5 and 6.

    Args:
        files: file system operations that make the changes.
        directory: the checkpoint directory.
        entries: the checkpoints in the directory, newest first.
        policy: the rules by which commits stay.
        corrupt: tokens of commits known to be corrupt; these commits are deleted, too.
        is_pinned: function that returns whether the commit at a path must stay for now.
    """
    kept, dropped = retention.plan(entries, policy, corrupt)
    point(files, directory, kept, dropped)
    for entry in kept:
        path = os.path.join(entry.path, layout.WITNESS)
        cannot_be_named = entry.manifest is not None and entry.manifest.prefix is None
        if cannot_be_named and not file_reading.is_there(path):
            files.publish(path, b"")
    for entry in dropped:
        if not is_pinned(entry.path):
            retention.try_delete(files, entry)


@contextlib.contextmanager
def tidying(directory: str) -> Iterator[None]:
    """Returns a context for cleanup after a commit: errors of the body are logged, not
    raised, because the commit is valid."""
    try:
        yield
    except (OSError, errors.CheckpointError) as error:
        _log.warning(
            "the commit in %s is valid, but old files could not be deleted; the next "
            "commit retries this: %s",
            directory,
            error,
        )


def point(
    files: Files, directory: str, kept: list[Entry], dropped: list[Entry]
) -> None:
    """Names the kept commits in TensorFlow's `checkpoint` file. Entries of other
    programs stay.

    Args:
        files: file system operations that make the changes.
        directory: the checkpoint directory.
        kept: commits of tfpreempt that stay, oldest first.
        dropped: commits of tfpreempt that are about to be deleted.
    """
    path = os.path.join(directory, layout.POINTER)
    names = {f"{entry.name}/{layout.PAYLOAD}" for entry in (*kept, *dropped)}
    ours: dict[str, str] = {}  # TensorFlow's prefix -> path of the `.index` file
    for entry in kept:
        prefix = f"{entry.name}/{layout.PAYLOAD}"
        index = os.path.join(directory, prefix + ".index")
        if file_reading.is_file(index):
            ours[prefix] = index
    if not ours:
        return
    try:
        found = checkpoint_state.read(directory)
    except OSError:
        if file_reading.is_file(path):
            raise
        found = None  # the path is a pipe or a device, not a state file
    old = found or checkpoint_state.CheckpointStateFile(latest="")
    foreign = [
        name
        for name in dict.fromkeys(old.paths)
        if name not in names
        and file_reading.is_file(os.path.join(directory, name + ".index"))
    ]
    times: list[float] = []
    if old.timestamps:
        known = dict(zip(old.paths, old.timestamps, strict=True))
        times = [known[name] for name in foreign]
        times += [os.stat(each).st_mtime_ns / 1e9 for each in ours.values()]
    new = checkpoint_state.CheckpointStateFile(
        latest=[*ours][-1],
        paths=(*foreign, *ours),
        timestamps=tuple(times),
        last_preserved=old.last_preserved,
    )
    files.publish(path, checkpoint_state.to_bytes(new))


def versions() -> dict[str, str]:
    """Returns the versions of Python, TensorFlow, Keras and NumPy, by package name.
    Packages that are not imported are omitted."""
    found = {"python": platform.python_version()}
    for name in ("tensorflow", "keras", "tf_keras", "numpy"):
        if module := sys.modules.get(name):
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found
