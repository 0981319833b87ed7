"""Snapshots of one run: saves into memory that outlives the process.

Each worker keeps on its own machine all values that it needs to resume, so no disk is
needed. A snapshot is an asynchronous save like any other (`AsyncSave`): the main thread
captures it, and another thread writes, sums and marks it. A snapshot without a marker
does not count.

At most two generations exist: the newest that all workers are known to have, and the
one that is being written. A round of snapshots succeeds if every worker has captured
its own, and has the snapshot of the round before intact: that snapshot is kept from
then on, and the new one is written. If one worker fails, no worker writes.
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
from tfpreempt.checkpoint.directory.catalog import Condition, Entry, Kind
from tfpreempt.checkpoint.directory.commit import Permit
from tfpreempt.checkpoint.directory.head import NONE
from tfpreempt.checkpoint.directory.manifest import Manifest, Parent
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.restore.opening import open_directory
from tfpreempt.checkpoint.restore.save import AsyncSave, Save
from tfpreempt.checkpoint.state.state import sync_states
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.memory import LentMemory, available_bytes
from tfpreempt.storage import reading
from tfpreempt.storage.local import LocalStore

log = logging.getLogger(__name__)

BECAUSE = "snapshot"
KEPT = 2
"""Generations: the newest that all workers have, and the one that is being written."""

COPIES = KEPT + 1
"""How often the state may be in memory: as these, and as what is to be written yet."""

TRIES = 3
"""Rounds without a snapshot after which none are taken any more."""

_RESERVE = 2  # of what is available, snapshots leave as much as they take
_PATIENCE_SECONDS = 5.0  # for the last one to end, where there are to be no more
_STATES = ".restored"  # keeps the States of what was restored


def directory_for(memory: LentMemory, checkpoint_dir: str, worker: int) -> str:
    """Where the snapshots of one worker of one checkpoint directory lie."""
    key = hashlib.sha256(os.path.abspath(checkpoint_dir).encode(errors="replace"))
    return os.path.join(memory.directory, f"{key.hexdigest()[:16]}-{worker}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A snapshot was captured, and training has gone on.

    Attributes:
        arrived: monotonic seconds at which the main thread came to the boundary.
        left: when it went on.
        steps: that had been made by then.
        intervals: that had been: steps, and whatever else passes boundaries.
    """

    arrived: float
    left: float
    steps: int
    intervals: int


@dataclasses.dataclass(eq=False)
class Snapshots:
    """What one worker has in memory for a checkpoint directory, and takes there.

    Main thread, unless said otherwise.

    Args:
        directory: the directory in that memory, of which this worker is the chief.
        memory: the memory that this worker may use.
        available: returns how many bytes of memory are free.

    Attributes:
        agreed: the name of the newest that all workers have whole; "" while none is.
        refused: on the chief, the rounds in which a worker said no, since there was one
            that all had whole.
        is_after_commit: whether a commit was begun since then: it may have broken one
            off, which then lacks the one before, and is not to blame.
        is_off: whether none are taken any more; any thread.
        taken: the newest, until its cost was looked at; any thread.
        rounds: rounds of the agreement whose keys are to be deleted.
        parent: the newest commit of the checkpoint directory.
    """

    directory: Directory
    memory: LentMemory
    available: Callable[[], int] = available_bytes
    agreed: str = ""
    refused: int = 0
    is_after_commit: bool = False
    is_off: bool = False
    taken: Taken | None = None
    rounds: list[int] = dataclasses.field(default_factory=list)
    parent: Parent = NONE
    _bytes: int = 0  # of one, as far as it is known
    _latest: str = ""  # the one that all have captured; "" after a round with a no
    _whole: str = ""  # the newest that this worker has made
    _why: str = ""  # the newest failure
    _captured: tuple[Save, Permit, Parent] | None = None
    _under_way: AsyncSave | None = None

    # --- the start -------------------------------------------------------------------

    def find(self) -> list[Entry]:
        """The snapshots that were taken by as many workers, newest first; not verified.

        What cannot be read is none: there is the disk.
        """
        world = self.directory.cluster.world
        return [
            each
            for each in self._scan()
            if each.is_committed
            and each.kind is Kind.OWN
            and each.manifest is not None
            and each.manifest.because == BECAUSE
            and each.manifest.world_size == world
        ]

    def _scan(self) -> list[Entry]:
        try:
            return catalog.scan(self.directory.path)
        except OSError as error:
            log.warning(
                "tfpreempt: snapshots cannot be read, so none is used: %s", error
            )
            return []

    def lacks(self, attempts: Collection[str]) -> list[str]:
        """Which of these snapshots this worker has not, or not whole; tells of damage.

        Args:
            attempts: their names, equal on all workers.
        """
        for each in self._scan():
            if each.condition is Condition.DAMAGED:
                _tell_of_damage(each.problems[0])
        missing = set(attempts)
        for each in reversed(self.find()):  # the newest last: its tensors are kept
            if attempt_of(each) not in missing:
                continue
            try:
                self.directory.check(each)
                missing.remove(attempt_of(each))
            except errors.CheckpointError as error:
                _tell_of_damage(str(error))
        return sorted(missing)

    def keep_states(self, restored: Entry) -> Entry:
        """The same with States that stay when the snapshot itself goes.

        A program may ask for one of them at any time; they are small, or the program
        has them anyway. Their files get a second name.
        """
        folder = os.path.join(self.directory.path, _STATES)
        manifest = restored.manifest
        try:
            if reading.is_dir(folder):
                shutil.rmtree(folder)
            os.makedirs(os.path.join(folder, restored.name))
            for file in manifest.files if manifest is not None else ():
                if file.name.endswith(layout.STATE_SUFFIX):
                    target = os.path.join(folder, restored.name, file.name)
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.link(restored.file(file.name), target)
        except OSError as error:
            log.info("tfpreempt: States of a snapshot cannot be kept: %s", error)
            return restored
        return dataclasses.replace(restored, store=LocalStore(folder))

    # --- taking one ------------------------------------------------------------------

    def capture(self, step: int, attempt: str) -> bool:
        """Takes this worker's part of a snapshot, which `go_on` has written.

        What fails is told, and training goes on. What other workers need of this one is
        done in any case.

        Args:
            step: that it is of.
            attempt: its name, equal on all workers and never used again.

        Returns:
            Whether it was captured, and the one before is whole here.

        Raises:
            CollectiveReadError: what others need of this one could not be done.
        """
        self.wait()
        is_whole = self._latest in ("", self._whole)
        try:
            is_possible = not self.is_off and is_whole and self._has_room()
        except Exception as error:  # noqa: BLE001 - the others wait for this worker
            self._failed(error)
            is_possible = False
        if not is_possible:
            self.take_part()
            return False
        permit = Permit()
        try:
            captured = Save(self.directory, step, attempt, permit)
            captured.capture()
        except errors.CollectiveReadError:
            raise
        except Exception as error:  # noqa: BLE001 - of a State, say; training goes on
            self._failed(error)
            return False
        self._captured = captured, permit, self.parent
        self.expect(_size(captured))
        if self._is_too_large():
            self.discard()
            return False
        return True

    def take_part(self) -> None:
        """Does what others need of this worker for theirs, and captures nothing."""
        try:
            self.directory.contents.take_part()
        finally:
            sync_states(self.directory.registry.in_order())

    def discard(self) -> None:
        """One worker has said no: none writes this one, and all may take the next."""
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
        is_wanted: bool = True,
    ) -> None:
        """All workers have captured theirs: it is written while training goes on.

        Args:
            arrived: see `Taken`.
            left: see `Taken`.
            steps: see `Taken`.
            intervals: see `Taken`.
            is_wanted: False: this worker has no time for it.
        """
        if self._captured is None:
            return
        if self._latest:  # which all have whole, as they said
            self.agreed, self.refused = self._latest, 0
        self.is_after_commit = False
        captured, permit, parent = self._captured
        self._latest = captured.attempt
        if not is_wanted:
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
        self.taken = Taken(arrived=arrived, left=left, steps=steps, intervals=intervals)

    def _complete(self, captured: Save, parent: Parent) -> None:
        """Writes it and marks it; on a thread of its own."""
        self._drop_older()
        captured.write()
        worker = self.directory.cluster.worker
        commit = captured.publish(BECAUSE, (worker,), parent)
        if commit is not None:
            self._bytes, self._whole = commit.bytes, captured.attempt

    def _drop_older(self) -> None:
        """Keeps the one that all have; the newest, where it is not known which."""
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
            log.info("tfpreempt: snapshots could not be removed: %s", error)

    # --- room ------------------------------------------------------------------------

    def expect(self, size: int) -> None:
        """One takes so many bytes, as what it is made of does elsewhere; any thread."""
        self._bytes = max(self._bytes, size)

    def expect_as_in(self, manifest: Manifest) -> None:
        """One takes as much as there is of this worker in a commit; any thread."""
        mine = layout.worker_name(self.directory.cluster.worker) + "/"
        sizes = [
            file.size
            for file in manifest.files
            if file.name.startswith(mine) or not file.name.startswith(layout.WORKER)
        ]
        self.expect(sum(sizes))

    def _has_room(self) -> bool:
        """Whether another one may be taken, as things are now."""
        if not self._whole:
            self.expect(self.directory.contents.held_bytes())
        if self._is_too_large():
            return False
        added = self._bytes if self._whole else 2 * self._bytes  # the copy is there
        workers = self.memory.workers
        needed = _RESERVE * workers * added
        try:
            available = self.available()
        except OSError:
            return True  # nobody says
        if available >= needed:
            return True
        self._failed(
            MemoryError(
                f"{available} bytes of memory can be had, and {needed} should be "
                f"left for {workers} worker(s)"
            )
        )
        return False

    def _is_too_large(self) -> bool:
        """What lies there for other directories goes first: they are not trained in."""
        needed, limit = COPIES * self._bytes, self.memory.bytes
        if needed <= limit:
            beside = _of_other_directories(self.directory.path)
            if needed + sum(map(_bytes_in, beside)) > limit:
                for each in beside:
                    shutil.rmtree(each, ignore_errors=True)
            return False
        self.end(
            f"the state takes {self._bytes} bytes, {COPIES} times that is needed, and "
            f"there are {limit} for this worker. `tfpreempt run --snapshots SIZE` "
            "gives it more"
        )
        return True

    def _failed(self, error: Exception) -> None:
        """Any thread."""
        self._why = str(error)
        log.info("tfpreempt: a snapshot failed: %s", error)

    def end(self, why: str = "") -> None:
        """None are taken any more, and there are none: memory may be what is short.

        Args:
            why: to be told; "": that failed too often.
        """
        if self.is_off:
            return
        self.is_off = True
        why = why or (
            f"{TRIES} could not be taken since the last one, the last because of: "
            f"{self._why or 'another worker, whose log may say more'}"
        )
        log.warning(
            "tfpreempt: no snapshots are taken any more: %s. A death without a notice "
            "costs what came after the last commit",
            why.rstrip("."),
        )
        self.give_up()
        self.wait(_PATIENCE_SECONDS)
        self.directory.contents.free_copies()
        self._drop_all()

    # --- the end of one --------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether one is being written; any thread."""
        under_way = self._under_way
        return under_way is not None and not under_way.wait(0.0)

    @property
    def is_dropped(self) -> bool:
        """Whether the newest was given up for a commit; any thread."""
        return self._under_way is not None and self._under_way.is_given_up

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until none is being written; any thread.

        Args:
            seconds: at most; None: as long as it takes.

        Returns:
            Whether none is.
        """
        under_way = self._under_way
        return under_way is None or under_way.wait(seconds)

    def give_up(self) -> None:
        """A commit is about to be made, which is worth more; nothing is waited for."""
        self.is_after_commit = True
        self._throw_away()
        if self.is_busy and self._under_way is not None:
            self._under_way.give_up()

    def close(self) -> None:
        """No more are taken. What there is stays, for the next start."""
        self.is_off = True
        self.give_up()
        self.wait()
        self.directory.contents.free_copies()

    def clear(self) -> None:
        """What was taken is worth nothing any more."""
        self.give_up()
        self.wait()
        self._drop_all()
        try:
            states = os.path.join(self.directory.path, _STATES)
            if reading.is_dir(states):
                shutil.rmtree(states)
        except OSError as error:
            log.info("tfpreempt: snapshots could not be removed: %s", error)


def open_snapshots(
    checkpoint: Any, memory: LentMemory, checkpoint_dir: str, cluster: Cluster
) -> Snapshots | None:
    """Opens the snapshots of this worker; None, logged, if there can be none.

    Args:
        checkpoint: a Checkpoint, a CheckpointManager, or None for named States alone.
        memory: the memory that was lent to this worker.
        checkpoint_dir: the checkpoint directory of the run.
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
            "tfpreempt: there can be no snapshots, so a death without a notice costs "
            "what came after the last commit: %s",
            error,
        )
        return None
    return Snapshots(directory, memory)


def _tell_of_damage(problem: str) -> None:
    text = problem.rstrip(".")
    log.warning("tfpreempt: %s; this snapshot is passed over", text)


def _size(captured: Save) -> int:
    """Bytes of what was captured: written already, or to be written."""
    tensors = sum(each.data.nbytes for each in captured.tensors)
    return tensors + _bytes_in(captured.staging)


def _bytes_in(directory: str) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _of_other_directories(mine: str) -> list[str]:
    """Where this worker's snapshots of other checkpoint directories are."""
    memory, name = os.path.split(mine)
    worker = name.rpartition("-")[2]
    return [
        os.path.join(memory, each)
        for each in reading.names(memory)
        if each != name and re.fullmatch(rf"[0-9a-f]{{16}}-{re.escape(worker)}", each)
    ]


def attempt_of(snapshot: Entry) -> str:
    """The name of a snapshot that all workers know it by."""
    manifest = snapshot.manifest
    return "" if manifest is None else str(manifest.metadata.get("attempt"))


def is_newer(snapshot: Entry, committed: Entry | None, highest: int) -> bool:
    """Whether a snapshot goes on from a commit, and is of a later step.

    It is not where another run has committed since the snapshot was taken.

    Args:
        snapshot: of this worker.
        committed: the newest that is whole on the disk; None without one.
        highest: the highest sequence there, of what is damaged too.
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
    # That one is damaged, and an older one of this run stands in for it.
    is_older = committed.sequence is not None and committed.sequence < parent.sequence
    return nothing_came and is_older
