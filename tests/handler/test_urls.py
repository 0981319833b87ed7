"""A handler whose checkpoint directory is gs://bucket/run: a scratch directory here,
and a mirror there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.checkpoint.fakes import Words
from tests.contracts.storage_places import MotoServer
from tests.fakes.azure import AzureServer
from tests.fakes.gcs import GcsServer
from tests.fakes.process import new_process
from tests.handler.program import Program
from tfpreempt import PreemptionCheckpointHandler, TerminationConfig, errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.manifest import Parent
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease import lease_record as holders
from tfpreempt.checkpoint.lease.object_store_lease import ObjectStoreLease
from tfpreempt.checkpoint.mirror.store_selection import Scratch
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.checkpoint.restore.opening import open_directory
from tfpreempt.cli import main
from tfpreempt.core.scratch import VARIABLE, scratch_directory
from tfpreempt.handler import current_session
from tfpreempt.storage.object_store import ObjectStore
from tfpreempt.storage.open_store import open_store

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

URL = "gs://bucket/run"


class Cloud:
    """A bucket, and machines that each have a scratch directory."""

    def __init__(
        self, server: GcsServer, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.server = server
        self.folder = folder
        self._monkeypatch = monkeypatch
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TFPREEMPT_JOURNAL_DIR", raising=False)
        monkeypatch.delenv("TFPREEMPT_MIRROR_DIR", raising=False)
        self.go_to("first")

    def go_to(self, machine: str) -> None:
        """Makes later starts run on this machine."""
        self._monkeypatch.setenv(VARIABLE, str(self.folder / machine))

    @property
    def scratch(self) -> Path:
        return Path(scratch_directory(URL))

    def here(self) -> list[int | None]:
        """Steps of the commits in the scratch directory, newest first."""
        return [each.step for each in catalog.scan(str(self.scratch))]

    def there(self) -> list[int | None]:
        """Steps of the commits in the bucket, newest first."""
        store = open_store(URL)
        return [each.step for each in catalog.commits(store, pytest.fail)]

    def empty(self) -> None:
        """Deletes all objects of the bucket, as the user may."""
        store = open_store(URL)
        for name in list(store.list()):
            store.delete(name)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with GcsServer() as server, new_process():
        yield Cloud(server, tmp_path, monkeypatch)


def train(steps: int, **more: object) -> tuple[list[float], int]:
    """Runs a program to its end; returns the weights, and the step of its start."""
    with new_process():
        program = Program(URL)  # type: ignore[arg-type]
        with program.handler(**more) as handler:
            began = handler.total_run_calls
            while handler.total_run_calls < steps:
                handler.run(program.step)
        return program.variable.numpy().tolist(), began


def die_after(step: int, *, deletes: bool = False) -> None:
    """Runs a program that crashes after its commit of a step, before the upload.

    Args:
        step: step of the commit.
        deletes: whether the program deletes the commit that it restored.
    """
    with new_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.mirror.upload.Upload.run", _stall)
        program = Program(URL)  # type: ignore[arg-type]
        handler = program.handler()
        if deletes:
            handler.delete_checkpoint(handler.checkpoints()[-1])
        while handler.total_run_calls < step:
            handler.run(program.step)
        handler.save()
        for each in current_session.current().runs:  # type: ignore[union-attr]
            each.directory.mirror.stop()
            each.release()


def _stall(upload: object) -> None:
    raise errors.SaveError("the machine dies")


def test_a_start_lists_the_mirror_before_and_under_its_lease_and_not_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(2)
    cloud.go_to("second")
    listed: list[str] = []
    listing = catalog.listing

    def count(store: ObjectStore, **more: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            listed.append(store.uri)
        return listing(store, **more)

    monkeypatch.setattr(catalog, "listing", count)
    assert train(2)[1] == 2
    assert listed == [URL, URL]


def test_a_notice_and_a_restart_on_another_machine(cloud: Cloud) -> None:
    """The weights, a State and the generators have the saved values."""
    word = Words("word", "before")
    with new_process():
        program = Program(URL)  # type: ignore[arg-type]
        handler = program.handler()
        random.seed(5)
        handler.run(program.step)
        random.random()
        program.button.press()
        handler.run(program.step)
        assert program.exits == 1
        assert cloud.there() == [1]
        [handle] = handler.checkpoints()
        assert handle.path == str(cloud.scratch / "1")
        assert handler.latest_checkpoint == handle.prefix
        handler.close()
        drawn = random.random()
    cloud.go_to("second")
    word.text = "after"
    with new_process():
        again = Program(URL)  # type: ignore[arg-type]
        with again.handler() as restored:
            restored.run(again.step)
            assert (restored.total_run_calls, word.text) == (3, "before")
            assert again.variable.numpy().tolist() == [4.0, 5.0]
    random.seed(5)
    random.random()
    assert random.random() == drawn
    assert cloud.there() == [3, 2]
    assert cloud.here() == [3]
    word.unregister()


def test_the_end_waits_for_each_commit_that_is_to_stay(cloud: Cloud) -> None:
    cloud.server.fail(3)
    train(9, save_freq=2, max_to_keep=None, async_save=False)
    assert cloud.there() == [9, 8, 6, 4, 2]
    train(10, max_to_keep=None)
    # The disk need not have the commits of the bucket. Commit 9 stays if its upload is
    # not noted when 10 is committed.
    assert cloud.here() in ([10], [10, 9])
    assert cloud.there()[:2] == [10, 9]


def test_a_commit_that_was_not_uploaded_is_used(cloud: Cloud) -> None:
    die_after(3)
    assert (cloud.here(), cloud.there()) == ([3], [])
    assert train(4) == ([5.0, 6.0], 3)
    die_after(6)
    assert cloud.there() == [4, 3]
    assert train(7) == ([8.0, 9.0], 6)
    assert cloud.there() == [7, 6]


def test_a_commit_deleted_from_the_bucket_is_not_uploaded_again(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    train(3)
    cloud.empty()
    assert train(2)[1] == 0
    assert cloud.there() == [2]
    assert "step(s) 3, which are only in the scratch directory" in caplog.text
    die_after(4)  # on a commit that the user deletes
    cloud.empty()
    assert train(1)[1] == 0


def test_the_journal_of_a_deleted_run_is_deleted(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journals"
    monkeypatch.setenv("TFPREEMPT_JOURNAL_DIR", str(journal))
    train(3)
    (journal / "worker-7.jsonl").write_text("{}")
    (journal / "supervisor.jsonl").write_text("{}")
    (journal / "worker-8" / "thesis").mkdir(parents=True)
    (journal / "worker-7.log").write_text("output")
    cloud.empty()
    assert train(1)[1] == 0
    assert not (journal / "worker-7.jsonl").exists()
    assert (journal / "worker-8" / "thesis").exists()  # not a journal
    assert (journal / "worker-7.log").exists()
    assert (journal / "supervisor.jsonl").exists()


def test_a_commit_of_another_machine_takes_precedence(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it is older than the commits of the crashed process on this machine."""
    train(2)
    die_after(9)
    cloud.go_to("second")
    assert train(3)[1] == 2
    cloud.go_to("first")
    assert train(4)[1] == 3
    assert "step(s) 9, which are only in the scratch directory" in caplog.text


def test_a_copy_that_was_not_noted_is_known_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process crashed between the marker and the note; then one more commit."""
    train(2)
    with monkeypatch.context() as patch:
        patch.setattr(
            "tfpreempt.checkpoint.mirror.store_selection.Scratch.note_copied",
            lambda scratch, commit: None,
        )
        train(3)
    die_after(5)
    assert train(6)[1] == 5


def test_a_worker_on_another_disk_becomes_the_chief(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own commits have higher sequence numbers, but were never uploaded."""
    train(2)
    for step in (8, 9):
        die_after(step)
    cloud.go_to("second")
    assert train(3)[1] == 2
    cloud.go_to("first")
    (newest, *_) = catalog.commits(open_store(URL), pytest.fail)
    worker = open_directory(
        None, str(cloud.scratch), policy=RetentionPolicy(max_to_keep=1)
    )
    assert worker.fetch(open_store(URL), newest.token) is not None
    assert cloud.here()[0] == 9
    assert train(4)[1] == 3
    assert "step(s) 9, which are only in the scratch directory" in caplog.text
    assert cloud.there() == [4, 3]


def test_a_commit_after_the_newest_one_was_deleted(cloud: Cloud) -> None:
    """The run itself deleted the commit, so no other program changed the bucket."""
    train(2)
    train(3)
    die_after(5, deletes=True)
    assert (cloud.here(), cloud.there()) == ([5], [2])
    assert train(6)[1] == 5


def test_a_start_that_loses_the_lease_deletes_nothing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended, and its successor commits in the directory now."""
    train(2)
    cloud.go_to("second")
    train(3)
    cloud.go_to("first")

    def suspended(scratch: Scratch) -> list[Parent]:
        shutil.rmtree(cloud.scratch / layout.LEASE)
        return expected(scratch)

    expected = Scratch._expected
    monkeypatch.setattr(Scratch, "_expected", suspended)
    with pytest.raises(errors.LeaseLostError):
        train(4)
    assert cloud.here() == [2]


def test_a_bucket_that_does_not_answer_ends_the_start(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the scratch directory has a commit: another machine may have more."""
    train(2)
    monkeypatch.setattr("tfpreempt.storage.gcs_client.RETRY_SECONDS", 0.2)
    cloud.server.close()
    with pytest.raises(
        errors.CheckpointError,
        match="does not start from scratch, because gs://",
    ):
        train(3)


def test_two_programs_at_once(cloud: Cloud) -> None:
    """On one machine both programs share the scratch directory."""
    with new_process():
        first = Program(URL).handler()  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigurationError, match="is open in"):
            Program(URL + "/").handler()  # type: ignore[arg-type]
        first.close()


def test_a_scratch_directory_without_room(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: few)
    with pytest.raises(
        errors.ConfigurationError, match=f"1,000 bytes free.*{VARIABLE}"
    ):
        train(1)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hdfs://host/run", "hdfs:// is not supported"),
        ("ram://run", "ram:// is not supported"),
        ("abfs://host/run", "Mount the storage"),
        ("file:///run", "Pass '/run'"),
        ("gs://bucket", "is a bucket without a folder"),
        ("gs://bucket/a/../b", "empty part"),
        ("gs:/bucket/run", "pass the URL as a str"),
    ],
)
def test_invalid_checkpoint_directories_are_refused(url: str, said: str) -> None:
    with (
        new_process(),
        pytest.raises(errors.ConfigurationError, match=said),
    ):
        Program(url).handler()  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", ["user:SECRET@", "?X-Amz-Signature=SECRET"])
@pytest.mark.parametrize(
    "more", [{"save_fn": lambda: None}, {}, {"mirror": "gs://b/c"}]
)
@pytest.mark.parametrize("scheme", ["s3", "file", "https"])
def test_no_error_quotes_a_secret_of_the_url(
    secret: str, more: dict[str, Any], scheme: str
) -> None:
    before, after = (secret, "") if "@" in secret else ("", secret)
    config = TerminationConfig(save_fn=more.get("save_fn"))
    with pytest.raises(errors.ConfigurationError) as refused:
        PreemptionCheckpointHandler(
            *(None, None, f"{scheme}://{before}bucket{after}", config),
            mirror_dir=more.get("mirror"),
        )
    assert "SECRET" not in str(refused.value)


def test_a_manager_and_a_save_fn_are_refused(cloud: Cloud) -> None:
    program = Program(URL)  # type: ignore[arg-type]
    manager = tf.train.CheckpointManager(program.checkpoint, "ram://run", max_to_keep=2)
    for given, config in ((manager, {}), (None, {"save_fn": lambda: None})):
        with pytest.raises(errors.ConfigurationError, match="mirror_dir="):
            program.handler(given, config=config)


def put(folder: Path, below: str = "") -> None:
    """Copies all files of a directory to the bucket."""
    store = open_store(URL)
    for path in folder.rglob("*"):
        if path.is_file():
            store.replace(below + str(path.relative_to(folder)), path.read_bytes())


def local_commit(folder: Path, steps: int) -> Path:
    """A commit in a directory of this machine."""
    with new_process():
        program = Program(folder)
        with program.handler() as handler:
            for _ in range(steps):
                handler.run(program.step)
    return folder / str(steps)


def test_a_run_of_an_earlier_version_is_continued(cloud: Cloud, tmp_path: Path) -> None:
    """That version committed in the bucket itself, under names of its saves."""
    for steps in (2, 3):
        commit = local_commit(tmp_path / f"old-{steps}", steps)
        put(commit, f"commit-{steps}abc-0/")
    open_store(URL).replace("commit-later/MANIFEST.json", b"{}")  # never committed
    listed = f'model_checkpoint_path: "{URL}/commit-3abc-0/ckpt"\n'
    open_store(URL).replace("checkpoint", listed.encode())
    with new_process():
        assert train(1, restore=False)[1] == 0  # nothing is fetched
    cloud.empty()
    for steps in (2, 3):
        put(tmp_path / f"old-{steps}" / str(steps), f"commit-{steps}abc-0/")
    cloud.go_to("second")
    assert train(5) == ([6.0, 7.0], 3)
    assert cloud.there() == [5, 3]
    assert train(6)[1] == 5


def test_corrupt_commits_of_an_earlier_version_are_no_beginning(
    cloud: Cloud, tmp_path: Path
) -> None:
    put(local_commit(tmp_path / "old", 2), "commit-abc/")
    open_store(URL).replace("commit-abc/ckpt.index", b"half")
    with pytest.raises(errors.CheckpointCorruptedError, match="no commit in gs://"):
        train(3)
    assert cloud.there() == []


@pytest.mark.parametrize("listed", ["ckpt-2", f"{URL}/ckpt-2"])
def test_a_managers_checkpoint_in_the_bucket_is_restored(
    cloud: Cloud, tmp_path: Path, listed: str
) -> None:
    program = Program(tmp_path)
    manager = tf.train.CheckpointManager(
        program.checkpoint, str(tmp_path / "flat"), max_to_keep=2
    )
    for _ in range(2):
        program.step()
        manager.save()
    put(tmp_path / "flat")
    state_file = f'model_checkpoint_path: "{listed}"\n'
    open_store(URL).replace("checkpoint", state_file.encode())
    with new_process():
        again = Program(URL)  # type: ignore[arg-type]
        with again.handler() as handler:
            assert again.variable.numpy().tolist() == [3.0, 4.0]
            handler.run(again.step)
    assert cloud.there() == [1]
    assert train(2) == ([5.0, 6.0], 1)


def test_a_deleted_commit_is_not_named_again(cloud: Cloud) -> None:
    with new_process():
        program = Program(URL)  # type: ignore[arg-type]
        with program.handler(save_freq=1, async_save=False) as handler:
            for _ in range(3):
                handler.run(program.step)
            handler.save()
            assert handler.wait_for_mirror()
            *_, newest = handler.checkpoints()
            handler.delete_checkpoint(newest)
            assert cloud.there() == [2]
            state_file = io.BytesIO()
            open_store(URL).get("checkpoint", state_file)
            assert state_file.getvalue().startswith(b'model_checkpoint_path: "2.2-')


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kind"), [("s3", MotoServer), ("az", AzureServer)])
def test_a_bucket_of_another_cloud(
    scheme: str,
    kind: type[MotoServer] | type[AzureServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"{scheme}://bucket/{tmp_path.name}"
    with contextlib.closing(kind()) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        for machine, steps in (("first", 2), ("second", 4)):
            monkeypatch.setenv(VARIABLE, str(tmp_path / machine))
            with new_process():
                program = Program(url)  # type: ignore[arg-type]
                with program.handler() as handler:
                    assert handler.total_run_calls == steps - 2
                    for _ in range(2):
                        handler.run(program.step)
        assert program.variable.numpy().tolist() == [5.0, 6.0]
        shown = CliRunner().invoke(main, ["inspect", "--json", url])
        newest = json.loads(shown.stdout)[0]
        assert newest["step"] == 4
        assert CliRunner().invoke(main, ["report", url]).exit_code == 0
        with Checkpoint(newest["uri"]).as_directory() as copy:
            assert "COMMITTED" in os.listdir(copy)
        # As docs/checkpoints/object-storage.md says.
        assert tf.train.latest_checkpoint(url) is None
        with pytest.raises(tf.errors.UnimplementedError):
            tf.io.gfile.exists(url)


class Looks:
    """Each poll of the lease is half a minute after the last; the holder renews it."""

    def __init__(self, token: str) -> None:
        self._place = ObjectStoreLease(open_store(URL))
        self._token = token
        self._count = 0

    def __call__(self, seconds: float) -> float:
        self._count += 1
        self._place.renew(self._token, self._count)
        return 30.0


def test_a_program_on_another_machine_is_refused_by_name(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(1)
    place = ObjectStoreLease(open_store(URL))
    place.read_owner()
    holder = dataclasses.replace(holders.this_process(30.0), host="node-7", boot="b")
    token = place.take(holder)
    assert token is not None
    monkeypatch.setattr(
        "tfpreempt.checkpoint.lease.lease._PollTimer", lambda: Looks(token)
    )
    cloud.go_to("second")
    with pytest.raises(
        errors.DirectoryLockedError, match=r"'gs://bucket/run' is in use.*on node-7"
    ):
        train(2)
    assert cloud.there() == [1]
    assert cloud.here() == []
