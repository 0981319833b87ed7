"""Small local commits, and the commits that a reader finds in a store."""

from __future__ import annotations

import threading

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.mirror import upload

PATIENCE = 20.0  # seconds after which a hanging test fails


class Gate:
    """A store whose writes wait until the test releases them."""

    def __init__(self, store):
        self.store = store
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def put_if_absent(self, name, source, **kwargs):
        self.entered.release()
        while not self.open.wait(0.01):
            source.read(0)  # raises when the upload was cancelled
        source.seek(0)
        return self.store.put_if_absent(name, source, **kwargs)


def commit(directory, step):
    """A commit of three files and a State-less manifest; as the catalog lists it."""
    save(open_directory(directory, OwnContents(), max_to_keep=None), step)
    return newest(directory)


def newest(directory):
    return catalog.scan(str(directory))[0]


def uploaded(store, entry, **kwargs):
    upload.Upload(store, entry, **kwargs).run()


def folders(store):
    """Returns the commits that a reader finds, with verified bytes, newest first."""
    problems = []
    found = list(catalog.commits(store, problems.append))
    assert problems == []
    for each in found:
        for entry in each.manifest.files:
            stat = store.stat(f"{each.name}/{entry.name}")
            assert (stat.size, stat.crc32c) == (entry.size, entry.crc32c)
    return [each.name for each in found]


IN_PARTS = {"threads": 4, "smallest_part": 500}
"""What makes an upload of `commit` send each of its files in parts, four of each."""


def left_parts(store):
    """Returns the parts of files that are left in a store."""
    return list(store.list("parts/"))
