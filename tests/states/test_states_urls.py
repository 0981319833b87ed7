"""Named States without a handler, whose checkpoint directory is gs://bucket/run."""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfpreempt
from tests.checkpoint.fakes import Words
from tests.fakes.gcs import GcsServer
from tests.fakes.process import new_process
from tests.fakes.storage import FaultyObjectStore
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, checkpoint_state
from tfpreempt.checkpoint.lease.directory_lease import DirectoryLease
from tfpreempt.checkpoint.mirror import store_selection
from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.scratch import VARIABLE, scratch_directory
from tfpreempt.handler import current_session
from tfpreempt.states import StepCounter, api
from tfpreempt.storage.object_store import ObjectNotFoundError
from tfpreempt.storage.open_store import open_store

pytestmark = pytest.mark.timeout(60)

URL = "gs://bucket/run"
LIMIT = 20.0


class Machines:
    """Machines with a scratch directory each."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def restart(self, machine: str) -> None:
        """Ends the process, and starts the next process on this machine."""
        for each in api._alone.values():
            if each._copies is not None:
                each._copies._end()
            each._lease.release()
        self._monkeypatch.setattr(api, "_alone", {})
        self._monkeypatch.setenv(VARIABLE, str(self._folder / machine))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    for name in ("TF_CONFIG", "TFPREEMPT_MIRROR_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", URL)
    for left in REGISTRY.in_order():
        left.unregister()
    made = Machines(tmp_path, monkeypatch)
    with GcsServer() as server, new_process():
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        made.restart("first")
        yield made
        made.restart("none")


def load(state: Words) -> tuple[bool, str]:
    state.text = ""
    return tfpreempt.load_state(state), state.text


def test_states_and_shards_on_another_machine(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = StepCounter()
    shared, own = Words("shared", "a"), Words("own", "b", per_worker=True)
    assert load(shared) == (False, "")
    for text in ("one", "two", "three"):
        shared.text, own.text = text, text + ", own"
        counter.increment()
        path = tfpreempt.save_all_states()
        assert path is not None
        assert path.startswith(scratch_directory(URL))
    assert load(shared) == (True, "three")
    counter.value = 0
    machines.restart("second")  # the end waits for the upload
    found = catalog.commits(open_store(URL), pytest.fail)
    assert next(found).step == 3
    assert tfpreempt.load_state(counter)
    assert (load(shared), load(own)) == ((True, "three"), (True, "three, own"))
    assert counter.value == 3
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", URL + "/")
    assert load(shared) == (True, "three")
    assert len(api._alone) == 1


def test_a_corrupt_commit_is_skipped(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    words = Words("words")
    for text in ("one", "two"):
        words.text = text
        tfpreempt.save_all_states()
        machines.restart("first")
    store = open_store(URL)
    newest = next(catalog.commits(store, pytest.fail))
    store.replace(f"{newest.name}/states/words.state", b"tw0")
    machines.restart("second")
    assert load(words) == (True, "one")
    assert "words.state" in caplog.text


def test_a_state_alone_is_saved_on_a_disk(machines: Machines, tmp_path: Path) -> None:
    words = Words("words", "text")
    with pytest.raises(errors.ConfigurationError, match="not be uploaded"):
        tfpreempt.save_state(words, URL)
    tfpreempt.save_state(words, tmp_path / "disk")


def become(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes later calls those of the given worker of two."""
    cluster = Cluster(worker=worker, jobs=(("worker", 2),))
    monkeypatch.setattr(current_session, "current_cluster", lambda: cluster)


def test_several_workers(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine, each in a separate process."""
    shared = Words("shared", "a")
    for index in range(2):
        become(index, monkeypatch)
        tfpreempt.save_all_states()
    assert load(shared) == (True, "a")


def test_a_worker_on_the_chiefs_machine_deletes_nothing(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief commits and uploads while the worker compares bucket and directory."""
    shared = Words("shared", "a")
    become(0, monkeypatch)
    path = tfpreempt.save_all_states()
    assert path is not None
    (chief,) = api._alone.values()
    assert chief._copies is not None
    assert chief._copies.mirror.wait(LIMIT)
    store = open_store(URL)
    (copy,) = catalog.commits(store, pytest.fail)
    for name in list(store.list(copy.name + "/")):
        store.delete(name)
    become(1, monkeypatch)
    assert load(shared) == (True, "a")
    assert catalog.read_at(path).is_committed


def test_a_worker_without_the_chief_on_its_machine(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abandoned commits of the machine are not read, and the lease is free again."""
    shared = Words("shared", "one")
    tfpreempt.save_all_states()
    machines.restart("first")
    with monkeypatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.mirror.upload.Upload.run", _fail)
        for _ in range(2):
            shared.text = "lost"
            tfpreempt.save_all_states()
        for each in api._alone.values():
            each._copies.mirror.stop()  # type: ignore[union-attr]
    machines.restart("second")
    assert load(shared) == (True, "one")
    shared.text = "two"
    tfpreempt.save_all_states()
    machines.restart("first")
    become(1, monkeypatch)
    assert load(shared) == (True, "two")
    assert DirectoryLease(scratch_directory(URL)).read_owner() is None


def _fail(upload: object) -> None:
    raise errors.SaveError("the machine dies")


@pytest.mark.parametrize("place", ["nowhere://bucket/run", "ram://a/b", "gs://a/../b"])
def test_a_place_that_cannot_be_one(
    place: str, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words("words", "x")
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", place)
    for call in (
        tfpreempt.save_all_states,
        lambda: tfpreempt.load_state(words),
        lambda: tfpreempt.save_state(words, place),
    ):
        with pytest.raises(errors.ConfigurationError, match=place):
            call()


class Bucket:
    """A bucket whose requests fail from a given request on, and its contents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")
        monkeypatch.setattr(store_selection, "open_store", lambda place: self.store)

    def check_state_file(self) -> None:
        """Checks that stock TensorFlow finds an intact newest checkpoint."""
        state_file = io.BytesIO()
        try:
            self.store.get("checkpoint", state_file)
        except ObjectNotFoundError:
            return
        named = checkpoint_state.parse(state_file.getvalue())
        assert named is not None
        entry = catalog.read(
            catalog.unread_entry(self.store, named.latest.split("/")[0])
        )
        assert entry.is_committed
        assert entry.manifest is not None
        for file in entry.manifest.files:
            assert self.store.stat(entry.object(file.name)) is not None


def die_in(process: Callable[[], None], bucket: Bucket, at: int) -> bool:
    """Makes requests fail from this one on; returns whether the function succeeded."""
    bucket.store.fail_from(
        len(bucket.store.operations) + at, errors.CheckpointError("the network is down")
    )
    is_well = True
    try:
        process()
    except errors.CheckpointError:
        is_well = False
    for each in api._alone.values():
        mirror = each._copies.mirror  # type: ignore[union-attr]
        while is_well and not (mirror.status.is_complete or mirror.status.last_error):
            time.sleep(0.001)
        is_well = is_well and not mirror.status.last_error and mirror.wait(LIMIT)
        is_well = is_well and not mirror.status.last_error
        mirror.stop()
    bucket.store.revive()
    return is_well


@pytest.mark.slow  # searches long
def test_a_network_that_fails_at_any_request(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is complete or absent in the bucket, and stays on the machine."""
    words = Words("words", "one")
    at, is_well = 0, False
    while not is_well:
        bucket = Bucket(monkeypatch)
        machines.restart(f"machine-{at}")
        words.text = "one"
        tfpreempt.save_all_states()
        saved: list[str] = []

        def second(saved: list[str] = saved) -> None:
            tfpreempt.load_state(words)
            words.text = "two"
            tfpreempt.save_all_states()
            saved.append("two")

        machines.restart(f"machine-{at}")
        is_well = die_in(second, bucket, at)
        bucket.check_state_file()
        machines.restart(f"other-{at}")
        assert load(words) in [(True, "one"), (True, "two")]
        if is_well:
            assert words.text == "two"
        expected = saved[0] if saved else words.text
        machines.restart(f"machine-{at}")
        assert load(words) == (True, expected)
        at += 1
    assert at > 10
