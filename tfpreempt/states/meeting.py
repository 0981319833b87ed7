"""Workers that share a directory and nothing else: they meet, and say "done", in files.

Files of a dead run must not pass for those of this one, and nobody else tells the two
apart. So each process draws a number: the chief repeats the workers' numbers beside its
own, and a worker that finds its number there answers with the chief's. From then on the
chief's number is part of every name.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

from tfpreempt.checkpoint import layout, retention
from tfpreempt.core.clock import Clock
from tfpreempt.core.cluster import Cluster
from tfpreempt.errors import SaveError
from tfpreempt.storage import reading
from tfpreempt.storage.files import Files, remove_if_empty, write_durably

_FOLDER = ".workers"  # no name of an attempt, so cleaning leaves it alone
_SHORTEST, _LONGEST = 0.005, 0.2  # seconds between two looks


class Meeting:
    """One worker's side; main thread.

    Args:
        directory: the checkpoint directory, shared by all workers.
        cluster: who the workers are.
        files: the file operations.
        clock: for the deadline.
        seconds: how long a wait for other workers may take.
    """

    def __init__(
        self,
        directory: str,
        cluster: Cluster,
        *,
        files: Files,
        clock: Clock,
        seconds: float,
    ) -> None:
        self._staging = os.path.join(directory, layout.STAGING)
        self._folder = os.path.join(self._staging, _FOLDER)
        self._cluster = cluster
        self._files = files
        self._clock = clock
        self._seconds = seconds
        self._number = uuid.uuid4().hex[:12]
        self._run = ""

    def attend(self) -> str:
        """Waits, the first time, until the chief and this worker know each other.

        Returns:
            The number of this run, equal on all workers.

        Raises:
            SaveError: a worker didn't come.
            OSError: as the file system says.
        """
        if not self._run:
            self._files.make_dirs(self._folder)
            self._run = self._call() if self._cluster.is_chief else self._answer()
        return self._run

    def _call(self) -> str:
        others = [str(worker) for worker in range(1, self._cluster.world)]
        told: dict[str, Any] = {}
        missing = others

        def all_have_answered() -> bool:
            nonlocal missing
            numbers = {i: self._read(f"hello-{i}") for i in others}
            if numbers != told:
                told.update(numbers)
                self._write("plan", {"run": self._number, "numbers": numbers})
            missing = [i for i in others if self._read(f"ack-{i}") != self._number]
            return not missing

        if not self._wait(all_have_answered):
            raise SaveError(self._nobody(", ".join(missing)))
        retention.delete_staging(self._files, self._folder)
        return self._number

    def _answer(self) -> str:
        me = str(self._cluster.worker)
        self._write(f"hello-{me}", self._number)
        plan: Any = None

        def is_called() -> bool:
            nonlocal plan
            plan = self._read("plan")
            numbers = plan.get("numbers") if isinstance(plan, dict) else None
            return isinstance(numbers, dict) and numbers.get(me) == self._number

        if not self._wait(is_called):
            raise SaveError(self._nobody("0"))
        self._write(f"ack-{me}", plan["run"])
        return str(plan["run"])

    def _nobody(self, workers: str) -> str:
        return (
            f"no sign within {self._seconds:g} s from worker(s) {workers} in "
            f"{self._staging!r}; nothing was committed, and the last commit stands. A "
            "commit with per-worker States needs all workers: each must register the "
            "same States, call save_all_states() at the same places, and see the same "
            "storage under the checkpoint directory. Look at the logs of those workers."
        )

    # --- one save --------------------------------------------------------------------

    def tell_done(self, attempt: str, problem: str | None) -> None:
        """This worker's part of a save is durable, or could not be written.

        Args:
            attempt: the save.
            problem: what went wrong; None if nothing did.

        Raises:
            OSError: as the file system says.
        """
        folder = self._done(attempt)
        self._files.make_dirs(folder)
        name = layout.worker_name(self._cluster.worker)
        self._put(os.path.join(folder, name), {"problem": problem})

    def wait_done(self, attempt: str) -> None:
        """Waits, on the chief, for all other workers' parts of a save.

        Raises:
            SaveError: a part didn't come, or its worker says that it failed.
            OSError: as the file system says.
        """
        folder = self._done(attempt)
        waiting = set(range(1, self._cluster.world))
        failed: dict[int, str] = {}

        def all_are_done() -> bool:
            for worker in sorted(waiting):
                said = _get(os.path.join(folder, layout.worker_name(worker)))
                if isinstance(said, dict) and "problem" in said:
                    waiting.discard(worker)
                    if said["problem"] is not None:
                        failed[worker] = str(said["problem"])
            return not waiting or bool(failed)

        self._wait(all_are_done)
        if os.path.isdir(folder):
            retention.delete_staging(self._files, folder)
        if failed:
            said = "; ".join(f"worker {i}: {text}" for i, text in failed.items())
            raise SaveError(
                f"a worker could not write its States ({said}); nothing was committed, "
                "and the last commit stands."
            )
        if waiting:
            raise SaveError(self._nobody(", ".join(map(str, sorted(waiting)))))
        remove_if_empty(self._files, self._staging)

    def _done(self, attempt: str) -> str:
        return os.path.join(self._staging, attempt + layout.DONE_SUFFIX)

    # --- files -----------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Looks again and again, until the deadline; returns whether it came true."""
        end = self._clock.monotonic() + self._seconds
        pause, never = _SHORTEST, threading.Event()
        while not condition():
            left = end - self._clock.monotonic()
            if left <= 0:
                return False
            never.wait(min(pause, left))
            pause = min(pause * 1.5, _LONGEST)
        return True

    def _read(self, name: str) -> Any:
        return _get(os.path.join(self._folder, name))

    def _write(self, name: str, value: Any) -> None:
        self._put(os.path.join(self._folder, name), value)

    def _put(self, path: str, value: Any) -> None:
        write_durably(self._files, path, json.dumps(value).encode())


def _get(path: str) -> Any:
    """What somebody wrote; None if it isn't there, or can't be what was written."""
    try:
        with reading.open_file(path) as file:
            return json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
