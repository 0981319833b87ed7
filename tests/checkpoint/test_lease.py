"""A lease on a fake clock: waits, timeouts, refusals, and losses."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import shutil
import threading

import pytest

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    open_directory,
    save,
    write_part,
)
from tests.multiprocess.harness import wait_until
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.lease.directory_lease import (
    PACE,
    DirectoryLease,
    FencedFiles,
    LocalLeaseFileSystem,
)
from tfpreempt.checkpoint.lease.lease import Lease, release_all
from tfpreempt.checkpoint.lease.lease_record import (
    LeaseOwner,
    ObservedLease,
    from_json,
    this_process,
)
from tfpreempt.checkpoint.lease.lease_timeouts import (
    GRACE,
    LONGEST_GRACE,
    MARGIN,
    LeaseWait,
    RenewalIntervals,
)
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.core import contained
from tfpreempt.storage.files import LocalFiles

ELSEWHERE = dataclasses.replace(
    this_process(GRACE), host="node-7", boot="another", pid=4711
)
EXPIRY, POLL = PACE.expiry, PACE.poll
HERE = this_process(GRACE)
THEIRS, THIEF, DEAD = (digit * 32 for digit in "cde")  # tokens of other processes


class Other:
    """Another process's lease on the disk."""

    def __init__(self, directory, **more):
        self.holder = dataclasses.replace(ELSEWHERE, token=THEIRS, **more)
        self.place = DirectoryLease(str(directory))
        self.renewals = 0
        assert self.place.take(self.holder)

    def renew(self):
        self.renewals += 1
        self.place.renew(THEIRS, self.renewals)

    def leave(self):
        self.place.end(THEIRS)


class Waiting:
    """The pauses of a waiting start, in which other processes act."""

    def __init__(self, during=lambda waited: None, takes=None):
        self.waited = 0.0
        self._during = during
        self._takes = takes

    def __call__(self, seconds):
        passed = seconds if self._takes is None else self._takes
        self.waited += passed
        self._during(self.waited)
        return passed


def acquired(directory, pause=None, **more):
    lease = Lease(pause=pause or Waiting(), **more)
    lease.acquire(str(directory))
    return lease


def is_free(directory):
    return DirectoryLease(str(directory)).read_owner() is None


# --- the quiet path ------------------------------------------------------------------


def test_a_free_lease_is_acquired_at_once_and_leaves_no_files(
    tmp_path,
):
    pause = Waiting()
    lease = acquired(tmp_path, pause)
    assert os.listdir(tmp_path) == [layout.LEASE]
    assert pause.waited == 0
    lease.release()
    lease.release()
    assert os.listdir(tmp_path) == []


def test_one_that_is_dropped_is_released(tmp_path):
    lease = acquired(tmp_path)
    del lease
    gc.collect()
    assert is_free(tmp_path)


def test_a_hard_exit_releases_every_lease(tmp_path):
    directories = [tmp_path / "one", tmp_path / "two"]
    for each in directories:
        each.mkdir()
    leases = [acquired(each) for each in directories]
    release_all()
    assert all(map(is_free, directories))
    assert [each.token for each in leases] == [None, None]


def test_in_one_process_the_newest_has_it(tmp_path, caplog):
    first = acquired(tmp_path)
    second = acquired(tmp_path)
    first.check()  # and now this one
    second.check()
    second.release()
    assert is_free(tmp_path)
    assert caplog.text == ""


def test_in_one_process_a_directory_of_two_names_has_one_lease(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    first = acquired(tmp_path / "run")
    pause = Waiting()
    acquired(tmp_path / "link", pause).check()
    assert pause.waited == 0
    first.check()
    assert caplog.text == ""


@pytest.mark.slow  # starts a process
def test_a_forked_child_does_not_hold_it(tmp_path):
    lease, saver = leased(tmp_path)
    child = os.fork()
    if child == 0:
        code = 0
        for attempt in (lease.check, lambda: lease.moving().__enter__()):
            try:
                attempt()
            except errors.LeaseLostError as error:
                code += f"process {os.getppid()} holds the lease" in str(error)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    save(saver, 1)


def test_the_record_has_the_program_but_not_its_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/train.py", "--key=secret"])
    assert this_process(GRACE).program == "train.py"


# --- who is gone ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "holder",
    [
        {"pid": 2**22 + 1, "boot": HERE.boot},
        {"pid": os.getppid(), "started": 1, "boot": HERE.boot},  # a number used again
        {"pid": HERE.pid, "boot": HERE.boot},  # this process before exec
    ],
    ids=["no such process", "another process", "before exec"],
)
def test_the_lease_of_an_exited_process_is_taken_over_at_once(tmp_path, holder, caplog):
    Other(tmp_path, **holder)
    pause = Waiting()
    acquired(tmp_path, pause)
    assert pause.waited == 0
    assert "which has terminated" in caplog.text


def test_a_leftover_of_an_earlier_version_is_taken_over_and_removed(tmp_path):
    """Earlier versions counted the renewals in a file called `beat`."""
    Other(tmp_path)
    (tmp_path / layout.LEASE / THEIRS / "beat").write_bytes(b"7")
    pause = Waiting()
    lease = acquired(tmp_path, pause)
    assert EXPIRY <= pause.waited < EXPIRY + MARGIN
    lease.release()
    assert os.listdir(tmp_path) == []


def test_of_another_pid_namespace_nothing_is_known(tmp_path):
    other = Other(tmp_path, pid=2**22 + 1, boot=HERE.boot, namespace="pid:[1]")
    pause = Waiting(lambda waited: other.leave() if waited > 3 else other.renew())
    acquired(tmp_path, pause)
    assert 3 < pause.waited < 4


def test_of_another_boot_nothing_is_known_whatever_the_machine_is_called(tmp_path):
    """Cloned machines and containers may have the same name, and all may run."""
    other = Other(tmp_path, host=HERE.host, boot="another", pid=HERE.pid)
    pause = Waiting(lambda waited: other.leave() if waited > 3 else other.renew())
    acquired(tmp_path, pause)
    assert 3 < pause.waited < 4


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_process_hidden_from_this_user_counts_as_running(monkeypatch, error):
    def hidden(pid):
        raise error("/proc is mounted with hidepid")

    monkeypatch.setattr("tfpreempt.checkpoint.lease.lease_record._started", hidden)
    assert not dataclasses.replace(HERE, pid=os.getppid()).is_dead(HERE)
    assert dataclasses.replace(HERE, pid=2**22 + 1).is_dead(HERE)


NEIGHBOR = dataclasses.replace(HERE, pid=os.getppid(), started=HERE.started + 1)


@pytest.mark.parametrize(
    ("holder", "here", "is_dead"),
    [
        (NEIGHBOR, HERE, True),  # another process has the pid now
        (dataclasses.replace(NEIGHBOR, time_namespace="time:[1]"), HERE, False),
        (dataclasses.replace(NEIGHBOR, started=0), HERE, False),
        (NEIGHBOR, dataclasses.replace(HERE, started=0), False),
        (dataclasses.replace(NEIGHBOR, pid=2**22 + 1, started=0), HERE, True),
        (
            dataclasses.replace(NEIGHBOR, pid=2**22 + 1, namespace=""),
            dataclasses.replace(HERE, namespace=""),
            False,
        ),
    ],
)
def test_start_times_count_only_if_they_can_be_compared(holder, here, is_dead):
    assert holder.is_dead(here) is is_dead


@pytest.mark.parametrize(
    ("holder", "here", "runs"),
    [
        (dataclasses.replace(HERE, pid=1, started=0), HERE, False),
        (NEIGHBOR, dataclasses.replace(HERE, started=0), False),
        (dataclasses.replace(NEIGHBOR, time_namespace="time:[1]"), HERE, False),
        (HERE, HERE, False),
    ],
)
def test_only_a_start_time_shows_for_certain_that_a_process_runs(holder, here, runs):
    """A new process may have the pid, above all in a container."""
    assert holder.is_running_beside(here) is runs


@pytest.mark.parametrize("own", ["", "1"])
def test_without_a_proc_of_this_process_nothing_is_read_there(monkeypatch, own):
    """/proc may be missing, or belong to another pid namespace, as in containers."""
    links = {"/proc/self": own}
    monkeypatch.setattr(
        "tfpreempt.checkpoint.lease.lease_record._link",
        lambda path: links.get(path, ""),
    )
    holder = this_process(GRACE)
    assert holder.started == 0
    assert not dataclasses.replace(holder, pid=2**22 + 1).is_dead(holder)


@pytest.mark.slow  # starts a process
def test_a_zombie_counts_as_exited(tmp_path):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert dataclasses.replace(HERE, pid=pid).is_dead(HERE)
    os.waitpid(pid, 0)


# --- who waits -----------------------------------------------------------------------


def test_a_start_continues_as_soon_as_the_holder_exits(tmp_path, caplog):
    other = Other(tmp_path)
    pause = Waiting(lambda waited: other.leave() if waited > 12 else other.renew())
    acquired(tmp_path, pause)
    assert 12 < pause.waited < 13
    said = [r.message for r in caplog.records if "waiting up to" in r.message]
    assert len(said) == 2  # at once, and now and then
    assert "process 4711 on node-7" in said[0]


def test_a_lease_without_renewals_is_taken_over(tmp_path, caplog):
    other = Other(tmp_path)
    pause = Waiting(lambda waited: other.renew() if waited < 5 else None)
    acquired(tmp_path, pause)
    assert EXPIRY < pause.waited < EXPIRY + 6
    assert "did not renew the lease for 30 s" in caplog.text


@pytest.mark.parametrize(
    ("grace", "limit"),
    [
        (5.0, 5.0 + EXPIRY + MARGIN),
        (3600.0, LONGEST_GRACE + EXPIRY + MARGIN),
        (float("nan"), LONGEST_GRACE + EXPIRY + MARGIN),
    ],
)
def test_a_living_holder_is_named_when_its_time_to_leave_is_over(
    tmp_path, grace, limit
):
    other = Other(tmp_path, grace_seconds=grace)
    before = sorted(tmp_path.rglob("*"))
    pause = Waiting(lambda waited: other.renew())
    with pytest.raises(errors.DirectoryLockedError) as caught:
        acquired(tmp_path, pause)
    assert limit <= pause.waited < limit + 1
    for part in (
        str(tmp_path),
        "process 4711 on node-7",
        "since 20",
        "end the other run",
    ):
        assert part in str(caught.value)
    assert [e for e in sorted(tmp_path.rglob("*")) if e.name != "renewals"] == before


def test_a_suspended_waiter_does_not_expire_the_lease(tmp_path):
    """Both processes were on a suspended machine, or this process was stopped."""
    other = Other(tmp_path, grace_seconds=0.0)
    polls = iter(range(1000))
    pause = Waiting(lambda waited: next(polls) % 20 or other.renew(), takes=100.0)
    with pytest.raises(errors.DirectoryLockedError):
        acquired(tmp_path, pause)


def test_a_stopped_clock_ends_the_wait_too(tmp_path):
    other = Other(tmp_path)
    with pytest.raises(errors.DirectoryLockedError):
        acquired(tmp_path, Waiting(lambda waited: other.renew(), takes=0.0))


def test_looks_that_take_long_count_as_long_as_they_take():
    """A slow store would be waited for many times its expiry, or the limit."""
    patience = LeaseWait(HERE, RenewalIntervals(renewal=15.0, expiry=60.0, poll=1.0))
    other = ObservedLease(token=THEIRS, holder=ELSEWHERE, renewals=b"1")
    looks = 0
    while patience.expiry_reason(other) is None:
        looks += 1
        patience.passed(4.0)  # a pause of 1 s, and a look of 3 s
    assert looks == patience.waited / 4 == 15


def test_a_pause_is_measured_from_look_to_look(tmp_path, monkeypatch):
    other, clock, passed = Other(tmp_path), iter(range(0, 1000, 7)), []

    def note(patience, seconds):
        passed.append(seconds)
        if len(passed) == 2:
            other.leave()

    monkeypatch.setattr("tfpreempt.checkpoint.lease.lease.LeaseWait.passed", note)
    monkeypatch.setattr(
        "tfpreempt.checkpoint.lease.lease.time.monotonic", clock.__next__
    )
    Lease().acquire(str(tmp_path))
    assert passed == [7, 7]  # for any part of the time that the polls took


def test_the_holder_of_an_unreadable_record_is_waited_for(tmp_path):
    Other(tmp_path)
    (tmp_path / layout.LEASE / THEIRS / "holder").write_bytes(b"\xff{")
    pause = Waiting()
    acquired(tmp_path, pause)
    assert pause.waited >= EXPIRY


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"pid": "1"}',
        HERE.to_json().replace(b"1", b"true"),
        dataclasses.replace(HERE, host="\x1b]0;title\x07").to_json(),
    ],
)
def test_a_hostile_record_is_an_unknown_holder(data):
    holder = from_json(data, "token")
    assert (holder.pid, holder.token) == (0, "token")
    assert not holder.is_dead(HERE)


def test_a_record_is_read_as_it_was_written():
    assert from_json(HERE.to_json(), HERE.token) == HERE
    assert isinstance(HERE, LeaseOwner)


def test_files_of_a_killed_start_are_removed(tmp_path):
    left = tmp_path / f"{layout.LEASE}.{DEAD}" / DEAD
    left.mkdir(parents=True)
    (left / "holder").write_bytes(b"{")
    lease = acquired(tmp_path)
    assert os.listdir(tmp_path) == [layout.LEASE]
    lease.release()


def test_other_files_among_the_leases_are_no_lease(tmp_path):
    (tmp_path / f"{layout.LEASE}.junk").write_bytes(b"")
    lease = acquired(tmp_path)
    for name in (".nfs0001", "zzz"):
        (tmp_path / layout.LEASE / name).write_bytes(b"")
    lease.check()
    lease.release()
    with pytest.raises(errors.DirectoryLockedError, match="which cannot be acquired"):
        acquired(tmp_path)
    assert (tmp_path / layout.LEASE / "zzz").exists()


def test_files_of_a_user_among_the_leases_are_never_deleted(tmp_path):
    """Only a directory named like a token is a lease."""
    notes = tmp_path / layout.LEASE / "notes" / "today"
    saved = tmp_path / f"{layout.LEASE}.old" / "old" / "holder"
    for each in (notes, saved):
        each.parent.mkdir(parents=True)
        each.write_text("mine")
    with pytest.raises(errors.DirectoryLockedError, match="Move these entries"):
        acquired(tmp_path)
    notes.rename(tmp_path / "today")
    notes.parent.rmdir()
    acquired(tmp_path).release()
    assert (tmp_path / "today").read_text() == saved.read_text() == "mine"


@pytest.mark.parametrize("name", [layout.LEASE, f"{layout.LEASE}.{DEAD}"])
def test_a_directory_of_the_user_with_the_name_of_the_leases_stays(tmp_path, name):
    """Another user cannot delete the files in it, but can give it another name."""
    objects = tmp_path / "objects"
    for each in (THEIRS, DEAD):
        (objects / each).mkdir(parents=True)
        (objects / each / "tree").write_text("years of work")
    objects.rename(tmp_path / name)
    if name == layout.LEASE:
        with pytest.raises(errors.DirectoryLockedError, match="Move these entries"):
            acquired(tmp_path)
    else:
        acquired(tmp_path).release()
    for each in (THEIRS, DEAD):
        assert (tmp_path / name / each / "tree").exists()


class Stale(LocalLeaseFileSystem):
    """An NFS client that reads a directory that another client has removed."""

    def names(self, path):
        found = super().names(path)
        if os.path.basename(path) == THEIRS:
            shutil.rmtree(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return found


def test_a_lease_removed_by_another_nfs_client_is_lost(tmp_path):
    Other(tmp_path, pid=2**22 + 1, boot=HERE.boot)
    lease = acquired(tmp_path, disk=Stale())
    lease.check()


class Forgetful(LocalLeaseFileSystem):
    """An NFS client that once reports the lease's files as missing."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def names(self, path):
        if os.path.dirname(path).endswith(layout.LEASE) and self.code:
            code, self.code = self.code, 0
            raise OSError(code, os.strerror(code), path)
        return super().names(path)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.ENOTDIR])
def test_a_lease_that_is_not_found_for_a_moment_is_released(tmp_path, code):
    disk = Forgetful(0)
    lease = acquired(tmp_path, disk=disk)
    disk.code = code
    lease.release()
    assert disk.code == 0
    assert not (tmp_path / layout.LEASE).exists()


class Foreign(LocalLeaseFileSystem):
    """Files of another user."""

    def remove(self, path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def test_an_exited_holder_of_another_user_is_named(tmp_path):
    Other(tmp_path, pid=2**22 + 1, boot=HERE.boot)
    with pytest.raises(
        errors.SaveError, match=r"process 4194305 .*Delete the lease as"
    ):
        acquired(tmp_path, disk=Foreign())


class Hanging(LocalLeaseFileSystem):
    """A server that does not answer any more."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def remove_dir(self, path):
        assert self.answers.wait(20)
        super().remove_dir(path)


def test_a_release_does_not_wait_for_a_server(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tfpreempt.checkpoint.lease.lease.RELEASE", 0.05)
    disk = Hanging()
    lease = acquired(tmp_path, disk=disk)
    disk.answers.clear()
    lease.release()
    assert "does not respond" in caplog.text
    disk.answers.set()
    wait_until(lambda: is_free(tmp_path), "the server ended it after all")


def test_an_interpreter_that_starts_no_thread_releases_the_lease_too(
    tmp_path, monkeypatch
):
    def refuse(seconds, call):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    lease = acquired(tmp_path)
    monkeypatch.setattr("tfpreempt.checkpoint.lease.lease.call_within", refuse)
    lease.release()
    assert is_free(tmp_path)


# --- the fence -----------------------------------------------------------------------


def steal(directory):
    place = DirectoryLease(str(directory))
    place.end(place.read_owner().token)
    assert place.take(dataclasses.replace(ELSEWHERE, token=THIEF))


def leased(directory):
    lease = acquired(directory)
    return lease, open_directory(directory, OwnContents(), lease=lease)


def test_a_holder_commits_and_leaves_nothing_in_the_lease(tmp_path):
    lease, saver = leased(tmp_path)
    for step in range(4):
        save(saver, step)
    assert saver.newest().step == 3
    assert (tmp_path / "checkpoint").read_text().startswith('model_checkpoint_path: "3')
    [mine] = (tmp_path / layout.LEASE).iterdir()
    assert [each.name for each in mine.iterdir()] == ["holder"]
    lease.release()


def test_a_process_without_its_lease_commits_nothing(tmp_path):
    lease, saver = leased(tmp_path)
    heard = []
    lease.on_loss(heard.append)
    save(saver, 1)
    staged = write_part(saver, 2, "a-2")
    steal(tmp_path)
    with pytest.raises(errors.LeaseLostError, match="4711 on node-7"):
        staged.publish("preemption", [0])
    assert saver.newest().step == 1
    assert len(heard) == 1
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.LeaseLostError):
        save(saver, 3)  # not even staged
    assert sorted(tmp_path.rglob("*")) == before
    lease.release()
    assert DirectoryLease(str(tmp_path)).has(THIEF)


def test_a_process_without_its_lease_deletes_no_commit(tmp_path):
    _, saver = leased(tmp_path)
    save(saver, 1)
    first = Checkpoint(str(tmp_path / "1"))
    steal(tmp_path)
    with pytest.raises(errors.LeaseLostError):
        saver.delete(first)
    assert saver.newest().step == 1


def test_a_lease_lost_during_a_deletion_protects_the_next_run(tmp_path):
    """The next run may have a commit under the same name by then."""

    class Frozen(LocalFiles):
        is_frozen = False

        def remove(self, path):
            super().remove(path)
            if self.is_frozen and os.path.basename(path).startswith("move-"):
                self.is_frozen = False
                steal(tmp_path)

    files = Frozen()
    saver = open_directory(
        tmp_path, OwnContents(), files=files, lease=acquired(tmp_path)
    )
    save(saver, 1)
    save(saver, 2)  # else TensorFlow's state file goes before the marker
    manifest = catalog.read_at(str(tmp_path / "1")).manifest
    first = Checkpoint(str(tmp_path / "1"))
    files.is_frozen = True  # once it has removed the marker
    with pytest.raises(errors.LeaseLostError):
        saver.delete(first)
    assert not (tmp_path / "1" / layout.MARKER).exists()
    assert all((tmp_path / "1" / each.name).exists() for each in manifest.files)


def test_a_manager_without_the_lease_deletes_nothing(tmp_path):
    class Frozen(LocalFiles):
        def remove(self, path):
            super().remove(path)
            if os.path.basename(path).startswith("move-"):  # the intent: the last step
                steal(tmp_path)

    payload = FlatContents(str(tmp_path))
    payload.committed = lambda: pytest.fail("it deletes")
    save(open_directory(tmp_path, payload, files=Frozen(), lease=acquired(tmp_path)), 1)


def test_a_save_fn_may_write_to_another_disk(tmp_path):
    class TwoDisks(LocalFiles):
        def rename(self, source, target):
            if (layout.LEASE in source) != (layout.LEASE in target):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)
            super().rename(source, target)

    saver = open_directory(tmp_path, files=TwoDisks(), lease=acquired(tmp_path))
    save(saver, 1)
    assert saver.newest().step == 1


def test_the_fence_is_the_move_and_not_a_look_before(tmp_path):
    """The takeover comes between the last check and the marker."""

    class Frozen(LocalFiles):
        def rename(self, source, target):
            if target.endswith(layout.MARKER):
                steal(tmp_path)
            super().rename(source, target)

    lease = acquired(tmp_path)
    saver = open_directory(tmp_path, OwnContents(), files=Frozen(), lease=lease)
    with pytest.raises(errors.LeaseLostError):
        save(saver, 1)
    assert saver.newest() is None


def test_a_move_through_a_lost_lease_is_a_loss(tmp_path):
    """An NFS client that has opened the directory gets ESTALE, not ENOENT."""

    class Stale(LocalFiles):
        def rename(self, source, target):
            if target.endswith(layout.MARKER):
                steal(tmp_path)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), source)
            super().rename(source, target)

    lease, heard = acquired(tmp_path), []
    lease.on_loss(heard.append)
    saver = open_directory(tmp_path, OwnContents(), files=Stale(), lease=lease)
    with pytest.raises(errors.LeaseLostError):
        save(saver, 1)
    assert len(heard) == 1


@pytest.mark.parametrize("name", [layout.POINTER, layout.MARKER])
def test_a_rename_to_a_name_for_readers_is_fenced_too(tmp_path, name):
    (tmp_path / "made").write_bytes(b"")
    lease = acquired(tmp_path)
    steal(tmp_path)
    with pytest.raises(errors.LeaseLostError):
        FencedFiles(LocalFiles(), lease).rename(
            str(tmp_path / "made"), str(tmp_path / name)
        )
    assert not (tmp_path / name).exists()


def test_a_takeover_ends_a_deletion_whose_directories_are_kept_open(tmp_path):
    names = [tmp_path / "first", tmp_path / "second"]
    for path in names:
        path.write_bytes(b"")
    files = FencedFiles(LocalFiles(str(tmp_path)), acquired(tmp_path))
    with contained.parents_kept_open():
        files.remove(str(names[0]))
        steal(tmp_path)
        with pytest.raises(errors.LeaseLostError):
            files.remove(str(names[1]))
    assert [path.exists() for path in names] == [False, True]


def test_a_directory_that_appears_before_a_deletion_does_not_keep_the_lease(tmp_path):
    """In the lease's directory, the directory would keep the lease from its end."""
    path = tmp_path / "planted"
    path.write_bytes(b"")

    class Swapping(LocalFiles):
        def rename(self, source, target):
            if source == str(path) and path.is_file():
                path.unlink()
                (path / "inside").mkdir(parents=True)
            super().rename(source, target)

    lease = acquired(tmp_path)
    FencedFiles(Swapping(str(tmp_path)), lease).remove(str(path))
    assert (path / "inside").is_dir()
    lease.release()
    assert is_free(tmp_path)


@pytest.mark.parametrize("name", [layout.POINTER, layout.MARKER])
def test_a_process_that_wakes_after_a_takeover_changes_no_foreign_file(tmp_path, name):
    """The process was frozen before its write, and wakes during the other's write."""
    (tmp_path / name).write_bytes(b"older")

    class Amid(LocalFiles):
        frozen: FencedFiles

        def sync_file(self, path):
            super().sync_file(path)
            with pytest.raises(errors.LeaseLostError):
                self.frozen.publish(str(tmp_path / name), b"of who was frozen")

    frozen = acquired(tmp_path)
    place = DirectoryLease(str(tmp_path))
    place.end(place.read_owner().token)
    files = Amid()
    files.frozen = FencedFiles(LocalFiles(), frozen)
    FencedFiles(files, acquired(tmp_path)).publish(str(tmp_path / name), b"new")
    assert (tmp_path / name).read_bytes() == b"new"
    assert frozen.token is None


def test_a_loss_that_a_thread_finds_out_just_before_a_move_is_no_free_pass(tmp_path):
    class Blind(Lease):
        """A lease whose check has just passed."""

        def check(self):
            pass

    lease = Blind(pause=Waiting())
    lease.acquire(str(tmp_path))
    steal(tmp_path)
    with pytest.raises(errors.LeaseLostError):
        Lease.check(lease)
    with pytest.raises(errors.LeaseLostError), lease.moving():
        pytest.fail("it may go on")


def test_a_released_lease_is_acquired_again_if_free(tmp_path):
    lease, saver = leased(tmp_path)
    lease.release()
    save(saver, 1)
    assert not is_free(tmp_path)
    lease.release()
    Other(tmp_path)
    with pytest.raises(errors.LeaseLostError):
        save(saver, 2)


def commit_of_another_run(directory, step, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.directory.head._PROCESS", "another")
        lease, saver = leased(directory)
        save(saver, step)
        lease.release()


def test_a_run_after_a_release_does_not_mix_steps_of_two_runs(tmp_path, monkeypatch):
    lease, saver = leased(tmp_path)
    heard = []
    lease.on_loss(heard.append)
    save(saver, 1)
    lease.release()
    commit_of_another_run(tmp_path, 2, monkeypatch)
    with pytest.raises(
        errors.LeaseLostError, match="another run has acquired the lease"
    ):
        save(saver, 3)
    assert saver.newest().step == 2
    assert len(heard) == 1
    assert is_free(tmp_path)  # for the other one


def test_commits_of_the_resumed_run_do_not_end_the_lease(tmp_path, monkeypatch):
    commit_of_another_run(tmp_path, 1, monkeypatch)
    lease, saver = leased(tmp_path)
    lease.head.follow(catalog.scan(str(tmp_path)), lease)
    lease.release()
    save(saver, 2)
    lease.release()
    other, inner = leased(tmp_path)  # a second handler of this process
    save(inner, 3)
    other.release()
    save(saver, 4)
    assert saver.newest().step == 4


def test_a_directory_that_is_away_for_a_while_is_no_loss(tmp_path):
    run = tmp_path / "mount" / "run"
    run.mkdir(parents=True)
    _, saver = leased(run)
    saver.start()
    (tmp_path / "mount").rename(tmp_path / "away")
    run.mkdir(parents=True)
    with pytest.raises(errors.SaveError, match="now leads to"):
        save(saver, 1)
    run.rmdir()
    (tmp_path / "mount").rmdir()
    (tmp_path / "away").rename(tmp_path / "mount")
    save(saver, 2)
    assert saver.newest().step == 2


def test_a_thread_renews_the_lease_and_reports_its_loss(tmp_path, monkeypatch):
    quick = RenewalIntervals(renewal=0.01, expiry=EXPIRY, poll=POLL)
    monkeypatch.setattr("tfpreempt.checkpoint.lease.directory_lease.PACE", quick)
    lease, heard = acquired(tmp_path), []
    lost = threading.Event()
    lease.on_loss(lambda reason: (heard.append(reason), lost.set()))
    place = DirectoryLease(str(tmp_path))
    first = place.read_owner()
    wait_until(
        lambda: place.read_owner().renewals not in (b"", first.renewals), "a renewal"
    )
    steal(tmp_path)
    assert lost.wait(20)
    assert "process 4711 on node-7" in heard[0]


def test_a_release_during_a_poll_of_another_thread_is_no_loss(tmp_path, monkeypatch):
    lease, heard = acquired(tmp_path), []
    lease.on_loss(heard.append)
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryLease, "has", lambda place, token: lease.release())
        lease.check()
    lease.check()
    assert (heard, lease.token is None) == ([], False)


def test_a_loss_before_the_registration_is_reported(tmp_path):
    lease, heard = acquired(tmp_path), []
    steal(tmp_path)
    with pytest.raises(errors.LeaseLostError):
        lease.check()
    lease.on_loss(heard.append)
    assert len(heard) == 1


def test_a_loss_during_the_cleanup_of_a_start_is_reported(tmp_path, monkeypatch):
    """On a slow disk that takes long, and the thread renews meanwhile."""
    quick = RenewalIntervals(renewal=0.01, expiry=EXPIRY, poll=POLL)
    monkeypatch.setattr("tfpreempt.checkpoint.lease.directory_lease.PACE", quick)
    lease, heard = Lease(pause=Waiting()), []
    lost = threading.Event()
    lease.on_loss(lambda reason: (heard.append(reason), lost.set()))

    class Slow(DirectoryLease):
        def sweep(self):
            steal(tmp_path)
            lost.wait(5)

    lease.acquire(Slow(str(tmp_path)))
    assert len(heard) == 1
    with pytest.raises(errors.LeaseLostError):
        lease.check()
