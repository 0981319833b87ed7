"""Ctrl-C waits for the save that is under way."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from tfpreempt.notice._signal_registry import REGISTRY

log = logging.getLogger(__name__)


@contextlib.contextmanager
def held_back(is_saving: Callable[[], bool]) -> Iterator[None]:
    """SIGINT within this block is honoured after it; a second one at once.

    In the program's own way: its handler is called, Python's raises KeyboardInterrupt.
    Where the block ends by SystemExit, that is the way out, and another one that would
    raise KeyboardInterrupt there is ignored. A SIGINT that is watched as a notice, or
    that nobody handles, is left alone. So is that of other threads: it comes to the
    main thread.

    Args:
        is_saving: whether there is something to finish; called in the signal handler
            and on a thread.

    Raises:
        KeyboardInterrupt: at the second one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before) or REGISTRY.is_watched(signal.SIGINT):
        yield
        return
    count, told = 0, False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += is_saving()
        if count == 0:
            before(signum, frame)
        elif count > 1:
            raise KeyboardInterrupt(
                "a second Ctrl-C gave up the save that was under way, or its copy: the "
                "last commit stands, what was trained after it is lost"
            )

    def tell() -> None:
        nonlocal told
        if is_saving() and not told:
            told = True
            log.warning(
                "tfpreempt: Ctrl-C is honoured when the save that is under way is "
                "finished; press it again to give that up"
            )

    signal.signal(signal.SIGINT, handle)
    REGISTRY.subscribe(signal.SIGINT, tell)  # seen at once, even within TensorFlow
    try:
        yield
    finally:
        REGISTRY.unsubscribe(signal.SIGINT, tell)
        if signal.getsignal(signal.SIGINT) is handle:
            REGISTRY.put_back(signal.SIGINT, before)
    if count:
        signal.raise_signal(signal.SIGINT)
