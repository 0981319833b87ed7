"""A handle refers to a checkpoint wherever it is, and is never taken for a path."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pathlib
import pickle
import threading

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint.fakes import FlatContents, OwnContents, open_directory, save
from tests.checkpoint.remote_commits import FILES, put_commit, put_hostile
from tests.checkpoint.test_download import read_tree
from tests.fakes.storage import damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import cache, catalog, file_locks, layout, retention
from tfpreempt.checkpoint.mirror import download_target, resolve
from tfpreempt.checkpoint.restore.handle import Checkpoint, checkpoints_in
from tfpreempt.core.threads import ManagedThread
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.open_store import open_store


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / f"tfpreempt-{os.getuid()}"


@pytest.fixture
def memory():
    """A file system object, empty, as a user passes it to a handle."""
    filesystem = MemoryFileSystem()
    yield filesystem
    filesystem.rm("/", recursive=True)


@pytest.fixture
def store(memory):
    """The content of the file system, as tfpreempt reads and writes it."""
    return open_store("/", memory)


@pytest.fixture
def remote(store, memory):
    return Checkpoint(put_commit(store).name, memory)


@pytest.fixture
def own(tmp_path):
    saver = open_directory(tmp_path / "run", OwnContents())
    save(saver, 6)
    [handle] = checkpoints_in(saver.path)
    return handle


@pytest.fixture
def flat(tmp_path):
    directory = tmp_path / "flat"
    saver = open_directory(directory, FlatContents(str(directory)))
    save(saver, 6)
    (directory / "ckpt-9.index").write_bytes(b"another one's")
    found = saver.newest()
    return Checkpoint(found.path, prefix=found.prefix, step=found.step)


@pytest.fixture
def plain(tmp_path):
    root = tmp_path / "plain"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return Checkpoint.from_directory(root)


@pytest.fixture
def foreign(tmp_path):
    (tmp_path / "tf").mkdir()
    for name in ("ckpt-3.index", "ckpt-3.data-00000-of-00001", "ckpt-4.index"):
        (tmp_path / "tf" / name).write_bytes(name.encode())
    return Checkpoint(tmp_path / "tf" / "ckpt-3")


@pytest.fixture(params=["own", "flat", "plain", "foreign", "remote", "file", "objects"])
def any_handle(request, store, memory, tmp_path):
    """Returns a handle to each kind of location."""
    if request.param == "file":
        commit = put_commit(LocalStore(str(tmp_path / "mirror")))
        return Checkpoint(f"file://{tmp_path}/mirror/{commit.name}")
    if request.param == "objects":
        for name, data in FILES.items():
            store.replace(f"deep/er/{name}", data)
        return Checkpoint("deep/er/", memory)
    return request.getfixturevalue(request.param)


EXPECTED = {
    "own": {"ckpt.index", "ckpt.data-00000-of-00002", "ckpt.data-00001-of-00002"},
    "flat": {"ckpt-6.index", *(f"ckpt-6.data-0000{n}-of-00002" for n in range(2))},
    "foreign": {"ckpt-3.index", "ckpt-3.data-00000-of-00001"},
}
STEPS = {"own": 6, "flat": 6, "remote": 7, "file": 7}
CONTROLS = {layout.MANIFEST, layout.MARKER}


def kind_of(request):
    return request.node.callspec.params["any_handle"]


def test_to_directory_copies_every_file(any_handle, request, tmp_path):
    kind = kind_of(request)
    target = any_handle.to_directory(tmp_path / "copy")
    assert target == str(tmp_path / "copy")
    controls = CONTROLS if kind in STEPS else set()
    assert read_tree(target).keys() == EXPECTED.get(kind, set(FILES)) | controls
    copy = Checkpoint(target)
    assert copy.step == any_handle.step == STEPS.get(kind)
    assert any_handle.to_directory(target) == target
    temporary = copy.to_directory()
    assert read_tree(temporary) == read_tree(target)
    assert os.path.dirname(temporary) == str(tmp_path)
    assert copy.to_directory() == temporary


def test_as_directory_has_every_file(any_handle, request, cache_root):
    is_local = kind_of(request) not in ("remote", "objects")
    names = EXPECTED.get(kind_of(request), set(FILES))
    with any_handle.as_directory() as path:
        assert names <= read_tree(path).keys()
        assert is_local == (not cache_root.exists())
    assert os.path.exists(path) == is_local


class PyarrowLocal:
    """The part of pyarrow.fs.LocalFileSystem that a handle uses."""

    type_name = "local"

    def __eq__(self, other):
        return isinstance(other, PyarrowLocal)

    __hash__ = None


@pytest.mark.parametrize("kind", ["pyarrow", "fsspec"])
def test_a_local_file_system_is_this_machines(kind, own):
    make = PyarrowLocal if kind == "pyarrow" else lambda: fsspec.filesystem("file")
    handle = Checkpoint(own.path, make())
    with handle.as_directory() as path:
        assert path == handle.path == own.path  # no copy
    assert handle.filesystem == make()
    assert handle == Checkpoint(own.path, make()) == Checkpoint(own.path)
    assert hash(handle) == hash(own)
    assert (handle.step, handle.prefix) == (own.step, own.prefix)
    handle.set_metadata({"a": 1})
    assert own.get_metadata() == {"a": 1}
    assert handle.to_directory() == own.to_directory()
    with pytest.raises(errors.ConfigurationError, match="together with filesystem"):
        Checkpoint(f"file://{own.path}", make())


def test_a_tilde_is_the_home_directory(own, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    target = own.to_directory("~/x")
    assert target == str(tmp_path / "home" / "x")
    named = [Checkpoint("~/x"), Checkpoint.from_directory("~/x")]
    named += [Checkpoint("~/x", PyarrowLocal()), Checkpoint(target)]
    assert len(set(named)) == 1
    assert named[0].step == own.step


def test_handles_in_an_equal_file_system_are_equal(tmp_path):
    places = [Checkpoint("run/5", fsspec.filesystem("memory")) for _ in range(2)]
    assert places[0] == pickle.loads(pickle.dumps(places[1]))
    assert places[0] != Checkpoint("run/5", DirFileSystem("x", MemoryFileSystem()))


def test_restore_calls_restore_with_the_prefix(any_handle, request):
    class Restorable:
        def restore(self, prefix):
            self.prefix, self.bytes = (
                prefix,
                pathlib.Path(prefix + ".index").read_bytes(),
            )
            return "status"

    target = Restorable()
    assert any_handle.restore(target) == "status"
    if any_handle.prefix is not None:
        assert target.prefix == any_handle.prefix
    else:
        assert kind_of(request) in ("remote", "objects")
        assert target.bytes == FILES["ckpt.index"]


def test_a_path_that_tensorflow_reads_as_a_pattern_is_refused(tmp_path):
    place = save(open_directory(tmp_path / "lr=[1,2]", OwnContents()), 1).path

    class Restorable:
        def restore(self, prefix):
            raise AssertionError("nothing is there for TensorFlow")

    with pytest.raises(errors.ConfigurationError, match="treats as a pattern"):
        Checkpoint(place).restore(Restorable())
    assert Checkpoint(place).step == 1  # functions without TensorFlow work
    copy = Checkpoint(place).to_directory(tmp_path / "copy")
    assert Checkpoint(copy).prefix == str(tmp_path / "copy" / "ckpt")


def test_metadata(any_handle, request):
    if kind_of(request) == "foreign":
        with pytest.raises(errors.CheckpointError, match="to_directory"):
            any_handle.set_metadata({"a": 1})
        return
    assert any_handle.get_metadata() == {}
    any_handle.set_metadata({"loss": 0.5, "note": "é"})
    any_handle.update_metadata({"loss": 0.25})
    assert any_handle.get_metadata() == {"loss": 0.25, "note": "é"}
    any_handle.set_metadata({})
    assert any_handle.get_metadata() == {}
    assert any_handle.step == STEPS.get(kind_of(request))


def test_a_temporary_directory_is_of_one_content(own, plain, tmp_path):
    first = plain.to_directory()
    (tmp_path / "plain" / "more").touch()
    assert len({first, plain.to_directory(), own.to_directory()}) == 3


def test_a_temporary_directory_of_others_is_not_trusted(own, tmp_path):
    os.chmod(own.to_directory(), 0o777)
    with pytest.raises(errors.ConfigurationError, match=r"cannot be trusted.*TMPDIR"):
        own.to_directory()


def test_a_temporary_directory_that_is_replaced_is_not_used(own, tmp_path, monkeypatch):
    """A copy that failed removes the directory, and another user puts a link there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def replaced(directory, *arguments, **more):
        os.rmdir(directory)
        os.symlink(elsewhere, directory)
        return file_locks.locked(directory, *arguments, **more)

    monkeypatch.setattr("tfpreempt.checkpoint.restore.handle.locked", replaced)
    with pytest.raises(errors.ConfigurationError, match="is not a link"):
        own.to_directory()
    assert os.listdir(elsewhere) == []


def test_a_refused_copy_leaves_no_directory(store, memory, tmp_path):
    put_hostile(store, [{"size": 10 << 40}])
    with pytest.raises(errors.CheckpointError, match="according to its manifest"):
        Checkpoint("", memory).to_directory(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_threads_that_copy_to_one_directory_wait_for_each_other(remote, tmp_path):
    copied = []

    def copy():
        copied.append(remote.to_directory(tmp_path / "copy"))

    threads = [threading.Thread(target=copy) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert copied == [str(tmp_path / "copy")] * 8
    assert read_tree(copied[0]).keys() == FILES.keys() | CONTROLS


def test_a_copy_waits_for_another_no_longer_than_it_may(remote, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "copy").mkdir()
    with (
        file_locks.locked(str(tmp_path / "copy"), "copy", seconds=1),
        pytest.raises(errors.CheckpointError, match="Another process still has"),
    ):
        remote.to_directory(tmp_path / "copy", timeout=0.01)
    assert os.listdir(tmp_path / "copy") == []
    assert (
        caplog.text.count(f"waiting for another process that has locked {tmp_path}")
        == 1
    )


def test_metadata_travels_with_a_copy(remote, tmp_path):
    remote.set_metadata({"a": 1})
    copy = Checkpoint(remote.to_directory(tmp_path / "copy"))
    assert copy.get_metadata() == {"a": 1}


def test_metadata_of_many_threads_is_not_lost(own):
    def note(number):
        own.update_metadata({str(number): number})

    threads = [threading.Thread(target=note, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert own.get_metadata() == {str(n): n for n in range(8)}


@pytest.mark.parametrize("large_bytes", [0, 1 << 25])
def test_a_commit_with_metadata_is_deleted_whole(own, large_bytes, monkeypatch):
    monkeypatch.setattr(retention, "_LARGE_BYTES", large_bytes)
    own.set_metadata({"a": 1})
    pathlib.Path(own.path, ".tfpreempt-put-0123").touch()  # its writer was killed
    retention.delete(LocalFiles(), catalog.read_at(own.path))
    assert not os.path.exists(own.path)


def test_a_commit_is_deleted_even_if_no_thread_can_start(own, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(retention, "_LARGE_BYTES", 0)
    monkeypatch.setattr(ManagedThread, "start", refuse)
    retention.delete(LocalFiles(), catalog.read_at(own.path))
    assert not os.path.exists(own.path)


def test_a_large_file_that_cannot_be_removed_stays_with_its_manifest(own, monkeypatch):
    class Stubborn(LocalFiles):
        def remove(self, path):
            if os.path.basename(path) == entry.manifest.files[0].name:
                raise OSError(errno.EIO, "Input/output error")
            super().remove(path)

    monkeypatch.setattr(retention, "_LARGE_BYTES", 0)
    entry = catalog.read_at(own.path)
    with pytest.raises(OSError, match="Input/output"):
        retention.delete(Stubborn(), entry)
    assert retention.is_uncommitted(catalog.read_at(own.path))
    retention.delete(LocalFiles(), catalog.read_at(own.path))
    assert not os.path.exists(own.path)


@pytest.mark.parametrize("bad", [[1], {1: 2}, {"a": {1, 2}}, {"a": float("nan")}, None])
def test_metadata_that_json_cannot_hold(own, bad):
    with pytest.raises(errors.ConfigurationError, match=r"Metadata (must|cannot) be"):
        own.set_metadata(bad)


@pytest.mark.parametrize("bad", [b"", b"[]", b"\xff", b"{}" + b" " * (5 << 20)])
def test_corrupt_metadata(remote, store, bad):
    store.replace(f"{remote.path}/{layout.METADATA}", bad)
    with pytest.raises(errors.CheckpointCorruptedError, match="not a JSON object"):
        remote.get_metadata()


def test_links_of_a_plain_directory_are_left_out(plain, tmp_path, caplog):
    (tmp_path / "plain" / "passwords").symlink_to("/etc/passwd")
    (tmp_path / "plain" / "etc").symlink_to("/etc")
    copy = plain.to_directory(tmp_path / "copy")
    assert read_tree(copy).keys() == FILES.keys()
    assert "links in a checkpoint are skipped" in caplog.text


@pytest.mark.parametrize("kind", ["own", "remote"])
def test_damage_is_found_before_anything_is_restored(kind, request, store, tmp_path):
    handle = request.getfixturevalue(kind)
    if kind == "own":
        damage(os.path.join(handle.path, "ckpt.index"))
    else:
        store.replace(f"{handle.path}/ckpt.index", b"indeX")
    for use in (handle.restore, lambda _: handle.to_directory(tmp_path / "copy")):
        with pytest.raises(errors.CheckpointCorruptedError, match=r"ckpt\.index"):
            use(Lazy())
    assert not (tmp_path / "copy" / layout.MARKER).exists()


class Status:
    """The result of TensorFlow's restore(), which references later reads."""

    def __init__(self, reader):
        self._checkpoint = reader


class Reader:
    """Reads the file when a variable is made."""

    def __init__(self, path):
        self.path = path


class Lazy:
    def restore(self, prefix):
        return Status(Reader(prefix))


def test_a_download_outlives_the_read(remote, cache_root):
    status = remote.restore(Lazy())
    assert os.path.exists(status._checkpoint.path + ".index")
    threads = set(threading.enumerate())
    del status
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert [name for name in os.listdir(cache_root) if name != "lock"] == []


def test_what_is_not_there(tmp_path, memory):
    for handle in (
        Checkpoint(tmp_path / "nothing"),
        Checkpoint("nothing", memory),
        Checkpoint("", memory),
    ):
        for use in (handle.get_metadata, handle.to_directory, lambda h=handle: h.step):
            with pytest.raises(errors.CheckpointError, match="There is no checkpoint"):
                use()


def test_a_runs_root_names_its_newest_commit(own, tmp_path, store, memory):
    put_commit(store)
    mirror = LocalStore(str(tmp_path / "mirror"))
    folder = put_commit(mirror).name
    for handle, newest in (
        (Checkpoint(tmp_path / "run"), own.path),
        (Checkpoint(tmp_path / "mirror"), f"{tmp_path}/mirror/{folder}"),
        (Checkpoint("/", memory), f"memory:/{folder}"),
    ):
        with pytest.raises(errors.CheckpointError, match="commits of a run") as caught:
            handle.get_metadata()
        assert newest in str(caught.value)
    store.replace("deep/5.1-00000000/x", b"")
    with pytest.raises(errors.CheckpointError, match=r"deep/5\.1-00000000"):
        Checkpoint("deep", memory).get_metadata()


def test_an_incomplete_commit_is_no_checkpoint(own, remote, store, memory, tmp_path):
    os.remove(os.path.join(own.path, layout.MARKER))
    store.delete(f"{remote.path}/{layout.MARKER}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / download_target.PROGRESS).touch()
    (tmp_path / "5.1-00000000").mkdir()
    store.replace("x/5.1-00000000/ckpt.index", b"")
    for handle in (
        Checkpoint(own.path),
        remote,
        Checkpoint(tmp_path / "half"),
        Checkpoint(tmp_path / "5.1-00000000"),
        Checkpoint("x/5.1-00000000", memory),
    ):
        with pytest.raises(errors.CheckpointError, match="no marker"):
            handle.get_metadata()


def test_a_copy_is_not_put_into_another_commit(own, remote):
    before = read_tree(own.path)
    with pytest.raises(errors.CheckpointError, match="of another save"):
        remote.to_directory(own.path)
    assert read_tree(own.path) == before


class Hostile(MemoryFileSystem):
    """A store with arbitrary names in its listing."""

    cachable = False

    def __init__(self, names):
        super().__init__()
        self.names = names

    def find(self, path, **more):
        return {f"{path}/{name}": {"type": "file"} for name in self.names}


LISTINGS = {
    "absolute": (["/etc/passwd"], "is absolute"),
    "upwards": (["../../x"], "'..'"),
    "NUL": (["a\0b"], "NUL"),
    "one too many": (range(100_001), "more than 100000 files"),
}


@pytest.mark.parametrize(("names", "says"), LISTINGS.values(), ids=LISTINGS)
def test_hostile_listings_are_refused_before_anything_is_written(tmp_path, names, says):
    with pytest.raises(errors.CheckpointCorruptedError, match=says):
        Checkpoint("", Hostile(names)).to_directory(tmp_path / "copy")
    assert os.listdir(tmp_path) == []


def test_a_manifest_that_claims_too_much_leaves_nothing_in_the_cache(
    store, memory, cache_root
):
    put_hostile(store, [{"size": 10 << 40}])
    context = Checkpoint("", memory).as_directory()
    with (
        pytest.raises(errors.CheckpointError, match="according to its manifest"),
        context,
    ):
        pass
    assert os.listdir(cache_root) == []


def test_the_state_file_of_a_plain_directory_chooses(foreign, tmp_path):
    handle = Checkpoint(tmp_path / "tf")
    with pytest.raises(errors.CheckpointError, match="more than one"):
        handle.restore(Lazy())
    pathlib.Path(tmp_path, "tf", "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-4"\n'
    )
    assert handle.prefix == str(tmp_path / "tf" / "ckpt-4")


def test_a_handle_is_not_a_path(own, remote):
    for handle in (own, remote):
        for use in (
            os.fspath,
            open,
            os.path.exists,
            lambda h: os.path.join(h, "x"),
            lambda h: h / "x",
            lambda h: h + "/x",
        ):
            with pytest.raises(TypeError, match="as_directory"):
                use(handle)
        assert not os.path.exists(str(handle))


def test_repr_shows_the_path(own, remote, tmp_path):
    assert repr(own) == f"Checkpoint({own.path!r}, step=6, local)"
    assert repr(remote) == f"Checkpoint({remote.path!r}, remote in MemoryFileSystem)"
    assert remote.step == 7
    assert (
        repr(remote)
        == f"Checkpoint({remote.path!r}, step=7, remote in MemoryFileSystem)"
    )
    assert repr(Checkpoint("gs://bucket/x/")) == "Checkpoint('gs://bucket/x', remote)"


def test_references_with_the_same_path_are_equal(own, remote, memory):
    assert own == Checkpoint(own.path) == Checkpoint(f"file://{own.path}")
    assert hash(own) == hash(Checkpoint(own.path))
    assert remote == Checkpoint(remote.path, memory)
    assert remote != Checkpoint(remote.path, DirFileSystem("x", memory))
    assert own != own.path
    assert pickle.loads(pickle.dumps(own)) == own


def test_invalid_paths_of_a_reference_are_refused(own, memory, remote):
    with pytest.raises(errors.ConfigurationError, match="directory of this machine"):
        Checkpoint.from_directory("gs://bucket/x")
    with pytest.raises(errors.ConfigurationError, match="directory of this machine"):
        own.to_directory("gs://bucket/x")
    pathlib.Path(own.path + "-file").touch()
    with pytest.raises(errors.CheckpointError, match="not a directory; expected"):
        own.to_directory(own.path + "-file")
    with pytest.raises(errors.ConfigurationError, match="expected parts separated"):
        Checkpoint("../x", memory).get_metadata()


def test_a_plain_directory_is_not_read_to_be_found(plain, monkeypatch):
    monkeypatch.setattr(resolve, "summed", None)
    with plain.as_directory() as path:
        assert path == plain.path
    assert plain.step is None
    assert json.loads(json.dumps(plain.get_metadata())) == {}
