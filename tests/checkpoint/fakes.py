"""Contents without TensorFlow: a few bytes per step, in the own and the flat form."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tfpreempt.checkpoint.directory import retention
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.checkpoint.state.contents import Contents
from tfpreempt.checkpoint.state.state import State, StateRegistry
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.storage.files import LocalFiles


class Later(SystemClock):
    """A clock that is far ahead, so that idle staging directories count as orphaned."""

    def wall(self):
        return super().wall() + retention.QUIET_SECONDS + 60


def content(step):
    return (b"%d;" % step) * 1000


class OwnContents(Contents):
    """Writes ckpt.index and two data files into the staging directory."""

    def __init__(self, is_chief=True):
        self.is_chief = is_chief
        self.restored_from = None
        self.states = []

    def capture(self, save, *args, **kwargs):
        super().capture(save, *args, **kwargs)
        for name in names("ckpt") if self.is_chief else ():
            put(os.path.join(save.staging, name), content(save.step))

    def restore(self, prefix, with_data=True, is_partial=False):
        self.restored_from = pathlib.Path(prefix + ".index").read_bytes()


class FlatContents(OwnContents):
    """Writes ckpt-N.* in place, as a CheckpointManager does, and keeps one."""

    def __init__(self, directory, before_file=lambda name: None):
        super().__init__()
        self.directory = directory
        self.before_file = before_file
        self.kept = []

    def capture(self, save, *args, **kwargs):
        step = save.step
        prefix = os.path.join(self.directory, f"ckpt-{step}")
        save.create_staging(prefix)
        for name in reversed(names(f"ckpt-{step}")):
            self.before_file(name)
            put(os.path.join(self.directory, name), content(step))
        self.kept.append(prefix)
        save.prefix = prefix

    def committed(self):
        while len(self.kept) > 1:
            prefix = self.kept.pop(0)
            for name in names(prefix):
                pathlib.Path(name).unlink()


class FunctionContents(OwnContents):
    """Writes ckpt-N.*, and reports the prefix afterwards, like a save_fn."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    def capture(self, save, *args, **kwargs):
        prefix = os.path.join(self.directory, f"ckpt-{save.step}")
        for name in names(prefix):
            pathlib.Path(name).write_bytes(content(save.step))
        save.create_staging()
        save.prefix = prefix


def put(path, data):
    """Writes a file as TensorFlow does: a name that is there is replaced."""
    pathlib.Path(f"{path}.tempstate1").write_bytes(data)
    os.replace(f"{path}.tempstate1", path)


def names(prefix):
    return [f"{prefix}.index", *(f"{prefix}.data-0000{i}-of-00002" for i in range(2))]


class Words(State):
    """A State of one string."""

    def __init__(self, name, text="", **kwargs):
        super().__init__(name, **kwargs)
        self.text = text

    def save(self, fileobj):
        fileobj.write(self.text.encode())

    def load(self, fileobj):
        self.text = fileobj.read().decode()


def cluster(worker, world):
    return Cluster(worker=worker, jobs=(("worker", world),))


def open_directory(
    path,
    contents=None,
    *,
    worker=0,
    world=1,
    registry=None,
    random_state=None,
    files=None,
    lease=None,
    clock=None,
    **kwargs,
):
    if "max_to_keep" in kwargs:
        kwargs["retention"] = RetentionPolicy(max_to_keep=kwargs.pop("max_to_keep"))
    os.makedirs(path, exist_ok=True)
    files = files or LocalFiles(str(path))
    return Directory(
        path=str(path),
        cluster=cluster(worker, world),
        contents=contents or Contents(),
        random_state=random_state,
        registry=registry or StateRegistry(),
        files=files if lease is None else FencedFiles(files, lease),
        lease=lease,
        clock=clock or SystemClock(),
        **kwargs,
    )


def capture_part(directory, step, attempt, cancel_token=None, *args, **kwargs):
    save = Save(directory, step, attempt, cancel_token)
    save.capture(*args, **kwargs)
    return save


def write_part(directory, step, attempt, *args, **kwargs):
    save = capture_part(directory, step, attempt, None, *args, **kwargs)
    save.write()
    return save


def save(directory, step, workers=(0,), attempt=None, **kwargs):
    part = write_part(directory, step, attempt or f"run-{step}", **kwargs)
    return part.publish("save", workers)


def watch_searches(
    monkeypatch: pytest.MonkeyPatch, on_search: Callable[[], object]
) -> None:
    """Calls a function whenever TensorFlow searches a Checkpoint for its objects."""
    import tensorflow as tf

    kind = type(tf.train.Checkpoint()._saver)
    find = kind._gather_serialized_tensors

    def search(*args: Any) -> Any:
        on_search()
        return find(*args)

    monkeypatch.setattr(kind, "_gather_serialized_tensors", search)
