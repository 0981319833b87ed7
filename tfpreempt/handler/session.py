"""The session: lets this process participate in the agreement of all workers.

A process has one session, and a run for each handler or fit. A boundary is the moment
before a step. Boundaries are counted per process, not per run, because the process is
preempted as a whole: at the agreed boundary every open run saves. The `StepFlag`
counts the intervals between boundaries, and has a flag that stops the main thread at
the next boundary. The session owns the key-value store, the coordinator and the exit; a
run owns its commits and its notice sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from tfpreempt.checkpoint.directory.layout import is_same
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.key_value_store import CoordinationService, KeyValueStore
from tfpreempt.coordination.state_machine import PREEMPTION
from tfpreempt.coordination.store_executor import StoreExecutor
from tfpreempt.core import frameworks
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster, connected_cluster
from tfpreempt.core.compat import add_note
from tfpreempt.core.deadline import needed_seconds, until_end
from tfpreempt.core.error_causes import is_of_data
from tfpreempt.core.events import Fault, FirstStep, Notice, Outcome
from tfpreempt.core.replay import read_replay
from tfpreempt.errors import (
    HandlerClosedError,
    NestedRunError,
    TfpreemptError,
    UsageError,
)
from tfpreempt.handler.activity import Activity, SnapshotScheduler
from tfpreempt.handler.collective_save import CollectiveSaves, RoundSave, VetoError
from tfpreempt.handler.exit import ExitController, defer_sigint, notify_peers
from tfpreempt.handler.final_vote import FinalVote
from tfpreempt.handler.run import Run, Runs
from tfpreempt.notice.killed_children import killed_children

log = logging.getLogger(__name__)

OPENS_WITHIN = 1.0
"""Seconds allowed from a notice until its round is open; usually milliseconds."""

REPORTS_WITHIN = 0.05
"""Seconds allowed from a signal until its source reports; usually milliseconds."""

DIES_WITHIN = 0.05
"""Seconds until a signal to a process group has ended children without a handler."""

_TRACED = 2
"""Number of steps that may trace; 2, because step functions may alternate (GAN)."""

Saving = Callable[[], contextlib.AbstractContextManager[None]]


def take_notice(pending: list[Notice], notice: Notice) -> bool:
    """Removes a notice from the pending notices.

    Several threads may call the function for the same notice; only a single call
    succeeds.

    Args:
        pending: notices that arrived while no run listened.
        notice: the notice to take.

    Returns:
        Whether the call has removed the notice; False if removed before.
    """
    with contextlib.suppress(ValueError):
        pending.remove(notice)
        return True
    return False


class Session:
    """Lets the main thread participate in the agreement, at boundaries and in saves.

    Args:
        cluster: the workers of the run.
        store: key-value store shared by the workers.
        incarnation: namespace of the keys, which identifies this start of all workers.
        peer_timeout: seconds that a wait may take without a known deadline.
        pending: notices that arrived while no run listened.

    Attributes:
        start_count: number of runs whose start was attempted; equal on every worker,
            and used in the names of keys.
        notice_at: monotonic seconds at which the newest notice of a run arrived.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: KeyValueStore,
        incarnation: str,
        peer_timeout: float,
        pending: list[Notice],
    ) -> None:
        self.cluster = cluster
        self.incarnation = incarnation
        self._pending = pending
        self._clock = SystemClock()
        self.runs = Runs()
        self.start_count = 0
        self._newest_notice: Notice | None = None  # the newest notice of a run
        self.notice_at = -math.inf  # monotonic seconds of `_newest_notice`
        self.executor = StoreExecutor(
            store, self._clock, lambda error: self.coordinator.store_gone(error)
        )
        self.coordinator = Coordinator(
            ev.ProtocolConfig(
                cluster.worker,
                cluster.num_workers,
                collectives=cluster.num_workers > 1,
                saves_alone=cluster.num_workers == 1,  # see `wait_for_directive`
            ),
            incarnation,
            self.executor,
            self._clock,
            peer_timeout=peer_timeout,
            step_seconds=lambda: self.step_flag.step_seconds,
            record=self.runs.record,
            on_overrun=lambda why: self.exit.force_exit(why),
        )
        self.saves = CollectiveSaves(
            cluster,
            f"tfpreempt/{incarnation}/save",
            self.coordinator,
            self.runs,
            on_failure=lambda error: self.failed(error),
        )
        self.vote = FinalVote(cluster, incarnation, self.coordinator)
        self.exit = ExitController(
            cluster,
            self.runs,
            self.coordinator,
            finish_save=self.saves.end_async_within,
        )
        self.step_flag = self.coordinator.step_flag
        self.activity = Activity(self.coordinator, self.runs)
        self.coordinator.start()

    # --- runs -------------------------------------------------------------------------

    def open(self, run: Run, every: datetime.timedelta | None = None) -> None:
        """Opens a run: starts to watch its notice sources and to mirror its commits.

        Args:
            run: the run; its state is already restored.
            every: time between two periodic commits; None for no periodic commits.

        Raises:
            NotMainThreadError: the caller is not the main thread, where Python requires
                signals to be watched.
            ConfigurationError: another open run mirrors to the same location.
        """
        self.resume_after_exit()
        before = list(self.runs)
        self.exit.is_over = False
        if not before:
            self.vote.failures.clear()
        # Before the watcher starts, because a pending notice needs an open run.
        self.runs.add(run)
        try:
            run.watcher.start()
            run.start_mirror()
            self.deliver_pending_notices()
        except BaseException:
            self.unregister(run)
            raise
        for other in before:
            directories = other.directory.path, run.directory.path
            if self.is_over(other) and is_same(*directories):
                self.unregister(other)
        if every is not None and self.cluster.is_chief:
            self.saves.repeat(every.total_seconds(), weakref.ref(run))
        if run.snapshots is not None and self.cluster.is_chief:
            SnapshotScheduler(
                weakref.ref(run),
                self.runs,
                self.coordinator,
                lambda: self.saves.is_busy,
            ).look()

    def deliver_pending_notices(self) -> None:
        """Delivers the pending notices, which arrived while no run listened.

        The newest listening run gets the notices. Any thread may call the method. The
        method is called after a notice is kept, and after a run begins to listen: the
        later call sees both the notice and the run.
        """
        listening = [run for run in self.runs if run.watcher.is_started]
        for notice in tuple(self._pending):
            if listening and take_notice(self._pending, notice):
                mine = dataclasses.replace(notice, worker=self.cluster.worker)
                self.on_notice(listening[-1].start.token, mine)

    def take_left_over(self) -> Notice | None:
        """Returns, once, the newest notice that the closed runs have not handled.

        Such a notice arrived after the last boundary, or has a grace period that
        outlasts the training. Returns None if there is no such notice.
        """
        is_held = self.coordinator.state.held is not None
        if self.runs or not is_held or self.exit.left or self.exit.detached:
            return None
        notice, self._newest_notice = self._newest_notice, None
        if notice is None:
            return None
        # Several notices may have arrived: the earliest of their deadlines counts.
        terminates_at = self.coordinator.deadlines.terminates_at
        grace = None if terminates_at is None else terminates_at - notice.received_at
        return dataclasses.replace(notice, grace_seconds=grace)

    def is_over(self, run: Run) -> bool:
        """Returns whether a run cannot continue, after a failed step or its exit."""
        has_failed = self.step_flag.failed == self.step_flag.started
        return has_failed or run.left_at == run.step

    def start_listening(self, run: Run) -> None:
        """Begins the training of a run, if training has not begun.

        Watches the notice sources again, and sets the random generators.

        Raises:
            UsageError: JAX has connected this process to other processes since the
                handler was created.
        """
        if not run.is_armed:
            here = connected_cluster()
            if self.cluster.num_workers == 1 and here.num_workers > 1:
                raise UsageError(
                    "jax.distributed.initialize() was called after the handler or fit "
                    f"was created, so this process, {here.worker} of "
                    f"{here.num_workers}, would train and commit alone. Call "
                    "jax.distributed.initialize() first, on every process."
                )
            # Hold the run before `arm` starts a thread. Otherwise the thread could have
            # the last reference, and the run would be closed on the thread.
            self.runs.kept.add(run)
            run.arm(self.activity.now, self.step_flag.step_times)

    def unregister(self, run: Run) -> None:
        """Closes a run; the run no longer participates in saves."""
        self.runs.kept.discard(run)
        self.saves.wait()  # a save still needs the lease, which `close` releases
        # After an exit at this step the commit is already logged.
        if run.left_at != run.step:
            self.runs.log_last(run)
        run.close()

    # --- boundaries ------------------------------------------------------------------

    def check_process(self, what: str) -> None:
        """Raises an error in a forked child, where the session's threads do not run.

        Args:
            what: the call, for an error message.

        Raises:
            UsageError: the calling process is a forked child.
        """
        if self.is_forked:
            raise UsageError(
                f"{what} was called in process {os.getpid()}, but the handler "
                f"belongs to process {self.exit.process}, from which this process "
                "was forked: the threads that save and watch for notices run there. "
                f"Call {what} in process {self.exit.process}; or create a new "
                "handler here, with a separate checkpoint_dir."
            )

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the session's process."""
        return os.getpid() != self.exit.process

    def check_open(self, run: Run, what: str) -> None:
        """Raises an error if a call comes after close, in a step or in a forked child.

        Args:
            run: the run of the call.
            what: the call, for an error message.

        Raises:
            HandlerClosedError: the run was closed before.
            NestedRunError: the call is inside `run()`.
            UsageError: the calling process is a forked child.
        """
        self.check_process(what)
        if run.is_closed:
            raise HandlerClosedError(
                "this handler was closed. Create a new PreemptionCheckpointHandler, "
                "which restores the last commit; or close the handler after the last "
                "run()"
            )
        if self.step_flag.busy:
            raise NestedRunError(
                f"{what} was entered inside run(), where the step is incomplete and "
                f"cannot be saved. Call {what} between two runs."
            )

    def ready(self, run: Run, what: str) -> None:
        """Begins the training of a run, before a boundary or a save.

        Args:
            run: the run; training may have begun before.
            what: the call, for an error message.

        Raises:
            HandlerClosedError: the run was closed before.
            NestedRunError: the call is inside `run()`.
            UsageError: an error was raised here before, and reported to the other
                workers.
        """
        self.check_open(run, what)
        if self.exit.detached:
            raise UsageError(
                "an error was raised in run() on this worker and reported to all "
                "workers, so the cluster cannot continue. Let the process exit with "
                "the error, and restart all workers."
            )
        self.start_listening(run)

    def enter(self, run: Run, what: str) -> None:
        """Does the work that only some boundaries need: the agreement, and the first
        steps.

        If a notice or a request has raised the flag (`StepFlag.flag`), waits for the
        agreement. Around the first steps, measures and checks, for example whether the
        States can be saved. The caller has counted the interval that begins after this
        boundary.

        Args:
            run: the run whose step is about to start.
            what: the call, for an error message.

        Raises:
            UsageError: the step cannot start, see `ready`. The interval is then not
                counted.
        """
        try:
            self.ready(run, what)
        except TfpreemptError:
            self.step_flag.started -= 1
            raise
        self.wait_at_boundary()
        if (replay := read_replay()) is not None and run.step >= replay.until:
            self.saves.save(run, "replay")
            self.exit.leave(Outcome.COMMITTED, "the steps of the replay are repeated")
        if run.steps_made < _TRACED:
            self.activity.traces = self.step_flag.started
        if run.steps_made == 1:
            began = self._clock.monotonic()
            run.directory.try_states()  # after a step, every State exists
            run.states.warn_of_late(run.directory.registry.in_order())
            run.record(FirstStep(step=run.step))
            run.record_caches()
            run.directory.contents.prepare()
            self.step_flag.leave_out_first(self._clock.monotonic() - began)
        elif run.steps_made == 3:
            # Do not warn after the first step: two step functions may alternate, as in
            # a GAN.
            run.source.contents.warn_of_unrestored()
            self._warn_of_long_steps(run)

    def _warn_of_long_steps(self, run: Run) -> None:
        grace = run.watcher.shortest_grace
        seconds = self.step_flag.step_seconds
        if grace is None:
            return
        save = self.coordinator.deadlines.save_seconds or 0.0
        needed, left = needed_seconds(save, grace), until_end(grace)
        if seconds + needed <= left:
            return
        where = "within a step" if seconds > left else "in the save"
        log.warning(
            "a step takes %.1f s and the save after the step %.1f s with margins, "
            "but a notice leaves %g s: the platform may terminate the process %s, "
            "and the steps since the last commit would be repeated. Do less in each "
            "run(), or commit more often (save_freq=)",
            seconds,
            needed,
            grace,
            where,
        )

    def boundary(self, saving: Saving = contextlib.nullcontext) -> None:
        """Passes a boundary that is not followed by a step.

        If a notice is pending, the process may save and exit here.

        Args:
            saving: function that returns a context manager. The context is entered
                before a save at this boundary, and prepares the state to be saved.
        """
        self.step_flag.started += 1
        self.step_flag.measure_from_now()
        if self.step_flag.flag:
            with saving():
                self.wait_at_boundary()

    def wait_at_boundary(self) -> None:
        """Waits at a boundary while a notice or a request for a save is handled.

        The caller has already counted the interval that begins after the boundary. The
        method returns when the interval may start. The method raises SystemExit if this
        process must exit.
        """
        self.resume_after_exit()
        if not self.step_flag.flag:
            return
        with self.deferring_sigint():
            while self.step_flag.flag:
                self.step_flag.started -= 1
                verdict = self.wait_for_directive()
                self.step_flag.started += 1
                if isinstance(verdict, ev.Proceed):
                    return

    @contextlib.contextmanager
    def deferring_sigint(self) -> Iterator[None]:
        """Context manager: defers Ctrl-C while a notice is being handled."""
        with defer_sigint(lambda: self.step_flag.flag):
            try:
                yield
            except KeyboardInterrupt:
                self.detach("was interrupted")
                raise

    def detach(self, why: str) -> None:
        """Ends this worker's participation, and notifies the other workers.

        Args:
            why: the reason, for people; follows "worker 3" in a sentence.
        """
        self.coordinator.notes.lost_because = f"worker {self.cluster.worker} {why}"
        self.exit.detached = True
        self.coordinator.dispatch(ev.Detached())

    def resume_after_exit(self) -> None:
        """Resumes training after SystemExit was caught (in a notebook, for example).

        Training continues as if the exit function had returned.
        """
        if self.exit.left:
            self.exit.cancel()
            self.runs.kept.clear()  # runs from before the exit are over
            # After the loss of a worker, the state is not ENDED, and no round follows.
            if self.coordinator.state.main is ev.MainThreadState.ENDED:
                self.coordinator.dispatch(ev.NextRound())

    def wait_for_directive(
        self,
        *,
        last: bool = False,
        limit: float | None = None,
        steps_follow: bool = True,
    ) -> ev.Directive | None:
        """Waits at a boundary for directives of the coordinator, and executes them.

        Args:
            last: whether training is over on this worker.
            limit: seconds to wait for a directive; None: no limit.
            steps_follow: whether steps may follow this boundary.

        Returns:
            The directive that ends the wait at this boundary; None after `limit`
            seconds.
        """
        c = self.coordinator
        need_peers = [m.directory.needs_peers() for m in self.runs]
        saves_alone = True not in need_peers
        c.settings = dataclasses.replace(c.settings, saves_alone=saves_alone)
        save = RoundSave(self.runs, c, self.saves, arrived_at=c.clock.monotonic())
        c.dispatch(ev.Boundary(self.step_flag.started, last))
        while True:
            match c.wait(limit):
                case None:
                    log.warning(
                        "other workers still train after %s s; this worker exits "
                        "without waiting any longer",
                        limit,
                    )
                    return None
                case ev.SaveDirective(_, _, repeat):
                    with self.saves.breaking_off():
                        is_staged = repeat or save.stage()
                    c.dispatch(ev.Saved(is_staged))
                case ev.WriteMarker(workers):
                    c.dispatch(ev.Committed(save.mark(workers, steps_follow)))
                case ev.ExitDirective(outcome) as verdict:
                    if outcome is not Outcome.COMMITTED:
                        save.committed_nothing()
                    note = str(c.commit_extra.get("note", ""))
                    self.exit.leave(outcome, c.notes.lost_because or note)
                    c.dispatch(ev.NextRound(served=outcome is not Outcome.FINISHED))
                    return verdict
                case verdict:
                    if isinstance(verdict, ev.Resume):
                        if c.state.saved_at != self.step_flag.started:
                            save.committed_nothing()
                        save.go_on()
                    return verdict

    # --- without a notice ------------------------------------------------------------

    def save(self, run: Run, *, wait: bool = True) -> str | None:
        """Saves on every worker, at the same point of the program.

        Args:
            run: the run to save.
            wait: whether to wait for the commit; False begins an asynchronous save, if
                the contents of the run allow one.

        Returns:
            On the chief, the directory of the commit. On the other workers, the
            checkpoint directory; on the chief too, if the commit has no directory (flat
            files), or if a save_fn left no files to commit. None if nothing was saved,
            because a worker has found a bad step, as far as this worker knows.

        Raises:
            CheckpointError: the directory cannot be written, or a worker's part did not
                arrive before the timeout.
            UsageError: the call is inside a step or a fit, or follows an error.
        """
        if run.amid:
            raise UsageError(
                f"save_all_states() was called while {run.amid} runs; its "
                "PreemptionCallback saves the States with the model. Use save_freq= "
                "of the callback, or call save_all_states() before or after the fit."
            )
        self.ready(run, "save()")
        is_async = not wait and run.saves_async
        try:
            commit = self.saves.save(run, "save", is_async=is_async)
        except VetoError as error:
            log.warning("the state was not saved: %s", error)
            return None
        run.may_have_changed = True
        if commit is None or not os.path.isdir(commit.path):
            return run.directory.path
        return commit.path

    def save_at_boundary(self, run: Run) -> None:
        """Makes a periodic save at a boundary.

        The caller has already counted the interval after this boundary
        (`step_flag.started`). A single process takes the interval back during the save.
        So if a notice arrives during the save, the agreed boundary is the current
        boundary, and the process exits with the new commit, without another step.
        Several workers keep the interval counted. Otherwise the workers could agree on
        the current boundary; a worker with fewer steps would then stop at the boundary,
        and miss the save in which the peers wait.
        """
        is_alone = self.cluster.num_workers == 1
        self.step_flag.started -= is_alone
        self.saves.try_save(run)
        self.step_flag.started += is_alone
        if is_alone:
            self.wait_at_boundary()

    def wait_for_save(self, seconds: float | None = None) -> bool:
        """Waits for the asynchronous save in progress; any thread may call.

        Args:
            seconds: longest wait; None: until the save is over.

        Returns:
            Whether no save is in progress.
        """
        with self.activity.main_may_wait():
            return self.saves.wait(seconds)

    def wait_for_mirror(self, run: Run, seconds: float | None) -> bool:
        """Waits until every save begun so far is uploaded; any thread may call.

        Args:
            run: the run whose saves are uploaded.
            seconds: longest wait; None: no limit while the upload progresses.

        Returns:
            Whether the newest commit is uploaded.
        """
        self.check_process("wait_for_mirror()")
        start = self._clock.monotonic()
        if not self.wait_for_save(seconds):
            return False
        if seconds is not None:
            seconds = max(0.0, seconds - (self._clock.monotonic() - start))
        with self.activity.main_may_wait():
            return run.directory.wait_for_mirror(seconds)

    @property
    def is_consistent(self) -> bool:
        """Whether no step is incomplete; for calls outside of `run()`."""
        return self.step_flag.started not in (
            self.step_flag.failed,
            self.step_flag.bare,
        )

    def is_noticed(self, within: float = 0.0) -> bool:
        """Returns whether a preemption notice is to be handled.

        Called on the main thread. Waits while the round of a notice is being opened.

        Args:
            within: seconds to wait for a notice that may be about to be reported by
                another thread.
        """
        start, never = self._clock.monotonic(), threading.Event()
        while self.coordinator.state.notice not in PREEMPTION:
            since = self.coordinator.deadlines.since_notice
            is_opening = since is not None and since < OPENS_WITHIN
            if not is_opening and self._clock.monotonic() - start >= within:
                return False
            never.wait(0.01)
        return bool(self.runs)

    def serve(self, error: Exception, is_consistent: bool) -> bool:
        """Handles a preemption notice, if one exists, when an error was raised.

        The error counts as a consequence of the notice, and the process exits to be
        restarted. A complete state is committed before the exit, unless the agreed
        boundary is later: this worker cannot reach a later boundary, because no step
        can follow the error. If a step fails because data cannot be read, no state is
        saved, as after the loss of a worker.

        Args:
            error: error raised by a step, or outside of steps.
            is_consistent: whether the state can be saved: no step is incomplete.

        Returns:
            Whether a notice was handled and the exit function returned.
        """
        killed, is_alone = killed_children(), self.cluster.num_workers == 1
        if killed:
            add_note(
                error, f"children of this process were killed: {', '.join(killed)}"
            )
        is_reading = bool(killed) or is_of_data(error)
        within = OPENS_WITHIN if killed else REPORTS_WITHIN if is_reading else 0.0
        if not (is_consistent or (is_alone and is_reading)) or not self.is_noticed(
            within
        ):
            return False
        log.error(
            "this error counts as a consequence of the preemption notice, not as a "
            "failure: the process exits to be restarted",
            exc_info=error,
        )
        verdict = None
        if is_consistent:
            with self.deferring_sigint():
                verdict = self.wait_for_directive(last=is_alone, steps_follow=False)
        if not isinstance(verdict, ev.ExitDirective):
            self.exit.fail(error, peer_is_gone=True)
        return True

    def on_notice(self, token: str, notice: Notice) -> None:
        """Handles a notice from a source. Called on the thread of the source.

        Args:
            token: token of the run that owns the source.
            notice: the notice.
        """
        before = self.notice_at
        self._newest_notice, self.notice_at = notice, notice.received_at
        self.coordinator.notice(notice)
        runs = [each for each in self.runs if each.start.token == token]
        for run in runs:
            if run.directory.mirror is not None:
                run.directory.mirror.shorten_waits()
            run.record(notice)
        grace = notice.grace_seconds
        unknown = (
            "unknown (pass termination_config=TerminationConfig(grace_period=...))"
        )
        log.warning(
            "preemption notice from %s; grace period %s. Checkpointing %s",
            notice.origin,
            f"{grace:g} s" if grace else unknown,
            "when the current step finishes"
            if self.step_flag.busy
            else "at the next boundary: a step, a batch of a validation, or "
            "check_preemption()",
        )
        # Once for many signals: a search takes long, and delays the deadline's alarm.
        if notice.received_at - before >= DIES_WITHIN:
            at = self._clock.monotonic() + DIES_WITHIN
            self.executor.call_at(at, self._name_killed)
        for run in runs:
            if not run.is_alive():
                self.exit.force_exit("model.fit has ended, and no step will follow")

    def _name_killed(self) -> None:
        """Logs the children of this process that were killed.

        The signal that caused the notice may have been sent to the children, too.
        """
        if killed := ", ".join(killed_children()):
            log.warning(
                "children of this process were killed: %s. If the children read "
                "data, a step that waits for the data hangs or fails. Have the "
                "signal sent to the main process only (docs/platforms/signals.md)",
                killed,
            )
            self.runs.record(Fault(where="children", error=f"killed: {killed}"))

    def failed(
        self,
        error: BaseException,
        *,
        is_consistent: bool = False,
        peer_is_gone: bool = False,
    ) -> None:
        """Handles an error: as the consequence of a notice, or by notifying the peers.

        If the method returns, the caller raises the error.

        Args:
            error: error raised by a step, or outside of steps.
            is_consistent: whether the state can be saved: no step is incomplete.
            peer_is_gone: whether the error looks like the loss of another worker.
        """
        if isinstance(error, Exception) and self.serve(error, is_consistent):
            return  # a notice was handled, and the exit function returned
        if self.cluster.num_workers > 1:
            service: CoordinationService
            service = frameworks.adapter(self.cluster.framework, "coordination")
            self.exit.fail(error, peer_is_gone)
            key = f"tfpreempt/{self.incarnation}/failure"
            worker, send = self.cluster.worker, service.report_error
            notify_peers(worker, self.executor, key, error, send)
