"""Finds what a single State was: in the newest commit, or in a file of its own."""

from __future__ import annotations

import logging
import os
import threading
from typing import IO

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, layout, retention, state_file
from tfpreempt.checkpoint import restore as restoring
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.state import State, naming, read_state
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.restarts import read_restarts
from tfpreempt.storage import reading

_log = logging.getLogger(__name__)
_SECONDS = 30.0  # that the chief may take to commit
_Own = tuple[int, IO[bytes]]  # of a file of its own: the rank, and the bytes


class StateLoader:
    """Loads States one by one; verifies a commit once, not once for each State.

    Args:
        directory: the checkpoint directory; it need not exist.
        worker: index of this worker.
        world_size: number of workers.
        agreed: the commit that all workers restored; None if there is none.
        after: the highest sequence when the workers agreed: what is higher is newer
            than the agreed one, and what isn't was refused.
        clock: for the deadline of a wait for the chief.
    """

    def __init__(
        self,
        directory: str,
        worker: int,
        world_size: int,
        *,
        agreed: Entry | None = None,
        after: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._directory = directory
        self._worker = worker
        self._world_size = world_size
        self._agreed = agreed
        self._after = after
        self._clock = clock or SystemClock()
        self._pending = ""
        # By path and token: what is fetched in place of a damaged commit has its token.
        self._verified: set[tuple[str, str]] = set()
        self._damaged: dict[tuple[str, str], str] = {}  # what is wrong with it
        self._told: set[str] = (
            set()
        )  # problems, and tokens of old commits, that were logged

    def expect(self, staged: str) -> None:
        """The chief is about to commit this staging directory; `load` waits for it.

        Otherwise a worker that is quicker than the chief would load the commit before.
        """
        self._pending = staged

    def load(self, state: State) -> bool:
        """Loads a State from wherever it was saved last.

        Returns:
            Whether there was something.

        Raises:
            CheckpointDamagedError: something was saved, and none of it is whole; or the
                State cannot read its own bytes.
        """
        self._await_pending()
        problems: list[str] = []
        commit = self._newest(problems)
        own = self._own_file(state, problems)
        if problems and commit is None and own is None and self._after == 0:
            raise errors.CheckpointDamagedError(
                f"nothing that was saved in {self._directory} is whole "
                f"({'; '.join(text.rstrip('.') for text in problems)}). Put the files "
                "back from a copy; or, to begin anew, move them away"
            )
        for problem in problems:
            if problem not in self._told:
                self._told.add(problem)
                _log.warning("tfpreempt: %s; it is passed over", problem.rstrip("."))
        if own is not None and (commit is None or own[0] >= (commit.sequence or 0)):
            return self._load_own(state, own)
        if commit is not None and self._load_from(commit, state):
            return True
        return self._load_own(state, own) if own is not None else False

    def _await_pending(self) -> None:
        """Until what was staged is committed, or was dropped."""
        if not self._pending:
            return
        end = self._clock.monotonic() + _SECONDS
        pause = threading.Event()
        while self._is_staged() or any(
            map(retention.is_uncommitted, catalog.scan(self._directory))
        ):
            if self._clock.monotonic() > end:
                _log.warning(
                    "tfpreempt: %s was not committed within %g s; what is loaded may "
                    "be older than on other workers",
                    self._pending,
                    _SECONDS,
                )
                break
            pause.wait(0.01)
        self._pending = ""

    def _is_staged(self) -> bool:
        """In a URL what was staged stays where it is, and gets a marker."""
        marker = os.path.join(self._pending, layout.MARKER)
        return reading.is_dir(self._pending) and not reading.is_there(marker)

    def newest(self) -> Entry | None:
        """The newest commit that is whole; `load` tells what is wrong with others.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        found = self._newest([])
        self._damaged.clear()  # what is damaged may be fetched again, to the same place
        return found

    def _newest(self, problems: list[str]) -> Entry | None:
        """The newest whole commit; else the one that all workers restored."""
        if not reading.is_dir(self._directory):
            return None

        def skip(problem: str) -> None:
            del problem  # somebody else's: it has no States

        for found in restoring.find_candidates(self._directory, skip, problems.append):
            if found.manifest is None or found.manifest.sequence <= self._after:
                continue
            if self._is_whole(found, problems):
                return found
        agreed = self._agreed
        return agreed if agreed is not None and agreed.manifest is not None else None

    def _is_whole(self, found: Entry, problems: list[str]) -> bool:
        key = (found.path, found.token)
        if key not in self._verified and key not in self._damaged:
            try:
                restoring.verify(found)
                self._verified.add(key)
            except errors.CheckpointDamagedError as error:
                self._damaged[key] = str(error)
        if key in self._damaged:
            problems.append(self._damaged[key])
            return False
        return True

    def _load_from(self, commit: Entry, state: State) -> bool:
        manifest = commit.manifest
        assert manifest is not None
        self._tell_of_lost_restarts(commit)
        folder = layout.STATES
        if state.per_worker:
            folder = layout.worker_name(self._worker)
            if (
                manifest.world_size != self._world_size
                or self._worker not in manifest.workers
            ):
                restoring.warn_about_world(commit, self._worker, self._world_size)
                return False
        if read_state(os.path.join(commit.shards, folder), state):
            return True
        _log.warning(
            "tfpreempt: %s has no State %r; it stays as it is", commit.path, state.name
        )
        return False

    def _own_file(self, state: State, problems: list[str]) -> _Own | None:
        path = state_file.path_of(self._directory, self._worker, state)
        try:
            return state_file.read(path)
        except errors.CheckpointDamagedError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"The State in {path!r} cannot be read: {error}")
        return None

    def _load_own(self, state: State, own: _Own) -> bool:
        with naming(state, "load"):
            state.load(own[1])
        return True

    def _tell_of_lost_restarts(self, commit: Entry) -> None:
        """Restarts that left nothing: their work is lost, which someone should know."""
        if commit.token in self._told or commit.manifest is None:
            return
        self._told.add(commit.token)
        restart = read_restarts()
        wrote = commit.manifest.metadata.get("restart")
        if restart is None or type(wrote) is not int or restart - wrote <= 1:
            return
        _log.warning(
            "tfpreempt: this is restart %d, and the newest whole commit, %s, was "
            "written by %s: nothing that came after it is left.",
            restart,
            commit.path,
            f"restart {wrote}" if wrote else "the first start",
        )
