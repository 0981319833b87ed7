"""Wrong arguments of a handle are refused before any read."""

from __future__ import annotations

import pathlib

import fsspec
import pytest

from tfpreempt import errors
from tfpreempt.checkpoint.restore.handle import Checkpoint

HERE, THERE = Checkpoint("/nowhere/5"), Checkpoint("gs://nowhere/5.5-00000000")


class Restorable:
    """The class itself cannot be restored."""

    def restore(self, prefix):
        raise NotImplementedError


class LikeAManager:
    """Like a CheckpointManager, which has no restore(), with a checkpoint inside."""

    checkpoint = latest_checkpoint = None


@pytest.mark.parametrize("handle", [HERE, THERE], ids=["here", "there"])
@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (None, "create a Checkpoint"),
        (Restorable, "create a Checkpoint"),
        (LikeAManager(), "pass the .checkpoint"),
    ],
)
def test_objects_that_cannot_be_restored(handle, given, advice):
    with pytest.raises(errors.ConfigurationError, match=f"expected a.*{advice}"):
        handle.restore(given)


@pytest.mark.parametrize("handle", [HERE, THERE], ids=["here", "there"])
@pytest.mark.parametrize("timeout", [-1, "1", True, float("inf")])
def test_a_timeout_that_is_none(handle, timeout, tmp_path):
    with pytest.raises(errors.ConfigurationError, match="timeout is"):
        handle.to_directory(tmp_path / "new", timeout=timeout)
    with pytest.raises(errors.ConfigurationError, match="timeout is"):
        handle.as_directory(timeout=timeout).__enter__()


def test_a_scheme_is_no_file_system():
    with pytest.raises(
        errors.ConfigurationError, match="For a URI, leave filesystem= out"
    ):
        Checkpoint("x", "gs")


@pytest.mark.parametrize(
    "uri",
    [
        *("gs://", "s3://", "az://", "gs:///x", "gs://UPPER/x", "az://a.b/x"),
        *("gs://bucket/a//b", "s3://b/x"),
    ],
)
def test_an_invalid_uri_is_refused_by_the_constructor(uri):
    with pytest.raises(errors.ConfigurationError, match=uri):
        Checkpoint(uri)


@pytest.mark.parametrize("uri", ["gs://b/x", "s3://b/x", "az://b/x", "file:///x"])
def test_a_uri_together_with_a_filesystem(uri):
    with pytest.raises(errors.ConfigurationError, match="together with filesystem"):
        Checkpoint(uri, fsspec.filesystem("memory"))


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
