"""An attacker may write to the checkpoint directory: nothing outside of it changes.

Each name that a start, a save, a deletion or a command uses is a link that leads out of
the directory, a pipe, a large sparse file, or a second name of a file elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    Words,
    open_directory,
    save,
)
from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.restore.restore import find_candidates
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.cli import main
from tfpreempt.storage import file_reading, os_errors
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
    [problem] = lost
    assert str(tmp_path / "a.index") in problem
