"""Snapshots of one run: saves into memory that outlives the process.

Each worker keeps on its own machine every value needed to resume, so no disk is needed.
A snapshot is an ordinary asynchronous save (`AsyncSave`). The main thread captures the
snapshot; a second thread writes the data, computes checksums and writes the marker. A
snapshot without a marker does not count.

At most two generations exist: the newest snapshot known to be held by every worker, and
the snapshot being written. A round of snapshots succeeds if every worker has captured
its own snapshot, and has the snapshot of the previous round intact. The previous
snapshot is kept from then on, and the new snapshot is written. If one worker fails, no
worker writes.
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
from tfpreempt.checkpoint.restore.save import AsyncSave, Save
from tfpreempt.checkpoint.state.state import sync_states
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.snapshot_memory import SnapshotMemory, available_bytes
from tfpreempt.storage import file_reading
from tfpreempt.storage.local import LocalStore

log = logging.getLogger(__name__)

BECAUSE = "snapshot"
KEPT = 2
"""Generations: the newest snapshot of every worker, and the snapshot being written."""

COPIES = KEPT + 1
"""Copies of the state in memory: the generations, and the copy still to be written."""

TRIES = 3
"""Rounds without a snapshot after which no more snapshots are taken."""

_RESERVE = 2  # snapshots leave as much free memory as they take
_PATIENCE_SECONDS = 5.0  # longest wait for the last snapshot in `end`
_STATES = ".restored"  # folder with the States of the restored snapshot


def directory_for(memory: SnapshotMemory, checkpoint_dir: str, worker: int) -> str:
    """Returns the folder of a worker's snapshots of a checkpoint directory."""
    key = hashlib.sha256(os.path.abspath(checkpoint_dir).encode(errors="replace"))
    return os.path.join(memory.directory, f"{key.hexdigest()[:16]}-{worker}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTiming:
    """Timing of a captured snapshot.

    Attributes:
        arrived: monotonic seconds at which the main thread reached the boundary.
        left: monotonic seconds at which training continued.
        steps: number of steps completed by then.
        intervals: number of intervals completed by then: steps, and other passages of
            boundaries.
    """

    arrived: float
    left: float
    steps: int
    intervals: int


@dataclasses.dataclass(eq=False)
class Snapshots:
    """The snapshots of one worker in memory, for a checkpoint directory.

    Main thread, unless a method says otherwise.

    Args:
        directory: the directory in memory, in which this worker acts as the chief.
        memory: the memory lent to this worker.
        available: returns the number of bytes of free memory.

    Attributes:
        agreed: name of the newest snapshot intact on every worker; "" without such a
            snapshot.
        refused: on the chief, the number of rounds in which a worker refused, since the
            agreed snapshot.
        is_after_commit: whether a commit was begun since then. The commit may have
            interrupted a snapshot; a worker without the previous snapshot is then not
            counted as refusing.
        is_off: whether no more snapshots are taken; any thread.
        taken: timing of the newest snapshot, until the scheduler has read it; any
            thread.
        rounds: rounds of the agreement whose keys are to be deleted.
        parent: the newest commit of the checkpoint directory.
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
    _latest: str = ""  # captured by every worker; "" after a refusal
    _whole: str = ""  # newest intact snapshot of this worker
    _why: str = ""  # newest failure
    _captured: tuple[Save, CancellationToken, Parent] | None = None
    _under_way: AsyncSave | None = None

    # --- the start -------------------------------------------------------------------

    def find(self) -> list[Entry]:
        """Returns the snapshots with the same number of workers, newest first.

        The snapshots are not verified. Unreadable snapshots are omitted, because a
        commit on disk can be restored instead.
        """
        num_workers = self.directory.cluster.num_workers
        return [
            each
            for each in self._scan()
            if each.is_committed
            and each.kind is Kind.OWN
            and each.manifest is not None
            and each.manifest.because == BECAUSE
            and each.manifest.world_size == num_workers
        ]

    def _scan(self) -> list[Entry]:
        try:
            return catalog.scan(self.directory.path)
        except OSError as error:
            log.warning("cannot read snapshots, so no snapshot is used: %s", error)
            return []

    def missing(self, attempts: Collection[str]) -> list[str]:
        """Returns the names of the snapshots missing or corrupt on this worker.

        Logs corrupt snapshots.

        Args:
            attempts: names of the snapshots, equal on every worker.
        """
        for each in self._scan():
            if each.condition is CommitStatus.CORRUPT:
                _tell_of_damage(each.problems[0])
        missing = set(attempts)
        for each in reversed(self.find()):  # newest last: its tensors stay in memory
            if attempt_of(each) not in missing:
                continue
            try:
                self.directory.check(each)
                missing.remove(attempt_of(each))
            except errors.CheckpointError as error:
                _tell_of_damage(str(error))
        return sorted(missing)

    def keep_states(self, restored: Entry) -> Entry:
        """Returns the same entry with States that outlive the snapshot itself.

        A program may load a State at any time. The States are small, or the program has
        their values anyway. Their files get a second name (a hard link).

        Args:
            restored: the restored snapshot.
        """
        folder = os.path.join(self.directory.path, _STATES)
        manifest = restored.manifest
        try:
            if file_reading.is_dir(folder):
                shutil.rmtree(folder)
            os.makedirs(os.path.join(folder, restored.name))
            for file in manifest.files if manifest is not None else ():
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
        """Captures this worker's part of a snapshot; `go_on` writes the part.

        A failure is logged, and training continues. The worker joins the collective
        work of the peers in any case.

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
        is_whole = self._latest in ("", self._whole)
        try:
            is_possible = not self.is_off and is_whole and self._has_room()
        except Exception as error:  # noqa: BLE001 - the peers wait for this worker
            self._failed(error)
            is_possible = False
        if not is_possible:
            self.take_part()
            return False
        permit = CancellationToken()
        try:
            captured = Save(self.directory, step, attempt, permit)
            captured.capture()
        except errors.CollectiveReadError:
            raise
        except Exception as error:  # noqa: BLE001 - e.g. of a State; training continues
            self._failed(error)
            return False
        self._captured = captured, permit, self.parent
        self.set_expected_size(_size(captured))
        if self._is_too_large():
            self.discard()
            return False
        return True

    def take_part(self) -> None:
        """Joins the collective work of the peers' snapshots, without a capture."""
        try:
            self.directory.contents.take_part()
        finally:
            sync_states(self.directory.registry.in_order())

    def discard(self) -> None:
        """Discards the captured snapshot, because a worker has refused.

        The next snapshot may be taken.
        """
        self._latest = ""
        self._throw_away()

    def _throw_away(self) -> None:
        if self._captured is not None:
            captured, self._captured = self._captured[0], None
            captured.discard()

    def go_on(
        self,
        arrived: float,
        left: float,
        steps: int,
        *,
        intervals: int = 0,
        should_save: bool = True,
    ) -> None:
        """Starts to write the captured snapshot while training continues.

        Called when every worker has captured its own snapshot.

        Args:
            arrived: monotonic seconds of the boundary, see `SnapshotTiming`.
            left: monotonic seconds of the continuation, see `SnapshotTiming`.
            steps: number of steps, see `SnapshotTiming`.
            intervals: number of intervals, see `SnapshotTiming`.
            should_save: False if this worker has no time for the write.
        """
        if self._captured is None:
            return
        if self._latest:  # reported intact by every worker
            self.agreed, self.refused = self._latest, 0
        self.is_after_commit = False
        captured, permit, parent = self._captured
        self._latest = captured.attempt
        if not should_save:
            self._throw_away()
            return
        self._captured = None
        complete = functools.partial(self._complete, captured, parent)
        try:
            self._under_way = AsyncSave(
                captured.attempt, permit, complete, self._failed
            )
        except RuntimeError as error:  # no thread can be started
            captured.discard()
            self._failed(error)
            return
        self.taken = SnapshotTiming(
            arrived=arrived, left=left, steps=steps, intervals=intervals
        )

    def _complete(self, captured: Save, parent: Parent) -> None:
        """Writes the captured snapshot and the marker; on the save's thread."""
        self._drop_older()
        captured.write()
        worker = self.directory.cluster.worker
        commit = captured.publish(BECAUSE, (worker,), parent)
        if commit is not None:
            self._bytes, self._whole = commit.bytes, captured.attempt

    def _drop_older(self) -> None:
        """Deletes every snapshot except the agreed (or else the newest) snapshot."""
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
        """Raises the expected size of a snapshot, in bytes; any thread."""
        self._bytes = max(self._bytes, size)

    def expect_as_in(self, manifest: Manifest) -> None:
        """Raises the expected size to this worker's share of a commit; any thread."""
        mine = layout.worker_name(self.directory.cluster.worker) + "/"
        sizes = [
            file.size
            for file in manifest.files
            if file.name.startswith(mine) or not file.name.startswith(layout.WORKER)
        ]
        self.set_expected_size(sum(sizes))

    def _has_room(self) -> bool:
        """Returns whether the free memory suffices for a snapshot now."""
        if not self._whole:
            self.set_expected_size(self.directory.contents.held_bytes())
        if self._is_too_large():
            return False
        # After the first snapshot, memory for the copy is already allocated.
        added = self._bytes if self._whole else 2 * self._bytes
        workers = self.memory.workers
        needed = _RESERVE * workers * added
        try:
            available = self.available()
        except OSError:
            return True  # the free memory is unknown
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

        Snapshots of other checkpoint directories are deleted first if memory is short,
        because no run trains in these directories.
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
        """Records and logs a failure; any thread."""
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
        self.wait(_PATIENCE_SECONDS)
        self.directory.contents.free_copies()
        self._drop_all()

    # --- the end of one --------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written; any thread."""
        under_way = self._under_way
        return under_way is not None and not under_way.wait(0.0)

    @property
    def is_dropped(self) -> bool:
        """Whether the newest snapshot was given up for a commit; any thread."""
        return self._under_way is not None and self._under_way.is_given_up

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until no snapshot is being written; any thread.

        Args:
            seconds: longest wait; None: no limit.

        Returns:
            Whether no snapshot is being written.
        """
        under_way = self._under_way
        return under_way is None or under_way.wait(seconds)

    def give_up(self) -> None:
        """Gives up the snapshot in progress before a commit, without a wait.

        A commit is worth more than a snapshot.
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
    """Opens the snapshots of this worker; logs the reason and returns None on failure.

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
            max_to_keep=KEPT,
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


def _tell_of_damage(problem: str) -> None:
    text = problem.rstrip(".")
    log.warning("%s; this snapshot is skipped", text)


def _size(captured: Save) -> int:
    """Returns the bytes of a captured snapshot, both written and still to write."""
    tensors = sum(each.data.nbytes for each in captured.tensors)
    return tensors + _bytes_in(captured.staging)


def _bytes_in(directory: str) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _of_other_directories(mine: str) -> list[str]:
    """Returns folders with this worker's snapshots of other checkpoint directories."""
    memory, name = os.path.split(mine)
    worker = name.rpartition("-")[2]
    return [
        os.path.join(memory, each)
        for each in file_reading.names(memory)
        if each != name and re.fullmatch(rf"[0-9a-f]{{16}}-{re.escape(worker)}", each)
    ]


def attempt_of(snapshot: Entry) -> str:
    """Returns the name of a snapshot, equal on every worker."""
    manifest = snapshot.manifest
    return "" if manifest is None else str(manifest.metadata.get("attempt"))


def is_newer(snapshot: Entry, committed: Entry | None, highest: int) -> bool:
    """Returns whether a snapshot continues from a commit, and is of a later step.

    False if another run has committed since the snapshot was taken.

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
    # The parent is corrupt, and an older commit of this run replaces it.
    is_older = committed.sequence is not None and committed.sequence < parent.sequence
    return nothing_came and is_older
