"""The handler inside `model.fit`: it restores when the fit is ready for it."""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.core.events import Notice
from tfpreempt.handler.handler import PreemptionCheckpointHandler
from tfpreempt.keras.fit.lookup import is_running
from tfpreempt.keras.fit.options import Options
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)


class FitHandler(PreemptionCheckpointHandler):
    """Loads the named States at once, the variables by `restore_variables`.

    In between Keras makes the variables, and all callbacks begin an epoch and a batch,
    which may change variables again (a schedule sets the learning rate).

    Args:
        *args: for the handler.
        is_fitting: whether the fit is still under way; any thread.
        **kwargs: for the handler.
    """

    is_amid = True  # between two of its hooks

    def __init__(
        self, *args: Any, is_fitting: Callable[[], bool], **kwargs: Any
    ) -> None:
        self._is_at_end = False
        self._is_fitting = is_fitting
        super().__init__(*args, **kwargs)

    def _restore(self) -> None:
        self._keeper.load_states()

    def _look_at(self, *call: Any) -> None:
        """Nothing: the callback keeps what a fit changes."""

    def _received(self, notice: Notice) -> None:
        super()._received(notice)
        if not self._is_fitting():  # it died, and no boundary will come any more
            self._session.departure.overrun("the fit has died")

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a commit to restore."""
        return self._keeper.has_candidate

    @property
    def has_moved(self) -> bool:
        """Whether there are train steps since the newest save."""
        return self._keeper.has_moved

    def restore_variables(self) -> None:
        """Restores the agreed commit's variables; every worker.

        Raises:
            CheckpointMismatchError: another model's; nothing was assigned.
        """
        self._keeper.restore(named_states=False)

    def adopt(self) -> None:
        """Counts on from the newest commit, whose variables are not wanted."""
        self._keeper.adopt()

    def arm(self) -> None:
        """Training begins: listens, and sets the random generators."""
        self._arm()

    def boundary(self) -> None:
        """A place where the process may save and leave; counts no step."""
        self._check_open("a callback")
        self._session.departure.check()
        self._arm()
        self._boundary()

    def save_periodically(self) -> None:
        """Commits together with all workers; a failure is logged and recorded."""
        self._arm()
        self._save_periodically()

    def save(self) -> NoReturn:
        """Not from within a fit: what its save takes is at hand at boundaries only."""
        raise errors.UsageError(
            "save_all_states() was called while model.fit runs; its PreemptionCallback "
            "saves the States with the model. Use its save_freq=, or call this before "
            "or after the fit."
        )

    def end(self) -> None:
        """The fit came to its end: commits that, with all workers."""
        self._is_at_end = True
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Called by the interpreter's end too, where the fit may have died half-way."""
        if not (self._is_at_end or self._closed):
            log.info("tfpreempt: this fit did not come to its end; nothing is saved")
            self.abandon()
        super().close(timeout)

    def abandon(self) -> None:
        """The fit died of an error: what it was in the middle of is not saved."""
        if self._closed:
            return
        if not self._session.departure.left:
            self._raised(errors.UsageError("model.fit did not come to its end"))
            self._session.departure.finish_mirrors([self._keeper])
        self._quiet()


def make_handler(
    options: Options, fit: Fit, checkpoint: tf.train.Checkpoint
) -> FitHandler:
    """The handler of the fit that runs; agrees with all workers on a commit.

    Args:
        options: the user's.
        fit: the fit.
        checkpoint: what a save writes.
    """
    every = options.save_freq
    return FitHandler(
        getattr(fit.model.distribute_strategy, "cluster_resolver", None),
        checkpoint,
        options.checkpoint_dir,
        options.termination_config,
        save_every=every if isinstance(every, datetime.timedelta) else None,
        restore=options.restore,
        save_timeout=options.save_timeout,
        max_to_keep=options.max_to_keep,
        remote_checkpoint_dir=options.remote_checkpoint_dir,
        is_fitting=functools.partial(is_running, fit),
    )
