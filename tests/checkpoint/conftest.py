"""Mirrors of a test, ended with it."""

from __future__ import annotations

import pytest

from tfpreempt.checkpoint.remote.mirror import Mirror


@pytest.fixture
def make_mirror(store):
    made = []

    def make(place=store, **kwargs):
        made.append(Mirror(place, **({"max_to_keep": 2} | kwargs)))
        return made[-1]

    yield make
    for mirror in made:
        mirror.close()
