"""Starts the processes of a JAX program, and waits for their output and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.multiprocess.harness import (
    LIMIT,
    PROGRAMS,
    RESTART,
    ROOT,
    Worker,
    Zygote,
    wait_until,
)
from tests.ports import free_ports

PROGRAM = PROGRAMS / "jax_loop.py"


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that computes on one CPU device."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFPREEMPT_")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept |= {"PYTHONPATH": path, "TFPREEMPT_PLATFORM": "generic"}
    kept |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    return kept | more


class Fork:
    """A fork of a zygote, with the methods of `subprocess.Popen` that tests call.

    Args:
        zygote: process that has imported the framework.
        command: Python file and arguments.
        log: file for the output.
        env: environment.
        folder: working directory.
    """

    def __init__(
        self,
        zygote: Zygote,
        command: Sequence[str],
        log: Path,
        env: dict[str, str],
        folder: Path,
    ) -> None:
        told_pid, told_exit = log.with_suffix(".pid"), log.with_suffix(".exit")
        for path in (log, told_pid, told_exit):
            path.unlink(missing_ok=True)
        request = {"argv": [*command], "env": env, "cwd": str(folder), "log": str(log)}
        self.pid = zygote.fork(request | {"pid": str(told_pid), "exit": str(told_exit)})
        self._worker = Worker(self.pid, log, told_exit)

    def poll(self) -> int | None:
        return self._worker.code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                self._worker.send(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        wait_until(lambda: self.poll() is not None, "the fork ends")


class JaxProcess:
    """A process and its output so far.

    Args:
        log: file with the output.
        process: the process, or the supervisor of the process.
    """

    def __init__(self, log: Path, process: subprocess.Popen[bytes] | Fork) -> None:
        self._log = log
        self.process = process

    @classmethod
    def start(
        cls, command: Sequence[str], log: Path, env: dict[str, str], folder: Path
    ) -> JaxProcess:
        """Starts a command in a folder, with its output in `log`."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=env, cwd=folder
            )
        return cls(log, process)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def lines(self, word: str) -> list[str]:
        """Returns the rest of each complete line that begins with a word."""
        whole = self.output.rpartition("\n")[0].split("\n")
        return [
            line[len(word) + 1 :] for line in whole if f"{line} ".startswith(f"{word} ")
        ]

    def wait_line(self, word: str, count: int = 1) -> str:
        """Waits for a line that begins with a word; returns the rest of the line."""

        def found() -> bool:
            is_there = len(self.lines(word)) >= count
            assert is_there or self.process.poll() is None, self.output[-6000:]
            return is_there

        wait_until(found, f"line {word!r}", say=self.output[-6000:])
        return self.lines(word)[count - 1]


@contextmanager
def killed_at_the_end() -> Iterator[list[JaxProcess]]:
    """Context manager: kills the processes that were added to its list."""
    started: list[JaxProcess] = []
    try:
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


@contextmanager
def jax_processes(
    folder: Path,
    *words: str,
    count: int = 2,
    devices: int = 1,
    program: Path = PROGRAM,
    zygote: Zygote | None = None,
    **more: str,
) -> Iterator[list[JaxProcess]]:
    """Context manager that starts the processes of one program, and ends them.

    Args:
        folder: directory of the logs, in which the processes run.
        *words: arguments of the program.
        count: number of processes.
        devices: number of CPU devices of each process.
        program: Python file.
        zygote: process that forks the program, with JAX imported and with a cache of
            compiled functions; None: each process is a new process.
        **more: environment variables.
    """
    (port,) = free_ports(1)
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    variables["JAX_NUM_PROCESSES"] = str(count)
    variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [str(program), *words]
    with killed_at_the_end() as started:
        for index in range(count):
            env = environment(**variables, **more, JAX_PROCESS_ID=str(index))
            log = folder / f"log-{index}.txt"
            if zygote is not None:
                fork = Fork(zygote, command, log, env, folder)
                started.append(JaxProcess(log, fork))
            else:
                new = [sys.executable, *command]
                started.append(JaxProcess.start(new, log, env, folder))
        yield started


def kill_the_peer_under_a_notice(processes: list[JaxProcess], held: Path) -> None:
    """Kills process 1 in a step, after a notice to process 0, which then exits.

    Process 0 has seen the notice, and so begins no step that needs process 1.

    Args:
        processes: two processes, both held in the same step.
        held: file that holds process 0; is removed.
    """
    for process in processes:
        process.wait_line("holds")
    processes[0].process.send_signal(signal.SIGTERM)
    processes[0].wait_line("noticed")
    processes[1].process.kill()
    held.unlink()
    ended(processes, RESTART, -signal.SIGKILL, limit=20.0)


def ended(
    processes: list[JaxProcess], *codes: int | None, limit: float = LIMIT
) -> None:
    """Waits until all processes have ended, and checks the exit codes.

    Args:
        processes: the processes.
        *codes: expected exit code of each; None: any.
        limit: longest wait in seconds.
    """
    wait_until(
        lambda: None not in [each.process.poll() for each in processes],
        "all processes end",
        limit,
        say="\n".join(each.output[-4000:] for each in processes),
    )
    found = [each.process.returncode for each in processes]
    said = "\n---\n".join(each.output[-4000:] for each in processes)
    expected = [f if c is None else c for f, c in zip(found, codes, strict=True)]
    assert found == expected, f"{found}\n{said}"
