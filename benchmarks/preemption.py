"""One preemption of two real workers, timed from outside, for both handlers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.states import FEW
from tests.journals import read_journal
from tests.ports import free_ports
from tfpreempt.core.journal import journal_directory

ROOT = Path(__file__).parents[1]
WORKERS = 2
START_SECONDS = 120.0
EXIT_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Times and bytes of one preemption.

    Attributes:
        codes: exit code of each worker.
        seconds: seconds from the signal to the exit of the last process.
        gone: seconds from the signal to the exit of each worker.
        written: bytes that each worker passed to write calls after the signal, for
            files, pipes and logs.
        journal: records of tfpreempt, with `monotonic` counted from the signal; else
            empty.
        files: sizes of the files in the directory at the end, by path.
        journal_grown: bytes by which each worker's journal and log grew.
        trained: seconds from the signal to the end of the last step of all workers.
    """

    codes: tuple[int, ...]
    seconds: float
    gone: tuple[float, ...]
    written: tuple[int, ...]
    journal: tuple[dict[str, Any], ...]
    files: dict[str, int]
    journal_grown: tuple[int, ...]
    trained: float


def strike(
    side: str, victims: tuple[int, ...], mebibytes: int, state: str = FEW
) -> Strike:
    """Starts two workers in a new directory in memory, and preempts them.

    Args:
        side: "ours" or "theirs".
        victims: workers that receive SIGTERM.
        mebibytes: size of a state of tensors.
        state: name of a state of `states.py`.
    """
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-", dir=memory))
    try:
        with workers(side, root, mebibytes, state) as processes:
            await_ready(processes, root)
            warm_memory(root)
            time.sleep(0.3)
            return end(processes, victims, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def workers(
    side: str, root: Path, mebibytes: int, state: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Context manager: starts two workers of a cluster, and kills them at the end."""
    with contextlib.ExitStack() as stack:
        processes = []
        addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
        for index in range(WORKERS):
            log = stack.enter_context((root / f"log-{index}").open("wb"))
            ready = root / f"ready-{index}"
            arguments = [side, root / "state", state, mebibytes, ready]
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.train", *map(str, arguments)],
                cwd=ROOT,
                env=environment(addresses, index),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def environment(addresses: list[str], index: int) -> dict[str, str]:
    """Returns the environment of one worker."""
    task = {"type": "worker", "index": index}
    config = json.dumps({"cluster": {"worker": addresses}, "task": task})
    fixed = {
        "TF_CONFIG": config,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GCE_METADATA_IP": "127.0.0.1:9",  # no metadata server, on any machine
    }
    return {**os.environ, **fixed}


def await_ready(processes: list[subprocess.Popen[bytes]], root: Path) -> None:
    """Waits until every worker has trained some steps."""
    limit = time.monotonic() + START_SECONDS
    while not all((root / f"ready-{i}").exists() for i in range(WORKERS)):
        ended = [p.poll() for p in processes]
        if any(code is not None for code in ended) or time.monotonic() > limit:
            logs = [(root / f"log-{i}").read_text()[-2000:] for i in range(WORKERS)]
            raise RuntimeError(f"the workers did not start ({ended}): {logs}")
        time.sleep(0.05)


def warm_memory(root: Path, mebibytes: int = 1_536) -> None:
    """Writes once to the memory that both sides use, so that the host backs its pages.

    On a virtual machine, the first write to a page takes ten times as long as another
    write, and it is random which side uses such pages.
    """
    path = root / "warm"
    with path.open("wb", buffering=0) as file:
        for _ in range(mebibytes):
            file.write(bytes(2**20))
    path.unlink()


def end(
    processes: list[subprocess.Popen[bytes]], victims: tuple[int, ...], root: Path
) -> Strike:
    """Sends the signals and waits; reads the counters of each worker as a zombie."""
    written = [written_bytes(process.pid) for process in processes]
    sizes = [record_bytes(root, i) for i in range(WORKERS)]
    began = time.monotonic()
    for victim in victims:
        processes[victim].send_signal(signal.SIGTERM)
    gone: dict[int, float] = {}
    while len(gone) < WORKERS:
        for index, process in enumerate(processes):
            if index not in gone and has_ended(process.pid):
                gone[index] = time.monotonic() - began
                written[index] = written_bytes(process.pid) - written[index]
                process.wait()
        if time.monotonic() - began > EXIT_SECONDS:
            raise RuntimeError(f"still running after {EXIT_SECONDS} s: {gone}")
        time.sleep(0.005)
    directory = root / "state"
    return Strike(
        codes=tuple(process.returncode for process in processes),
        seconds=max(gone.values()),
        gone=tuple(gone[i] for i in range(WORKERS)),
        written=tuple(written),
        journal=tuple(
            {**record, "monotonic": record["monotonic"] - began}
            for record in read_journal(journal_directory(directory))
        ),
        files={
            path.relative_to(directory).as_posix(): path.stat().st_size
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        },
        journal_grown=tuple(
            record_bytes(root, i) - size for i, size in enumerate(sizes)
        ),
        trained=max(float((root / f"ready-{i}").read_text()) for i in range(WORKERS))
        - began,
    )


def has_ended(pid: int) -> bool:
    """Returns whether a child has exited; the child stays a zombie."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None


def written_bytes(pid: int) -> int:
    """Returns the bytes that a process or zombie has passed to write calls."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["wchar"])


def record_bytes(root: Path, worker: int) -> int:
    """Returns the size of a worker's log and journal."""
    journal = journal_directory(root / "state") / f"worker-{worker}.jsonl"
    paths = [root / f"log-{worker}", journal]
    return sum(path.stat().st_size for path in paths if path.exists())
