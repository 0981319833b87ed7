"""Snapshots of one run: saves into memory that outlives the process.

Every worker saves all values needed to resume into memory of its own machine, so no
disk is needed. A snapshot is an ordinary asynchronous save (`AsyncSave`): the main
thread captures the values; a second thread writes the data, computes checksums and
writes the marker. A snapshot without a marker is not used.

A worker has at most two snapshots: the newest snapshot that is known to be intact on
every worker, and the snapshot being written. In a round (a notice with the agreement
that follows), every worker captures a new snapshot and checks that the previous
snapshot is intact. If both succeed on every worker, the new snapshots are written, and
the previous snapshots are kept until the next round. Otherwise no worker writes a
snapshot.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout, retention
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.directory.head import NONE
from tfpreempt.checkpoint.directory.manifest import Manifest, Parent
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.restore.opening import open_directory
from tfpreempt.checkpoint.restore.reshard import is_resized
from tfpreempt.checkpoint.restore.save import AsyncSave, Save
from tfpreempt.checkpoint.state.state import sync_states
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.snapshot_memory import SnapshotMemory, available_bytes
from tfpreempt.storage import file_reading
from tfpreempt.storage.local import LocalStore

log = logging.getLogger(__name__)

BECAUSE = "snapshot"
KEPT = 2
"""Number of snapshots: the newest intact snapshot, and the snapshot being written."""

COPIES = KEPT + 1
"""Number of copies of the state: the snapshots, and the captured copy to be written."""

TRIES = 3
"""Rounds without a snapshot after which no more snapshots are taken."""

# Free memory needed before a round of snapshots, as a multiple of the size of all
# workers' new snapshots. The factor 2 leaves as much memory free as the snapshots take.
_RESERVE = 2
_LAST_WAIT_SECONDS = 5.0  # longest wait for the last snapshot in `end`
_STATES = ".restored"  # folder with the States of the restored snapshot


def directory_for(memory: SnapshotMemory, checkpoint_dir: str, worker: int) -> str:
    """Returns the folder for a worker's snapshots, in the memory for snapshots.

    Args:
        memory: the memory lent to the worker.
        checkpoint_dir: the checkpoint directory, which determines the folder.
        worker: index of the worker.
    """
    key = hashlib.sha256(os.path.abspath(checkpoint_dir).encode(errors="replace"))
    return os.path.join(memory.directory, f"{key.hexdigest()[:16]}-{worker}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTiming:
    """Time and step at which a snapshot was captured.

    Attributes:
        arrived: monotonic seconds at which the main thread reached the boundary.
        left: monotonic seconds at which training continued.
        steps: number of completed steps at this boundary.
        intervals: number of completed intervals at this boundary. An interval is the
            time between two boundaries, usually a step.
    """

    arrived: float
    left: float
    steps: int
    intervals: int


@dataclasses.dataclass(eq=False)
class Snapshots:
    """The snapshots of this worker in memory, for one checkpoint directory.

    Use on the main thread, unless a method says otherwise.

    Args:
        directory: the directory in memory, which only this worker writes.
        memory: the memory lent to this worker by the supervisor.
        available: function that returns the number of bytes of free memory.

    Attributes:
        agreed: name of the newest snapshot that is intact on every worker; "" without
            such a snapshot.
        refused: on the chief, the number of rounds since snapshot `agreed` in which a
            worker took no snapshot.
        is_after_commit: whether a commit was begun since the newest snapshot. The
            commit may have interrupted the snapshot, so a worker without the snapshot
            does not increase `refused`.
        is_off: whether no more snapshots are taken; may be read on any thread.
        taken: timing of the newest snapshot, until the scheduler has read the timing;
            for use on any thread.
        rounds: rounds of the agreement whose keys are to be deleted.
        parent: the newest commit of the checkpoint directory; a snapshot names the
            commit as its parent.
    """

    directory: Directory
    memory: SnapshotMemory
    available: Callable[[], int] = available_bytes
    agreed: str = ""
    refused: int = 0
    is_after_commit: bool = False
    is_off: bool = False
    taken: SnapshotTiming | None = None
    rounds: list[int] = dataclasses.field(default_factory=list)
    parent: Parent = NONE
    _bytes: int = 0  # expected size of a snapshot
    _latest: str = ""  # newest snapshot captured by every worker; "" after a refusal
    _intact: str = ""  # newest intact snapshot of this worker
    _why: str = ""  # error message of the newest failure
    _captured: tuple[Save, CancellationToken, Parent] | None = None
    _under_way: AsyncSave | None = None

    # --- the start -------------------------------------------------------------------

    def find(self) -> list[Entry]:
        """Returns the snapshots that can be restored, newest first, not verified.

        Snapshots of a run with another number of workers, and unreadable snapshots, are
        omitted: a commit on disk can be restored instead.
        """
        return [
            each
            for each in self._scan()
            if each.is_committed
            and each.kind is Kind.OWN
            and each.because == BECAUSE
            and not is_resized(each, self.directory.cluster)
        ]

    def _scan(self) -> list[Entry]:
        try:
            return catalog.scan(self.directory.path)
        except OSError as error:
            log.warning("cannot read snapshots, so no snapshot is used: %s", error)
            return []

    def missing(self, attempts: Collection[str]) -> list[str]:
        """Returns the given snapshots that are missing or corrupt on this worker.

        Logs corrupt snapshots.

        Args:
            attempts: names of the snapshots, equal on every worker.
        """
        for each in self._scan():
            if each.condition is CommitStatus.CORRUPT:
                _log_corrupt_snapshot(each.problems[0])
        missing = set(attempts)
        # Check the newest snapshot last: the tensors of the last checked snapshot stay
        # in memory for the restore.
        for each in reversed(self.find()):
            if attempt_of(each) not in missing:
                continue
            try:
                self.directory.check(each)
                missing.remove(attempt_of(each))
            except errors.CheckpointError as error:
                _log_corrupt_snapshot(str(error))
        return sorted(missing)

    def keep_states(self, restored: Entry) -> Entry:
        """Keeps the named States of a snapshot after the snapshot is deleted.

        A program may load a State at any time. The files of the States get a second
        name (a hard link) in another folder. The links take little memory: the States
        are small, or the program uses their values anyway.

        Args:
            restored: the restored snapshot.

        Returns:
            The snapshot, with the other folder as the source of the States.
        """
        folder = os.path.join(self.directory.path, _STATES)
        try:
            if file_reading.is_dir(folder):
                shutil.rmtree(folder)
            os.makedirs(os.path.join(folder, restored.name))
            for file in restored.files:
                if file.name.endswith(layout.STATE_SUFFIX):
                    target = os.path.join(folder, restored.name, file.name)
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.link(restored.file(file.name), target)
        except OSError as error:
            log.debug("States of a snapshot cannot be kept: %s", error)
            return restored
        return dataclasses.replace(restored, store=LocalStore(folder))

    # --- taking one ------------------------------------------------------------------

    def capture(self, step: int, attempt: str) -> bool:
        """Captures a snapshot on this worker; `go_on` writes the snapshot.

        A failure is logged, and training continues. Even if no snapshot can be taken,
        the worker joins the collectives of the peers.

        Args:
            step: step of the snapshot.
            attempt: name of the snapshot, equal on every worker and never used again.

        Returns:
            Whether the snapshot was captured, and the previous snapshot is intact here.

        Raises:
            CollectiveReadError: this worker could not join a collective read of the
                peers.
        """
        self.wait()
        is_intact = self._latest in ("", self._intact)
        try:
            is_possible = not self.is_off and is_intact and self._has_room()
        except Exception as error:  # noqa: BLE001 - the peers wait for this worker
            self._failed(error)
            is_possible = False
        if not is_possible:
            self.take_part()
            return False
        cancel_token = CancellationToken()
        try:
            captured = Save(self.directory, step, attempt, cancel_token)
            captured.capture()
        except errors.CollectiveReadError:
            raise
        except Exception as error:  # noqa: BLE001 - e.g. of a State; training continues
            self._failed(error)
            return False
        self._captured = captured, cancel_token, self.parent
        # The files, and the values that are still in memory.
        self.set_expected_size(captured.captured_bytes + _bytes_in(captured.staging))
        if self._is_too_large():
            self.discard()
            return False
        return True

    def take_part(self) -> None:
        """Joins the collectives of the peers' snapshots, but takes no snapshot here."""
        try:
            self.directory.contents.take_part()
        finally:
            sync_states(self.directory.registry.in_order())

    def discard(self) -> None:
        """Discards the captured snapshot, because some worker has taken none.

        The next round can take a snapshot.
        """
        self._latest = ""
        self._throw_away()

    def _throw_away(self) -> None:
        if self._captured is not None:
            captured, self._captured = self._captured[0], None
            captured.discard()

    def go_on(self, timing: SnapshotTiming, *, should_save: bool = True) -> None:
        """Starts to write the captured snapshot while training continues.

        Called once every worker has captured a snapshot.

        Args:
            timing: time and step of the snapshot.
            should_save: whether to write the snapshot; False if a notice leaves no
                time.
        """
        if self._captured is None:
            return
        if self._latest:  # every worker has reported this snapshot as intact
            self.agreed, self.refused = self._latest, 0
        self.is_after_commit = False
        captured, cancel_token, parent = self._captured
        self._latest = captured.attempt
        if not should_save:
            self._throw_away()
            return
        self._captured = None
        complete = functools.partial(self._complete, captured, parent)
        try:
            self._under_way = AsyncSave(
                captured.attempt, cancel_token, complete, self._failed
            )
        except RuntimeError as error:  # no thread can be started
            captured.discard()
            self._failed(error)
            return
        self.taken = timing

    def _complete(self, captured: Save, parent: Parent) -> None:
        """Writes the captured snapshot, then the marker. Runs on the save's thread."""
        self._drop_older()
        captured.write()
        worker = self.directory.cluster.worker
        commit = captured.publish(BECAUSE, (worker,), parent)
        if commit is not None:
            self._bytes, self._intact = commit.bytes, captured.attempt

    def _drop_older(self) -> None:
        """Deletes every snapshot but `agreed`; without `agreed`, all but the newest."""
        found = self.find()
        kept = [each for each in found if attempt_of(each) == self.agreed] or found[:1]
        for entry in found:
            if entry not in kept:
                retention.delete(self.directory.files, entry)

    def _drop_all(self) -> None:
        try:
            for entry in self.find():
                retention.delete(self.directory.files, entry)
        except (OSError, errors.CheckpointError) as error:
            log.debug("snapshots could not be removed: %s", error)

    # --- room ------------------------------------------------------------------------

    def set_expected_size(self, size: int) -> None:
        """Raises the expected size of a snapshot to `size` bytes. Thread-safe."""
        self._bytes = max(self._bytes, size)

    def expect_as_in(self, manifest: Manifest) -> None:
        """Raises the expected size of a snapshot to the size computed from a commit.

        May be called on any thread.

        Args:
            manifest: manifest of the commit. Only files that a snapshot of this worker
                would have are counted.
        """
        mine = layout.worker_name(self.directory.cluster.worker) + "/"
        sizes = [
            file.size
            for file in manifest.files
            if file.name.startswith(mine) or not file.name.startswith(layout.WORKER)
        ]
        self.set_expected_size(sum(sizes))

    def _has_room(self) -> bool:
        """Returns whether the machine has enough free memory for a snapshot now."""
        if not self._intact:
            self.set_expected_size(self.directory.contents.held_bytes())
        if self._is_too_large():
            return False
        # After the first snapshot, the memory for the copy is already allocated.
        added = self._bytes if self._intact else 2 * self._bytes
        workers = self.memory.workers
        needed = _RESERVE * workers * added
        try:
            available = self.available()
        except OSError:
            return True  # try the snapshot: the free memory is unknown
        if available >= needed:
            return True
        self._failed(
            MemoryError(
                f"{available} bytes of memory are available, and {needed} should "
                f"stay free for {workers} worker(s)"
            )
        )
        return False

    def _is_too_large(self) -> bool:
        """Returns whether the state is too large for the lent memory.

        If the state is too large, no more snapshots are taken. If the lent memory is
        short only because of snapshots of other checkpoint directories, the other
        snapshots are deleted: no run trains in the other directories now.
        """
        needed, limit = COPIES * self._bytes, self.memory.bytes
        if needed <= limit:
            beside = _of_other_directories(self.directory.path)
            if needed + sum(map(_bytes_in, beside)) > limit:
                for each in beside:
                    shutil.rmtree(each, ignore_errors=True)
            return False
        self.end(
            f"the state takes {self._bytes} bytes, and snapshots need {COPIES} times "
            f"that; this worker has {limit} bytes. `tfpreempt run --snapshots SIZE` "
            "provides more"
        )
        return True

    def _failed(self, error: Exception) -> None:
        """Records and logs a failure; may be called on any thread."""
        self._why = str(error)
        log.debug("a snapshot failed: %s", error)

    def end(self, why: str = "") -> None:
        """Stops taking snapshots, and deletes the existing snapshots to free memory.

        Args:
            why: the reason, for the log; "": too many failures.
        """
        if self.is_off:
            return
        self.is_off = True
        why = why or (
            f"{TRIES} snapshots in a row failed, the last because of: "
            f"{self._why or 'another worker, whose log may have the reason'}"
        )
        log.warning(
            "no more snapshots are taken: %s. A crash costs the steps since the last "
            "commit",
            why.rstrip("."),
        )
        self.give_up()
        self.wait(_LAST_WAIT_SECONDS)
        self.directory.contents.free_copies()
        self._drop_all()

    # --- the end of one --------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written; may be read on any thread."""
        return not self.wait(0.0)

    @property
    def is_dropped(self) -> bool:
        """Whether the newest snapshot was given up for a commit; read on any thread."""
        return self._under_way is not None and self._under_way.is_given_up

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until no snapshot is being written; may be called on any thread.

        Args:
            seconds: longest wait; None: no limit.

        Returns:
            Whether no snapshot is being written.
        """
        under_way = self._under_way
        return under_way is None or under_way.wait(seconds)

    def give_up(self) -> None:
        """Gives up the snapshot in progress, without waiting for its thread.

        Called before a commit, which is worth more than a snapshot.
        """
        self.is_after_commit = True
        self._throw_away()
        if self.is_busy and self._under_way is not None:
            self._under_way.give_up()

    def close(self) -> None:
        """Stops taking snapshots. Existing snapshots are kept for the next start."""
        self.is_off = True
        self.give_up()
        self.wait()
        self.directory.contents.free_copies()

    def clear(self) -> None:
        """Deletes every snapshot, for example after the end of training."""
        self.give_up()
        self.wait()
        self._drop_all()
        try:
            states = os.path.join(self.directory.path, _STATES)
            if file_reading.is_dir(states):
                shutil.rmtree(states)
        except OSError as error:
            log.debug("snapshots could not be removed: %s", error)


def open_snapshots(
    checkpoint: Any, memory: SnapshotMemory, checkpoint_dir: str, cluster: Cluster
) -> Snapshots | None:
    """Opens the snapshots of this worker.

    Returns None after a failure, and logs the reason.

    Args:
        checkpoint: a Checkpoint, a CheckpointManager, or None for named States alone.
        memory: the memory lent to this worker.
        checkpoint_dir: checkpoint directory of the run.
        cluster: the workers, and the index of this worker.
    """
    try:
        directory = open_directory(
            getattr(checkpoint, "checkpoint", checkpoint),
            directory_for(memory, checkpoint_dir, cluster.worker),
            cluster=dataclasses.replace(cluster, saves_all=True),
            policy=retention.RetentionPolicy(max_to_keep=KEPT),
            is_second=True,
        )
        directory.start()
    except errors.TfpreemptError as error:
        log.warning(
            "snapshots are not available, so a crash costs the steps since the last "
            "commit: %s",
            error,
        )
        return None
    return Snapshots(directory, memory)


def _log_corrupt_snapshot(problem: str) -> None:
    text = problem.rstrip(".")
    log.warning("%s; this snapshot is skipped", text)


def _bytes_in(directory: str) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _of_other_directories(mine: str) -> list[str]:
    """Returns the folders of this worker's snapshots for other checkpoint directories.

    Args:
        mine: the folder of this worker's snapshots for the current directory.
    """
    memory, name = os.path.split(mine)
    worker = name.rpartition("-")[2]
    return [
        os.path.join(memory, each)
        for each in file_reading.names(memory)
        if each != name and re.fullmatch(rf"[0-9a-f]{{16}}-{re.escape(worker)}", each)
    ]


def attempt_of(snapshot: Entry) -> str:
    """Returns the name of a snapshot; the name is equal on every worker."""
    manifest = snapshot.manifest
    return "" if manifest is None else str(manifest.metadata.get("attempt"))


def is_newer(snapshot: Entry, committed: Entry | None, highest: int) -> bool:
    """Returns whether a snapshot is worth more than the newest commit on disk.

    True if the snapshot has a later step than the commit, and no other run has
    committed after the snapshot.

    Args:
        snapshot: a snapshot of this worker.
        committed: the newest intact commit on disk; None without a commit.
        highest: highest sequence number on disk, including corrupt commits.
    """
    parent = None if snapshot.manifest is None else snapshot.manifest.parent
    if parent is None:
        return False
    nothing_came = highest <= parent.sequence
    if committed is None:
        return nothing_came
    if (snapshot.step or 0) <= (committed.step or 0):
        return False
    if parent.token == committed.token:
        return True
    # Case: the snapshot's parent is corrupt, and `committed` is an older commit of the
    # same run.
    is_older = committed.sequence is not None and committed.sequence < parent.sequence
    return nothing_came and is_older
