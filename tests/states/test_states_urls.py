"""Named States without a handler, in a directory that only TensorFlow can reach."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfpreempt
from tests.checkpoint.fakes import Words
from tfpreempt import errors
from tfpreempt.checkpoint.state import REGISTRY
from tfpreempt.checkpoint.state_loader import StateLoader
from tfpreempt.core.cluster import Cluster
from tfpreempt.handler import this_process
from tfpreempt.states import StepCounter, registered
from tfpreempt.states.alone import StatesAlone
from tfpreempt.testing.clock import FakeClock

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]


@pytest.fixture
def url(tmp_path, monkeypatch):
    place = f"ram:/{tmp_path}/run"
    for name in ("TF_CONFIG", "TFPREEMPT_REMOTE_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", place)
    for left in REGISTRY.in_order():
        left.unregister()
    restart(monkeypatch)
    with this_process.new_process():
        yield place


def restart(monkeypatch):
    monkeypatch.setattr(registered, "_alone", {})


def load(state):
    state.text = ""
    return tfpreempt.load_state(state), state.text


def test_states_and_shards_and_back(url, monkeypatch):
    counter = StepCounter()
    shared, own = Words("shared", "a"), Words("own", "b", per_worker=True)
    assert load(shared) == (False, "")
    for text in ("one", "two", "three"):
        shared.text, own.text = text, text + ", own"
        counter.increment()
        path = tfpreempt.save_all_states()
        assert path.startswith(f"{url}/commit-")
    assert load(shared) == (True, "three")
    counter.value = 0
    restart(monkeypatch)
    assert tfpreempt.load_state(counter)
    assert (load(shared), load(own)) == ((True, "three"), (True, "three, own"))
    assert counter.value == 3
    commits = [n for n in tf.io.gfile.listdir(url) if n.startswith("commit-")]
    assert len(commits) == 2
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", url + "/")
    assert load(shared) == (True, "three")
    assert len(registered._alone) == 1


def test_a_damaged_commit_is_passed_over(url, monkeypatch, caplog):
    words = Words("words")
    paths = []
    for text in ("one", "two"):
        words.text = text
        paths.append(tfpreempt.save_all_states())
    with tf.io.gfile.GFile(f"{paths[1]}/states/words.state", "wb") as file:
        file.write(b"tw0")
    restart(monkeypatch)
    assert load(words) == (True, "one")
    assert "words.state" in caplog.text


def test_one_state_alone(url):
    words = Words("words", "commit")
    tfpreempt.save_all_states()
    for text in ("file", "newer file"):
        words.text = text
        tfpreempt.save_state(words, url)
        assert load(words) == (True, text)
    words.text = "newer commit"
    tfpreempt.save_all_states()
    assert load(words) == (True, "newer commit")


def test_a_commit_that_stays_where_it_was_staged_is_not_waited_for(url, caplog):
    class Hasty(FakeClock):
        def monotonic(self):
            self.advance(100.0)  # any wait is over at the second look
            return super().monotonic()

    words = Words("words", "one")
    path = tfpreempt.save_all_states()
    loader = StateLoader(url, Cluster(worker=1, jobs=(("worker", 2),)), clock=Hasty())
    loader.expect(path)
    words.text = ""
    assert loader.load(words)
    assert words.text == "one"
    assert "was not committed within" not in caplog.text


def test_several_workers(url):
    shared = Words("shared", "a")
    for index in range(2):
        cluster = Cluster(worker=index, jobs=(("worker", 2),))
        StatesAlone(url, cluster).save(url)
    assert load(shared) == (True, "a")


@pytest.mark.parametrize("place", ["nowhere://bucket/run", "ram://a/../b"])
def test_a_place_that_cannot_be_one(place, url, monkeypatch):
    words = Words("words", "x")
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", place)
    for call in (
        tfpreempt.save_all_states,
        lambda: tfpreempt.load_state(words),
        lambda: tfpreempt.save_state(words, place),
    ):
        with pytest.raises(errors.ConfigurationError, match=place):
            call()
