"""The archive of compiled functions: which files a start gives to JAX."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports JAX
jax = pytest.importorskip("jax")

from tests.replays import replaying  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.directory import layout  # noqa: E402
from tfpreempt.handler.registration import open_compile_cache  # noqa: E402
from tfpreempt.jax import compile_cache  # noqa: E402
from tfpreempt.jax.compile_cache import machine  # noqa: E402
from tfpreempt.storage.local import LocalStore  # noqa: E402

SETTINGS = (*compile_cache._SETTINGS, "jax_compilation_cache_dir")


class Uploads:
    """A mirror whose thread runs a task at once.

    Args:
        store: the mirror's store.
    """

    def __init__(self, store: LocalStore) -> None:
        self.store = store

    def enqueue(self, task: Callable[[], None]) -> None:
        task()


class Run:
    """The starts of one run on one machine.

    Args:
        root: holds the directory, the mirror, and the folder for JAX's files.
    """

    def __init__(self, root: Path) -> None:
        self.directory = root / "run"
        self.directory.mkdir()
        self.store = LocalStore(str(root / "mirror"))

    @property
    def archive(self) -> Path:
        return self.directory / layout.COMPILED / f"{machine()}.zip"

    @property
    def folder(self) -> Path:
        return Path(jax.config.jax_compilation_cache_dir)

    def start(self) -> dict[str, bytes]:
        """A new process starts; returns the files that JAX finds."""
        jax.config.update("jax_compilation_cache_dir", None)
        compile_cache._current = None
        compile_cache.open_cache(str(self.directory), self.store)
        return {each.name: each.read_bytes() for each in self.folder.iterdir()}

    def train(self, **files: bytes) -> None:
        """JAX writes files; then steps are trained."""
        for name, data in files.items():
            (self.folder / f"{name}-cache").write_bytes(data)
        uploads: Any = Uploads(self.store)
        for _ in range(2):
            compile_cache.keep(str(self.directory), uploads)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(compile_cache, "_LOOKS_EVERY", 0.0)
    monkeypatch.setattr(compile_cache, "_current", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield Run(tmp_path)
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_restart_finds_the_files(run: Run) -> None:
    assert run.start() == {}
    run.train(jit_step=b"code")
    assert run.start() == {"jit_step-cache": b"code"}
    run.train(jit_test=b"more")
    assert run.start() == {"jit_step-cache": b"code", "jit_test-cache": b"more"}


def test_a_file_that_jax_is_still_writing_is_left_out(run: Run) -> None:
    run.start()
    for size in range(1, 4):
        (run.folder / "jit_step-cache").write_bytes(b"x" * size)
        compile_cache.keep(str(run.directory), None)
    assert not run.archive.exists()
    assert run.start() == {}


def test_a_corrupt_archive_is_not_used(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The mirror's copy is."""
    run.start()
    run.train(jit_step=b"code")
    run.archive.write_bytes(run.archive.read_bytes().replace(b"code", b"Code"))
    assert run.start() == {"jit_step-cache": b"code"}
    assert "is corrupt" in caplog.text
    run.train()
    copy = Path(run.store.uri, f"compiled/{machine()}.zip")
    copy.write_bytes(copy.read_bytes()[:-5])
    run.archive.unlink()
    assert run.start() == {}


def test_an_empty_disk_gets_the_files_of_the_mirror(run: Run) -> None:
    run.start()
    run.train(jit_step=b"code")
    run.archive.unlink()
    assert run.start() == {"jit_step-cache": b"code"}
    run.train()
    assert run.archive.exists()


def test_files_that_another_program_deletes_stay_in_the_archive(run: Run) -> None:
    """Systems delete files in the folder for temporary files after some days."""
    run.start()
    run.train(jit_step=b"code")
    (run.folder / "jit_step-cache").unlink()
    run.train()
    with zipfile.ZipFile(run.archive) as archive:
        assert archive.namelist() == ["jit_step-cache"]


def test_an_archive_can_be_used_whatever_the_umask(run: Run) -> None:
    run.start()
    before = os.umask(0)
    try:
        run.train(jit_step=b"code")
    finally:
        os.umask(before)
    assert run.start() == {"jit_step-cache": b"code"}


def test_a_clock_that_was_not_set_is_no_error(run: Run) -> None:
    """A zip archive has no times before 1980."""
    run.start()
    file = run.folder / "jit_step-cache"
    file.write_bytes(b"code")
    os.utime(file, (0, 0))
    run.train()
    assert run.start() == {"jit_step-cache": b"code"}


def test_the_mirror_of_a_later_fit_gets_the_archive(run: Run) -> None:
    """The first fit has ended before the upload."""
    run.start()
    (run.folder / "jit_step-cache").write_bytes(b"code")
    first: Any = Uploads(run.store)
    first.enqueue = lambda task: None
    for _ in range(2):
        compile_cache.keep(str(run.directory), first)
    run.train()
    run.archive.unlink()
    run.store = LocalStore(run.store.uri)
    assert run.start() == {"jit_step-cache": b"code"}


def test_names_that_lead_elsewhere_are_ignored(run: Run) -> None:
    run.start()
    with zipfile.ZipFile(run.archive, "w") as archive:
        for name in ("../up-cache", "/tmp/root-cache", "other", "jit_step-cache"):
            archive.writestr(name, b"code")
    assert run.start() == {"jit_step-cache": b"code"}


def test_after_a_start_that_crashed_before_its_second_step_nothing_is_used(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.start()
    run.train(jit_step=b"code")
    assert run.start() != {}
    assert run.start() == {}
    assert "crashed before its second step" in caplog.text
    run.train(jit_step=b"code")
    assert run.start() != {}


def test_the_oldest_files_are_left_out_beyond_the_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 2500)
    run.start()
    for name in ("a", "b", "c"):
        run.train(**{name: b"code" * 250})
    assert run.start().keys() == {"b-cache", "c-cache"}


def test_an_archive_of_other_users_is_not_used(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.start()
    run.train(jit_step=b"code")
    run.archive.chmod(0o666)
    with pytest.raises(TypeError):
        run.start()
    assert jax.config.jax_compilation_cache_dir is None
    assert "can be changed by every user" in caplog.text


def test_settings_of_the_program_come_first(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    jax.config.update("jax_compilation_cache_dir", "/mine")
    compile_cache.open_cache(str(run.directory), None)
    compile_cache.keep(str(run.directory), None)
    assert jax.config.jax_compilation_cache_dir == "/mine"
    assert "jax_compilation_cache_dir='/mine'" in caplog.text
    assert not run.archive.parent.exists()


def test_another_run_of_the_process_has_its_own_folder(
    run: Run, tmp_path: Path
) -> None:
    run.start()
    first = run.folder
    compile_cache.open_cache(str(run.directory), None)
    assert run.folder == first
    other = tmp_path / "other"
    other.mkdir()
    compile_cache.open_cache(str(other), None)
    assert run.folder != first


def test_a_program_that_does_not_train_on_jax_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="does not train on JAX"):
        open_compile_cache(str(tmp_path), None, on_jax=False)


def test_a_replay_leaves_the_cache_to_the_run(run: Run, tmp_path: Path) -> None:
    run.start()
    run.train(a=b"compiled")
    files = sorted(run.directory.rglob("*"))
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache._current = None
    with replaying(run.directory, tmp_path / "copy"):
        open_compile_cache(str(run.directory), None, on_jax=True)
    assert compile_cache._current is None
    assert sorted(run.directory.rglob("*")) == files
    open_compile_cache(str(run.directory), None, on_jax=True)
    assert compile_cache._current is not None
