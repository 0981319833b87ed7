"""The fit's side of its member: it restores when the fit is ready for it."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.core.arguments import check_save_every
from tfpreempt.handler.admission import admit, find_session
from tfpreempt.handler.step_errors import step_failed
from tfpreempt.keras.fit.lookup import is_running
from tfpreempt.keras.fit.options import Options
from tfpreempt.keras.fit.schedule import NEVER
from tfpreempt.keras.interface import Fit
from tfpreempt.platforms.config import TerminationConfig

T = TypeVar("T")


class FitHandler:
    """Loads the named States at once, and leaves the variables to the fit.

    In between Keras makes the variables, and all callbacks begin an epoch and a batch,
    which may change variables again (a schedule sets the learning rate).

    Args:
        options: the user's.
        fit: the fit that runs.
        checkpoint: what a save writes.
    """

    def __init__(
        self, options: Options, fit: Fit, checkpoint: tf.train.Checkpoint
    ) -> None:
        resolver = getattr(fit.model.distribute_strategy, "cluster_resolver", None)
        config = TerminationConfig.accept(options.termination_config)
        every = options.save_freq
        period = every if isinstance(every, datetime.timedelta) else None
        check_save_every(period)
        self._session = find_session(resolver, options.save_timeout)
        self._gate = self._session.gate
        self.member = admit(
            self._session,
            checkpoint,
            options.checkpoint_dir,
            config,
            restore=options.restore,
            max_to_keep=options.max_to_keep,
            remote_checkpoint_dir=options.remote_checkpoint_dir,
            amid="model.fit",  # its state is whole at the callback's hooks only
            is_alive=functools.partial(is_running, fit),
        )
        self.member.commits.load_states()
        self._session.open(self.member, period)

    def run(self, step: Callable[..., T], *args: Any) -> T:
        """One call of the train function; the boundary is before it."""
        gate, member = self._gate, self.member
        gate.started += 1
        if gate.flag or gate.busy or member.runs >= member.stop_at:
            self._enter()
        gate.busy = True
        try:
            result = step(*args)
        except BaseException as error:
            step_failed(error, self._session, member)
            raise
        gate.busy = False
        member.runs += 1
        return result

    def _enter(self) -> None:
        session, member = self._session, self.member
        try:
            self._check()
        except errors.TfpreemptError:
            self._gate.started -= 1
            raise
        session.look()
        if member.runs == 1:
            member.commits.try_states()  # all is there: a step was made
            session.begin_measuring()
        member.stop_at = 1 if member.runs == 0 else NEVER

    def _check(self) -> None:
        self._session.check_open(self.member, "a callback")
        self._session.exit.check()
        self._session.arm(self.member)

    def boundary(self) -> None:
        """A place where the process may save and leave; counts no step."""
        self._check()
        self._session.boundary()

    def arm(self) -> None:
        """Training begins: listens, and sets the random generators."""
        self._session.arm(self.member)

    def save_periodically(self) -> None:
        """Commits together with all workers; a failure is logged and recorded."""
        self._session.arm(self.member)
        self._session.try_to_save(self.member)

    def end(self) -> None:
        """The fit came to its end: commits that, with all workers."""
        self.member.is_at_end = True
        self._session.close(self.member)

    def abandon(self) -> None:
        """The fit died of an error: what it was in the middle of is not saved."""
        error = errors.UsageError("model.fit did not come to its end")
        self._session.give_up(self.member, error)
