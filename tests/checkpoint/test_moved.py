"""What a handle cannot be made of, and names of others that it doesn't have."""

from __future__ import annotations

import pathlib

import pytest

from tfpreempt import errors
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.testing.storage import FaultyStore


@pytest.mark.parametrize("uri", ["gs://b/x", "s3://b/x", "file:///x"])
def test_a_uri_together_with_a_filesystem(uri):
    with pytest.raises(errors.ConfigurationError, match="together with filesystem"):
        Checkpoint(uri, FaultyStore())


NO_PLACES = [
    "",
    None,
    3,
    "hdfs://x/y",
    "a\0b",
    "file://host/x",
    pathlib.Path("gs://b/x"),
]


@pytest.mark.parametrize("path", NO_PLACES)
def test_what_cannot_be_a_place(path):
    with pytest.raises(errors.ConfigurationError):
        Checkpoint(path)


OLD_NAMES = [
    "from_dict", "to_dict", "from_bytes", "to_bytes", "from_uri", "to_uri", "uri",
    "from_object_ref", "to_object_ref", "from_checkpoint",
    "get_internal_representation", "get_preprocessor", "set_preprocessor",
]  # fmt: skip


@pytest.mark.parametrize("name", OLD_NAMES)
def test_names_that_others_have_say_what_to_use(name):
    for owner in (Checkpoint, Checkpoint("/x")):
        with pytest.raises(AttributeError, match=rf"{name!r}: .*(use|reference|State)"):
            getattr(owner, name)
        assert not hasattr(owner, name)
