"""A base class of sources that poll in a thread, and log each failure once."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable

from tfpreempt import errors
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.threads import ManagedThread
from tfpreempt.notice.source import NoticeSourceBase

_logger = logging.getLogger(__name__)

Wait = Callable[[threading.Event, float], bool]
"""Function that waits for an event, at most for a number of seconds; returns whether
the event is set."""

CLOSE_LIMIT_SECONDS = 2.0

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def retry_seconds(failures: int, first: float = 1.0, longest: float = 30.0) -> float:
    """Returns the seconds to wait before the next poll; doubles with every failure.

    Args:
        failures: number of consecutive failed polls, from 1 on.
        first: seconds after the first failure.
        longest: maximum seconds.
    """
    return min(first * 2.0 ** min(failures - 1, 16), longest)


class FailureLog:
    """Counts consecutive failures, and logs equal failures only once.

    Failures are equal if their types and messages are equal. Numbers in a message are
    ignored unless the error is tfpreempt's NoticeError, because a message may contain
    the memory address of an object.

    Args:
        name: name of the source, for messages.

    Attributes:
        count: number of failures since the last success.
        text: message of the last failure; "" after a success.
    """

    def __init__(self, name: str) -> None:
        self.count = 0
        self.text = ""
        self._name = name
        self._last: tuple[type[BaseException], str] | None = None

    def note_failure(self, error: BaseException, pause: float) -> None:
        """Counts a failure, and logs the failure unless the previous one was equal.

        Args:
            error: the exception of the failed attempt.
            pause: seconds until the next attempt.
        """
        self.count += 1
        self.text = str(error)
        ours = error if isinstance(error, errors.NoticeError) else None
        this = type(error), self.text if ours else _NUMBER.sub("", self.text)
        if this != self._last:
            # Log a traceback for the first failure only. Errors of tfpreempt need no
            # traceback.
            is_known = ours is not None or self._last is not None
            _logger.warning(
                "%s failed (%s: %s); the next attempt is in %.2g s, and later attempts "
                "follow with back-off. Until an attempt succeeds, no notice of this "
                "source is seen",
                self._name,
                *(type(error).__name__, self.text),
                pause,
                exc_info=None if is_known else error,
            )
            self._last = this

    def note_success(self) -> None:
        """Logs the recovery, if the last attempt had failed."""
        if self._last is not None:
            _logger.info("%s works again after %d failures", self._name, self.count)
        self.count, self._last, self.text = 0, None, ""


class PollingLoop:
    """Polls repeatedly in a thread, until it is closed.

    Args:
        name: name of the thread, also for messages.
        poll: function that polls once, and returns the seconds until the next poll. If
            it raises an error, the error is logged, once if it repeats, and the
            function is called again.
        retry: function that takes the number of consecutive failures, from 1 on, and
            returns the seconds to wait before the next poll.
        wait: function that waits between polls; tests pass the wait of a fake clock.
        cut_off: function that makes a running `poll` end; called on any thread.
    """

    def __init__(
        self,
        name: str,
        poll: Callable[[], float],
        *,
        retry: Callable[[int], float],
        wait: Wait,
        cut_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._poll = poll
        self._retry = retry
        self._cut_off = cut_off
        self._wait = wait
        self._failures = FailureLog(name)
        self._thread = ManagedThread(f"tfpreempt-{name}", self._run)

    def start(self) -> None:
        """Starts the thread, which polls immediately. May be called only once."""
        self._thread.start()

    def close(self) -> None:
        """Stops polling; logs a warning if the thread does not end within 2 s."""
        self._thread.stop_event.set()
        self._cut_off()
        # If the polling thread calls close(), it cannot wait for its own end.
        is_own = self._thread is threading.current_thread()
        if not self._thread.join(CLOSE_LIMIT_SECONDS) and not is_own:
            _logger.warning(
                "%s: a call has not returned within %.1f s of closing. Its daemon "
                "thread continues, and the result is ignored. A "
                "termination_watcher_fn should return at once",
                self._name,
                CLOSE_LIMIT_SECONDS,
            )

    def _run(self) -> None:
        stop = self._thread.stop_event
        while not stop.is_set():
            try:
                pause = self._poll()
            except BaseException as error:  # noqa: BLE001 - a poll's sys.exit() is one
                if stop.is_set():
                    return  # close() has ended the poll
                pause = self._retry(self._failures.count + 1)
                self._failures.note_failure(error, pause)
            else:
                self._failures.note_success()
            if self._wait(stop, pause):
                return


class PollingSource(NoticeSourceBase):
    """Base class of sources that poll; reports a notice when it becomes active.

    After a failed poll the next poll comes after 1 s, then after longer pauses, up to
    30 s.

    Args:
        name: name of the source in logs and the journal.
        interval: seconds between two successful polls.
        wait: function that waits between polls; tests pass the wait of a fake clock.

    Raises:
        ConfigurationError: the interval is not positive.
    """

    def __init__(self, name: str, interval: float, wait: Wait) -> None:
        super().__init__(name)
        self._interval = check_seconds(f"the interval of {name}", interval)
        self._is_up = False
        self._loop = PollingLoop(name, self._poll, retry=retry_seconds, wait=wait)

    def poll_once(self) -> str | None:
        """Polls once; returns the active notice's detail, None if there is none."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._loop.start()

    def _end(self) -> None:
        self._loop.close()

    def _poll(self) -> float:
        detail = self.poll_once()
        is_new, self._is_up = not self._is_up, detail is not None
        if is_new and detail is not None:
            self.send(detail)
        return self._interval
