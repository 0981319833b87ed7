"""The store of a URL, and errors of invalid URLs."""

from __future__ import annotations

import os
import pathlib
import sys

import fsspec
import pytest
from click.testing import CliRunner

from tfpreempt import errors
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror.store_selection import choose_storage
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.cli import main
from tfpreempt.storage import os_errors, paths
from tfpreempt.storage.azure import AzureStore
from tfpreempt.storage.fsspec_store import FsspecStore
from tfpreempt.storage.gcs import GcsStore
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.open_store import open_store
from tfpreempt.storage.s3 import S3Store


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """Opening makes no request, so an unused address is enough."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.mark.parametrize(
    ("place", "kind", "uri"),
    [
        ("/a/b", LocalStore, "/a/b"),
        ("file:///a/b%20c", LocalStore, "/a/b c"),
        ("file://localhost/a", LocalStore, "/a"),
        ("gs://bucket", GcsStore, "gs://bucket"),
        ("gs://bucket/", GcsStore, "gs://bucket"),
        ("gs://my-bucket.org/run/5/", GcsStore, "gs://my-bucket.org/run/5"),
        ("s3://bucket/run", S3Store, "s3://bucket/run"),
        ("az://my-container/run/", AzureStore, "az://my-container/run"),
    ],
)
def test_places(place, kind, uri):
    store = open_store(place)
    assert isinstance(store, kind)
    assert store.uri == uri


def test_a_path_object():
    assert open_store(pathlib.Path("/a")).uri == "/a"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "expected a path, or a URI"),
        ("gs:/bucket/x", "two slashes"),
        ("s3:/bucket", "two slashes"),
        ("gs://", "names the bucket ''"),
        ("gs:///run", "names the bucket ''"),
        ("gs://Bucket/run", "names the bucket 'Bucket'"),
        ("gs://user@bucket/run", "user name or password"),
        ("gs://bucket:80/run", "names the bucket"),
        ("s3://b/run", "3 to 222"),
        ("gs://bucket/run?x=1", "without options"),
        ("gs://bucket/run#1", "without options"),
        ("gs://bucket/a/../b", r"'\.\.'"),
        ("gs://bucket/a//b", "empty part"),
        ("s3://bucket/a\\b", "backslash"),
        ("az:/container/x", "two slashes"),
        ("az://", "names the container ''"),
        ("az://a_b/x", "names the container 'a_b'"),
        ("az://a--b/x", "single '-'"),
        ("az://container@account/x", "user name or password"),
        ("az://container/x?sv=1", "without options"),
        ("az://container/a//b", "empty part"),
        ("abfs://container/x", "filesystem="),
        ("https://host/x", "Mount other storage. Only tfpreempt.Checkpoint"),
        ("GS://bucket", "filesystem="),
        ("file://host/x", "host 'host'"),
        ("file:///a?b", "%3F"),
        ("file://", "three slashes"),
    ],
)
def test_places_that_are_none(place, said):
    with pytest.raises(errors.ConfigurationError, match=said):
        open_store(place)


SECRET = "hunter2"


def test_only_the_host_of_a_url_has_user_info():
    assert paths.without_secrets("gs://bucket/a/b@c") == "gs://bucket/a/b@c"
    assert paths.without_secrets(f"gs://user:{SECRET}@bucket/b@c").count("***") == 1


@pytest.mark.parametrize(
    "place",
    [
        f"gs://user:{SECRET}@bucket/run",
        f"s3://{SECRET}@bucket/run",
        f"s3a://key:{SECRET}@bucket/run",
        f"s3://key:slash/{SECRET}@bucket/run",
        f"hdfs://user:{SECRET}@namenode:8020/run",
        f"file://user:{SECRET}@localhost/run",
        f"gs:/user:{SECRET}@bucket/run",
        f"gs://bucket/run?token={SECRET}",
        f"gs://bucket?token={SECRET}",
        f"az://container/run?sig={SECRET}",
        f"az://{SECRET}@container/run",
        f"file:///run?token={SECRET}",
    ],
)
def test_no_secret_of_a_url_is_quoted(place, monkeypatch, tmp_path):
    monkeypatch.setenv("TFPREEMPT_MIRROR_DIR", place)
    opens = [lambda: open_store(place), lambda: Checkpoint(place)]
    if "://" in place:
        opens += [
            lambda: Checkpoint(place, LocalStore("/a")),
            lambda: open_store(place, LocalStore("/a")),
            lambda: os_errors.check_directory(place, name="ckpt"),
        ]
    if "://" in place and "@" in place:
        remote = ["run", "--mirror-dir", place, "--checkpoint-dir"]
        opens += [
            lambda: choose_storage(None, tmp_path, RetentionPolicy()),
            lambda: choose_storage(None, place, RetentionPolicy()),
            lambda: os_errors.check_directory(place),
            *(
                lambda name=name: run_command(name, place)
                for name in ("report", "status", "inspect", "verify", "doctor")
            ),
            lambda: run_command("run", "--checkpoint-dir", place, "--", "true"),
            lambda: run_command(*remote, str(tmp_path), "--", "true"),
            lambda: run_command("inspect", str(tmp_path), "--mirror", place),
            lambda: run_command("simulate", "--metadata", place),
        ]
    for each in opens:
        with pytest.raises((errors.ConfigurationError, SystemExit)) as caught:
            each()
        assert SECRET not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("AWS_ENDPOINT_URL", "s3://bucket/x"),
        ("AZURE_STORAGE_ENDPOINT", "az://bucket/x"),
        ("STORAGE_EMULATOR_HOST", "gs://bucket"),
    ],
)
def test_no_secret_of_an_endpoint_is_quoted(variable, place, monkeypatch):
    monkeypatch.setenv(variable, f"http://user:{SECRET}@127.0.0.1:1")
    with pytest.raises(errors.ConfigurationError, match=variable) as caught:
        open_store(place).stat("name")
    assert SECRET not in str(caught.value)


def run_command(*words):
    result = CliRunner().invoke(main, words)
    assert SECRET not in result.output
    raise SystemExit(result.exit_code)


@pytest.mark.parametrize(
    "place", ["/a@b/c", "gs://bucket/a@b", "gs://bucket/a:b@c", "a@b/c:d@e"]
)
def test_an_at_sign_of_a_path_is_no_user_info(place):
    paths.check_no_user_info(place)
    open_store(place)


def test_a_path_mangled_by_pathlib():
    with pytest.raises(errors.ConfigurationError, match=r"pathlib\.Path"):
        open_store(pathlib.Path("gs://bucket/run"))


def test_something_else_than_a_path():
    with pytest.raises(TypeError, match="int"):
        open_store(5)
    with pytest.raises(errors.ConfigurationError, match="expected a path"):
        open_store(b"/a")


def test_file_systems_of_others():
    store = open_store("/run", fsspec.filesystem("memory"))
    assert isinstance(store, FsspecStore)
    assert store.uri == "memory:/run"


def test_a_file_system_that_is_none():
    with pytest.raises(errors.ConfigurationError, match="pyarrow or fsspec"):
        open_store("/x", filesystem=object())


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("az", "azure")])
def test_obstore_is_missing(scheme, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    said = rf"pip install '\.\[{extra}\]' in a clone"
    with pytest.raises(errors.ConfigurationError, match=said):
        open_store(f"{scheme}://bucket/run")


def test_no_account_of_azure(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    said = r"cannot be opened: .*\. .*AZURE_STORAGE_ACCOUNT_NAME is required"
    with pytest.raises(errors.ConfigurationError, match=said):
        open_store("az://container/run")
