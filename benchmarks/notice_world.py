"""The sources of notices, in a separate process: fake clouds, a file, a signal.

Each line of standard input is one action. The reply is one line with the monotonic
seconds at which the action began; all processes of the machine share this clock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import Self

from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce

SIGNAL = signal.SIGUSR1
ROOT = Path(__file__).parents[1]
START_SECONDS = 30.0


class World:
    """Context manager: runs the process with the sources.

    Args:
        path: path of the notice file.

    Attributes:
        path: path of the notice file.
        urls: URLs of the metadata servers, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path), str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.urls: dict[str, str] = json.loads(self._read())

    def change(self, place: str) -> float:
        """Announces a preemption at a place; returns the time of the announcement."""
        return float(self._ask(f"change {place}"))

    def calm(self, place: str) -> None:
        """Withdraws the announcement."""
        self._ask(f"calm {place}")

    def requests(self) -> int:
        """Returns the number of requests to the servers so far."""
        return int(self._ask("requests -"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(START_SECONDS)
            finally:
                self._process.kill()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the fake servers has ended")
        return line


# --- the process ---------------------------------------------------------------------


def serve(path: Path, pid: int, lines: Iterable[str], out: TextIO) -> None:
    """Executes the action of each line, until the lines end.

    Args:
        path: path of the notice file.
        pid: process that receives the signal.
        lines: "change PLACE", "calm PLACE", or "requests -".
        out: receives the servers' addresses, and then a reply to each line.
    """
    with FakeGce() as gce, FakeAws() as aws, FakeAzure() as azure:
        fakes = {"gce": gce, "aws": aws, "azure": azure}
        events: list[str] = []

        def calm_azure() -> None:
            while events:
                azure.withdraw(events.pop())

        acts: dict[str, Any] = {
            "change gce": gce.preempt,
            "calm gce": lambda: gce.set("instance/preempted", "FALSE"),
            "change gce-maintenance": lambda: gce.set(
                "instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"
            ),
            "calm gce-maintenance": lambda: gce.set(
                "instance/maintenance-event", "NONE"
            ),
            "change aws": aws.interrupt,
            "calm aws": lambda: aws.remove("spot/instance-action"),
            "change azure": lambda: events.append(azure.schedule()),
            "calm azure": calm_azure,
            "change file": path.touch,
            "calm file": lambda: path.unlink(missing_ok=True),
            "change signal": lambda: os.kill(pid, SIGNAL),
            "calm signal": lambda: None,
        }
        print(json.dumps({name: f.url for name, f in fakes.items()}), file=out)
        out.flush()
        for line in lines:
            asked = line.strip()
            answer: float = time.monotonic()
            if asked == "requests -":
                answer = sum(len(fake.requests) for fake in fakes.values())
            else:
                acts[asked]()
            print(repr(answer), file=out, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), sys.stdin, sys.stdout)
