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
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

from tfpreempt import errors
from tfpreempt.checkpoint.mirror.status import MirrorStatus
from tfpreempt.checkpoint.restore.handle import Checkpoint, latest
from tfpreempt.checkpoint.restore.opening import adapter_of
from tfpreempt.checkpoint.state.unsaved_state_check import UnsavedStateCheck
from tfpreempt.core.arguments import check_save_every, check_timeout
from tfpreempt.handler import training_end
from tfpreempt.handler.collective_save import PLAIN, Stages
from tfpreempt.handler.current_session import find_session, take_over
from tfpreempt.handler.exit import describe
from tfpreempt.handler.registration import CheckpointOptions, admit
from tfpreempt.handler.run import NEVER
from tfpreempt.handler.training_end import is_end_of_data, step_failed, was_preemption
from tfpreempt.platforms.detected import resolve_config

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class PreemptionCheckpointHandler:
    """Turns a termination notice into an agreed, durable commit and the right exit.

    Drop-in for `tf.distribute.experimental.PreemptionCheckpointHandler`: make it after
    the strategy, on the main thread of every worker; it restores the newest commit.
    Wrap each step in `run()` and close it at the end, or use it as a context manager.

    Args:
        cluster_resolver: the strategy's `cluster_resolver`; None for one process.
        checkpoint_or_checkpoint_manager: a `tf.train.Checkpoint` (with
            `checkpoint_dir`), a `tf.train.CheckpointManager` of the user's on every
            worker, or None: then the named States alone are the checkpoint, and the
            process needs no TensorFlow.
        checkpoint_dir: where a Checkpoint is saved; shared storage for all workers, or
            a URL, "gs://bucket/run" or "s3://bucket/run", which is the mirror of a
            scratch directory on each machine.
        termination_config: when, with how much grace and how to leave; TensorFlow's own
            TerminationConfig objects are completed for the platform. None: the platform
            is detected. SIGTERM is watched at once; the metadata server of a cloud is
            asked in the background, and a line of the log names the platform.
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
        async_save: whether the saves of `save_every` are asynchronous: the state is
            copied in memory, and written while training goes on. False: training waits
            for them, and no memory is taken. It waits in any case where a
            CheckpointManager or a save_fn saves.

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
        async_save: bool = True,
    ) -> None:
        given = checkpoint_or_checkpoint_manager
        if given is not None:
            adapter_of(given).check_directory(given, checkpoint_dir)
        config = resolve_config(termination_config)
        every = check_save_every(save_every)
        options = CheckpointOptions(
            checkpoint_dir=checkpoint_dir,
            restore=restore,
            max_to_keep=max_to_keep,
            remote_checkpoint_dir=remote_checkpoint_dir,
            async_save=async_save,
        )
        self._save_steps = every if isinstance(every, int) else None
        self._session = find_session(cluster_resolver, save_timeout)
        self._gate = self._session.gate
        with admit(self._session, given, config, options) as self._run:
            self._unsaved = UnsavedStateCheck(getattr(given, "checkpoint", given))
            self._run.restore()
            self._random_at_start = b""  # as a save would hold the generators
            if self._run.candidate is not None:
                self._random_at_start = self._run.source.random_bytes()
            self._run.clear_caches(is_all_restored=False)
            period = None if isinstance(every, int) else every
            self._session.open(self._run, period)

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
        gate, run = self._gate, self._run
        gate.started += 1
        if gate.flag or gate.busy or run.steps_made >= run.stop_at:
            self._enter("run()")
            if run.steps_made in (1, 2) and run.config.save_fn is None:
                # Two, as a GAN's, may take turns. Nobody knows what a save_fn saves.
                self._unsaved.before_call(fn, args, kwargs)
        gate.busy = True
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            step_failed(error, self._session)
            raise
        gate.busy = False
        run.steps_made += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """A boundary alone: saves and leaves if it is the agreed one.

        Args:
            *args: for `CheckpointManager.save`, or for the config's save_fn.
            **kwargs: likewise, such as `checkpoint_number=` or `options=`.
        """
        gate, run = self._gate, self._run
        gate.started += 1
        if gate.flag or gate.busy or run.steps_made >= run.stop_at:
            if not run.is_armed and run.candidate is not None:
                self._warn_of_late_random_state()
            self._enter(
                "save_checkpoint_if_preempted()",
                {run: lambda name: run.stage(name, *args, **kwargs)}
                if args or kwargs
                else PLAIN,
            )
        gate.bare = gate.started
        run.steps_made += 1

    def check(self) -> None:
        """A place within an evaluation, say, where this worker may save and leave.

        Counts no step and costs next to nothing, so it can stand at each batch. All
        workers call it equally often. The run that is started again goes on where the
        newest step ended: what was done since then without `run()` is done again.

        Raises:
            HandlerClosedError: after `close()`.
            NestedRunError: inside `run()`.
            SystemExit: by the exit function, after a commit.
        """
        gate, run = self._gate, self._run
        if gate.flag or gate.busy or run.stop_at < 0:
            self._session.ready(run, "check()")
        if gate.bare == gate.started:
            gate.bare += 1  # its step goes on
        self._session.boundary()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Arms the sources, reports errors inside to peers, and ends in a boundary.

        With remote workers (`connect_to_cluster`), the loss of one that was preempted
        is no error: the process leaves with the last commit, or, where the exit
        function returns, the scope ends, to be entered again with a new connection.

        Yields:
            Nothing.
        """
        session, run = self._session, self._run
        session.check_open(run, "watch_preemption_scope()")
        session.arm(run)
        try:
            yield
        except BaseException as error:
            self._gate.failed = self._gate.started  # steps may be bare in here
            if session.exit.left or not was_preemption(error, session, is_whole=False):
                raise
            session.part(run)  # the exit function came back; the step is half done
            return
        if not run.is_closed:
            session.boundary()

    def without_hang_timeout(self) -> contextlib.AbstractContextManager[None]:
        """What is done inside may take as long as it takes, such as an evaluation.

        `tfpreempt run --hang-timeout` takes a worker for hung that comes to no boundary
        in its time. Workers of the same machine that wait for this one don't hang
        either. It does nothing else, and nothing where that is not watched.

        Returns:
            A context manager, to be entered once.
        """
        return self._session.activity.hang_detection_paused()

    @property
    def total_run_calls(self) -> int:
        """Calls that came back, over all restarts; what the checkpoint counts."""
        return self._run.step

    @property
    def runs(self) -> int:
        """Calls of `run()` that came back in this process."""
        return self._run.steps_made

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
        self._session.save(self._run)
        return self.latest_checkpoint if self._session.cluster.is_chief else None

    # --- its commits -----------------------------------------------------------------

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest commit in the directory, or None. Reads the directory."""
        return latest(self._run.directory.path)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes a commit, in the directory and in `remote_checkpoint_dir`.

        Where the local copy is gone already a warning says so, and the remote one
        still goes. On workers other than the chief this does nothing.

        Args:
            checkpoint: of this handler's directory or store.

        Raises:
            ConfigurationError: it is not one of them, or belongs to a
                CheckpointManager, which deletes its own; or it is no handle.
            HandlerClosedError: after `close()`.
            CheckpointError: the store, or the disk.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise errors.ConfigurationError(
                f"delete_checkpoint() got {checkpoint!r}; expected a "
                "tfpreempt.Checkpoint, such as handler.latest_checkpoint or "
                "tfpreempt.Checkpoint(path)"
            )
        self._session.check_process("delete_checkpoint()")
        if self._run.is_closed:
            raise errors.HandlerClosedError(
                f"delete_checkpoint({checkpoint!r}) was called after close(); call it "
                "before, or on a new handler of the same directory"
            )
        if self._session.cluster.is_chief:
            self._session.wait_for_save()
            self._run.directory.delete(checkpoint)

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """How far the copying to `remote_checkpoint_dir` is; any thread.

        None without one, and on workers other than the chief, which copies for all.
        """
        return self._run.directory.mirror_status

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until every commit is copied to `remote_checkpoint_dir`; any thread.

        An asynchronous save that has begun is one of them.

        Args:
            timeout: seconds; None waits as long as the upload gets on, and gives up
                after five minutes in which it didn't.

        Returns:
            Whether the newest commit is there; True without a `remote_checkpoint_dir`,
            and on workers other than the chief.

        Raises:
            ConfigurationError: the timeout is no number of seconds.
        """
        check_timeout(timeout)
        return self._session.wait_for_mirror(self._run, timeout)

    # --- the end ---------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """The last boundary: serves a notice that is up, or finishes with all workers.

        The final state is committed, so that a complete run that is started again
        finishes at once, and its copy in `remote_checkpoint_dir` is waited for. All
        workers end well, or none does: the others wait for the chief's commit, and
        that wait has no part in `timeout`. Signals and sources are put back. Closing
        twice does nothing.

        Args:
            timeout: seconds to wait for workers that still train, and again for the
                copy; None: while they live, and while it gets on.

        Raises:
            UsageError: inside `run()`, or in a forked child of the handler's process.
            SaveError: the final state could not be committed, here or by another
                worker; the handler is closed.
            SystemExit: a notice was served instead, or another worker was lost in the
                final save: all are to be started again.
        """
        check_timeout(timeout)
        if not self._gate.busy:
            self._unsaved.after_call()
        try:
            training_end.close(self._session, self._run, timeout)
        finally:
            if self._run.is_closed:
                take_over()

    def __enter__(self) -> PreemptionCheckpointHandler:
        self._session.check_open(self._run, "the `with` block")
        return self

    def __exit__(
        self, kind: Any, error: BaseException | None, trace: Any
    ) -> Literal[False]:
        session, run = self._session, self._run
        if error is None:
            self.close()
        elif run.is_closed or session.is_forked:
            pass  # there is nothing to close
        elif session.exit.left:
            session.part(run)
        else:
            was_preemption(error, session, is_whole=session.is_whole)
            is_exit = isinstance(error, SystemExit | GeneratorExit)
            is_meant = is_exit or is_end_of_data(error)
            training_end.close_failed(session, run, "" if is_meant else describe(error))
        return False

    # --- boundaries, the slow path ---------------------------------------------------

    def _warn_of_late_random_state(self) -> None:
        """Warns if random numbers were drawn between the restore and the first step."""
        if self._run.source.random_bytes() != self._random_at_start:
            log.warning(
                "tfpreempt: random numbers were drawn after the restart and before the "
                "first save_checkpoint_if_preempted(); the generators are set back to "
                "the commit only now. For an exact resume enter "
                "watch_preemption_scope() before the loop, or call this first in it."
            )

    def _enter(self, what: str, stages: Stages = PLAIN) -> None:
        """A boundary at which there is something to do; the interval is counted."""
        session, run = self._session, self._run
        session.enter(run, what, stages)
        self._unsaved.after_call()
        every = self._save_steps
        if every is not None and run.has_moved and run.step % every == 0:
            session.save_at_boundary(run, stages)
        if run.steps_made < 4:
            run.stop_at = run.steps_made
        elif every is None:
            run.stop_at = NEVER
        else:
            run.stop_at = (run.step // every + 1) * every - run.base
