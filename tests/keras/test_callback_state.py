"""Rules about callbacks that need no Keras: values, matching, warnings, conflicts."""

from __future__ import annotations

import collections
import functools
import json
import logging
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from tests.keras.both_lines import travelled
from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import encode
from tfpreempt.checkpoint.state.state import State
from tfpreempt.keras.callbacks import callback_list, callback_state
from tfpreempt.keras.fit_record import EncodedValue


class Callback:
    """The attributes that Keras' base class sets."""

    def __init__(self):
        self.params = None
        self._model = None

    @property
    def model(self):
        return self._model


Callback.__module__ = "keras.src.callbacks.callback"


class MonitorCallback(Callback):
    def __init__(self, monitor="loss"):
        super().__init__()
        self.monitor = monitor
        self.best = None


MonitorCallback.__module__ = "keras.src.callbacks.monitor_callback"


class ModelCheckpoint(MonitorCallback):
    def __init__(self, filepath):
        super().__init__()
        self.filepath = filepath


ModelCheckpoint.__module__ = "tf_keras.src.callbacks"


class BackupAndRestore(Callback):
    def __init__(self, backup_dir):
        super().__init__()
        self.backup_dir = backup_dir


BackupAndRestore.__module__ = "keras.src.callbacks.backup_and_restore"


class Remembering(Callback):
    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, state):
        self.value = state


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({"a": [0, {1, 2}]}, r"get_state\(\)\['a'\]\[1\] is \{1, 2\} \(set\)"),
        ([np.array([None])], r"get_state\(\)\[0\] is an array of dtype object"),
        (np.zeros(2, "i4,f4"), r"array of dtype \[\('f0'"),
        (b"x" * 99, r"b'x+\.\.\. \(bytes\)"),
    ],
)
def test_a_state_that_cannot_be_kept_is_named(value, part):
    with pytest.raises(errors.SaveError, match=part) as caught:
        callback_state.capture([Callback(), Remembering(value)])
    assert f"{__name__}.Remembering" in str(caught.value)


def test_a_commit_leaves_out_a_callback_that_fails_and_names_it(caplog):
    values = [np.zeros(2), [np.zeros(3), {1, 2}], np.ones(2)]
    saved = callback_state.capture(
        [Remembering(value) for value in values], leaves_out=True
    )
    (record,) = caplog.records
    assert "Remembering#2. After a restart from this commit" in record.getMessage()
    assert "(set)" in record.getMessage()
    fresh = [Remembering(), Remembering("kept"), Remembering()]
    callback_state.restore(fresh, travelled(saved))
    assert [list(fresh[0].value), fresh[1].value] == [[0, 0], "kept"]
    assert list(fresh[2].value) == [1, 1]


# --- hooks and matching --------------------------------------------------------------


def test_hooks_are_matched_by_class_and_order(caplog):
    saved = [Remembering(1), Callback(), Remembering([np.float32(2)])]
    states = travelled(callback_state.capture(saved))
    fresh = [Remembering(), Remembering(), Callback()]
    callback_state.restore(fresh, states)
    assert [callback.value for callback in fresh[:2]] == [1, [2]]
    assert type(fresh[1].value[0]) is np.float32
    assert not caplog.records


def test_missing_and_new_callbacks_are_named(caplog):
    class New(Remembering):
        pass

    states = callback_state.capture([Remembering(1), Remembering(2)])
    fresh = [Remembering(), New()]
    callback_state.restore(fresh, travelled(states))
    assert fresh[0].value == 1
    new, missing = (record.getMessage() for record in caplog.records)
    assert "no state for the callback" in new
    assert "New" in new
    assert "Remembering#2" in missing
    assert "is ignored" in missing


def test_a_callback_that_lost_its_hooks_goes_on_without():
    states = callback_state.capture([Remembering(1)])

    class Plain(Callback):
        pass

    Plain.__module__, Plain.__qualname__ = Remembering.__module__, "Remembering"
    callback_state.restore([Plain()], states)


def test_a_subclass_keeps_what_its_base_and_its_hooks_remember():
    class Mine(ModelCheckpoint, Remembering):
        pass

    def make():
        one = Mine("x.keras")
        one.value = None
        return one

    saved, fresh = make(), make()
    saved.best, saved.value = 0.1, {"n": 3}
    callback_state.restore([fresh], travelled(callback_state.capture([saved])))
    assert (fresh.best, fresh.value) == (0.1, {"n": 3})


@pytest.mark.parametrize(
    ("callback", "key"),
    [
        (ModelCheckpoint("model.keras"), "tf_keras.ModelCheckpoint"),
        (BackupAndRestore("backup"), "keras.BackupAndRestore"),
        (Callback(), "keras.Callback"),
    ],
)
def test_a_commit_sets_no_paths_of_callbacks(callback, key):
    """Keras writes to these paths, and deletes the directory of a backup at the end."""
    path, before = "/home/user/thesis", dict(vars(callback))
    state = dict.fromkeys(("filepath", "backup_dir", "__class__", "model"), path)
    entry = {"keras": encode({**state, "best": 0.5})}
    callback_state.restore([callback], EncodedValue(header={key: entry}))
    best = {"best": 0.5} if "best" in before else {}
    assert vars(callback) == {**before, **best}


def test_a_commit_sets_no_further_times_of_a_progress_bar():
    class ProgbarLogger(Callback):
        target, progbar = None, Callback()

    ProgbarLogger.__module__ = "keras.src.callbacks.progbar_logger"
    ProgbarLogger.__qualname__ = "ProgbarLogger"
    names, path = ("_values", "file", "_start"), "/home/user/thesis"
    state = {"target": 5, "seen": 1, "bar": dict.fromkeys(names, path)}
    state["elapsed"] = dict.fromkeys(("_start", "width"), 1.0)
    saved = {"keras.ProgbarLogger": {"keras": encode(state)}}
    logger = ProgbarLogger()
    callback_state.restore([logger], EncodedValue(header=saved))
    kept = {"params", "_model", "target", "_values", "_start"}
    assert set(vars(logger.progbar)) == kept


# --- what is not kept ----------------------------------------------------------------


class Counting(Callback):
    def __init__(self, **values):
        super().__init__()
        vars(self).update(values)


class Counter(State):
    def save(self, fileobj):
        pass

    def load(self, fileobj):
        pass


def net(variables=()):
    """Something that can be called and holds variables, as a model does."""
    kind = type("Net", (), {"__call__": print, "variables": variables})
    return kind()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"fn": len, "part": functools.partial(len, ""), "cls": int, "module": json},
        {"_chief_worker_only": True, "_supports_tf_logs": True, "params": {}},
        {"path": "x", "counter": Counter("c", registry=None)},
        {"get_state": lambda: 1, "set_state": print, "count": 1},
    ],
)
def test_callbacks_that_lose_nothing(values):
    assert callback_list.unsupported([Counting(**values)]) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"losses": [], "fn": len, "last": {}}, "(losses, last)"),
        ({"ema": net()}, "(ema)"),
        ({"get_state": lambda: 1}, "has only get_state; expected"),
    ],
)
def test_callbacks_that_lose_something_are_named(values, named):
    (text,) = callback_list.unsupported([Callback(), Counting(**values)])
    assert text.startswith(f"{__name__}.Counting (")
    assert named in text


def test_numbers_and_texts_that_only_the_constructor_sets_are_settings():
    class Base(Callback):
        def __init__(self):
            super().__init__()
            self.every, self.name, self.sizes = 10, "run", (1, (2.5, None))
            self.count, self.words = 0, []

        def on_epoch_end(self, epoch, logs=None):
            self.count += 1

    class Mine(Base):
        def __init__(self):
            super().__init__()
            self.rate = 0.1

    (text,) = callback_list.unsupported([Mine()])
    assert text.endswith("Mine (count, words)")


def test_settings_that_other_code_changes_are_named():
    callback = Counting(alpha=0.1, beta=0.2)
    start = {"alpha": 0.1, "beta": 0.2}
    assert callback_list.unsupported([callback], start) == []
    callback.alpha = 0.2
    vars(callback)["new"] = 1
    (text,) = callback_list.unsupported([callback], start)
    assert text.endswith("Counting (alpha, new)")


def test_the_model_itself_is_nothing_to_lose():
    callback = Counting(net=net())
    callback._model = callback.net
    assert callback_list.unsupported([callback]) == []


def test_of_a_subclass_only_what_it_adds_is_named():
    class Mine(ModelCheckpoint):
        def __init__(self):
            super().__init__("x.keras")
            self.saves = []

    (text,) = callback_list.unsupported([ModelCheckpoint("y"), Mine()])
    assert text.endswith("Mine (saves)")


def test_the_warning_names_attributes_because_the_rest_is_saved(caplog):
    class Mine(ModelCheckpoint):
        def __init__(self):
            super().__init__("x.keras")
            self.saves = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.saves += 1

    holder = types.SimpleNamespace(callbacks=[Mine()])
    callback_list.UserCallbacks(holder, types.SimpleNamespace(), "ckpt")
    (record,) = caplog.records
    begin, _, rest = record.getMessage().partition(": ")
    assert begin == "these callbacks have attributes that are not saved"
    assert "Mine (saves). After a restart, the attributes have" in rest


def test_defaults_of_a_class_that_training_changes_are_named():
    """Attributes that no method assigns are constant."""

    class Base(Callback):
        seen, best, rate = 0, math.inf, 0.1
        words, last = [], collections.deque()
        NAMES, pair = ["a", "b"], ("a", "b")

        def on_epoch_end(self, epoch, logs=None):
            self.seen += 1
            self.model.stop_training = True

    class Mine(Base):
        @property
        def twice(self):
            return 2 * self.best

        def on_train_batch_end(self, batch, logs=None):
            self.best = min(self.best, logs["loss"])

    (text,) = callback_list.unsupported([Mine()])
    assert text.endswith("Mine (seen, best, words, last)")

    class Kept(Mine):
        kept = Counter("kept", registry=None)

    assert callback_list.unsupported([Kept()]) == []


def test_a_callback_without_attributes_at_all():
    class Slotted:
        __slots__ = ()

    assert callback_list.unsupported([Slotted()]) == []
    assert callback_state.capture([Slotted()]).header == {}


# --- directories ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ours/m.keras",
        "ours/{epoch}.keras",
        "ours/sub/a-{epoch:02d}/m",
        "link/m",
        "ours",
    ],
)
def test_checkpoints_in_our_directory_are_refused(tmp_path, name):
    ours = tmp_path / "ours"
    ours.mkdir()
    (tmp_path / "link").symlink_to(ours)
    theirs = str(tmp_path / name)
    with pytest.raises(errors.ConfigurationError) as caught:
        callback_list.conflicts([ModelCheckpoint(theirs)], f"{ours}{os.sep}")
    assert repr(theirs) in str(caught.value)
    assert repr(f"{ours}{os.sep}") in str(caught.value)
    assert "two separate directories" in str(caught.value)


@pytest.mark.multiprocess
def test_checkpoints_in_a_mount_of_our_directory_are_refused(tmp_path):
    script = 'mount --bind "$1" "$2" && exec "$0" -c "$3" "$1" "$2"'
    program = (
        "import sys\n"
        "from tests.keras.test_callback_state import ModelCheckpoint, callback_list\n"
        "theirs = ModelCheckpoint(f'{sys.argv[2]}/m.keras')\n"
        "callback_list.conflicts([theirs], sys.argv[1])\n"
    )
    ours, alias = tmp_path / "ours", tmp_path / "alias"
    ours.mkdir()
    alias.mkdir()
    alone = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts are possible here")
    done = subprocess.run(
        [*alone, "sh", "-c", script, sys.executable, ours, alias, program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "ConfigurationError: tf_keras.ModelCheckpoint has filepath=" in done.stderr


@pytest.mark.parametrize("name", ["m.keras", "ours-{epoch}/m.keras", "{epoch}/m", "o"])
def test_checkpoints_elsewhere_are_fine(tmp_path, name):
    callbacks = [ModelCheckpoint(str(tmp_path / name)), Callback()]
    callback_list.conflicts(callbacks, tmp_path / "ours")


def test_remote_directories_are_compared_too():
    callback_list.conflicts([ModelCheckpoint("gs://b/theirs/m")], "gs://b/ours")
    with pytest.raises(errors.ConfigurationError, match="'gs://b/ours/m'"):
        callback_list.conflicts([ModelCheckpoint("gs://b/ours/m")], "gs://b/ours")


def test_a_backup_directory_that_is_deleted_must_not_hold_ours(tmp_path):
    callback_list.conflicts([BackupAndRestore(tmp_path / "b")], tmp_path / "ours")
    for place in (tmp_path, tmp_path / "ours", tmp_path / "ours" / "b"):
        with pytest.raises(errors.ConfigurationError, match="backup_dir="):
            callback_list.conflicts([BackupAndRestore(place)], tmp_path / "ours")


def test_backup_and_restore_is_named_and_left_alone(tmp_path, caplog):
    callbacks = [Callback(), BackupAndRestore("theirs")]
    with caplog.at_level(logging.WARNING):
        callback_list.conflicts(callbacks, tmp_path)
    (record,) = caplog.records
    assert "keras.BackupAndRestore (backup_dir='theirs')" in record.getMessage()
    assert "Remove keras.BackupAndRestore" in record.getMessage()
    assert callback_list.unsupported(callbacks) == []
    assert callback_state.capture(callbacks).header == {}
