"""Keeps the state after the last step of an epoch, until `on_epoch_end` has returned.

After the last step Keras validates and calls `on_epoch_end`. Validation and hook may
change any variable, and a restart repeats the validation and the hook. So a save during
the validation or the hook, because of a notice or an error, must contain the state from
before the validation.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpreempt.errors import SaveError
from tfpreempt.handler.run import Run
from tfpreempt.handler.session import Session
from tfpreempt.keras.callbacks import callback_state
from tfpreempt.keras.fit.fit_state import Moment
from tfpreempt.keras.fit.frame_lookup import is_running
from tfpreempt.keras.fit_protocol import Fit, after_each, instead_once, uncover

_ASKS = "_should_eval"  # Keras' method called before a validation


class EpochEnd:
    """Keeps the state of a fit after an epoch's last step. Use on the main thread.

    Args:
        fit: the fit.
        session: the session of this process.
        run: the run of the fit.
        take: function returning the current state of the fit.
        check: function called before a validation; ends the process after a bad step.

    Attributes:
        moment: the state that a save must write; None if saves write the current state.
    """

    def __init__(
        self,
        fit: Fit,
        session: Session,
        run: Run,
        take: Callable[[], Moment],
        check: Callable[[], None],
    ) -> None:
        self.moment: Moment | None = None
        self._fit = fit
        self._session = session
        self._run = run
        self._take = take
        self._check = check
        # Wrappers of the functions that a validation calls.
        self._guards = contextlib.ExitStack()
        after_each(fit.model, _ASKS, self._guard_validation)

    def close(self) -> None:
        """Drops the kept state, and restores the replaced functions of Keras."""
        self.moment = None
        self._guards.close()
        uncover(self._fit.model, _ASKS)

    def hold(self) -> Moment:
        """Returns the state after the epoch's last step; the first call in an epoch
        captures the state."""
        if self.moment is None:
            self.moment = self._take()
        return self.moment

    def hold_files(self, callbacks: Sequence[Any]) -> bool:
        """Adds the text of the callbacks' log files to the state at the epoch's end.

        Call before the hooks `on_epoch_end`, which append to the log files.

        Args:
            callbacks: callbacks of the fit.

        Returns:
            Whether the log files were read; False after an error.
        """
        moment = self.hold()
        # Ignore an error: a save reads the files again, and reports the error.
        with contextlib.suppress(OSError):
            files = callback_state.capture_files(callbacks)
            self.moment = dataclasses.replace(moment, files=files)
        return self.moment is not moment

    @contextlib.contextmanager
    def assigned(self) -> Iterator[None]:
        """Context manager: in the body the variables have the kept values."""
        with self.hold().variables.assigned():
            yield

    @contextlib.contextmanager
    def committed_on_error(self) -> Iterator[None]:
        """Context manager: commits the kept state if the body raises an error.

        No save is tried if the state contains a bad step.

        With several workers, the save needs every worker, so the save succeeds only if
        every worker fails in the same way. No save is tried if the capture needs every
        worker (a collective read), because the capture would hang.
        """
        try:
            yield
        except BaseException as error:
            self._guards.close()
            if (
                isinstance(error, Exception)
                and is_running(self._fit)
                and self._run.has_moved
            ):
                self._try_commit()
            raise

    def _try_commit(self) -> None:
        """Commits the kept state, after an error of the program.

        Raises no error, because the program's error is the one to report: Keras shows
        only the last error.
        """
        try:
            if not self._run.directory.needs_peers():
                with self.assigned():
                    self._session.saves.try_save(self._run, because="error")
        except SaveError:
            pass  # the state contains a bad step, and is not saved
        except Exception as error:  # noqa: BLE001 - from variables of a failed trace
            self._session.runs.fault("error save", error)

    def _guard_validation(self, _: str, is_due: bool, *args: Any, **more: Any) -> bool:
        """Checks the losses before a validation, and wraps the functions of the
        validation in `committed_on_error`.

        Called after Keras' `_should_eval`, so before every validation. If Keras has not
        made the iterator over the validation data yet, wraps the function that makes
        the iterator, too.

        Args:
            is_due: result of `_should_eval`: whether a validation follows.
        """
        self._guards.close()
        if is_due:
            self._check()
        for owner, name in self._fit.validation_calls() if is_due else ():
            # A context manager made by contextlib is also a decorator.
            guarded = self.committed_on_error()(getattr(owner, name))
            self._guards.callback(instead_once(owner, name, guarded))
        return is_due
