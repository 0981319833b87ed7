"""A Slurm of one machine, for one test: two daemons, no authentication, own ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.multiprocess.harness import wait_until
from tests.ports import free_ports

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
SECONDS = 180.0


def why_not() -> str | None:
    """Returns why Slurm cannot be started here; None if it can."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian's package slurm-wlm)"
    return None if os.getuid() == 0 else "slurmd needs root"


class Slurm:
    """A controller and a node.

    Args:
        folder: for state, logs and configuration.
        recipe: lines of slurm.conf that are under test.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        self.host = socket.gethostname().partition(".")[0]
        self._conf = folder / "slurm.conf"
        self._conf.write_text(self._configuration(recipe))
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf)}

    def _configuration(self, recipe: str) -> str:
        controller, node = free_ports(2)
        folder, host = self.folder, self.host
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": controller,
            "SlurmdPort": node,
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "SlurmUser": "root",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd.pid",
            "SlurmctldLogFile": folder / "slurmctld.log",
            "SlurmdLogFile": folder / "slurmd.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "ReturnToService": 2,
            "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,bf_interval=1",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN")
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        return "\n".join([*lines, recipe])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Both daemons, ended on leaving."""
        own = [
            ["slurmctld", "-D", "-f", str(self._conf)],
            ["slurmd", "-D", "-f", str(self._conf), "-N", self.host],
        ]
        with contextlib.ExitStack() as held:
            for command in own:
                log = held.enter_context((self.folder / f"{command[0]}.out").open("wb"))
                process = subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log
                )
                held.callback(_end, process)
            wait_until(lambda: "idle" in self.run("sinfo", "-h"), "a node", 60.0)
            yield

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Returns the output of a command of Slurm."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

    def submit(self, *arguments: str, cwd: Path) -> str:
        """The id of a new job."""
        told = self.run("sbatch", "--parsable", *arguments, cwd=cwd).strip()
        assert told.isdecimal(), told
        return told

    def state(self, job: str) -> dict[str, str]:
        """Returns a field of `scontrol show job`."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        pairs = (word.partition("=") for word in words)
        return {name: value for name, _, value in pairs}

    def wait_state(self, job: str, state: str) -> None:
        """Until a job is in this state."""
        self.wait(lambda: self.state(job).get("JobState") == state, f"{job} is {state}")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Waits for a condition; on a timeout, the error contains the daemons' logs."""
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                logs = [p.read_text()[-3000:] for p in self.folder.glob("*.log")]
                raise AssertionError(f"{what}: not within {SECONDS} s", *logs)
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
