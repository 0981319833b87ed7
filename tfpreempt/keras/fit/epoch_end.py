"""The end of an epoch's training, while the validation and `on_epoch_end` follow.

Both may change any variable, and a restart repeats both. So a save in between, because
of a notice or an error, contains the state at the end of the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpreempt.handler.run import Run
from tfpreempt.handler.session import Session
from tfpreempt.keras.callbacks import callback_state
from tfpreempt.keras.fit.fit_state import Moment
from tfpreempt.keras.fit.frame_lookup import is_running
from tfpreempt.keras.fit_protocol import Fit, after_each, instead_once, uncover

_ASKS = "_should_eval"  # Keras' method called before a validation


class EpochEnd:
    """The state of a fit after the last training step of an epoch. Main thread.

    Args:
        fit: the fit.
        session: the session of this process.
        run: the run of the fit.
        take: function that captures the current moment of the fit.

    Attributes:
        moment: the held moment, used by saves; None: saves use the current state.
    """

    def __init__(
        self, fit: Fit, session: Session, run: Run, take: Callable[[], Moment]
    ) -> None:
        self.moment: Moment | None = None
        self._fit = fit
        self._session = session
        self._run = run
        self._take = take
        # Wrappers of the functions that a validation calls.
        self._guards = contextlib.ExitStack()
        after_each(fit.model, _ASKS, self._guard_validation)

    def close(self) -> None:
        """Removes the replacements of Keras' functions."""
        self.moment = None
        self._guards.close()
        uncover(self._fit.model, _ASKS)

    def hold(self) -> Moment:
        """Returns the end of the epoch's training, captured by the first call."""
        if self.moment is None:
            self.moment = self._take()
        return self.moment

    def hold_files(self, callbacks: Sequence[Any]) -> bool:
        """Captures the text of log files before a hook may write to the files.

        Returns:
            Whether the files were captured; False after an error.
        """
        moment = self.hold()
        with contextlib.suppress(OSError):  # every save reports the error
            files = callback_state.capture_files(callbacks)
            self.moment = dataclasses.replace(moment, files=files)
        return self.moment is not moment

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Assigns the values from the end of the epoch's training inside the block."""
        with self.hold().variables.assigned():
            yield

    @contextlib.contextmanager
    def committed_on_error(self) -> Iterator[None]:
        """Commits the end of the epoch's training if an error ends the fit inside.

        With several workers the commit needs the parts of the other workers. So the
        commit is made only if every worker fails in the same way.
        """
        try:
            yield
        except BaseException as error:
            self._guards.close()
            is_error = isinstance(error, Exception) and is_running(self._fit)
            needs_peers = self._run.directory.contents.needs_peers()
            if is_error and self._run.has_moved and not needs_peers:
                with self.assigned():
                    self._session.saves.try_save(self._run, because="error")
            raise

    def _guard_validation(self, _: str, is_due: bool, *args: Any, **more: Any) -> bool:
        """Wraps the next validation in `committed_on_error`, before Keras validates.

        The wrapped functions include the function that makes the validation data, if
        Keras has not made the data yet.

        Args:
            is_due: whether a validation follows.
        """
        self._guards.close()
        for owner, name in self._fit.validation_calls() if is_due else ():
            # A context manager made by contextlib is also a decorator.
            guarded = self.committed_on_error()(getattr(owner, name))
            self._guards.callback(instead_once(owner, name, guarded))
        return is_due
