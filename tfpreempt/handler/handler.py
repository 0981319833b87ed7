"""PreemptionCheckpointHandler: what a custom training loop holds.

A boundary is an entry of `run()` or `save_checkpoint_if_preempted()`, the end of a
watch scope, or `close()`. Between two of them training is left alone: no RPC, no lock,
no collective, no device sync.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.checkpoint.unsaved import Unsaved
from tfpreempt.core.arguments import check_save_every, check_seconds, check_timeout
from tfpreempt.core.cluster import read_cluster
from tfpreempt.core.events import Notice
from tfpreempt.handler.commits import Commits
from tfpreempt.handler.member import Keeper
from tfpreempt.handler.raised import was_preemption
from tfpreempt.handler.reading import is_before_all
from tfpreempt.handler.remote_cluster import connection, expect_to_go
from tfpreempt.handler.session import session_for
from tfpreempt.handler.start import Start, make_store
from tfpreempt.handler.tensorflow_side import (
    END_OF_DATA,
    DirectoryRequiredError,
    attach_counters,
    check_checkpoint,
)
from tfpreempt.handler.watching import watch
from tfpreempt.platforms.config import TerminationConfig

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT = 300.0  # seconds that the slowest worker may need to make its handler
NEVER = 1 << 62


class PreemptionCheckpointHandler(Commits):
    """Turns a termination notice into an agreed, durable commit and the right exit.

    Drop-in for `tf.distribute.experimental.PreemptionCheckpointHandler`: make it after
    the strategy, on the main thread of every worker; it restores the newest commit.
    Wrap each step in `run()` and close it at the end, or use it as a context manager.

    Args:
        cluster_resolver: the strategy's `cluster_resolver`; None for one process.
        checkpoint_or_checkpoint_manager: a `tf.train.Checkpoint` (with
            `checkpoint_dir`), a `tf.train.CheckpointManager` of the user's on every
            worker, or None: then the named States alone are the checkpoint.
        checkpoint_dir: where a Checkpoint is saved; shared storage for all workers. A
            path, or a URL that TensorFlow serves, such as "gs://bucket/run".
        termination_config: when, with how much grace and how to leave; TensorFlow's own
            TerminationConfig objects are accepted. None watches SIGTERM and leaves
            with exit code 143.
        save_every: also commit every so many `run()` calls (an int), or whenever so
            much time has passed (a timedelta, by agreement on a step). None: only on
            notices, `save()` and at the end.
        restore: False starts afresh although there are commits.
        save_timeout: seconds that any wait for other workers may take where the notice
            came without a grace period. A step or a save of this worker's own has no
            limit then: the platform ends it, if it must.
        max_to_keep: commits kept in `checkpoint_dir`; None keeps all. A manager keeps
            its own number.
        remote_checkpoint_dir: gs://bucket/run or s3://bucket/run, a place of this run's
            own: each commit is copied there in the background, and a start whose
            directory has nothing newer goes on from there. Then workers need not share
            `checkpoint_dir`. None: TFPREEMPT_REMOTE_CHECKPOINT_DIR, if set.

    Attributes:
        runs: calls of `run()` that came back in this process.

    Raises:
        ConfigurationError: an argument cannot work, or another handler of this process
            is open in the directory. (One whose exit was served, and that has not
            trained on since, is closed: this one goes on from its commit.)
        DirectoryNotSharedError: workers see different storage under the directory.
        CheckpointDamagedError: there are commits in the directory, and none is whole.
        CheckpointMismatchError: the newest commit belongs to another model.
        WorkersDisagreeError: workers differ in world size.
        NotMainThreadError: signals can only be watched from the main thread.
    """

    is_amid = False  # see `Participant`

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: Any = None,
        *,
        save_every: int | datetime.timedelta | None = None,
        restore: bool = True,
        save_timeout: float = 30.0,
        max_to_keep: int | None = 2,
        remote_checkpoint_dir: Any = None,
    ) -> None:
        given = checkpoint_or_checkpoint_manager
        if isinstance(given, tf.train.Checkpoint) and not checkpoint_dir:
            raise DirectoryRequiredError(
                "checkpoint_or_checkpoint_manager is a tf.train.Checkpoint and "
                f"checkpoint_dir is {checkpoint_dir!r}; pass the directory too, or a "
                "tf.train.CheckpointManager, which has one"
            )
        self._config = TerminationConfig.accept(termination_config)
        self._connection = connection()
        self._cluster = read_cluster(
            cluster_resolver, drives_others=self._connection is not None
        )
        self._save_every = check_save_every(save_every)
        check_seconds("save_timeout", save_timeout)
        self._session = session_for(
            self._cluster, lambda: make_store(self._cluster), save_timeout
        )
        self._session.come_back()
        self._gate = self._session.gate
        self._closed = False
        self._armed = False
        self._noticed = threading.Event()
        self.runs = 0
        check_checkpoint(given)
        counter = attach_counters(given)
        start = Start(
            given,
            checkpoint_dir,
            cluster=self._cluster,
            restore=restore,
            max_to_keep=max_to_keep,
            save_fn=self._config.save_fn,
            io_device=None if self._connection is None else self._connection.device,
            remote_checkpoint_dir=remote_checkpoint_dir,
            in_use=self._session.in_use(),
        )
        start.agree(self._session.store, self._session.next_prefix(), START_TIMEOUT)
        self._keeper = Keeper(
            start,
            self._session.coordinator,
            self._config,
            self._cluster,
            counter,
            handler=self,
        )
        self._unsaved = Unsaved(getattr(given, "checkpoint", given))
        self._restore()
        self._slow_at = self._next_stop()
        self._watcher = watch(
            self._config, self._cluster, self._received, self._connection
        )
        weakref.finalize(self, self._watcher.close)
        self._keeper.begin_copying()
        self._session.join(self._keeper)
        if isinstance(self._save_every, datetime.timedelta) and self._cluster.is_chief:
            self._session.save_each(self._save_every.total_seconds(), self._keeper)

    # --- the loop --------------------------------------------------------------------

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a training function; the boundary is before the call.

        If a notice has come by then, this worker saves with all others at the agreed
        step and leaves. What the caller assigns after `run()` returns belongs to the
        step; a batch that was fetched in the argument list is lost if the process
        leaves here, so exact loops fetch inside (`handler.run(step, iterator)`).

        Args:
            fn: the training function, usually with `strategy.run` inside.
            *args: for fn.
            **kwargs: for fn.

        Returns:
            What fn returns.

        Raises:
            HandlerClosedError: after `close()`.
            NestedRunError: inside another `run()`.
            SystemExit: by the exit function, after a commit.
        """
        gate = self._gate
        gate.started += 1
        if gate.flag or gate.busy or self.runs >= self._slow_at:
            self._enter()
            if self.runs in (1, 2):  # two, as a GAN's, may take turns
                self._look_at(fn, args, kwargs)
        gate.busy = True
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            gate.busy = False
            is_end = isinstance(error, END_OF_DATA)  # equal on all workers, and counts
            is_whole = not is_end and is_before_all(error)
            if is_whole:
                gate.started -= 1
            elif not is_end:
                gate.failed = gate.started
            self._raised(error, is_whole)
            raise
        gate.busy = False
        self.runs += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """A boundary alone: saves and leaves if it is the agreed one.

        Args:
            *args: for `CheckpointManager.save`, or for the config's save_fn.
            **kwargs: likewise, such as `checkpoint_number=` or `options=`.
        """
        gate = self._gate
        gate.started += 1
        if gate.flag or gate.busy or self.runs >= self._slow_at:
            if not self._armed:
                self._keeper.warn_of_late_random_state()
            self._keeper.save_arguments = (args, kwargs)
            try:
                self._enter()
            finally:
                self._keeper.save_arguments = ((), {})
        gate.bare = gate.started
        self.runs += 1

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Arms the sources, reports errors inside to peers, and ends in a boundary.

        With remote workers (`connect_to_cluster`), the loss of one that was preempted
        is no error: the process leaves with the last commit, or, where the exit
        function returns, the scope ends, to be entered again with a new connection.

        Yields:
            Nothing.
        """
        self._check_open()
        self._arm()
        try:
            yield
        except BaseException as error:
            self._gate.failed = self._gate.started  # steps may be bare in here
            if self._session.departure.left or not self._raised(error):
                raise
            self._quiet()  # the exit function came back; the step is half done
            return
        if not self._closed:
            self._boundary()

    @property
    def total_run_calls(self) -> int:
        """Calls that came back, over all restarts; what the checkpoint counts."""
        return self._keeper.base + self.runs

    # --- saving ----------------------------------------------------------------------

    def save(self) -> Checkpoint | None:
        """Commits now; every worker calls it at the same place of its loop.

        A notice that is served before the next `run()` leaves with this commit: what is
        changed in between is done again, as after any restart from it.

        Returns:
            The commit on the chief, None elsewhere (where it may not be complete yet).

        Raises:
            SaveError: the directory, or a worker whose part did not come in time.
        """
        self._check_open("save()")
        self._session.departure.check()
        self._arm()
        self._session.save_together(self._keeper, "save")
        return self.latest_checkpoint if self._cluster.is_chief else None

    # --- the end ---------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """The last boundary: serves a notice that is up, or finishes with all workers.

        The final state is committed, so that a complete run that is started again
        finishes at once, and its copy in `remote_checkpoint_dir` is waited for.
        Signals and sources are put back. Closing twice does nothing.

        Args:
            timeout: seconds to wait for workers that still train, and again for the
                copy; None: while they live, and while it gets on.

        Raises:
            UsageError: inside `run()`.
            SaveError: the final state could not be committed; the handler is closed.
            SystemExit: a notice was served instead.
        """
        check_timeout(timeout)
        if self._closed:
            return
        if self._gate.busy:
            raise errors.UsageError(
                "close() was called inside run(); call it after the loop"
            )
        self._arm()
        self._unsaved.compare()
        failure = None
        if not self._session.departure.detached:
            # With others open no boundary: workers may differ in those never used.
            is_last = self._session.members() == [self._keeper]
            if not is_last or self._session.finish(timeout):
                failure = self._commit_final()
            if is_last and failure is None:
                self._keeper.finished()
            self._session.departure.finish_copy(self._keeper, timeout)
        self._quiet()
        if failure is not None:
            raise failure

    def __enter__(self) -> PreemptionCheckpointHandler:
        self._check_open()
        return self

    def __exit__(
        self, kind: Any, error: BaseException | None, trace: Any
    ) -> Literal[False]:
        if error is None:
            self.close()
        elif not self._closed:
            if not self._session.departure.left:
                self._raised(error, self._session.is_whole)
                self._session.departure.finish_mirrors([self._keeper])
            self._quiet()
        return False

    def _quiet(self) -> None:
        """Stops listening, puts signals back, and is closed."""
        self._closed = True
        self._slow_at = -1
        self._watcher.close()
        self._session.part(self._keeper)
        self._keeper.put_away()

    def _restore(self) -> None:
        """What is restored when a handler is made."""
        self._keeper.restore()

    def _look_at(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Watches what one call of a step changes."""
        if self._config.save_fn is None:  # nobody knows what that saves
            self._unsaved.look(fn, args, kwargs)

    # --- boundaries, the slow path ---------------------------------------------------

    def _enter(self) -> None:
        """A boundary at which there is something to do; the interval is counted."""
        try:
            self._check_open()
            self._session.departure.check()
        except errors.TfpreemptError:
            self._gate.started -= 1
            raise
        self._arm()
        self._session.look()
        if self.runs == 1:
            self._keeper.try_states()  # all is there: a step was made
            self._session.begin_measuring()
        self._unsaved.compare()
        every, new = self._save_every, self._keeper.has_moved
        if isinstance(every, int) and new and self.total_run_calls % every == 0:
            self._save_periodically()
        self._slow_at = self._next_stop()

    def _boundary(self) -> None:
        self._gate.started += 1
        if self._gate.flag:
            self._session.look()

    def _next_stop(self) -> int:
        """The number of runs at which the slow path must be taken next."""
        if self.runs < 4:
            return self.runs
        if isinstance(self._save_every, int):
            done = self.total_run_calls // self._save_every
            return (done + 1) * self._save_every - self._keeper.base
        return NEVER

    def _save_periodically(self) -> None:
        self._session.try_to_save(self._keeper)

    def _commit_final(self) -> Exception | None:
        """The state at the normal end, so that a restart has nothing left to do.

        Returns:
            Why it could not be saved, to be raised when all is put away.
        """
        if self._keeper.has_moved:
            try:
                self._session.save_together(self._keeper, "finished")
            except Exception as error:  # noqa: BLE001 - of a State, say; raised later
                self._session.departure.fault("the final save", error)
                error.add_note(
                    "Training is over, and its end is not committed. Mend what the "
                    "error names and start the program again: it repeats the steps "
                    "after the last commit."
                )
                return error
        return None

    def _check_open(self, what: str = "run()") -> None:
        if self._closed:
            raise errors.HandlerClosedError(
                "this handler was closed; make a new PreemptionCheckpointHandler (it "
                "restores what the old one committed), or close it after the last run()"
            )
        if self._gate.busy:
            raise errors.NestedRunError(
                f"{what} was entered inside run(), where it cannot be safe to save: "
                "the step is half done. Call it between two runs."
            )

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._watcher.rearm()
            self._session.keep(self._keeper, self)
            self._keeper.load_random_state()

    def _raised(self, error: BaseException, is_whole: bool = False) -> bool:
        """Whether it was a preemption, and was served; else peers are told."""
        return was_preemption(
            error, self._session, self._connection, self._noticed, is_whole=is_whole
        )

    def _received(self, notice: Notice) -> None:
        """A source speaks; on its thread."""
        self._session.coordinator.notice(notice)
        expect_to_go(notice)
        self._noticed.set()
        self._keeper.hurry_mirror()
        self._keeper.record(notice)
        self._session.name_killed_children()
        grace = notice.grace_seconds
        boundary = "the next boundary"
        if not self._gate.started:
            boundary += ", and no step was begun by run() yet"
        log.warning(
            "tfpreempt: notice from %s (%s), %s; the commit waits for %s",
            notice.source,
            notice.detail,
            f"grace {grace:g} s" if grace else "nobody says how long it leaves",
            "the step that runs" if self._gate.busy else boundary,
        )
