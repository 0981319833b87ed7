"""A program's side of the object store: where it is, what goes there, how it ends."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint import catalog
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.checkpoint.payload import Staged
from tfpreempt.checkpoint.remote import tidy, upload
from tfpreempt.checkpoint.remote.exchange import ShardExchange
from tfpreempt.checkpoint.remote.mirror import Mirror
from tfpreempt.checkpoint.remote.status import MirrorStatus
from tfpreempt.core.events import Fault
from tfpreempt.storage.deadline import RETRY_SECONDS
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.interface import ObjectStore
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.opening import check_apart, is_uri, open_store

_log = logging.getLogger(__name__)

REMOTE_VARIABLE = "TFPREEMPT_REMOTE_CHECKPOINT_DIR"
DIRECTORY_VARIABLE = "TFPREEMPT_CHECKPOINT_DIR"
SILENT_SECONDS = 2.0  # that a start asks a store before it says that there's no answer
LOOK_SECONDS = 8.0  # that it asks on where a local commit can be restored

_in_use: weakref.WeakValueDictionary[str, Remote] = weakref.WeakValueDictionary()


def open_remote(given: Any, checkpoint_dir: Any) -> ObjectStore | None:
    """The store that a handler's commits are copied to.

    Args:
        given: `remote_checkpoint_dir`; None asks the environment, where the supervisor
            names the place of its own checkpoint directory, and of those below it.
        checkpoint_dir: the handler's.

    Returns:
        The store; None where there is to be none.

    Raises:
        ConfigurationError: the place cannot be one.
    """
    place: Any = given
    if given is None and checkpoint_dir:
        place = _from_environment(os.fsdecode(checkpoint_dir))
    if place is None or place == "":
        return None
    if hasattr(place, "put_if_absent"):
        store: ObjectStore = place
        if checkpoint_dir and isinstance(store, LocalStore):
            check_apart(store.uri, os.fsdecode(checkpoint_dir))
        return store
    if not isinstance(place, str | os.PathLike):
        raise errors.ConfigurationError(
            f"remote_checkpoint_dir is {place!r}; expected a URI such as "
            '"gs://bucket/run", or an ObjectStore of tfpreempt'
        )
    if is_uri(os.fsdecode(checkpoint_dir or "")):
        raise errors.ConfigurationError(
            f"checkpoint_dir is {checkpoint_dir!r} and remote_checkpoint_dir is "
            f"{place!r}; commits of a local directory can be copied, those of a URI "
            "are in object storage already. Leave one of the two out."
        )
    if checkpoint_dir:
        check_apart(os.fspath(place), os.fsdecode(checkpoint_dir))
    return open_store(os.fspath(place))


def _from_environment(checkpoint_dir: str) -> str | None:
    place = os.environ.get(REMOTE_VARIABLE, "")
    root = os.environ.get(DIRECTORY_VARIABLE, "")
    if not place or not root or is_uri(root):
        return place or None
    below = os.path.relpath(os.path.abspath(checkpoint_dir), os.path.abspath(root))
    if below == os.curdir:
        return place
    if below.split(os.sep)[0] == os.pardir:
        _log.warning(
            "tfpreempt: %s=%s is for what lies in %s; the checkpoints in %s are not "
            "copied there. Pass remote_checkpoint_dir= to have them copied.",
            REMOTE_VARIABLE,
            place,
            root,
            checkpoint_dir,
        )
        return None
    return f"{place.rstrip('/')}/{below.replace(os.sep, '/')}"


class Remote:
    """What a handler, or a program without one, has in an object store; every worker.

    Args:
        store: the store.
        worker: index of this worker.
        apart: workers that do not see the chief's directory.

    Attributes:
        has_apart: whether there are any.
    """

    def __init__(
        self, store: ObjectStore, worker: int, apart: Collection[int] = ()
    ) -> None:
        self.store = store
        self._exchange = ShardExchange(store, worker, apart, LocalFiles())
        self.has_apart = bool(apart)
        self._mirror: Mirror | None = None
        self._highest = 0
        self._directory = ""

    def open(
        self,
        directory: str,
        newest: Entry | None,
        *,
        token: str,
        max_to_keep: int | None,
        record: Callable[[Fault], None],
    ) -> None:
        """Begins to copy; on the chief.

        Args:
            directory: the checkpoint directory. One handler may follow another in it
                that was never closed (a notebook catches SystemExit), and takes over.
            newest: the newest local commit, which the last run may not have copied.
            token: of this start; begins the names of its saves.
            max_to_keep: commits to keep in the store; None keeps all.
            record: a method that is told faults, for the journal; held weakly.

        Raises:
            ConfigurationError: a handler with another directory copies to this place.
        """
        other = _in_use.get(self.store.uri)
        if other is not None and other._directory != directory:
            raise errors.ConfigurationError(
                f"Two open handlers of this process, in {other._directory!r} and "
                f"{directory!r}, have remote_checkpoint_dir={self.store.uri!r}; their "
                "commits would be taken for one another's. Give each a place of its "
                "own, or close the first."
            )
        if other is not None:
            other.close()
        self._directory = directory
        _in_use[self.store.uri] = self
        weak = weakref.WeakMethod(record)

        def tell(fault: Fault) -> None:
            alive = weak()
            if alive is not None:
                alive(fault)

        self._mirror = Mirror(self.store, max_to_keep=max_to_keep, record=tell)
        self._mirror.errand(self._exchange.clearing_others(token))
        if newest is not None and newest.manifest is not None:
            self.committed(newest.path)

    @property
    def is_apart(self) -> bool:
        """Whether this worker does not see the chief's directory."""
        return self._exchange.is_apart

    @property
    def highest_sequence(self) -> int:
        """The highest sequence seen in the store."""
        seen = 0 if self._mirror is None else self._mirror.highest_sequence
        return max(self._highest, seen)

    def look(self, timeout: float | None = None) -> None:
        """Finds out what sequences are taken.

        Args:
            timeout: seconds; None: the store's own limit.

        Raises:
            CheckpointError: the store cannot be listed.
        """
        self._highest = tidy.highest(catalog.copies(self.store, timeout=timeout))

    def _look_aloud(self, *, timeout: float | None) -> None:
        """Looks; where no answer comes at once it says so, and asks on."""
        try:
            self.look(SILENT_SECONDS)
        except errors.CheckpointError as error:
            if error.is_permanent:
                raise
            _log.warning(
                "tfpreempt: %s does not answer, and is asked again for up to %g s "
                "before the start goes on or ends: %s",
                self.store.uri,
                timeout or RETRY_SECONDS,
                error,
            )
            self.look(timeout)

    def look_for_newer(
        self, local: Entry | None, fetch: Callable[[], bool], *, instead: str
    ) -> bool:
        """Looks, and brings a newer commit; without a local one it has to succeed.

        Args:
            local: the newest local checkpoint that is whole; None without one.
            fetch: brings a commit that is newer, and says whether there was one.
            instead: what a user can do who wants to begin anew.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: the store cannot be read, and there is nothing local.
            SaveError: the disk.
        """
        try:
            self._look_aloud(timeout=None if local is None else LOOK_SECONDS)
            return fetch()
        except errors.SaveError:
            raise  # this disk
        except errors.CheckpointError as error:
            if local is None:
                raise errors.CheckpointError(
                    f"{error} Training does not begin anew without knowing what is in "
                    f"remote_checkpoint_dir; make it reachable, or {instead}"
                ) from error
            _log.warning(
                "tfpreempt: %s cannot be asked for a newer commit, and %s (step %s) is "
                "restored: %s",
                self.store.uri,
                local.path,
                local.step,
                error,
            )
            return False

    @property
    def is_open(self) -> bool:
        """Whether it copies, and no other has taken over."""
        return _in_use.get(self.store.uri) is self

    @property
    def status(self) -> MirrorStatus | None:
        """How far the mirror is; None on workers other than the chief."""
        return None if self._mirror is None else self._mirror.status

    def is_pinned(self, path: str) -> bool:
        """Whether a local commit is being copied now."""
        return self._mirror is not None and self._mirror.is_pinned(path)

    def send(self, staged: Staged) -> None:
        """This worker's part of a save is staged."""
        self._exchange.send(staged)

    def collect(
        self,
        staged: Staged,
        workers: Collection[int],
        because: str,
        left: Callable[[], float],
    ) -> list[int]:
        """Takes other workers' parts; returns whose are there. On the chief.

        Args:
            staged: the save.
            workers: those that say that they have staged.
            because: of the commit.
            left: seconds that a notice leaves.

        Raises:
            SaveError: one is missing, and nobody has to leave: then the last commit,
                which is whole, is worth more than a newer one without that part.
        """
        present = self._exchange.collect(staged, workers, left)
        missing = sorted(set(workers) - set(present))
        if missing and because in ("periodic", "save"):
            raise errors.SaveError(
                f"the part of worker(s) {missing} did not come by way of "
                f"{self.store.uri}; this save is dropped, the last commit stands. Look "
                "at the store, and at the logs of those workers."
            )
        return present

    def committed(self, path: str) -> None:
        """A local commit is to be copied; on the chief."""
        if self._mirror is not None and (entry := catalog.at(path)).is_committed:
            self._mirror.add(entry)

    def copy_now(self, path: str) -> None:
        """Copies a local commit and returns when it is there; on the chief.

        Raises:
            CheckpointError: the store, or the commit is damaged.
        """
        entry = catalog.at(path)
        if entry.is_committed:
            upload.Upload(self.store, entry).run()

    def saved(self, staged: Staged) -> None:
        """A save is over, committed or not; on the chief."""
        if self._mirror is not None and self.has_apart:
            self._mirror.errand(self._exchange.clearing(staged.attempt))

    def wait(self, timeout: float | None) -> bool:
        """Waits until all is copied; see `Mirror.wait`. True on other workers."""
        return self._mirror is None or self._mirror.wait(timeout)

    def hurry(self) -> None:
        """A notice has come: waits that have no limit end."""
        if self._mirror is not None:
            self._mirror.hurry()

    def finish(self, seconds: float) -> bool:
        """Whether the newest commit is in the store by then; says so, or what is."""
        if self._mirror is None:
            return True
        is_whole = self._mirror.finish(seconds)
        status = self._mirror.status
        if is_whole:
            if status.newest is not None:
                _log.warning(
                    "tfpreempt: the copy of step %s in %s is whole",
                    status.newest,
                    self.store.uri,
                )
            return True
        known = status.mirrored
        there = "what was there before" if known is None else f"step {known}"
        _log.error(
            "tfpreempt: the copy of step %s in %s was not whole when the time was up "
            "(%s; %s). The commit stands in %s, and a start there finishes the copy; a "
            "start on another machine goes on from %s.",
            status.newest,
            self.store.uri,
            status.progress,
            (status.fault or "no fault, too little time").rstrip("."),
            self._directory or "the local directory",
            there,
        )
        return False

    def delete(self, checkpoint: Checkpoint, entry: Entry | None) -> bool:
        """Deletes a commit from the store; on the chief.

        Args:
            checkpoint: the user's handle.
            entry: the local commit; None where that is gone.

        Returns:
            Whether it could be one of this store: it is now gone, or was before.

        Raises:
            CheckpointError: the store.
        """
        if self._mirror is not None and entry is not None:
            self._mirror.forget(entry.path)
        meant = self._meant(checkpoint, entry)
        for folder in meant:
            tidy.delete(folder)
        return bool(meant) or _holder(checkpoint) == self.store.uri

    def _meant(self, checkpoint: Checkpoint, entry: Entry | None) -> list[Entry]:
        folders = catalog.copies(self.store)
        if entry is not None:
            return [each for each in folders if each.token == entry.token]
        name = checkpoint.path.rstrip("/").rpartition("/")[2]
        if _holder(checkpoint) == self.store.uri:
            return [each for each in folders if each.name == name]
        if _holder(checkpoint) != self._directory:
            return []
        # Gone here; the others of its step that are here are not meant.
        here = {each.token for each in catalog.scan(self._directory)}
        return [
            each
            for each in folders
            if each.token not in here
            and name in (f"{each.step}", f"{each.step}.{each.sequence}")
        ]

    def close(self) -> None:
        """Ends the mirror's thread; what is under way is for the next start."""
        if self._mirror is not None:
            self._mirror.close()
        if _in_use.get(self.store.uri) is self:
            del _in_use[self.store.uri]


def _holder(checkpoint: Checkpoint) -> str:
    """What a commit lies in: a checkpoint directory, or a store."""
    return checkpoint.path.rstrip("/").rpartition("/")[0]
