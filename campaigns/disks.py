"""Disks that fail while a run saves, prunes, reads and restarts; without TensorFlow."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import pathlib
import random
import re
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

from campaigns.campaign import Campaign, Facts, Trial, silent
from tests.checkpoint.fakes import (
    FlatContents,
    Later,
    OwnContents,
    Words,
    capture_part,
    names,
    open_directory,
    write_part,
)
from tests.storage import faulty_disk
from tests.storage.faulty_disk import Fault
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.checkpoint.state.contents import Contents, StagedSave
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.core.clock import Clock
from tfpreempt.storage import os_errors

ACTIONS = 8
TODO = [
    *os_errors.ADVICE.values(),
    "Raise the limit",
    "Mount the file system",
    "Check the disk",
    "check the directory",
]
HALF = re.compile(r"ckpt-\d+\.(index|data-.*|tfpreempt-intent)")
LATE = (errno.ETIMEDOUT, errno.ESTALE)  # a network reports these after success, too


def said_in(attempt: str, name: str) -> bytes:
    """Returns the bytes of a file of a save; every save has different bytes."""
    return f"{attempt}/{name};".encode() * 50


def is_empty(path: str) -> bool:
    """Returns whether a path is an empty directory, which any save may have created."""
    return os.path.isdir(path) and not os.listdir(path)


class Own(OwnContents):
    """The data files are written after the capture, as large tensors are."""

    def capture(self, save: StagedSave, *_: Any, **__: Any) -> None:
        save.create_staging()
        self._put(save, names("ckpt")[:1])

    def write(self, save: StagedSave) -> None:
        self._put(save, names("ckpt")[1:])

    def restore(
        self, prefix: str, *, with_data: bool = True, is_partial: bool = False
    ) -> None:
        """Does nothing: the trial compares the files themselves."""

    def _put(self, save: StagedSave, files: list[str]) -> None:
        for name in files:
            data = said_in(save.attempt, name)
            pathlib.Path(save.staging, name).write_bytes(data)


class Flat(FlatContents):
    """The files of a CheckpointManager with `max_to_keep=1`."""

    def capture(self, save: StagedSave, *_: Any, **__: Any) -> None:
        prefix = os.path.join(self.directory, f"ckpt-{save.step}")
        save.create_staging(prefix)
        for name in reversed(names("ckpt")):
            path = pathlib.Path(
                self.directory, name.replace("ckpt", f"ckpt-{save.step}")
            )
            path.write_bytes(said_in(save.attempt, name))
        # Like the list of a CheckpointManager: each path is in the list once.
        self.kept = [each for each in self.kept if each != prefix] + [prefix]
        save.prefix = prefix

    restore = Own.restore


class Function(FlatContents):
    """The files of a save_fn: complete before tfpreempt sees them, never deleted."""

    def capture(self, save: StagedSave, *_: Any, **__: Any) -> None:
        stem = save.attempt.replace("run", "ckpt")
        for name in reversed(names("ckpt")):
            path = pathlib.Path(self.directory, name.replace("ckpt", stem))
            path.write_bytes(said_in(save.attempt, name))
        save.create_staging()
        save.prefix = os.path.join(self.directory, stem)

    def committed(self) -> None:
        """Deletes nothing."""

    restore = Own.restore


class Disk(Protocol):
    """The disk of a run, with controlled faults.

    Attributes:
        root: a directory on the disk.
    """

    root: str

    @property
    def failed(self) -> int:
        """Number of failed operations since the disk was last intact."""
        ...

    def unsynced(self, path: str, below: str) -> str:
        """Returns why a file may be missing or different after a loss of power.

        An empty text means that the file is safe.
        """
        ...

    def sound(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: operations that only read do not fail."""
        ...


class Run:
    """A run in a directory: its processes, one after the other.

    Args:
        disk: disk that has the directory.
        form: "own"; "flat": files of a manager that keeps one checkpoint; "save_fn".
        max_to_keep: number of commits to keep in the form "own".
        has_lease: whether each process holds the lease of the directory.

    Attributes:
        facts: counts of the actions of the run.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        form: str,
        max_to_keep: int | None = 2,
        has_lease: bool = False,
    ) -> None:
        self._disk = disk
        self._directory = os.path.join(disk.root, "run")
        self._form = form
        self._max_to_keep = max_to_keep if form == "own" else None
        self._has_lease = has_lease
        self._attempts = 0
        self._reported = -1  # number of the newest save that reported a commit
        self._step = 0
        self._saver: Directory | None = None
        self._lease: Lease | None = None
        self.facts: Facts = {"form": form}

    # --- what a program does ---------------------------------------------------------

    def start(self, clock: Clock | None = None) -> None:
        """Starts the next process, which cleans up and restores the newest commit."""
        self._leave()
        with self._disk.sound():
            os.makedirs(self._directory, exist_ok=True)
        with self._ours("start"):
            saver, word = self._made(clock)
            if self._lease is not None:
                self._lease.acquire(self._directory)
            saver.start()
            lost: list[str] = []
            found = saver.newest(lost.append, lost.append)
            if self._reported >= 0 and self._number(found) < self._reported:
                assert lost, f"{found} in place of {self._reported}, without a word"
            if found is not None:
                if not self._is_restored(saver, found):
                    return
                assert word.text == said_in(_attempt(found), "word").decode()
                self._check_bytes(found)
                self._step = found.step or 0
            self._saver = saver

    def save(self, *, is_async: bool = False) -> None:
        """Saves the next step, and records whether the save reported a commit."""
        if self._saver is None:
            self.start()
            return
        saver, self._step = self._saver, self._step + 1
        number, self._attempts = self._attempts, self._attempts + 1
        attempt = f"run-{number}"
        self._word.text = said_in(attempt, "word").decode()
        commit = None
        with self._ours("save"):
            if self._form == "save_fn" or not is_async:
                staged = write_part(saver, self._step, attempt)
                commit = staged.publish("save", [0])
            else:
                captured = capture_part(saver, self._step, attempt, CancellationToken())
                with concurrent.futures.ThreadPoolExecutor(1) as thread:
                    thread.submit(captured.write).result()
                    commit = thread.submit(captured.publish, "periodic", [0]).result()
        if commit is not None:
            self._reported = number
            self._check_lasts(commit.path)
            self._count("commits")

    def delete(self, rng: random.Random) -> None:
        """Deletes a commit like `handler.delete_checkpoint`; the disk may fail."""
        with self._disk.sound():
            found = [e for e in catalog.scan(self._directory) if e.is_committed]
        if self._saver is None or self._form != "own" or not found:
            return
        entry = found.pop(rng.randrange(len(found)))
        self._reported = max(map(self._number, found), default=-1)
        with self._ours("delete"):
            self._saver.delete(Checkpoint(entry.path))
            with self._disk.sound():
                assert not os.path.exists(entry.path)
            self._count("deletions")

    def finish(self) -> None:
        """Checks that a last start and save on an intact disk leave no other files."""
        self.start(Later())
        self.save()
        assert self._reported == self._attempts - 1
        self._leave()
        found = catalog.scan(self._directory)
        keep = 1 if self._form == "flat" else self._max_to_keep
        assert all(each.is_committed for each in found), found
        assert keep is None or len(found) <= keep, [each.path for each in found]
        known = {"checkpoint", ".tfpreempt-directory"}
        for each in found:
            known |= {each.holder, *_files(each)}
        left = set(os.listdir(self._directory)) - known
        left -= {name for name in left if is_empty(os.path.join(self._directory, name))}
        if self._form != "own":  # tfpreempt does not delete files of others
            left -= {name for name in left if HALF.fullmatch(name)}
        assert not left, left

    # --- what must hold --------------------------------------------------------------

    def check(self) -> None:
        """Checks that a new process finds the reported commit, or a newer one."""
        with self._disk.sound():
            for each in catalog.scan(self._directory):
                is_pruned = not (
                    self._form == "own" or os.path.exists(each.path + ".index")
                )
                if each.is_committed and not is_pruned:
                    self._check_bytes(each)
            lost: list[str] = []
            found = open_directory(self._directory).newest(str, lost.append)
            assert not lost, lost
            assert self._number(found) >= self._reported, (
                f"{found and found.path} of attempt {self._number(found)}; attempt "
                f"{self._reported} was reported"
            )

    def _check_lasts(self, path: str) -> None:
        """Checks that all files of a commit were synced without an error."""
        with self._disk.sound():
            entry = catalog.read_at(path)
            controls = map(entry.control, (layout.MANIFEST, layout.MARKER))
            for name in (*map(entry.object, _files(entry)), *controls):
                file = os.path.join(self._directory, name)
                fault = self._disk.unsynced(file, self._directory)
                assert not fault, fault

    def _check_bytes(self, entry: Entry) -> None:
        """Checks that a commit has all files of one save, with unchanged bytes."""
        with self._disk.sound():
            attempt = _attempt(entry)
            files = _files(entry)
            stem = os.path.basename(entry.prefix or "")
            inside = "" if self._form == "own" else f"{entry.holder}/"
            wanted = {stem + name.removeprefix("ckpt"): name for name in names("ckpt")}
            wanted[f"{inside}states/word.state"] = "word"
            assert files == set(wanted), f"{entry.path} has {files}"
            for name, said in wanted.items():
                data = pathlib.Path(entry.file(name)).read_bytes()
                assert data == said_in(attempt, said), f"{name} in {entry.path}"

    # --- details ---------------------------------------------------------------------

    def _is_restored(self, saver: Directory, found: Entry) -> bool:
        try:
            saver.restore(found)
        except OSError as error:  # an error of a State's load() is raised unchanged
            said = f"{error} {vars(error)}"
        else:
            return True
        assert "load() of" in said, said
        self._count("starts failed")
        return False

    def _made(self, clock: Clock | None) -> tuple[Directory, Words]:
        registry = StateRegistry()
        self._word = Words("word", registry=registry)
        self._lease = Lease() if self._has_lease else None
        payload: Contents
        if self._form == "own":
            payload = Own()
        elif self._form == "save_fn":
            payload = Function(self._directory)
        else:
            payload = Flat(self._directory)
            payload.kept = self._flat_prefixes()
        with self._disk.sound():
            saver = open_directory(
                self._directory,
                payload,
                registry=registry,
                lease=self._lease,
                max_to_keep=self._max_to_keep,
                clock=clock,
            )
        return saver, self._word

    def _flat_prefixes(self) -> list[str]:
        """Returns the prefixes in a manager's state file, the oldest first."""
        with self._disk.sound():
            found = pathlib.Path(self._directory).glob("ckpt-*.index")
            by_age = sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))
            return [str(path.with_suffix("")) for path in by_age]

    def _leave(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._saver = self._lease = None

    @contextlib.contextmanager
    def _ours(self, doing: str) -> Iterator[None]:
        """Context manager: accepts a CheckpointError with advice after a fault."""
        try:
            yield
        except errors.CheckpointError as error:
            said = str(error)
        else:
            return
        assert self._disk.failed, f"{said} on a sound disk"
        assert any(text in said for text in TODO), said
        self._count(f"{doing}s failed")

    def _count(self, what: str) -> None:
        self.facts[what] = int(self.facts.get(what, 0)) + 1

    def _number(self, entry: Entry | None) -> int:
        return -1 if entry is None else int(_attempt(entry).removeprefix("run-"))


def _files(entry: Entry) -> set[str]:
    assert entry.manifest is not None
    return {each.name for each in entry.manifest.files}


def _attempt(entry: Entry) -> str:
    assert entry.manifest is not None
    return str(entry.manifest.metadata["attempt"])


def drawn_fault(rng: random.Random) -> Fault:
    """Draws a fault: from some operation on, operations fail for a while or for good.

    Often only fsync fails, because a disk reports a failed write when the file is
    synced.
    """
    if rng.random() < 0.15:
        return Fault(
            number=rng.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT]),
            first=rng.randrange(12),
            count=rng.choice([1, 1, 3]),
            is_late=False,
            only="fsync",
        )
    number = rng.choice(faulty_disk.ERRORS)
    return Fault(
        number=number,
        first=int(rng.choice([rng.expovariate(1 / 15), rng.uniform(0, 150)])),
        count=rng.choice([1, 1, 2, 5, 20, None]),
        is_late=number in LATE and rng.random() < 0.5,
    )


def trial(rng: random.Random) -> Facts:
    """Makes one run on a disk that fails, and is repaired, at random moments."""
    with tempfile.TemporaryDirectory() as root, faulty_disk.disk(root) as disk:
        run = Run(
            disk,
            form=rng.choices(["own", "flat", "save_fn"], [5, 3, 2])[0],
            max_to_keep=rng.choice([1, 1, 2, 3, None]),
            has_lease=rng.random() < 0.5,
        )
        run.start()
        run.save()
        run.check()
        for _ in range(ACTIONS):
            if rng.random() < 0.6:
                disk.begin(drawn_fault(rng))
            match rng.choices(["save", "start", "delete"], [15, 4, 2])[0]:
                case "save":
                    run.save(is_async=rng.random() < 0.5)
                case "start":
                    run.start()
                case "delete":
                    run.delete(rng)
            run.check()
            if rng.random() < 0.7:
                disk.mend()
        disk.mend()
        run.finish()
        run.check()
        return run.facts


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: hides the warnings, which are correct here."""
    with silent(), faulty_disk.watching():
        yield trial


CAMPAIGN = Campaign(
    name="disks",
    promise=(
        "A full disk, a used-up quota, a read-only remount, EIO, ESTALE, ETIMEDOUT "
        "and too many open files occur in random operations of saves, retention, "
        "deletions and starts. The fault occurs once, several times or permanently; "
        "some faults affect only syncs. Each save ends as a commit or as an error "
        "with advice. Every file and every name of a reported commit was synced, "
        "and no sync of the commit failed. A start finds the newest reported commit "
        "or a newer intact commit, and reports no commit as lost."
    ),
    trials=20_000,
    short=40,
    mark="slow",
    prepare=prepare,
    fixed=(
        "A commit that could not be read was skipped without a warning, so training "
        "started from scratch or resumed from an older commit. Fixed "
        "(`checkpoint/test_bad_disk.py::test_a_commit_that_cannot_be_read_is_not_skip"
        "ped_silently`).",
        "If a commit could not be read for a moment, its sequence number was unknown, "
        "so the next commit counted as older than this commit. Fixed "
        "(`checkpoint/test_bad_disk.py::test_a_temporarily_unreadable_commit_ranks_be"
        "low_a_new_save`).",
        "If the disk failed at a data file, a flat commit could be made without this "
        "file. Fixed "
        "(`checkpoint/test_bad_disk.py::test_no_data_file_is_left_out_of_a_flat_commit"
        "`).",
        "The error for a directory that could not be read called the directory "
        "unmounted, or a file. Fixed "
        "(`checkpoint/test_bad_disk.py::test_an_unreadable_directory_is_not_reported_"
        "as_unmounted`, "
        "`checkpoint/test_bad_disk.py::test_an_unreadable_directory_is_not_reported_as"
        "_a_file`).",
        "A single ESTALE error for the file of the lease was treated as the loss of "
        "the lease. Fixed "
        "(`checkpoint/test_bad_disk.py::test_a_lease_is_not_lost_where_a_network_forge"
        "ts_it_for_a_moment`).",
        "Some files were never removed: the files of a deletion that failed after its "
        "first files, and the files of a save that could not write the intent file. "
        "Fixed "
        "(`checkpoint/test_bad_disk.py::test_a_deletion_that_fails_at_a_folder_is_fini"
        "shed_by_the_next_start`, "
        "`checkpoint/test_bad_disk.py::test_an_intent_that_could_not_be_written_leaves"
        "_nothing`).",
        "If a commit could not be read for a moment, `delete()` reported that the "
        "commit was already deleted, and deleted the commit's copy in the mirror. "
        "Fixed "
        "(`checkpoint/test_bad_disk.py::test_an_unreadable_commit_is_not_reported_as_de"
        "leted`).",
    ),
    labels={
        "saves failed": "failed saves",
        "starts failed": "failed starts",
        "deletes failed": "failed deletions",
        "form": "form of the commits",
    },
)
