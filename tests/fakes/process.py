"""A new process, as far as the handlers and fits of this process see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.handler import current_session


@contextlib.contextmanager
def new_process() -> Iterator[None]:
    """Context manager that simulates a new process.

    In the body there is no session, as before the first handler. At the end, open
    handlers are closed without a commit, and the earlier session is current again.
    """
    before = current_session._current, current_session._pending
    current_session._current, current_session._pending = None, []
    try:
        yield
    finally:
        made = current_session.current()
        current_session._current, current_session._pending = before
        if made is not None:
            for run in made.runs:
                made.unregister(run)
            made.resume_after_exit()
            made.executor.stop()
            if isinstance(made.executor.store, InMemoryStore):
                made.executor.store.close()  # ends blocking reads of the threads


def forget_fits() -> None:
    """Forgets earlier fits, as a new process does, and abandons an open fit."""
    from tfpreempt.keras import callback
    from tfpreempt.keras.fit import resume_plan

    while callback._running:
        callback._running.pop().abandon()
    resume_plan.PASTS.clear()
