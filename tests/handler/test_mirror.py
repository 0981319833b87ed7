"""A handler with an object store: uploads, exits, starts on other machines."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tensorflow as tf

from tests.checkpoint.fakes import Words
from tests.fakes.storage import FaultyObjectStore, damage
from tests.handler.program import Program
from tfpreempt import Checkpoint, errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import summed

pytestmark = pytest.mark.tensorflow
LIMIT = 20.0


class Stuck(FaultyObjectStore):
    """A store that accepts no object until it is released."""

    def __init__(self) -> None:
        super().__init__(uri=f"memory://{uuid.uuid4()}")
        self.entered = threading.Event()
        self.opened = threading.Event()

    def put_if_absent(self, name: str, source: Any, **kwargs: Any) -> bool:
        self.entered.set()
        while not self.opened.wait(0.01):
            source.read(0)
        source.seek(0)
        return super().put_if_absent(name, source)


@pytest.fixture
def store() -> FaultyObjectStore:
    """Returns a separate store: a process mirrors only one run to a path."""
    return FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")


@pytest.fixture
def elsewhere(program: Program, tmp_path: Path) -> Callable[[], Program]:
    """The same program on another machine, with an empty disk."""
    made: list[Program] = []

    def make() -> Program:
        made.append(Program(tmp_path / f"other-{len(made)}"))
        made[-1].variable.assign([0.0, 0.0])
        return made[-1]

    return make


def train(program: Program, store: Any, steps: int, **more: Any) -> None:
    """A run to its normal end."""
    with program.handler(mirror_dir=store, **more) as handler:
        for _ in range(steps):
            handler.run(program.step)


def steps(store: Any) -> list[int]:
    """Returns the steps of the complete commits, newest first."""
    found = list(catalog.commits(store, lambda problem: None))
    for each in found:
        for entry in each.manifest.files:
            stat = summed(store, each.object(entry.name))
            assert (stat.size, stat.crc32c) == (entry.size, entry.crc32c)
    return [each.manifest.step for each in found]


def faults(program: Program) -> list[str]:
    return [record["error"] for record in program.events("fault")]


def test_every_commit_is_copied_and_the_end_waits(
    program: Program, store: FaultyObjectStore
) -> None:
    handler = program.handler(mirror_dir=store, save_freq=2, async_save=False)
    for _ in range(5):
        handler.run(program.step)
    assert handler.wait_for_mirror(LIMIT)
    assert handler.mirror_status.latest_step == handler.mirror_status.mirrored_step == 4
    handler.close()
    assert steps(store) == [5, 4]  # max_to_keep acts there too


def test_a_commit_that_cannot_be_read_back_is_valid_and_uploaded(
    program: Program, store: FaultyObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that made the commit knows its manifest."""

    def fail(path: str) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    with program.handler(mirror_dir=store) as handler:
        handler.run(program.step)
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "read_at", fail)
            handler.save()
            assert handler.wait_for_mirror(LIMIT)
            assert steps(store) == [1]
        handler.run(program.step)
        handler.save()
        assert handler.wait_for_mirror(LIMIT)
        assert handler.mirror_status is not None
        assert handler.mirror_status.mirrored_step == 2
    assert [r["step"] for r in program.events("commit")][:2] == [1, 2]


def test_without_one_there_is_nothing_to_wait_for(program: Program) -> None:
    with program.handler() as handler:
        assert handler.mirror_status is None
        assert handler.wait_for_mirror()


def test_another_machine_resumes_from_the_store(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    train(program, store, 3)
    other = elsewhere()
    handler = other.handler(mirror_dir=store)
    assert handler.total_run_calls == 3
    assert other.events("restored")[-1]["tier"] == "mirror"
    assert other.variable.numpy().tolist() == [4.0, 5.0]
    assert (other.directory / "checkpoint").exists()  # stock TensorFlow finds it
    handler.run(other.step)
    handler.close()
    assert steps(store) == [4, 3]


def managed(program: Program) -> tf.train.CheckpointManager:
    return tf.train.CheckpointManager(
        program.checkpoint, str(program.directory), max_to_keep=2
    )


def test_a_managers_checkpoints_are_mirrored_too(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    handler = program.handler(managed(program), mirror_dir=store)
    kept = Words("kept", "as it was")
    for _ in range(3):
        handler.run(program.step)
    handler.close()
    kept.text = "changed"
    other = elsewhere()
    handler = other.handler(managed(other), mirror_dir=store)
    assert (handler.total_run_calls, kept.text) == (3, "as it was")
    assert other.variable.numpy().tolist() == [4.0, 5.0]
    handler.run(other.step)
    handler.close()
    assert (other.directory / "ckpt-2.index").exists()  # its own, as it counts
    assert steps(store) == [4, 3]
    assert len(list(other.directory.glob("*/COMMITTED"))) == 2  # one was fetched
    with elsewhere().handler(mirror_dir=store) as third:
        assert third.total_run_calls == 4


def test_the_newer_of_local_and_mirrored_commits_is_restored(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    train(program, store, 3)
    other = elsewhere()
    train(other, store, 2)
    with program.handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 5  # of the other machine
    with other.handler(mirror_dir=store) as handler:
        handler.run(other.step)
    with other.handler() as handler:  # not copied
        handler.run(other.step)
    with other.handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 7  # its own
    assert steps(store)[0] == 7  # which the start has copied


def test_a_corrupt_copy_falls_back_to_the_older_one(
    program: Program,
    store: FaultyObjectStore,
    elsewhere: Callable[[], Program],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(program, store, 3)
    train(program, store, 1)
    newest = next(iter(catalog.commits(store, pytest.fail)))
    store.damage(f"{newest.name}/{newest.manifest.files[0].name}")
    other = elsewhere()
    with other.handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 3
        handler.run(other.step)
        handler.run(other.step)
    assert newest.manifest.files[0].name in caplog.text
    third = elsewhere()
    with third.handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 5  # newer than the corrupt commit


def test_a_start_is_refused_if_all_mirrored_copies_are_corrupt(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    """As with corrupt commits on a disk."""
    train(program, store, 3)
    for commit in list(catalog.commits(store, pytest.fail)):
        store.damage(f"{commit.name}/{commit.manifest.files[0].name}")
    other = elsewhere()
    with pytest.raises(errors.CheckpointCorruptedError, match="or memory://"):
        other.handler(mirror_dir=store)
    with other.handler(mirror_dir=store, restore=False) as handler:
        assert handler.total_run_calls == 0


def test_a_corrupt_local_commit_is_replaced_by_its_mirrored_copy(
    program: Program, store: FaultyObjectStore
) -> None:
    train(program, store, 3)
    for name in (program.directory / "3").glob("ckpt.data-*"):
        damage(str(name))
    with program.handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 3
        assert program.variable.numpy().tolist() == [4.0, 5.0]
    tokens = [entry.token for entry in catalog.scan(str(program.directory))]
    assert len(tokens) == len(set(tokens)) == 1  # other workers look for the token


def test_faults_of_the_store_never_stop_training(
    program: Program, store: FaultyObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    handler = program.handler(mirror_dir=store, save_freq=1)
    store.fail_from(len(store.operations), errors.SaveError("503 from the bucket"))
    for _ in range(4):
        handler.run(program.step)
    assert not handler.wait_for_mirror(0.2)
    assert "503" in handler.mirror_status.last_error
    store.revive()
    handler.close()
    assert steps(store)[0] == 4
    assert len([text for text in faults(program) if "503" in text]) == 1
    assert caplog.text.count("Training continues") == 1


def test_the_exit_waits_for_the_mirror(
    program: Program, store: FaultyObjectStore
) -> None:
    there: list[list[int]] = []
    config = {"exit_fn": lambda: there.append(steps(store))}
    handler = program.handler(mirror_dir=store, config=config)
    for _ in range(3):
        handler.run(program.step)
    program.button.press()
    handler.run(program.step)
    assert there == [[3]]
    handler.close()


def test_an_incomplete_upload_is_logged_and_has_its_own_exit_code(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    store = Stuck()
    config = {"exit_fn": None, "mirror_incomplete_exit_code": 75}
    more = {"mirror_dir": store, "peer_timeout": 1.0}
    handler = program.handler(config=config, **more)
    handler.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit) as left:
        handler.run(program.step)
    assert left.value.code == 75
    assert "was not complete in time" in caplog.text
    assert any("not complete in time" in text for text in faults(program))
    assert steps(store) == []
    recorded = program.events("exit")[-1]
    assert (recorded["outcome"], recorded["code"]) == ("committed", 75)
    handler._run.close()
    store.opened.set()
    with program.handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 1  # here nothing was lost
        assert handler.wait_for_mirror(LIMIT)
        assert steps(store) == [1]


def test_without_a_code_of_its_own_it_is_the_restart_code(program: Program) -> None:
    more = {"mirror_dir": Stuck(), "peer_timeout": 1.0}
    handler = program.handler(config={"exit_fn": None}, **more)
    handler.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit) as left:
        handler.run(program.step)
    assert left.value.code == 143
    handler._run.close()


def test_a_notice_while_the_end_waits_has_the_run_started_again(
    program: Program,
) -> None:
    store = Stuck()
    more = {"mirror_dir": store, "peer_timeout": 1.0}
    handler = program.handler(config={"exit_fn": None}, **more)
    handler.run(program.step)

    def press() -> None:
        assert store.entered.wait(LIMIT)
        program.button._tell("pressed")

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(SystemExit) as left:
        handler.close()
    thread.join(LIMIT)
    assert left.value.code == 143
    handler._run.close()


def test_objects_of_other_runs_are_not_deleted(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    train(program, store, 2)
    other = elsewhere()
    train(other, FaultyObjectStore(uri=f"memory://{uuid.uuid4()}"), 2)
    with program.handler(mirror_dir=store) as handler:
        assert handler.wait_for_mirror(LIMIT)
        for foreign in (
            Checkpoint(other.directory / "2"),
            Checkpoint(other.directory / "7", step=2),
            Checkpoint("gs://bucket/other/2.1-00000000"),
        ):
            with pytest.raises(
                errors.ConfigurationError,
                match="expected a checkpoint in this handler's",
            ):
                handler.delete_checkpoint(foreign)
        assert steps(store) == [2]
        assert (other.directory / "2").is_dir()


def test_an_unreachable_store_stops_only_a_start_without_commits(
    program: Program,
    store: FaultyObjectStore,
    elsewhere: Callable[[], Program],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(program, store, 2)
    store.fail_from(len(store.operations), errors.CheckpointError("no route"))
    other = elsewhere()
    with pytest.raises(errors.CheckpointError, match="does not start from scratch"):
        other.handler(mirror_dir=store)
    handler = program.handler(mirror_dir=store)
    assert handler.total_run_calls == 2
    assert "for a newer commit; restoring" in caplog.text
    store.revive()
    handler.close()


def test_a_run_from_scratch_ranks_above_older_commits(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    train(program, store, 2)
    train(program, store, 2)
    other = elsewhere()
    train(other, store, 1, restore=False)
    with elsewhere().handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 1


def test_deleting_acts_on_both_sides(
    program: Program, store: FaultyObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    handler = program.handler(mirror_dir=store)
    for _ in range(2):
        handler.run(program.step)
        handler.save()
    assert handler.wait_for_mirror(LIMIT)
    handler.delete_checkpoint(handler.checkpoints()[-1])
    assert steps(store) == [1]
    [gone] = handler.checkpoints()
    assert gone.step == 1
    shutil.rmtree(program.directory / "1")
    handler.delete_checkpoint(gone)
    handler.delete_checkpoint(gone)
    assert caplog.text.count("is no longer in the checkpoint directory") == 2
    assert steps(store) == []
    handler.close()


def test_two_open_handlers_cannot_share_a_mirror(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    handler = program.handler(mirror_dir=store)
    with pytest.raises(errors.ConfigurationError, match="a separate mirror_dir"):
        elsewhere().handler(mirror_dir=store)
    handler.close()
    elsewhere().handler(mirror_dir=store).close()


def test_a_dropped_handler_frees_its_mirror(
    program: Program, store: FaultyObjectStore, elsewhere: Callable[[], Program]
) -> None:
    handler = program.handler(mirror_dir=store)
    del handler
    gc.collect()
    elsewhere().handler(mirror_dir=store).close()


@pytest.mark.parametrize("place", ["ftp://host/x", 5, "gs:/bucket/x"])
def test_a_place_that_cannot_be_one(program: Program, place: Any) -> None:
    with pytest.raises(errors.ConfigurationError):
        program.handler(mirror_dir=place)


@pytest.fixture
def supervised(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    place = tmp_path / "remote"
    monkeypatch.setenv("TFPREEMPT_MIRROR_DIR", place.as_uri())
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", str(tmp_path))
    return place


def test_the_supervisors_mirror_applies_to_its_directory_and_below(
    program: Program, supervised: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(program, None, 2)
    assert steps(LocalStore(str(supervised / "ckpt"))) == [2]
    other = Program(Path(f"{supervised.parent}-beside"))
    with caplog.at_level(logging.WARNING):
        train(other, None, 1)
    assert "are not mirrored" in caplog.text


def test_a_corrupt_local_commit_is_not_copied(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    store = Stuck()
    handler = program.handler(mirror_dir=store)
    handler.run(program.step)
    handler.save()
    assert store.entered.wait(LIMIT)
    for name in (program.directory / "1").glob("ckpt.data-*"):
        damage(str(name))
    store.opened.set()
    assert not handler.wait_for_mirror(LIMIT)
    assert steps(store) == []
    assert "Check the disk" in caplog.text
    handler._run.close()
