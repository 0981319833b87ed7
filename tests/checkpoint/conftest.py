"""Mirrors of a test, ended with it."""

from __future__ import annotations

import pytest

from tfpreempt.checkpoint.remote.mirror import Mirror


class Journal(list):
    """What faults were told."""

    def record(self, fault):
        self.append(fault)


@pytest.fixture
def make_mirror(store):
    made = []

    def make(place=store, told=None, **kwargs):
        made.append(Mirror(place, **({"max_to_keep": 2} | kwargs)))
        made[-1].begin("", None, (Journal() if told is None else told).record)
        return made[-1]

    yield make
    for mirror in made:
        mirror.close()
