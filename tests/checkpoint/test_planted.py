"""An attacker may write to the checkpoint directory: nothing outside of it changes.

Each name that a start, a save, a deletion or a command uses is a link that leads out of
the directory, a pipe, a large sparse file, or a second name of a file elsewhere.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    Words,
    open_directory,
    save,
    write_part,
)
from tests.checkpoint.test_array_contents import Program, directory_of
from tests.fakes.storage import FaultyObjectStore
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.manifest import FileEntry, from_json, to_json
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror.download_target import DownloadTarget
from tfpreempt.checkpoint.mirror.import_commit import bring
from tfpreempt.checkpoint.mirror.mirror_retention import Retention
from tfpreempt.checkpoint.mirror.resolve import listed_in_store
from tfpreempt.checkpoint.mirror.shard_transfer import ShardTransfer, clear_others
from tfpreempt.checkpoint.mirror.store_selection import Scratch
from tfpreempt.checkpoint.mirror.upload import Upload
from tfpreempt.checkpoint.restore.restore import find_candidates
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.array_contents import read_worker_values
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.cli import main
from tfpreempt.core import contained
from tfpreempt.storage import checksum, file_reading, os_errors
from tfpreempt.storage.files import Files, LocalFiles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

TOKEN = "a" * 32
SPARSE = 8 << 40  # bytes, more than any memory has
NAMES = [
    "checkpoint",
    "checkpoint.tmp",
    ".tfpreempt-directory",
    ".tfpreempt-directory.tmp",
    ".tfpreempt-staging",
    ".tfpreempt-staging/dead",
    ".tfpreempt-staging/dead.parts",
    ".tfpreempt-staging/fetch-1-00000000",
    ".tfpreempt-staging/run-3",
    ".tfpreempt-staging/run-3/ckpt.index",
    ".tfpreempt-staging/run-3/MANIFEST.json.tmp",
    ".tfpreempt-staging/run-3/states",
    ".tfpreempt-lease",
    f".tfpreempt-lease/{TOKEN}",
    f".tfpreempt-lease/{TOKEN}/holder",
    f".tfpreempt-lease/{TOKEN}/renewals",
    f".tfpreempt-lease.{TOKEN}",
    f".tfpreempt-lease.{TOKEN}/{TOKEN}",
    f".tfpreempt-lease.{TOKEN}/{TOKEN}/holder",
    "dead.tfpreempt-intent",
    "dead.tfpreempt-intent.tmp",
    "dead_temp",
    "dead.tfpreempt",
    "dead.index",
    "ckpt-3.index",
    "ckpt-3.tfpreempt",
    "ckpt-3.tfpreempt-intent",
    "ckpt-3.tfpreempt-intent.tmp",
    "ckpt-3_temp",
    "commit-dead",
    "states",
    "states/word.state",
    "states/word.state.tmp",
    "3",
    "1",
    "1/states",
    "1/states/word.state",
    "1/ckpt.index",
    "1/MANIFEST.json",
    "1/MANIFEST.json.tmp",
    "1/COMMITTED",
    "1/.metadata.json",
    "1/.was-committed",
    "1/.tfpreempt-put-aa",
]


NEEDED = [
    ".tfpreempt-staging",
    ".tfpreempt-staging/run-3",
    ".tfpreempt-lease",
    f".tfpreempt-lease/{TOKEN}",
    "ckpt-3_temp",
    "states",
    "states/word.state",
]
"""Without these nothing can be saved: the error says so."""


def link_to_tree(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "holder")


def second_name(path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "holder")


def pipe(path: Path, outside: Path) -> None:
    del outside
    os.mkfifo(path)


def sparse(path: Path, outside: Path) -> None:
    del outside
    path.touch()
    os.truncate(path, SPARSE)


KINDS = [link_to_tree, link_to_file, second_name, pipe, sparse]


@dataclasses.dataclass
class Job:
    """A start of a run in a directory, from the lease to the end."""

    directory: Path
    form: str
    files: Files | None = None

    def __post_init__(self) -> None:
        registry = StateRegistry()
        self.word = Words("word", registry=registry)
        self.lease = Lease(1.0, pause=lambda seconds: seconds)
        directory = str(self.directory)
        self.saver = open_directory(
            directory,
            OwnContents() if self.form == "own" else FlatContents(directory),
            registry=registry,
            files=self.files,
            lease=self.lease,
            max_to_keep=2,
        )

    def start(self) -> None:
        self.lease.acquire(str(self.directory))
        self.saver.start()

    def restore(self) -> None:
        if (found := self.saver.newest()) is not None:
            self.saver.restore(found)

    def commit(self, step: int) -> None:
        self.word.text = str(step)
        save(self.saver, step)

    def save_alone(self) -> None:
        directory = str(self.directory)
        files = FencedFiles(self.files or LocalFiles(directory), self.lease)
        with os_errors.translated("save a State", directory):
            state_file.write(files, directory, 0, self.word)

    def load_alone(self) -> None:
        state_file.read(state_file.path_of(str(self.directory), 0, self.word))

    def close(self) -> None:
        self.lease.release()


def tree_of(root: Path) -> dict[str, bytes | None]:
    """Returns the entries below a directory: bytes of files, None for directories."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def inspect(directory: Path) -> None:
    for command in ("inspect", "verify"):
        done = CliRunner().invoke(main, [command, str(directory)])
        assert done.exit_code in (0, 1, 2), done.output
        if not isinstance(done.exception, SystemExit | None):
            raise done.exception


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint directories of both forms, and files of the user elsewhere.

    The files elsewhere have all names that lie in a checkpoint directory.
    """
    root = tmp_path_factory.mktemp("made")
    for form in ("own", "flat"):
        for step in (1, 2):
            job = Job(root / form, form)
            job.start()
            job.commit(step)
            job.close()
    shutil.copytree(root / "own", root / "outside")
    shutil.copytree(root / "own" / "1", root / "outside", dirs_exist_ok=True)
    (root / "outside" / "chapter").mkdir()
    for name in ("holder", "renewals", "part-00000-of-00001.index", "chapter/b.tex"):
        (root / "outside" / name).write_bytes(b"years of work")
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_changes_and_nothing_waits(
    tmp_path: Path, made: Path, name: str, kind: Callable[[Path, Path], None]
) -> None:
    form = "flat" if name.startswith("ckpt-3") else "own"
    directory = shutil.copytree(made / form, tmp_path / "ckpt")
    outside = shutil.copytree(made / "outside", tmp_path / "outside")
    before = tree_of(outside)
    path = directory / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "dead_temp":
        (directory / f"dead{layout.INTENT_SUFFIX}").write_text("{}")
    kind(path, outside)
    inspect(directory)
    job = Job(directory, form)
    commits = [functools.partial(job.commit, step) for step in (3, 4, 5)]
    failed = []
    alone = [job.load_alone, job.save_alone, job.load_alone]
    for operation in (job.start, job.restore, *alone, *commits, job.close):
        try:
            operation()
        except errors.TfpreemptError as error:  # an attacker achieves no more
            failed.append(error)
    inspect(directory)
    assert tree_of(outside) == before
    assert failed == [] or name in NEEDED


@pytest.mark.parametrize(
    "name",
    [
        "1/ckpt.index",
        "1/states/word.state",
        "1/.metadata.json",
        "1/.was-committed",
        "1/.tfpreempt-put-aa",
        "1/MANIFEST.json.tmp",
        "dead.tfpreempt-intent.tmp",
    ],
)
def test_a_directory_in_place_of_a_deleted_file_stays(
    tmp_path: Path, made: Path, name: str
) -> None:
    """Such a directory was moved into the lease's directory: no later start ran."""
    directory = shutil.copytree(made / "own", tmp_path / "ckpt")
    path = directory / name
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "notes").write_text("mine")
    for step in (3, 4, 5):
        job = Job(directory, "own")
        job.start()
        job.commit(step)
        job.close()
    assert (path / "notes").read_text() == "mine"
    steps = [each.step for each in catalog.scan(str(directory)) if each.is_committed]
    assert steps == [5, 4]


class WatchedNames(LocalFiles):
    """Another user creates each file just before tfpreempt does, and keeps it open."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.opened: list[IO[bytes]] = []

    def write(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        self.opened.append(open(path, "wb", buffering=0))  # noqa: SIM115
        super().write(path, data)


@pytest.mark.parametrize("form", ["own", "flat"])
def test_no_file_of_another_user_becomes_part_of_a_commit(
    tmp_path: Path, made: Path, form: str
) -> None:
    directory = shutil.copytree(made / form, tmp_path / "ckpt")
    files = WatchedNames(str(directory))
    job = Job(directory, form, files)
    job.start()
    job.commit(3)
    job.save_alone()
    before = tree_of(directory)
    assert len(files.opened) > 3
    for file in files.opened:
        with file:
            file.write(b"changed later")
    assert tree_of(directory) == before
    job.close()


def test_no_commit_follows_the_highest_possible_sequence(tmp_path: Path) -> None:
    """The manifest of the next commit was invalid: each start restored older ones."""
    job = Job(tmp_path, "own")
    job.start()
    job.commit(1)
    path = tmp_path / "1" / layout.MANIFEST
    record = json.loads(path.read_bytes()) | {"sequence": (1 << 63) - 1}
    path.write_bytes(json.dumps(record).encode())
    marker = catalog.marker_bytes(path.read_bytes(), record["sequence"])
    (path.parent / layout.MARKER).write_bytes(marker)
    assert [each.is_committed for each in catalog.scan(str(tmp_path))] == [True]
    for step in (2, 3, 4):
        with pytest.raises(errors.CheckpointError, match="Delete the directory"):
            job.commit(step)
    assert [each.name for each in catalog.scan(str(tmp_path))] == ["1"]
    job.close()


@pytest.mark.parametrize("sequence", [(1 << 63) - 1, 10**19 - 1])
def test_an_empty_folder_of_a_mirror_makes_no_invalid_commits(sequence: int) -> None:
    store = FaultyObjectStore()
    store.replace(f"1.{sequence}-00000000/x", b"")
    mirror = Retention(store, RetentionPolicy(), 0)
    with pytest.raises(errors.CheckpointError, match="Delete the directory"):
        mirror.look()
    assert mirror.highest_sequence == 0


def test_a_commit_above_the_highest_sequence_is_not_called_planted() -> None:
    """The run itself had written this commit, after a planted folder at the limit."""
    store = FaultyObjectStore()
    for sequence in (7, (1 << 62) - 1, 1 << 62, (1 << 62) + 1):
        store.replace(f"1.{sequence}-00000000/x", b"")
    with pytest.raises(errors.CheckpointError) as caught:
        catalog.highest_sequence(catalog.copies(store))
    message = str(caught.value)
    planted = rf"Delete the directory '[^']*/1\.{(1 << 62) - 1}-00000000', which was"
    assert re.search(planted, message)
    assert "Move away all directories with a higher sequence" in message


def uploaded(directory: Path) -> tuple[catalog.Entry, catalog.Entry]:
    """Returns a new commit, and its copy in an object store."""
    source, store = open_directory(directory, OwnContents()), FaultyObjectStore()
    save(source, 5)
    [commit] = catalog.scan(source.path)
    Upload(store, commit).run()
    [copy] = catalog.copies(store)
    return commit, copy


class SwappingFiles(LocalFiles):
    """Another user replaces a directory by a link when the first file is synced."""

    def __init__(self, root: str, directory: Path, outside: Path) -> None:
        super().__init__(root)
        self.directory, self.outside = directory, outside

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        if self.directory.is_dir() and not self.directory.is_symlink():
            self.directory.rename(f"{self.directory}.moved")
            self.directory.symlink_to(self.outside)


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_download_writes_nothing_through_a_link(
    tmp_path: Path, made: Path, is_parent: bool
) -> None:
    directory, (_, copy) = tmp_path / "run", uploaded(tmp_path / "source")
    outside = shutil.copytree(made / "outside", tmp_path / "outside")
    staged = directory / layout.STAGING / f"{layout.FETCH}{copy.token}"
    if is_parent:
        shutil.copytree(made / "outside", outside / staged.name)
    swapped = staged.parent if is_parent else staged
    before = tree_of(outside)
    files = SwappingFiles(str(directory), swapped, outside)
    with pytest.raises(errors.CheckpointError):
        bring(files, catalog.read(copy), str(directory))
    assert swapped.is_symlink()
    assert tree_of(outside) == before


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_download_does_not_read_through_a_link(
    tmp_path: Path, is_parent: bool
) -> None:
    """Matching files at the target of the link counted as downloaded."""
    root, (commit, copy) = tmp_path / "run", uploaded(tmp_path / "source")
    elsewhere, folder = tmp_path / "elsewhere", root / "staging" / "5"
    elsewhere.mkdir()
    root.mkdir()
    target = DownloadTarget(
        str(folder), catalog.read(copy), LocalFiles(str(root)), str(root)
    )
    assert commit.manifest is not None
    [entry, *_] = commit.manifest.files
    shutil.copytree(commit.path, elsewhere / "5" if is_parent else elsewhere / "x")
    if is_parent:
        (root / "staging").symlink_to(elsewhere)
    else:
        (root / "staging").mkdir()
        folder.symlink_to(elsewhere / "x")
    with pytest.raises(contained.LinkError):
        target.is_intact(entry)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_worker_with_too_many_open_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    transfer = ShardTransfer(
        FaultyObjectStore(), 1, [1], LocalFiles(str(tmp_path / "run"))
    )
    registry = StateRegistry()
    word = Words("word", "mine", registry=registry, per_worker=True)
    saver = open_directory(tmp_path / "run", worker=1, world=2, registry=registry)
    part = write_part(saver, 3, "run-3")
    assert word.text == "mine"

    def refused(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(contained, "open_file", refused)
    with pytest.raises(errors.CheckpointError, match="ulimit -n"):
        transfer.send(part)


@pytest.mark.parametrize("name", ["word.state", ""])
def test_a_worker_uploads_no_files_from_elsewhere(tmp_path: Path, name: str) -> None:
    """A link in the staging directory made the worker upload the target of the link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "word.state").write_text("secret")
    store, worker = FaultyObjectStore(), 1
    transfer = ShardTransfer(store, worker, [worker], LocalFiles(str(tmp_path / "run")))
    registry = StateRegistry()
    word = Words("word", "mine", registry=registry, per_worker=True)
    saver = open_directory(tmp_path / "run", worker=1, world=2, registry=registry)
    part = write_part(saver, 3, "run-3")
    path = Path(part.staging, layout.worker_name(worker), name)
    assert word.text == "mine"
    assert path.exists()
    path.rename(tmp_path / "moved")
    path.symlink_to(outside / name)
    with pytest.raises(errors.CheckpointError, match="Links are not followed"):
        transfer.send(part)
    assert list(store.list()) == []


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"\xff",
        b"5",
        b"[5]",
        b'[{"token": "1-0", "sequence": Infinity}]',
        b'[{"token": "1-0", "sequence": null}]',
    ],
)
def test_a_corrupt_note_in_a_scratch_directory_stops_no_start(
    tmp_path: Path, text: bytes
) -> None:
    (tmp_path / ".tfpreempt-mirror").write_bytes(text)
    scratch = Scratch("gs://bucket/run", str(tmp_path))
    assert scratch.settle([], LocalFiles(str(tmp_path)))


def test_directories_may_lie_in_one_another_to_any_depth(tmp_path: Path) -> None:
    """A staging directory is walked at each start; Python calls itself 1000 times."""
    path, made = str(tmp_path), []
    for _ in range(sys.getrecursionlimit() + 100):
        path = os.path.join(path, "a")
        os.mkdir(path)
        made.append(path)
    try:
        assert [folder for folder, _, _ in file_reading.walk(str(tmp_path))][1:] == made
    finally:
        for each in reversed(made):
            os.rmdir(each)


def test_a_long_state_file_does_not_delay_a_start(tmp_path: Path) -> None:
    """Each name in the file is looked at once: 3,000 names once took two minutes."""
    lines = [f'all_model_checkpoint_paths: "a{number}"\n' for number in range(10_000)]
    (tmp_path / "checkpoint").write_text(
        f'model_checkpoint_path: "a"\n{"".join(lines)}'
    )
    for name in ("a", "a7"):
        (tmp_path / f"{name}.data-00000-of-00001").touch()
    for number in range(10):
        (tmp_path / str(number) / "states").mkdir(parents=True)
    lost: list[str] = []
    assert find_candidates(str(tmp_path), lost.append) == []
    for name in ("a", "a7"):
        assert any(f"{tmp_path / name}.index" in problem for problem in lost)
    assert len(lost) == 2


# --- commits of another user ---------------------------------------------------------


def forge(commit: Path, **changes: Any) -> None:
    """Replaces the manifest of a commit, and its marker."""
    old = from_json((commit / "MANIFEST.json").read_bytes(), "")
    new = dataclasses.replace(old, **changes)
    data = to_json(new)
    (commit / "MANIFEST.json").write_bytes(data)
    (commit / "COMMITTED").write_bytes(catalog.marker_bytes(data, new.sequence))


def without(commit: Path, *names: str) -> tuple[FileEntry, ...]:
    """Returns the files of a commit but for some."""
    manifest = from_json((commit / "MANIFEST.json").read_bytes(), "")
    return tuple(each for each in manifest.files if each.name not in names)


def test_an_index_that_the_manifest_does_not_name_is_not_restored(
    tmp_path: Path, made: Path
) -> None:
    """A link made the run restore, and then commit, a private checkpoint elsewhere."""
    directory = shutil.copytree(made / "own", tmp_path / "ckpt")
    outside, commit = shutil.copytree(made / "outside", tmp_path / "o"), directory / "2"
    forge(commit, files=without(commit, "ckpt.index"))
    (commit / "ckpt.index").unlink()
    (commit / "ckpt.index").symlink_to(outside / "ckpt.index")
    contents = OwnContents()
    saver = open_directory(directory, contents)
    problems: list[str] = []
    found = saver.newest(problems.append)
    assert found is not None
    assert found.step == 1
    [problem] = problems
    assert "ckpt.index' is not in the manifest" in problem


@pytest.mark.parametrize("kind", [None, os.mkfifo])
@pytest.mark.parametrize("is_index_whole", [True, False])
def test_data_that_the_manifest_does_not_name_are_not_restored(
    tmp_path: Path, kind: Callable[[Path], None] | None, is_index_whole: bool
) -> None:
    """Links led to the weights of a private checkpoint; TensorFlow waits for a pipe."""
    for name, value in (("run", 0.0), ("private", 7.0)):
        for step in (1, 2):
            weights = Program({"weight": np.full(1000, value)})
            save(directory_of(tmp_path / name, weights), step)
    commit, private = tmp_path / "run" / "2", tmp_path / "private" / "2"
    index = (private / "ckpt.index").read_bytes()
    if not is_index_whole:  # compressed blocks, for example, which TensorFlow can read
        index = b"\1" + index[1:]
    (commit / "ckpt.index").write_bytes(index)
    crc = checksum.of_bytes(index)
    named = FileEntry(name="ckpt.index", size=len(index), crc32c=crc)
    forge(commit, files=(named,))
    for path in commit.glob("ckpt.data-*"):
        path.unlink()
        if kind is None:
            path.symlink_to(private / path.name)
        else:
            kind(path)
    fresh = Program({"weight": None})
    saver = directory_of(tmp_path / "run", fresh)
    problems: list[str] = []
    found = saver.newest(problems.append)
    assert found is not None
    saver.restore(found)
    assert fresh.held["weight"].tolist() == [0.0] * 1000
    [problem] = problems
    assert "00000-of-00002' is not in the manifest" in problem


def test_data_of_another_save_of_the_same_name_are_not_needed(tmp_path: Path) -> None:
    """A save by more workers was interrupted before TensorFlow replaced the index."""
    save(directory_of(tmp_path, Program({"weight": np.zeros(1000)})), 1)
    (tmp_path / "1" / "ckpt.data-00001-of-00003").touch()
    found = directory_of(tmp_path, Program({"weight": None})).newest()
    assert found is not None
    assert found.step == 1


def test_values_of_replicas_that_the_manifest_does_not_name_are_not_read(
    tmp_path: Path,
) -> None:
    save(open_directory(tmp_path, OwnContents()), 1)
    [commit] = catalog.scan(str(tmp_path))
    path = tmp_path / "1" / "worker-0000" / "tfpreempt.per_replica.state"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        header = [{"path": "x", "dtype": "float32", "shapes": [[1]]}]
        write_parts(file, header, [bytes(4)])
    assert read_worker_values(commit) == {}
    data = path.read_bytes()
    named = FileEntry(
        name=f"worker-0000/{path.name}", size=len(data), crc32c=checksum.of_bytes(data)
    )
    forge(tmp_path / "1", files=(named,))
    [commit] = catalog.scan(str(tmp_path))
    assert list(read_worker_values(commit)) == ["x"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_that_the_manifest_does_not_name_is_not_loaded(
    tmp_path: Path, world: int
) -> None:
    """The file was not verified, and a link led to the State of another run."""
    (tmp_path / "secret").write_text("secret")
    for is_new, workers in ((True, 1), (False, world)):
        registry = StateRegistry()
        words = [
            Joined("mine", "initial", registry=registry, per_worker=True),
            Words("all", "initial", registry=registry),
        ]
        saver = open_directory(tmp_path / "run", registry=registry, world=workers)
        if is_new:
            save(saver, 1)
            commit = tmp_path / "run" / "1"
            names = ["worker-0000/mine.state", "states/all.state"]
            forge(commit, files=without(commit, *names))
            for name in names:
                (commit / name).unlink()
                (commit / name).symlink_to(tmp_path / "secret")
            continue
        found = saver.newest()
        assert found is not None
        with pytest.raises(errors.CheckpointMismatchError, match="has no State"):
            saver.restore(found)
        assert [each.text for each in words] == ["initial"] * 2


class Joined(Words):
    """The words of all workers."""

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        del worker, num_workers
        self.text = "".join(each.read().decode() for each in files if each is not None)


@pytest.mark.parametrize("name", ["ckpt-9", "folder/ckpt-9"])
def test_a_checkpoint_of_tensorflow_behind_a_link_is_not_restored(
    tmp_path: Path, made: Path, name: str
) -> None:
    """`inspect` called it corrupt, and a start restored it."""
    directory, secret = shutil.copytree(made / "own", tmp_path / "ckpt"), tmp_path / "s"
    secret.mkdir()
    names = ["ckpt-9.index", "ckpt-9.data-00000-of-00001"]
    for each, data in zip(
        names, [bundle.to_bytes({b"": bundle.header(1)}), b""], strict=True
    ):
        (secret / each).write_bytes(data)
        if name == "ckpt-9":
            (directory / each).symlink_to(secret / each)
    if name != "ckpt-9":
        (directory / "folder").symlink_to(secret)
        (directory / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\n')
    later = time.time() + 60
    os.utime(secret / "ckpt-9.index", (later, later))
    problems: list[str] = []
    found = open_directory(directory, OwnContents()).newest(problems.append)
    assert found is not None
    assert found.step == 2
    [problem] = problems
    link = directory / ("ckpt-9.index" if name == "ckpt-9" else "folder")
    assert f"Links are not followed here: '{link}'" in problem


def test_very_many_index_files_do_not_delay_a_start(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory was listed for each of them: 16,000 of them took minutes."""
    directory, listed = shutil.copytree(made / "own", tmp_path / "ckpt"), list[str]()
    later, names = time.time() + 60, file_reading.names
    for number in range(50):
        (directory / f"ckpt-{number}.index").touch()
        os.utime(directory / f"ckpt-{number}.index", (later, later))

    def watched(path: str) -> list[str]:
        listed.append(path)
        return names(path)

    monkeypatch.setattr(file_reading, "names", watched)
    problems: list[str] = []
    found = open_directory(directory, OwnContents()).newest(problems.append)
    assert found is not None
    assert found.step == 2
    assert len(problems) == 50
    assert len(listed) < 10


def test_the_name_of_a_checkpoint_of_tensorflow_forges_no_line_of_a_log(
    tmp_path: Path, made: Path
) -> None:
    directory, name = shutil.copytree(made / "own", tmp_path / "ckpt"), "a\nresumed"
    index = directory / f"{name}.index"
    index.write_bytes(bundle.to_bytes({b"": bundle.header(1)}))
    (directory / f"{name}.data-00000-of-00001").touch()
    later = time.time() + 60
    os.utime(index, (later, later))
    found = open_directory(directory, OwnContents()).newest()
    assert found is not None
    assert found.step == 2


def test_a_file_larger_than_in_the_manifest_is_not_read_ahead(
    tmp_path: Path, made: Path
) -> None:
    directory = shutil.copytree(made / "own", tmp_path / "ckpt")
    os.truncate(directory / "2" / "ckpt.data-00000-of-00002", SPARSE)
    contents, read = OwnContents(), list[str]()

    def read_ahead(prefix: str) -> dict[str, tuple[int, int]]:
        read.append(prefix)
        return {}

    contents.read_ahead = read_ahead  # type: ignore[method-assign]
    found = open_directory(directory, contents).newest(lambda problem: None)
    assert found is not None
    assert found.step == 1
    assert read == [str(directory / "1" / "ckpt")]


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_name_that_is_no_unicode_stops_no_start(
    tmp_path: Path, made: Path, is_marked: bool
) -> None:
    directory = shutil.copytree(made / "own", tmp_path / "ckpt")
    forge(directory / "2", files=(FileEntry(name="\ud800", size=0, crc32c=0),))
    if not is_marked:
        (directory / "2" / "COMMITTED").unlink()
    job = Job(directory, "own")
    for operation in (job.start, job.restore, functools.partial(job.commit, 3)):
        operation()
    job.close()
    assert max(each.step or 0 for each in catalog.scan(str(directory))) == 3


class KeptFiles(LocalFiles):
    """A user who may not delete the files of another user."""

    def remove(self, path: str) -> None:
        if "/1/" in path or "/dead/" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        super().remove(path)


def test_files_that_cannot_be_deleted_keep_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk filled up beside a single commit of another user."""
    saver = open_directory(
        tmp_path, OwnContents(), files=KeptFiles(str(tmp_path)), max_to_keep=2
    )
    for step in range(1, 6):
        save(saver, step)
    assert sorted(each for each in os.listdir(tmp_path) if each.isdecimal()) == [
        *("1", "4", "5")
    ]
    assert f"could not delete {tmp_path / '1'}" in caplog.text
    for name in ("dead", "left"):
        (tmp_path / layout.STAGING / name / "states").mkdir(parents=True)
        (tmp_path / layout.STAGING / name / "states" / "word.state").touch()
    (tmp_path / "4" / "COMMITTED").unlink()
    (tmp_path / "checkpoint").unlink()
    saver.start()
    assert os.listdir(tmp_path / layout.STAGING) == ["dead"]
    assert not (tmp_path / "4").exists()


def test_a_pointer_at_a_url_names_only_its_own_files() -> None:
    """Objects with ".." in their names became files beside the checkpoint."""
    store = UncheckedStore()
    store.replace("checkpoint", b'model_checkpoint_path: "sub/ckpt-5"\n')
    for name in ("ckpt-5.index", "ckpt-5./../.tfpreempt-mirror", ".tfpreempt-mirror"):
        store.replace(f"sub/{name}", b"planted")
    with pytest.raises(errors.ConfigurationError, match=r"'\.\.'"):
        listed_in_store(store)


def test_an_odd_object_beside_the_shards_of_workers_keeps_no_shard() -> None:
    store, folder = UncheckedStore(), "shards/aaaaaaaaaaaa-3/worker-0001"
    for name in ("MANIFEST.json", "a\\b", "my word.state"):
        store.replace(f"{folder}/{name}", b"")
    clear_others(store, "b" * 12)
    assert list(store.list()) == [f"{folder}/a\\b"]


class UncheckedStore(FaultyObjectStore):
    """A bucket, in which objects may have any names."""

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        self._objects[name] = data
