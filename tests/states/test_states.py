"""save_all_states(), save_state(), load_state() in one process, without TensorFlow."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import tfpreempt
from tests.checkpoint.fakes import Words
from tests.fakes.process import new_process
from tests.replays import replaying
from tfpreempt import errors
from tfpreempt.checkpoint.state.state import REGISTRY, State
from tfpreempt.states import JsonState, StepCounter, api

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A process that was just started, in a directory of its own."""
    for name in (
        *("TF_CONFIG", "TFPREEMPT_NUM_RESTARTS", "SLURM_RESTART_COUNT"),
        "TFPREEMPT_MIRROR_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    restart(monkeypatch)
    for left in REGISTRY.in_order():  # by a test that failed, in its traceback
        left.unregister()
    with new_process():
        yield tmp_path / "ckpt"


def restart(monkeypatch, number=None):
    """Resets the state of this process, like a new process."""
    monkeypatch.setattr(api, "_alone", {})
    if number is not None:
        monkeypatch.setenv("TFPREEMPT_NUM_RESTARTS", str(number))


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- commits -------------------------------------------------------------------------


def test_all_states_and_back(directory, monkeypatch):
    words, numbers = Words("words", "one"), JsonState("numbers", [1.5, {"a": None}])
    path = tfpreempt.save_all_states()
    assert path == str(directory / "1")
    assert sorted(os.listdir(directory / "1" / "states")) == [
        "numbers.state",
        "words.state",
    ]
    words.text, numbers.value = "two", None
    assert tfpreempt.save_all_states() == str(directory / "2")
    words.text = "three"
    restart(monkeypatch)
    assert tfpreempt.load_state(words)
    assert tfpreempt.load_state(numbers)
    assert (words.text, numbers.value) == ("two", None)
    assert not (directory / ".tfpreempt-staging").exists()


def test_a_plain_state_is_saved_and_loaded(directory):
    plain = State("x")
    assert not tfpreempt.load_state(plain)
    tfpreempt.save_all_states()
    assert tfpreempt.load_state(plain)
    tfpreempt.save_state(plain, directory)
    assert tfpreempt.load_state(plain)


def test_the_only_step_counter_names_the_commit(directory):
    counter = StepCounter(value=40)
    counter.increment(2)
    assert tfpreempt.save_all_states() == str(directory / "42")
    assert tfpreempt.save_all_states() == str(directory / "42.2")
    other = StepCounter("other", 7)
    assert tfpreempt.save_all_states() == str(directory / "43")
    assert other.value == 7


def test_no_variable_and_no_state(directory, monkeypatch):
    with pytest.raises(errors.UsageError, match="keep a reference"):
        tfpreempt.save_all_states()
    assert not directory.exists()


def test_without_a_directory_states_are_synced_and_not_saved(
    directory, tmp_path, monkeypatch, caplog
):
    calls = []

    class Synced(Words):
        def sync(self):
            calls.append(self.name)

    monkeypatch.delenv("TFPREEMPT_CHECKPOINT_DIR")
    api._warn_of_no_directory.cache_clear()
    words = [Synced(name, "one") for name in ("b", "a")]
    for _ in range(2):
        assert tfpreempt.save_all_states() is None
    assert calls == ["a", "b"] * 2
    (said,) = warnings(caplog)
    assert "saves nothing" in said
    assert "TFPREEMPT_CHECKPOINT_DIR is not set" in said
    tfpreempt.save_state(words[0], None)
    tfpreempt.save_state(words[0], None, sync=False)
    assert calls[4:] == ["b"]
    assert not tfpreempt.load_state(words[0])
    assert os.listdir(tmp_path) == []


def test_a_missing_or_an_empty_directory_is_false(directory, caplog):
    words = Words("words", "one")
    assert not tfpreempt.load_state(words)
    directory.mkdir()
    assert not tfpreempt.load_state(words)
    assert (words.text, warnings(caplog)) == ("one", [])


def test_a_url_that_lost_a_slash_is_no_directory(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", "gs:/bucket/run")
    words = Words("words")
    for _ in range(2):
        with pytest.raises(errors.ConfigurationError, match="pass the URL as a str"):
            tfpreempt.save_all_states()
    assert os.listdir(tmp_path) == []
    del words


def test_a_state_that_the_commit_lacks(directory, caplog):
    words = Words("words", "one")
    tfpreempt.save_all_states()
    late = Words("late", "own")
    assert not tfpreempt.load_state(late)
    assert late.text == "own"
    assert "has no State 'late'" in warnings(caplog)[0]
    assert words.text == "one"


def test_a_corrupt_commit_is_skipped(directory, monkeypatch, caplog):
    words = Words("words", "one")
    tfpreempt.save_all_states()
    words.text = "two"
    tfpreempt.save_all_states()
    damage(directory / "2" / "states" / "words.state")
    restart(monkeypatch)
    assert tfpreempt.load_state(words)
    assert words.text == "one"
    assert tfpreempt.load_state(words)
    assert len(warnings(caplog)) == 1  # said once
    assert "words.state" in warnings(caplog)[0]
    damage(directory / "1" / "states" / "words.state")
    restart(monkeypatch)
    words.text = "mine"
    with pytest.raises(errors.CheckpointCorruptedError, match="is intact"):
        tfpreempt.load_state(words)
    assert words.text == "mine"


def test_a_commit_is_verified_once(directory, monkeypatch):
    states = [Words(name, name) for name in "abc"]
    tfpreempt.save_all_states()
    from tfpreempt.checkpoint.restore import restore

    calls = []
    verify = restore.verify
    monkeypatch.setattr(restore, "verify", lambda c: (calls.append(c), verify(c)))
    assert all(tfpreempt.load_state(state) for state in states)
    assert len(calls) == 1


def test_foreign_checkpoints_do_not_hide_commits(directory):
    words = Words("words", "one")
    tfpreempt.save_all_states()
    (directory / "ckpt-9.index").write_bytes(b"somebody else's")
    words.text = ""
    assert tfpreempt.load_state(words)
    assert words.text == "one"


def test_a_worker_that_loads_from_two_commits_is_warned(directory, monkeypatch, caplog):
    def become(worker):
        config = {
            "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
            "task": {"type": "worker", "index": worker},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        monkeypatch.setattr(
            "tfpreempt.checkpoint.directory.head._PROCESS", f"worker {worker}"
        )

    words = Words("words", "one")
    become(0)
    tfpreempt.save_all_states()
    become(1)
    assert load(words) == load(words) == "one"
    assert warnings(caplog) == []
    become(0)
    words.text = "two"
    tfpreempt.save_all_states()
    become(1)
    assert load(words) == load(words) == "two"
    (said,) = warnings(caplog)
    assert "while worker 1 loaded its States" in said
    tfpreempt.save_all_states()  # of worker 1: nothing is refused


def test_a_state_in_a_file_is_not_reported_as_missing(directory, caplog):
    late = Words("late", "own", registry=None)
    tfpreempt.save_state(late, directory)
    words = Words("words", "one")
    tfpreempt.save_all_states()
    assert load(late) == "own"
    assert warnings(caplog) == []
    del words


def test_lost_restarts_are_logged(directory, monkeypatch, caplog):
    words = Words("words", "one")
    restart(monkeypatch, 2)
    tfpreempt.save_all_states()
    manifest = json.loads((directory / "1" / "MANIFEST.json").read_text())
    assert manifest["metadata"]["restart"] == 2
    restart(monkeypatch, 3)
    assert tfpreempt.load_state(words)
    assert warnings(caplog) == []
    restart(monkeypatch, 4)
    assert tfpreempt.load_state(words)
    assert tfpreempt.load_state(words)
    (said,) = warnings(caplog)
    assert "this is restart 4" in said
    assert "written by restart 2" in said


# --- one State alone -----------------------------------------------------------------


def test_one_state_alone(directory):
    words = Words("words", "one", registry=None)
    shard = Words("shard", "mine", per_worker=True, registry=None)
    for state in (words, shard):
        tfpreempt.save_state(state, directory)
    assert (directory / "states" / "words.state").exists()
    assert (directory / "worker-0000" / "shard.state").exists()
    words.text = shard.text = ""
    assert tfpreempt.load_state(words)
    assert tfpreempt.load_state(shard)
    assert (words.text, shard.text) == ("one", "mine")


def test_the_newer_of_file_and_commit_is_taken(directory):
    words = Words("words", "file")
    tfpreempt.save_state(words, directory)
    words.text = "commit"
    tfpreempt.save_all_states()
    assert load(words) == "commit"
    words.text = "newer file"
    tfpreempt.save_state(words, directory)
    assert load(words) == "newer file"
    late = Words("late", "old file", registry=None)
    tfpreempt.save_state(late, directory)
    tfpreempt.save_all_states()
    assert load(late) == "old file"  # the commit lacks it


def test_a_corrupt_file_is_skipped(directory, caplog):
    words = Words("words", "file")
    tfpreempt.save_state(words, directory)
    path = directory / "states" / "words.state"
    whole = path.read_bytes()
    damage(path)
    with pytest.raises(errors.CheckpointCorruptedError, match=r"words\.state"):
        tfpreempt.load_state(words)
    words.text = "commit"
    tfpreempt.save_all_states()
    for bad in (whole[:-1], whole[:5], b"", b"x" * 40, whole + b"x"):
        path.write_bytes(bad)
        assert load(words) == "commit"
    path.write_bytes(whole)
    assert "this checkpoint is skipped" in warnings(caplog)[0]


def load(state):
    state.text = ""
    assert tfpreempt.load_state(state)
    return state.text


def test_sync_is_requested(directory):
    calls = []

    class Synced(Words):
        def sync(self):
            calls.append(self.name)

    states = [Synced(name, "x") for name in ("b", "a")]
    tfpreempt.save_state(states[0], directory)
    tfpreempt.save_state(states[0], directory, sync=False)
    assert calls == ["b"]
    tfpreempt.save_all_states()
    assert calls == ["b", "a", "b"]


# --- errors name the State -----------------------------------------------------------


class Broken(Words):
    """Fails in one method."""

    def __init__(self, method, **kwargs):
        super().__init__("broken", **kwargs)
        self.method = method

    def _fail(self, method):
        if self.method == method:
            raise KeyError(f"in {method}")

    def save(self, fileobj):
        fileobj.write(b"half")
        self._fail("save")

    def load(self, fileobj):
        self._fail("load")

    def sync(self):
        self._fail("sync")


def test_a_missing_directory_is_not_created_again(directory):
    words = Words("words", "one")
    tfpreempt.save_all_states()
    directory.rename(directory.with_name("away"))
    words.text = "two"
    with pytest.raises(errors.SaveError, match="now leads to"):
        tfpreempt.save_all_states()
    assert not directory.exists()
    directory.with_name("away").rename(directory)
    tfpreempt.save_all_states()


@pytest.mark.parametrize("method", ["save", "sync"])
def test_a_state_that_fails_to_save_is_named_and_nothing_is_lost(method, directory):
    words = Words("words", "one")
    tfpreempt.save_all_states()
    broken = Broken(method)
    words.text = "two"
    with pytest.raises(KeyError, match=f"in {method}") as caught:
        tfpreempt.save_all_states()
    assert f"{method}() of <Broken 'broken' replicated>" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as caught:
        tfpreempt.save_state(broken, directory)
    assert "'broken'" in caught.value.__notes__[0]
    ours = [".tfpreempt-directory", ".tfpreempt-lease"]
    assert sorted(os.listdir(directory)) == [*ours, "1"]
    assert load(words) == "one"
    broken.unregister()
    tfpreempt.save_all_states()
    assert sorted(os.listdir(directory)) == [*ours, "1", "2"]


def test_a_state_that_fails_to_load_is_named(directory):
    broken = Broken("load")
    tfpreempt.save_all_states()
    with pytest.raises(KeyError) as caught:
        tfpreempt.load_state(broken)
    assert "load() of <Broken 'broken' replicated>" in caught.value.__notes__[0]


# --- the life of a State -------------------------------------------------------------


def test_a_name_is_free_again(directory):
    words = Words("words", "one")
    with pytest.raises(ValueError, match="'words'"):
        JsonState("words")
    gone = weakref.ref(words)
    tfpreempt.save_all_states()
    tfpreempt.load_state(words)
    del words
    gc.collect()
    assert gone() is None
    kept = JsonState("words", 1)
    kept.unregister()
    again = JsonState("words", 2)
    assert REGISTRY.in_order() == (again,)


# --- without TensorFlow --------------------------------------------------------------


@pytest.mark.slow  # starts an interpreter
def test_nothing_imports_tensorflow(tmp_path):
    program = """
import sys, tfpreempt
from tfpreempt.states import (
    ArrayDictState, JsonState, NumpyRandomState, PythonRandomState, StepCounter)
states = [JsonState("a"), StepCounter(), ArrayDictState("b"), NumpyRandomState(),
          PythonRandomState()]
assert not tfpreempt.load_state(states[0])
tfpreempt.save_state(states[0], sys.argv[1])
print(tfpreempt.save_all_states(), tfpreempt.num_restarts())
assert all(map(tfpreempt.load_state, states))
sys.exit(bool({"tensorflow", "keras"} & sys.modules.keys()))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= {"TFPREEMPT_CHECKPOINT_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / '0'} 0\n"


@pytest.mark.parametrize("given", ["mine", State, None, Path("/dir")])
def test_only_a_state_is_accepted(given, tmp_path):
    with pytest.raises(errors.ConfigurationError, match=r"a tfpreempt\.State"):
        tfpreempt.load_state(given)
    with pytest.raises(errors.ConfigurationError, match=r"a tfpreempt\.State"):
        tfpreempt.save_state(given, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_replay_saves_in_the_copy(directory, tmp_path, monkeypatch):
    """Also below the directory, while the run is active, and through a link."""
    words = JsonState("words", "of the run")
    api.save_state(words, directory)  # the process keeps the lease of the run
    best, link, elsewhere = directory / "best", tmp_path / "link", tmp_path / "other"
    api.save_state(words, best)
    link.symlink_to(directory)
    files = {each: each.stat().st_mtime_ns for each in directory.rglob("*")}
    copy = tmp_path / "copy"
    monkeypatch.setenv("TFPREEMPT_CHECKPOINT_DIR", str(copy))
    monkeypatch.setenv("TFPREEMPT_MIRROR_DIR", f"file://{tmp_path}/mirror")
    words.value = "of the replay"
    with replaying(directory, copy):
        restart(monkeypatch)
        for each in (directory, best, link, elsewhere):
            api.save_state(words, each)
        api.save_all_states()
        words.value = ""
        assert api.load_state(words)
    assert words.value == "of the replay"
    assert {each: each.stat().st_mtime_ns for each in directory.rglob("*")} == files
    for each in (copy, copy / "best", elsewhere):
        assert (each / "states" / "words.state").exists()
    assert not (tmp_path / "mirror").exists()
