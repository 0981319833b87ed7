"""Mirrors that end with their test, and disks that fail."""

from __future__ import annotations

import errno
import os

import pytest

from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror.mirror import Mirror


class Journal(list):
    """Records the faults."""

    def record(self, fault):
        self.append(fault)


@pytest.fixture
def broken(monkeypatch):
    """Makes a file unreadable, as on a failing disk, until the file is mended."""
    paths = {}
    real = os.open

    def open_unless_broken(path, *args, dir_fd=None, **kwargs):
        below = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if os.path.join(below, path) in paths:
            number = paths[os.path.join(below, path)]
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, dir_fd=dir_fd, **kwargs)

    def break_it(path, number=errno.EIO):
        paths[str(path)] = number

    monkeypatch.setattr(os, "open", open_unless_broken)
    break_it.mend = paths.clear
    return break_it


@pytest.fixture
def make_mirror(store):
    made = []

    def make(place=store, told=None, begins=("", None), **kwargs):
        most = kwargs.pop("max_to_keep", 2)
        policy = kwargs.pop("policy", None) or RetentionPolicy(max_to_keep=most)
        made.append(Mirror(place, policy, **kwargs))
        made[-1].begin(*begins, (Journal() if told is None else told).record)
        return made[-1]

    yield make
    for mirror in made:
        mirror.close()
