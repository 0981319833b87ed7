"""Loads a single State from the newest commit, or from a separate file of the State.

`save_state` writes such a separate file (`checkpoint/state/state_file.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterable

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout, retention
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.restore import restore as restoring
from tfpreempt.checkpoint.restore.reshard import has_part_of, load_state
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.state import State, naming
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.restarts import read_restarts
from tfpreempt.storage import file_reading

_log = logging.getLogger(__name__)
_SECONDS = 30.0  # timeout of the wait for the chief's commit


@dataclasses.dataclass(eq=False)
class StateLoader:
    """Loads single States. Each commit is verified only once, for the first State.

    Args:
        directory: path of the checkpoint directory; need not exist.
        cluster: the workers, and the index of this worker.
        agreed: the commit that all workers restored at the start; None if they restored
            no commit.
        after: highest sequence number of any commit at the start. Commits with a higher
            number were made by this run, and can be loaded. Of the other commits, only
            `agreed` is loaded, because the workers did not choose the rest.
        clock: time source for the timeout of a wait for the chief.
        loaded: names of the States that the start loads.
    """

    directory: str
    cluster: Cluster
    _: dataclasses.KW_ONLY
    agreed: Entry | None = None
    after: int = 0
    clock: Clock = dataclasses.field(default_factory=SystemClock)
    loaded: set[str] = dataclasses.field(default_factory=set)
    _pending: str = dataclasses.field(default="", init=False)
    # Result of verifying a commit: path and token -> the problem, or "". The path is
    # needed: a corrupt commit and the same commit imported again have the same token.
    _checked: dict[tuple[str, str], str] = dataclasses.field(
        default_factory=dict, init=False
    )
    # To log each problem once: texts of the logged problems, and tokens of the commits
    # that `_log_lost_restarts` has checked.
    _logged: set[str] = dataclasses.field(default_factory=set, init=False)

    def expect(self, staged: str) -> None:
        """Records that the chief is about to commit the staging directory `staged`.

        The next `load` waits for that commit. Without the wait, a worker that is faster
        than the chief would load the value of the previous commit.
        """
        self._pending = staged

    def load(self, state: State) -> bool:
        """Loads the newest saved value of a State.

        The value comes from the newest commit. If the separate file of the State is
        newer, or the commit has no value of the State, the value comes from the file.

        Returns:
            Whether a saved value was found, and loaded.

        Raises:
            CheckpointCorruptedError: no commit and no file is intact; or the State
                cannot load the saved bytes.
        """
        self.loaded.add(state.name)
        self._await_pending()
        problems: list[str] = []
        commit = self._newest(problems)
        own = None  # sequence number and bytes from the separate file of the State
        try:
            path = state_file.path_of(self.directory, self.cluster.worker, state)
            own = state_file.read(path)
        except errors.CheckpointCorruptedError as error:
            problems.append(str(error))
        if problems and commit is None and own is None and self.after == 0:
            raise errors.CheckpointCorruptedError(
                f"no saved State in {self.directory} is intact "
                f"({'; '.join(text.rstrip('.') for text in problems)}). Put the "
                "files back from a copy. To start from scratch, move the files away"
            )
        for problem in problems:
            if problem not in self._logged:
                self._logged.add(problem)
                _log.warning("%s; this checkpoint is skipped", problem.rstrip("."))
        sequence = 0 if commit is None else commit.sequence or 0
        is_newer = own is not None and own[0] >= sequence
        if commit is not None and not is_newer:
            self._log_lost_restarts(commit)
            if load_state(commit, state, self.cluster):
                return True
        if own is not None:
            with naming(state, "load"):
                state.load(own[1])
            return True
        if commit is not None:
            self._warn_of_missing(commit, state)
        return False

    def warn_of_late(self, states: Iterable[State]) -> None:
        """Warns of States that the program has created after the start and has not
        loaded, although the restored commit has values for them."""
        if (found := self.agreed) is None:
            return
        worker = layout.worker_name(self.cluster.worker)
        for state in states:
            folder = worker if state.per_worker else layout.STATES
            path = os.path.join(found.shards, folder, state.name + layout.STATE_SUFFIX)
            if state.name not in self.loaded and os.path.exists(path):
                _log.warning(
                    "%r was created after the restore, so its value in %s was not "
                    "loaded, and the first step has used its initial value. Create the "
                    "State before the handler, or call tfpreempt.load_state(state)",
                    state,
                    found.path,
                )

    def _await_pending(self) -> None:
        """Waits until the chief has committed, or removed, the expected save.

        The last call of `expect` has named the staging directory of this save.
        """
        if not self._pending:
            return
        end = self.clock.monotonic() + _SECONDS
        pause = threading.Event()
        while file_reading.is_dir(self._pending) or any(
            map(retention.is_uncommitted, catalog.scan(self.directory))
        ):
            if self.clock.monotonic() > end:
                _log.warning(
                    "%s was not committed within %g s; the loaded States may be older "
                    "than the States of other workers",
                    self._pending,
                    _SECONDS,
                )
                break
            pause.wait(0.01)
        self._pending = ""

    def newest(self) -> Entry | None:
        """Returns the newest intact commit; None if there is no intact commit.

        Logs no problems of corrupt commits: `load` logs the problems.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        found = self._newest([])
        # Check corrupt commits again next time: the user may import an intact copy to
        # the same path.
        self._checked = {key: text for key, text in self._checked.items() if not text}
        return found

    def _newest(self, problems: list[str]) -> Entry | None:
        """Returns the newest intact commit made since the start; without such a commit,
        returns `agreed`, the commit that all workers restored at the start.

        Args:
            problems: list that receives the problems of corrupt commits.
        """
        if not file_reading.is_dir(self.directory):
            return None
        found = restoring.newest_verified(
            self.directory,
            # Ignore the problem of a foreign checkpoint, which has no States.
            lambda problem: None,
            problems.append,
            wants=lambda each: (
                each.manifest is not None and (each.sequence or 0) > self.after
            ),
            check=self._check,
        )
        agreed = self.agreed
        is_ours = agreed is not None and agreed.manifest is not None
        return agreed if found is None and is_ours else found

    def _check(self, found: Entry) -> None:
        key = (found.path, found.token)
        if key not in self._checked:
            try:
                restoring.verify(found)
                self._checked[key] = ""
            except errors.CheckpointCorruptedError as error:
                self._checked[key] = str(error)
        if problem := self._checked[key]:
            raise errors.CheckpointCorruptedError(problem)

    def _warn_of_missing(self, commit: Entry, state: State) -> None:
        if state.per_worker and not has_part_of(commit, self.cluster):
            restoring.warn_about_workers(commit, self.cluster)
            return
        if state._is_optional:
            return
        _log.warning(
            "%s has no State %r; the State keeps the initial value of the program",
            commit.path,
            state.name,
        )

    def _log_lost_restarts(self, commit: Entry) -> None:
        """Logs a warning if the run was restarted more than once since a commit.

        In this case, processes that ran after the commit have committed no step, so
        their work is lost.
        """
        if commit.token in self._logged or commit.manifest is None:
            return
        self._logged.add(commit.token)
        restart = read_restarts()
        wrote = commit.manifest.metadata.get("restart")
        if restart is None or type(wrote) is not int or restart - wrote <= 1:
            return
        _log.warning(
            "this is restart %d, and the newest intact commit, %s, was written by %s: "
            "the steps since that commit were lost, and are repeated. For the reasons, "
            "read the logs of the starts in between",
            restart,
            commit.path,
            f"restart {wrote}" if wrote else "the first start",
        )
