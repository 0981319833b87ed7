"""Named States without a handler, whose commits are copied to an object store."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
import sys
import threading
import uuid
from types import SimpleNamespace

import pytest

import tfpreempt
from tests.checkpoint.fakes import Words
from tests.checkpoint.test_lease import ELSEWHERE, THIEF
from tests.cli.conftest import supervised  # noqa: F401  (a fixture)
from tests.fakes.process import new_process
from tests.fakes.storage import FaultyObjectStore, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import DirectoryLease
from tfpreempt.checkpoint.mirror import store_selection
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.restore.state_loader import StateLoader
from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.states import api, standalone_mirror
from tfpreempt.storage.files import LocalFiles

pytestmark = pytest.mark.timeout(60)
LIMIT = 20.0


def copies_here():
    (alone,) = api._alone.values()
    return alone._copies


class Place:
    """The persistent part of a process: a directory and a store."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self.store = FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")
        self._monkeypatch = monkeypatch

    def restart(self):
        """Resets the state of this process, like a new process."""
        self.stop()
        self._monkeypatch.setattr(api, "_alone", {})

    def stop(self):
        for each in api._alone.values():
            each._copies.mirror.close()

    def lose_disk(self):
        shutil.rmtree(self.directory)

    def save(self, words, text):
        words.text = text
        return tfpreempt.save_all_states()

    def load(self, words):
        words.text = "nothing"
        tfpreempt.load_state(words)
        return words.text

    def hear(self, fault):
        """Records the events for a handler's journal."""

    def wait(self):
        found = copies_here()
        assert found.mirror.wait(LIMIT)

    def break_store(self):
        error = errors.CheckpointError("503 from the bucket.")
        self.store.fail_from(len(self.store.operations), error)

    def copied(self):
        """Sequences of the commits in the store, newest first."""
        found = catalog.commits(self.store, pytest.fail)
        return [each.manifest.sequence for each in found]

    def fetched(self):
        """How often a State was downloaded."""
        return len([1 for how, name in self.store.operations if ".state" in name])


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("TF_CONFIG", "TFPREEMPT_NUM_RESTARTS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    made = Place(tmp_path / "ckpt", monkeypatch)
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", str(made.directory))
    monkeypatch.setenv("TFPREEMPT_MIRROR_DIR", made.store.uri)
    monkeypatch.setattr(store_selection, "open_store", lambda place: made.store)
    for left in REGISTRY.in_order():
        left.unregister()
    made.restart()
    with new_process():
        yield made
        made.stop()


@pytest.fixture
def words():
    return Words("words", "one")


def said(caplog, text):
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [line for line in lines if text in line]


def test_every_commit_is_uploaded_and_a_new_disk_resumes(place, words):
    assert place.load(words) == "nothing"
    for number in range(3):
        place.save(words, str(number))
        place.wait()
    assert place.copied() == [3, 2]
    place.lose_disk()
    place.restart()
    assert place.load(words) == "2"
    place.save(words, "4")
    place.wait()
    assert place.copied() == [4, 3]


def test_a_first_save_ranks_above_older_commits(place, words):
    place.save(words, "old")
    place.wait()
    place.lose_disk()
    place.restart()
    assert place.save(words, "new") == str(place.directory / "2")
    place.wait()
    assert place.copied() == [2, 1]
    assert place.load(words) == "new"


def test_a_mirror_below_a_file_is_refused(place, words, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", str(place.directory))
    there = f"file://{tmp_path}/there"
    monkeypatch.setenv("TFPREEMPT_MIRROR_DIR", there)
    place.save(words, "one")
    place.wait()
    place.lose_disk()
    place.restart()
    assert place.load(words) == "one"


def test_a_copy_that_was_cut_short_is_finished_by_the_next_start(place, words):
    place.save(words, "one")
    place.wait()
    place.break_store()
    place.save(words, "two")
    place.restart()
    place.store.revive()
    assert place.copied() == [1]
    assert place.load(words) == "two"
    place.wait()
    assert place.copied() == [2, 1]


def test_a_store_that_cannot_be_asked(place, words, caplog):
    place.save(words, "one")
    place.wait()
    place.break_store()
    place.restart()
    assert place.load(words) == "one"
    assert len(said(caplog, "for a newer commit; restoring")) == 1
    place.lose_disk()
    place.restart()
    for call in (lambda: tfpreempt.load_state(words), tfpreempt.save_all_states):
        with pytest.raises(errors.CheckpointError, match="does not start from scratch"):
            call()
    place.store.revive()
    assert place.load(words) == "one"  # it is asked again


def test_faults_never_reach_the_loop(place, words, caplog):
    place.save(words, "one")
    place.wait()
    place.break_store()
    for number in range(4):
        place.save(words, str(number))
    found = copies_here()
    assert not found.mirror.wait(0.05)
    assert len(said(caplog, "Training continues")) == 1
    found.seconds = 0.05
    found._end()
    (text,) = said(caplog, "was not complete in time")
    assert "503 from the bucket" in text
    assert str(place.store.uri) in text


def test_the_end_waits_for_the_copy(place, words):
    place.save(words, "one")
    found = copies_here()
    found.seconds = LIMIT
    found._end()
    assert place.copied() == [1]
    assert not found.mirror.is_open


def test_a_forked_child_waits_for_nothing(place, words):
    place.save(words, "one")
    found = copies_here()
    found._process += 1
    found._end()
    assert found.mirror.is_open


def test_a_download_is_guarded_by_the_lease(place, words):
    """A process that was frozen while it fetched, and taken over meanwhile."""
    place.save(words, "kept")
    place.wait()
    place.restart()
    place.lose_disk()
    get = place.store.get

    def get_late(name, *args, **kwargs):
        if name.endswith(".state"):
            here = DirectoryLease(str(place.directory))
            if (found := here.read_owner()) and found.token != THIEF:
                here.end(found.token)
                assert here.take(dataclasses.replace(ELSEWHERE, token=THIEF))
        return get(name, *args, **kwargs)

    place.store.get = get_late
    with pytest.raises(errors.LeaseLostError):
        tfpreempt.load_state(words)
    assert not list(place.directory.glob("*/COMMITTED"))


def test_a_corrupt_copy_is_skipped(place, words, caplog):
    for text in ("one", "two"):
        place.save(words, text)
        place.wait()
    newest = next(iter(catalog.commits(place.store, pytest.fail)))
    place.store.damage(f"{newest.name}/states/words.state")
    place.lose_disk()
    place.restart()
    assert place.load(words) == "one"
    assert len(said(caplog, "this checkpoint is skipped")) == 1
    place.save(words, "three")
    place.wait()
    assert place.copied()[0] == 3  # newer than the corrupt commit


def test_a_start_is_refused_if_all_copies_are_corrupt(place, words):
    for text in ("one", "two"):
        place.save(words, text)
        place.wait()
    for commit in list(catalog.commits(place.store, pytest.fail)):
        place.store.damage(f"{commit.name}/states/words.state")
    place.lose_disk()
    place.restart()
    with pytest.raises(errors.CheckpointCorruptedError, match="no commit in memory://"):
        place.load(words)
    assert words.text == "nothing"


def test_corrupt_files_are_replaced_from_the_store(place, words, caplog):
    for text in ("one", "two"):
        place.save(words, text)
        place.wait()
    for number in "12":
        damage(place.directory / number / "states" / "words.state")
    place.restart()
    assert place.load(words) == "two"
    place.save(words, "three")
    place.wait()
    assert place.copied() == [3, 2]


def test_with_an_open_handler_it_is_the_handlers(place, words, monkeypatch):
    class Session:
        states = SimpleNamespace(load=lambda state: True)

        @property
        def runs(self):
            return [self]

        def save(self, run):
            return "its own"

        def wait_for_save(self):
            pass

    monkeypatch.setattr(api, "current_session", SimpleNamespace(current=Session))
    assert tfpreempt.load_state(words)
    assert tfpreempt.save_all_states() == "its own"
    assert api._alone == {}
    assert place.store.operations == []


def test_after_a_handler_uploads_begin_again(place, words):
    place.save(words, "one")
    place.wait()
    taker = Mirror(place.store, RetentionPolicy())
    here = str(place.directory)
    taker.begin(here, None, place.hear)
    place.wait()  # ended
    taker.close()
    place.save(words, "two")
    place.wait()
    assert place.copied() == [2, 1]


def test_a_directory_that_is_a_url(place, words, monkeypatch):
    monkeypatch.setattr(api.os_errors, "check_directory", lambda given: given)
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", "gs://bucket/run")
    with pytest.raises(
        errors.ConfigurationError, match="Remove one of these arguments"
    ):
        tfpreempt.load_state(words)


# --- many workers --------------------------------------------------------------------


def worker(place, index, directory):
    cluster = Cluster(worker=index, jobs=(("worker", 3),))
    loader = StateLoader(str(directory), cluster)
    files = LocalFiles()
    made = standalone_mirror.StandaloneMirror(
        place.store, str(directory), cluster, loader.newest, files
    )
    return made, loader


@pytest.fixture
def run_before(place, words):
    """Makes a commit that is only in the store."""
    place.save(words, "of the chief")
    place.wait()
    place.lose_disk()
    place.restart()
    place.store.operations.clear()


def test_of_those_that_share_a_disk_one_fetches(place, words, run_before):
    place.directory.mkdir()
    made = [worker(place, index, place.directory) for index in range(3)]
    failures = []

    def begin(copy):
        try:
            copy.begin()
        except Exception as error:  # reported by the main thread
            failures.append(error)

    others = [threading.Thread(target=begin, args=[c]) for c, _ in made[1:]]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(LIMIT)
    made[0][0].begin()
    assert failures == []
    assert made[0][0].mirror.wait(LIMIT)
    assert place.fetched() == 1
    for each, loader in made:
        words.text = ""
        assert loader.load(words)
        assert words.text == "of the chief"
        assert each.mirror.is_open == (each is made[0][0])
    made[0][0]._end()


def test_of_those_with_disks_of_their_own_each_fetches(
    place, words, run_before, tmp_path
):
    for index in (2, 1):
        directory = tmp_path / f"disk-{index}"
        directory.mkdir()
        made, loader = worker(place, index, directory)
        made.begin()
        made.begin()
        words.text = ""
        assert loader.load(words)
        assert words.text == "of the chief"
        assert not made.mirror.is_open  # it copies nothing
    assert place.fetched() == 2


def test_a_deleted_commit_is_not_uploaded(place):
    place.directory.mkdir()
    directory, files = str(place.directory), LocalFiles()
    made = standalone_mirror.StandaloneMirror(
        place.store, directory, LOCAL, lambda: None, files
    )
    made.begin()
    made.mirror.add(catalog.read_at(str(place.directory / "gone")))
    made._end()


# --- under the supervisor ------------------------------------------------------------

LOOP = """
import random
import tfpreempt
from tfpreempt.states import JsonState, PythonRandomState, StepCounter
step, drawn = StepCounter(), JsonState("drawn", [])
rng = random.Random(7)
generator = PythonRandomState("rng", rng)
for state in (step, drawn, generator):
    tfpreempt.load_state(state)
tell(f"start-{os.environ['RUN']}", str(step.value))
while step.value < int(os.environ["STEPS"]):
    drawn.value.append(rng.random())
    if step.increment() % 4 == 0:
        tfpreempt.save_all_states()
tell("result", json.dumps(drawn.value))
assert "tensorflow" not in sys.modules
"""


@pytest.mark.slow
def test_a_plain_loop_outlives_its_disk(supervised, tmp_path):  # noqa: F811
    for run, steps in enumerate((10, 20)):
        code, _, err = supervised.run(
            LOOP,
            "--mirror-dir",
            f"file://{tmp_path}/there",
            command=[sys.executable, "worker.py"],
            environment={"RUN": str(run), "STEPS": str(steps)},
        )
        assert code == 0, err + supervised.log(0)
        shutil.rmtree(tmp_path / "ckpt")
    assert [supervised.wait_told(f"start-{n}") for n in range(2)] == ["0", "8"]
    rng = random.Random(7)
    result = json.loads(supervised.wait_told("result"))
    assert result == [rng.random() for _ in range(20)]
