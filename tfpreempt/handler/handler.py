"""PreemptionCheckpointHandler, the object that runs the steps of a custom loop.

A boundary is a moment at which this worker may save and exit: an entry of `run()`,
`save_checkpoint_if_preempted()` or `check_preemption()`, the end of a watch scope, or
`close()`. Between two boundaries tfpreempt does not touch training: no RPC, no lock, no
collective, no device synchronization.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from tfpreempt import errors
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.checkpoint.restore.handle import (
    Checkpoint,
    checkpoints_in,
    latest_prefix,
)
from tfpreempt.checkpoint.restore.opening import adapter_of
from tfpreempt.checkpoint.state.following_step import (
    FollowingStepCheck,
    learning_rates,
)
from tfpreempt.checkpoint.state.unsaved_state_check import LOOKS, UnsavedStateCheck
from tfpreempt.core import frameworks
from tfpreempt.core.arguments import check_metrics, check_save_freq, check_timeout
from tfpreempt.core.events import FollowingStep
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.handler import training_end
from tfpreempt.handler.bad_steps import BadSteps, LoopBadSteps
from tfpreempt.handler.current_session import find_session, take_over
from tfpreempt.handler.exit import describe
from tfpreempt.handler.registration import (
    CheckpointOptions,
    open_compile_cache,
    register,
)
from tfpreempt.handler.run import NEVER, next_stop
from tfpreempt.handler.training_end import is_end_of_data, step_failed, was_preemption
from tfpreempt.platforms.detected import resolve_config

if TYPE_CHECKING:
    import tensorflow as tf

    from tfpreempt.platforms.config import TerminationConfig
    from tfpreempt.storage.object_store import ObjectStore

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class PreemptionCheckpointHandler:
    """Saves and exits at an agreed step when a termination notice arrives.

    All workers agree on the step. Drop-in replacement for
    `tf.distribute.experimental.PreemptionCheckpointHandler`. Create the handler after
    the strategy, on the main thread of every worker. The constructor restores the
    newest commit. Call each training step through `run()`, and call `close()` after the
    loop, or use the handler as a context manager.

    Args:
        cluster_resolver: `cluster_resolver` attribute of the strategy. None for JAX,
            and for training in a single process. If the program has called
            `jax.distributed.initialize` before, for several processes, these processes
            are the workers: worker i is process i. Every process then creates the
            handler.
        checkpoint_or_checkpoint_manager: a `tf.train.Checkpoint` (with
            `checkpoint_dir`); or a `tf.train.CheckpointManager`, created by the program
            on every worker; or None. With None the checkpoint contains the named States
            only, and the process needs no TensorFlow.
        checkpoint_dir: directory for the commits of a Checkpoint. Either storage shared
            by all workers, or a URL: "gs://bucket/run", "s3://bucket/run" or
            "az://container/run". The URL is the mirror of a scratch directory on each
            machine.
        termination_config: notices to watch, grace period, and exit code or exit
            function. In TensorFlow's own TerminationConfig objects, missing values are
            replaced by the values of the platform. None detects the platform: SIGTERM
            is watched at once, the metadata server of a cloud is queried in the
            background, and a log line names the platform.
        save_freq: interval between periodic commits: a number of `run()` calls (an
            int), or a duration (a timedelta; the workers agree on the step). None
            commits only on notices, on `save()` and at the end.
        restore: False starts from scratch even if there are commits. "partial" restores
            the variables that fit the commit: a variable of the Checkpoint that the
            commit lacks, or has in another shape or type, keeps its initial value, and
            a warning names the variable. Steps, data and named States resume as with
            True.
        peer_timeout: timeout in seconds for a wait for other workers if no deadline is
            known: in a save without a notice, or after a notice without a grace period.
            The timeout limits waits for other workers, not the worker's own steps and
            saves, during which the platform may kill the process after a notice.
        max_to_keep: number of commits kept in `checkpoint_dir`; None keeps every
            commit. With a CheckpointManager, the manager's `max_to_keep` counts, not
            this argument.
        keep_every: a number of steps or a `datetime.timedelta`: the first commit of
            each such period stays for ever. None: no such commit.
        best_by: `("val_loss", "min", 3)` also keeps the three commits with the lowest
            ("max": highest) value of a metric of `save(metrics=...)`. With
            `keep_every` or `best_by`, at least the two newest commits stay.
        mirror_dir: the mirror, "gs://bucket/run", "s3://bucket/run" or
            "az://container/run": a prefix that only this run uses. Each commit is
            uploaded to the mirror in the background. A start resumes from the mirror
            unless the directory has a newer commit. With a mirror the workers need not
            share `checkpoint_dir`. None uses the environment variable
            TFPREEMPT_MIRROR_DIR, if set.
        async_save: whether periodic saves (`save_freq`) are asynchronous: the state is
            copied in memory, and written while training continues. If False, training
            waits for the save, and no memory is needed for a copy. Training also waits
            if a CheckpointManager or a save_fn saves.
        compile_cache: True keeps JAX's compilation cache with the commits: a restarted
            program loads compiled functions instead of compiling the functions again.
            Functions that are compiled before the handler is created are not kept.
            Every user who can write to the directory or to the mirror can then make
            this program run code. Only for programs on JAX.
        on_bad_step: which steps to leave out, such as steps with a NaN loss; see
            `BadSteps`. After such a step the process exits, and after the restart
            `run()` returns None for the step. None: no step is left out. Pass the same
            value on every worker. Only in loops that call `run()`.

    Raises:
        ConfigurationError: an argument cannot work, or another handler of this process
            is open in the directory. No error is raised if the other handler cannot
            continue, because the handler has exited or its last step failed: the new
            handler closes the other handler, and resumes from its commit.
        DirectoryLockedError: another program holds the lease of the directory.
        StorageNotSharedError: workers see different storage under the directory.
        CheckpointCorruptedError: the directory has commits, and none is intact.
        CheckpointMismatchError: the newest commit belongs to another model, and
            `restore` is not "partial".
        WorkerMismatchError: workers disagree on the number of workers, or on the
            commit to restore.
        NotMainThreadError: the caller is not the main thread, where Python requires
            signals to be watched.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        checkpoint_or_checkpoint_manager: tf.train.Checkpoint
        | tf.train.CheckpointManager
        | None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig
        | tf.distribute.experimental.TerminationConfig
        | None = None,
        *,
        save_freq: int | datetime.timedelta | None = None,
        restore: bool | Literal["partial"] = True,
        peer_timeout: float = 30.0,
        max_to_keep: int | None = 2,
        keep_every: int | datetime.timedelta | None = None,
        best_by: tuple[str, Literal["min", "max"], int] | None = None,
        mirror_dir: str | os.PathLike[str] | ObjectStore | None = None,
        async_save: bool = True,
        compile_cache: bool = False,
        on_bad_step: BadSteps | None = None,
    ) -> None:
        show_log_lines()
        given = checkpoint_or_checkpoint_manager
        if given is not None:
            adapter_of(given).check_directory(given, checkpoint_dir)
        config = resolve_config(termination_config)
        every = check_save_freq(save_freq)
        if isinstance(restore, str) and restore != "partial":
            raise errors.ConfigurationError(
                f'restore is {restore!r}; expected True, False or "partial"'
            )
        if on_bad_step is not None and not (
            isinstance(on_bad_step, BadSteps) and restore
        ):
            raise errors.ConfigurationError(
                f"on_bad_step is {on_bad_step!r}, and restore is {restore!r}; expected "
                "None, or tfpreempt.BadSteps(...) with restore=True, because the next "
                "start must return to the last commit"
            )
        options = CheckpointOptions(
            checkpoint_dir=checkpoint_dir,
            restore=bool(restore),
            policy=RetentionPolicy(
                max_to_keep=max_to_keep, keep_every=keep_every, best_by=best_by
            ),
            mirror_dir=mirror_dir,
            async_save=async_save,
        )
        if compile_cache and (given is not None or checkpoint_dir is not None):
            on_jax = given is None and frameworks.is_imported("jax")
            open_compile_cache(checkpoint_dir, mirror_dir, on_jax)
        self._save_steps = every if isinstance(every, int) else None
        self._session = find_session(cluster_resolver, peer_timeout)
        self._step_flag = self._session.step_flag
        with register(self._session, given, config, options) as self._run:
            checkpoint = getattr(given, "checkpoint", given)
            self._unsaved = UnsavedStateCheck(checkpoint)
            rates = learning_rates(checkpoint)
            self._run.restore(is_partial=restore == "partial")
            candidate = self._run.candidate
            self._following_step = FollowingStepCheck(
                self._run.base,
                self._session.cluster,
                self._run.directory.registry,
                self._run.record,
                functools.partial(self._run.journal.read_earlier, FollowingStep),
                rates,
                candidate.because if candidate is not None else None,
            )
            if candidate is not None and restore is True:
                because = candidate.because
                is_at_run = self._following_step.is_at_run
                # After a commit in an evaluation, a restart repeats the evaluation,
                # which may set variables.
                if is_at_run or because != "preemption":
                    self._unsaved.watch_restored(
                        with_states=is_at_run and because in ("preemption", "periodic")
                    )
            self._bad_steps: LoopBadSteps | None = None
            if on_bad_step is not None:
                self._bad_steps = LoopBadSteps(
                    on_bad_step, self._session, self._run, checkpoint
                )
            # State of the random generators at the start, as the bytes that a save
            # would write; empty if no commit is restored.
            self._random_at_start = b""
            if self._run.candidate is not None:
                self._random_at_start = self._run.source.random_bytes()
            self._run.clear_caches(is_all_restored=False)
            period = None if isinstance(every, int) else every
            self._session.open(self._run, period)

    # --- the loop --------------------------------------------------------------------

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the training function `fn`; before the call, this worker may exit.

        If a preemption notice has arrived, all workers save at an agreed step, at the
        beginning of a `run()`, and exit. Assignments that the caller makes after
        `run()` returns belong to the step, and are saved with the step. If the process
        exits, a batch fetched in the argument list of `run()` is lost. So fetch the
        batch inside the training function: `handler.run(step, iterator)`.

        Args:
            fn: the training function, usually with `strategy.run` inside.
            *args: positional arguments for `fn`.
            **kwargs: keyword arguments for `fn`.

        Returns:
            The return value of `fn`; None for a step that `on_bad_step` leaves out.

        Raises:
            BadStepsError: too many steps were bad, or a step cannot be left out.
            ConfigurationError: `fn` has no arguments, although `on_bad_step` is given.
            HandlerClosedError: the handler was closed before.
            NestedRunError: the call is inside another `run()`.
            SystemExit: raised by the exit function, after a commit.
        """
        step_flag, run, guard = self._step_flag, self._run, self._bad_steps
        if guard is not None and guard.leaves_out(args, kwargs):
            return cast(T, self._leave_out(guard, args, kwargs))
        step_flag.started += 1
        if step_flag.flag or step_flag.busy or run.steps_made >= run.stop_at:
            # Without `run()` the first boundary may come after the first step.
            self._unsaved.compare_restored()
            if run.steps_made:
                self._following_step.before_commit(run.step, fn, args, kwargs)
            else:
                self._following_step.compare(
                    *(run.step, fn, args, kwargs), is_again=run.may_have_changed
                )
            self._enter("run()")
            run.may_have_changed = False
            if run.steps_made in (1, 2) and run.config.save_fn is None:
                # Check at two calls, because two step functions may alternate, as in a
                # GAN. With a save_fn there is no check: the contents of its checkpoint
                # are unknown.
                self._unsaved.before_call(fn, args, kwargs)
        step_flag.busy = True
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            step_failed(error, self._session)
            if guard is not None:
                guard.failed(error)
            raise
        step_flag.busy = False
        step_flag.ends.append(monotonic())
        run.steps_made += 1
        if guard is not None:
            guard.add(result)
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and exits here, if the workers have agreed on this step.

        For loops without `run()`: call the method once per step. The call counts the
        step.

        Args:
            *args: positional arguments for `CheckpointManager.save`, or for the save_fn
                of the config.
            **kwargs: keyword arguments for the same function, such as
                `checkpoint_number=` or `options=`.
        """
        step_flag, run = self._step_flag, self._run
        if self._bad_steps is not None:
            raise errors.ConfigurationError(
                "save_checkpoint_if_preempted() was called on a handler with "
                "on_bad_step; expected run(), because only run() can leave a step out"
            )
        step_flag.started += 1
        if step_flag.flag or step_flag.busy or run.steps_made >= run.stop_at:
            if not run.is_armed and run.candidate is not None:
                self._warn_of_late_random_state()
            run.save_arguments = args, kwargs
            try:
                self._enter("save_checkpoint_if_preempted()")
            finally:
                run.save_arguments = (), {}
        step_flag.bare = step_flag.started
        step_flag.ends.append(monotonic())
        run.steps_made += 1

    def check_preemption(self) -> None:
        """Handles a pending preemption notice here, without counting a step.

        Call the method in long evaluations, for example at every batch (a call costs
        next to nothing), and equally often on every worker. If a notice has arrived,
        all workers save and exit. The restarted program resumes after the last step, so
        the program's code between this call and the next `run()` is not executed again:
        evaluate at the beginning of the loop body.

        Raises:
            HandlerClosedError: the handler was closed before.
            NestedRunError: the call is inside `run()`.
            SystemExit: raised by the exit function, after a commit.
        """
        step_flag, run = self._step_flag, self._run
        if step_flag.flag or step_flag.busy or run.stop_at < 0:
            self._session.ready(run, "check_preemption()")
        if step_flag.bare == step_flag.started:
            step_flag.bare += 1  # a step outside of run() is still incomplete
        try:
            self._session.boundary(self._checked)
        except SystemExit:
            self._check_before_exit(sys._getframe(1), "check_preemption()")
            raise
        run.may_have_changed = True

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Context manager that watches for notices; this worker may exit at its end.

        An error raised inside the scope is reported to the other workers. With remote
        workers (`connect_to_cluster`), the loss of a preempted worker is no error: the
        process exits, and resumes from the last commit. If the exit function returns,
        the scope ends; the program may then connect again and enter a new scope.

        Yields:
            None.
        """
        session, run = self._session, self._run
        session.check_open(run, "watch_preemption_scope()")
        session.start_listening(run)
        run.may_have_changed = True
        steps_before = run.step
        try:
            yield
        except BaseException as error:
            # The step is incomplete: a scope may contain a step without run().
            self._step_flag.failed = self._step_flag.started
            if session.exit.left or not was_preemption(
                error, session, is_consistent=False
            ):
                raise
            # The exit function has returned. The step is incomplete, so close the run.
            session.unregister(run)
            return
        if not run.is_closed:
            if run.step == steps_before == 0:
                # The program may train in scopes only, without counted steps.
                run.saved_at = None
            session.boundary(self._checked)

    def pause_hang_detection(self) -> contextlib.AbstractContextManager[None]:
        """Pauses hang detection in a `with` block, for example around an evaluation.

        `tfpreempt run --hang-timeout` treats a worker as hung if the worker starts no
        step in time. Inside the block this worker is not treated as hung, nor are
        workers of this machine that wait for this worker. Without `--hang-timeout` the
        block has no effect.

        Returns:
            A context manager that can be entered once.
        """
        return self._session.activity.hang_detection_paused()

    @property
    def total_run_calls(self) -> int:
        """Number of completed `run()` calls over all restarts; saved in commits.

        Includes the calls that `on_bad_step` has left out.
        """
        return self._run.step

    @property
    def run_calls(self) -> int:
        """Number of steps in this process: of completed `run()` calls, without the
        calls that `on_bad_step` has left out."""
        return self._run.steps_made

    # --- saving ----------------------------------------------------------------------

    def save(
        self, *, wait: bool = True, metrics: Mapping[str, float] | None = None
    ) -> Checkpoint | None:
        """Commits now; every worker calls this method at the same point of the loop.

        If a notice arrives before the next `run()`, that `run()` saves again, with all
        changes since `save()`. If the process is killed, the restarted program resumes
        after the last step, so the program's code between `save()` and the next `run()`
        is not executed again: make changes before `save()`.

        Args:
            wait: False returns as soon as the state is copied in memory; the copy is
                written while training continues, see `wait_for_save`. The call first
                waits for an asynchronous save in progress. With `async_save=False`, a
                CheckpointManager or a save_fn, the call waits for the commit.
            metrics: metrics of the current step, by name, for `best_by`; recorded in
                the commit. The values of the chief count.

        Returns:
            The commit on the chief. None with `wait=False`, and on the other workers,
            because the chief may still be writing the commit. None on every worker if
            one of several workers has found a bad step (`on_bad_step`): no commit is
            made, and all workers exit soon.

        Raises:
            ConfigurationError: a metric is not a number.
            SaveError: the directory cannot be written, or the part of a worker did not
                arrive before the timeout.
            SystemExit: a step was bad (`on_bad_step`).
        """
        self._checked()
        if metrics is not None:
            self._run.directory.set_metrics(self._run.step, check_metrics(metrics))
        saved = self._session.save(self._run, wait=wait)
        # The next run() records the batch that follows the commit.
        self._run.stop_at = min(self._run.stop_at, self._run.steps_made)
        if saved is None or not (wait and self._session.cluster.is_chief):
            return None
        return next(reversed(self.checkpoints()), None)

    def wait_for_save(self, timeout: float | None = None) -> bool:
        """Waits for the asynchronous save in progress; any thread may call the method.

        Asynchronous saves are those of `save(wait=False)` and of `save_freq`. On the
        chief, the save ends with the commit; on another worker, with its own part.

        Args:
            timeout: seconds; None waits until the save is over.

        Returns:
            Whether no asynchronous save is in progress.

        Raises:
            ConfigurationError: the timeout is not a number of seconds.
            SaveError: an asynchronous save has failed since the last call. The error
                was also logged, and older commits are valid.
        """
        check_timeout(timeout)
        self._session.check_process("wait_for_save()")
        is_over = self._session.wait_for_save(timeout)
        self._session.saves.raise_error(self._run)
        return is_over

    # --- its commits -----------------------------------------------------------------

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest commit for `tf.train.Checkpoint.restore`, or None.

        The same kind of path as `tf.train.CheckpointManager.latest_checkpoint`. None if
        there is no commit, or if the newest commit has named States only. Reads the
        directory, but does not verify the commit.
        """
        return latest_prefix(self._run.directory.path)

    def checkpoints(self) -> list[Checkpoint]:
        """Returns references to the commits in the directory, oldest first.

        Reads the directory, but does not verify the commits. The list includes other
        checkpoints there that a handler can restore, such as TensorFlow's.
        `Checkpoint.kept_because` says why retention keeps a commit.

        Raises:
            CheckpointError: the directory cannot be listed.
        """
        return checkpoints_in(self._run.directory.path)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes a commit, in the directory and in `mirror_dir`.

        If the commit is missing in the directory, a warning is logged, and the copy in
        the mirror is deleted. On workers other than the chief the call does nothing.

        Args:
            checkpoint: a commit of this handler's directory or mirror.

        Raises:
            ConfigurationError: the commit is neither in the directory nor in the
                mirror; or a CheckpointManager wrote the commit, and deletes it itself;
                or the argument is not a `tfpreempt.Checkpoint`.
            HandlerClosedError: the handler was closed before.
            CheckpointError: the object store or the disk failed.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise errors.ConfigurationError(
                f"delete_checkpoint() got {checkpoint!r}; expected a "
                "tfpreempt.Checkpoint, such as handler.checkpoints()[0] or "
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
        """Progress of the uploads to `mirror_dir`; may be read on any thread.

        None without a mirror, and on workers other than the chief, because only the
        chief uploads.
        """
        return self._run.directory.mirror_status

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until every commit is uploaded to `mirror_dir`.

        The wait includes an asynchronous save in progress. Any thread may call the
        method.

        Args:
            timeout: seconds; None waits while the upload makes progress, and gives up
                after five minutes without progress.

        Returns:
            Whether the newest commit is in the mirror. True without a
            `mirror_dir`, and on workers other than the chief.

        Raises:
            ConfigurationError: the timeout is not a number of seconds.
        """
        check_timeout(timeout)
        return self._session.wait_for_mirror(self._run, timeout)

    # --- the end ---------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Ends training: handles a pending notice, or commits the final state.

        Because the final state is committed, a program started again finishes at once.
        The call also waits for the upload of the final commit to `mirror_dir`. Either
        every worker exits with 0, or all workers are restarted. So the workers wait for
        the commit of the chief; `timeout` does not limit this wait. Signal handlers are
        restored, and notice sources are closed. A second call does nothing.

        Args:
            timeout: seconds to wait for workers that are still training, and the same
                again for the upload. None: wait while the workers run, and while the
                upload makes progress.

        Raises:
            UsageError: the call is inside `run()`, or in a forked child of the
                handler's process.
            SaveError: this worker or another worker could not commit the final state;
                the handler is closed.
            SystemExit: a notice was handled in place of the final commit, or another
                worker was lost in the final save: all workers are to be restarted.
        """
        check_timeout(timeout)
        if not self._step_flag.busy:
            self._unsaved.after_call()
        self._unsaved.forget()
        session, run = self._session, self._run
        try:
            self._checked()
            training_end.close(session, run, timeout)
        except errors.BadStepsError as error:
            if not run.is_closed:
                training_end.close_failed(session, run, describe(error), error)
            raise
        finally:
            if run.is_closed:
                take_over()

    def __enter__(self) -> PreemptionCheckpointHandler:
        self._session.check_open(self._run, "the `with` block")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        session, run = self._session, self._run
        if error is None:
            self.close()
            return False
        self._unsaved.forget()
        if run.is_closed or session.is_forked:
            pass  # there is nothing to close
        elif session.exit.left:
            session.unregister(run)
        else:
            was_preemption(error, session, is_consistent=session.is_consistent)
            try:
                if self._bad_steps is not None:
                    self._bad_steps.loop_failed(error)
            except errors.BadStepsError as limit:
                training_end.close_failed(session, run, describe(limit), limit)
                raise
            is_exit = isinstance(error, SystemExit | GeneratorExit)
            is_meant = is_exit or is_end_of_data(error)
            training_end.close_failed(
                session, run, "" if is_meant else describe(error), error
            )
        return False

    # --- bad steps -------------------------------------------------------------------

    def _checked(self) -> contextlib.AbstractContextManager[None]:
        """Ends the process if a step was bad; returns a context for `boundary`."""
        session, run = self._session, self._run
        is_usable = not (run.is_closed or session.exit.left or session.is_forked)
        if self._bad_steps is not None and is_usable and not self._step_flag.busy:
            self._bad_steps.check()
        return contextlib.nullcontext()

    def _leave_out(
        self, guard: LoopBadSteps, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Handles the boundary before a step, and leaves the step out."""
        session, run = self._session, self._run
        session.ready(run, "run()")
        self._unsaved.after_call()
        session.boundary(self._checked)
        if self._is_save_due:
            self._checked()
            session.save_at_boundary(run)
        self._step_flag.busy = True
        try:
            guard.skip(args, kwargs)
        except BaseException as error:
            step_failed(error, session)
            raise
        self._step_flag.busy = False
        # Not `steps_made`: the state is unchanged, and a save before the first trained
        # step of this process would lack variables that the step creates.
        run.base += 1
        run.stop_at = min(run.stop_at, run.steps_made)

    # --- rare work at boundaries -----------------------------------------------------

    def _warn_of_late_random_state(self) -> None:
        """Warns if the program drew random numbers before the generators' restore."""
        if self._run.source.random_bytes() != self._random_at_start:
            log.warning(
                "random numbers were drawn after the restart and before the first "
                "save_checkpoint_if_preempted(), which restores the random "
                "generators only now. For an exact resume, enter "
                "watch_preemption_scope() before the loop, or call "
                "save_checkpoint_if_preempted() first in the loop."
            )

    def _enter(self, what: str) -> None:
        """Does the work that only some boundaries need: agreement, saves, first steps.

        The caller has already counted the interval after the boundary.
        """
        session, run = self._session, self._run
        if self._bad_steps is not None:
            will_save = self._step_flag.flag or self._is_save_due
            try:
                session.check_open(run, what)
                self._bad_steps.check(will_save=will_save)
            except BaseException:
                self._step_flag.started -= 1
                raise
        frame = sys._getframe(2)
        try:
            session.enter(run, what)
        except SystemExit:
            self._check_before_exit(frame, what)
            raise
        self._unsaved.after_call()
        if run.steps_made in LOOKS:
            self._watch_loop(frame, what)
        if self._is_save_due:
            session.save_at_boundary(run)
        every = self._save_steps
        if run.steps_made < 4:
            run.stop_at = run.steps_made
        else:
            stop_at = min(each for each in (*LOOKS, NEVER) if each > run.steps_made)
            if every is not None:
                next_save = (run.step // every + 1) * every - run.base
                stop_at = min(stop_at, next_save)
            run.stop_at = next_stop(run, stop_at)

    def _check_before_exit(self, frame: FrameType, what: str) -> None:
        """Names changed state that no commit holds, before the exit after a notice. A
        state that changes once per epoch may have changed only now.

        Called after the save, because the search may take a second of the grace period.

        Args:
            frame: the frame that called the handler.
            what: the called method.
        """
        if self._run.steps_made > LOOKS[0]:
            self._watch_loop(frame, what)

    def _watch_loop(self, frame: FrameType, what: str) -> None:
        if self._run.config.save_fn is None:
            self._unsaved.watch_loop(
                frame,
                is_before_step=what == "run()",
                is_last=self._run.steps_made == LOOKS[-1],
            )

    @property
    def _is_save_due(self) -> bool:
        """Whether `save_freq` requests a save after the newest step."""
        every, run = self._save_steps, self._run
        return every is not None and run.has_moved and run.step % every == 0
