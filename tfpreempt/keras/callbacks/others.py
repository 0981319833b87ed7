"""The other callbacks of a fit: checked, and held back at times."""

from __future__ import annotations

import logging
from typing import Any

from tfpreempt.keras.callbacks import check

log = logging.getLogger(__name__)


class OtherCallbacks:
    """Puts our callback behind them, and refuses what does not go together with it.

    Args:
        holder: Keras' CallbackList.
        ours: our callback.
        checkpoint_dir: must not be one of theirs.

    Attributes:
        callbacks: they, without ours.

    Raises:
        ConfigurationError: one of them writes to the same directory.
    """

    def __init__(self, holder: Any, ours: Any, checkpoint_dir: str) -> None:
        self._holder = holder
        self.callbacks = [one for one in holder.callbacks if one is not ours]
        self._all = [*self.callbacks, ours]
        self._ours = [ours]
        check.conflicts(self.callbacks, checkpoint_dir)
        check.warn_of_backup(self.callbacks)
        # One more of our kind is refused when its turn comes.
        theirs = [one for one in self.callbacks if not isinstance(one, type(ours))]
        if lost := check.unsupported(theirs):
            log.warning(
                "tfpreempt: the state of these callbacks is not saved, so they begin "
                "anew after a restart: %s. Give them get_state() and set_state(state), "
                "or keep what they remember in a tfpreempt.State.",
                "; ".join(lost),
            )
        holder.callbacks = self._all

    def silence(self) -> None:
        """The others are not called for a step that they have seen before."""
        self._holder.callbacks = self._ours

    def wake(self, hook: str, *args: Any) -> None:
        """They are called again, at once for the hook that is under way."""
        self._holder.callbacks = self._all
        self.call(hook, *args)

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of the others."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args)
