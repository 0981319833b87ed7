"""Starts real workers, waits for their output, sends signals, and removes leftovers.

No function sleeps until something has probably happened. Every wait is for a line, a
file, a journal record or the end of a process, has a deadline, and fails with the
workers' output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.journals import read_journal
from tests.ports import free_ports
from tfpreempt.core.journal import journal_directory

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().with_name("programs")
LIMIT = 90.0
"""Longest wait in seconds: proves only, on a busy machine, that nothing hangs."""

IMPORTED = 200.0
"""Seconds that a busy machine may need to import TensorFlow, before the first fork."""

HEARD_WITHIN = 0.5
"""Seconds from a signal until all workers know of the notice (milliseconds on an idle
machine). A step that begins later is an error. After a signal each step takes this
time, so that at most one step can begin too late."""

RESTART = 143
WITHOUT_HOST = {"tensorflow": {RESTART}, "jax": {RESTART, -signal.SIGABRT}}
"""Exit codes of a worker after a notice, if the chief was killed: JAX may abort the
process before the process exits."""

FRAMEWORKS = ("tensorflow", "jax")
STEPS = 12
"""Number of steps of train.py by default."""

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], what: str, limit: float = LIMIT, say: str | None = None
) -> T:
    """Waits until a condition is true and returns it."""
    end = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit:g} s\n{say or ''}")
        time.sleep(0.01)
    return value


class Zygote:
    """The process that forks workers (see zygote.py); start it once, close it.

    Args:
        framework: framework of the workers: "tensorflow", "jax", or "keras-jax" (Keras
            on JAX).
    """

    def __init__(self, framework: str = "tensorflow") -> None:
        self.framework = framework
        environment = dict(os.environ, PYTHONPATH=_python_path())
        environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}
        environment.pop("TF_CONFIG", None)
        if framework == "keras-jax":
            environment["KERAS_BACKEND"] = "jax"
        # Compilations take a third of the time of a short program on JAX.
        self._compiled = tempfile.TemporaryDirectory(prefix="tfpreempt-test-")
        environment["JAX_COMPILATION_CACHE_DIR"] = self._compiled.name
        for least in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES"):
            environment[f"JAX_PERSISTENT_CACHE_MIN_{least}"] = "0"
        zygote = ROOT / "tests" / "multiprocess" / "zygote.py"
        self._process = subprocess.Popen(
            [sys.executable, str(zygote), framework],
            stdin=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )

    def fork(self, request: dict[str, Any]) -> int:
        """Starts a worker; returns its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        told = Path(request["pid"])

        def forked() -> bool:
            assert self._process.poll() is None, "the zygote ended; see its stderr"
            return told.exists()

        wait_until(forked, "the zygote forks", IMPORTED)
        return int(told.read_text())

    def run(
        self,
        program: Path,
        *arguments: object,
        directory: Path,
        env: dict[str, str] | None = None,
        limit: float = LIMIT,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end like `subprocess.run`, but several times faster.

        Args:
            program: a Python file.
            *arguments: arguments of the program.
            directory: working directory.
            env: environment of the program; by default the environment of a worker.
            limit: longest duration in seconds.
        """
        with tempfile.TemporaryDirectory(prefix="tfpreempt-test-") as told:
            stem = Path(told) / "process"
            request = {
                "argv": [str(program), *map(str, arguments)],
                "env": worker_environment(directory) if env is None else env,
                "cwd": str(directory),
                "log": f"{stem}.out",
                "errors": f"{stem}.err",
                "pid": f"{stem}.pid",
                "exit": f"{stem}.exit",
            }
            pid = self.fork(request)
            ended = Worker(pid, Path(request["log"]), Path(request["exit"]))
            try:
                wait_until(lambda: ended.code is not None, "the program ends", limit)
            finally:
                if ended.code is None:
                    os.kill(pid, signal.SIGKILL)
            assert ended.code is not None
            errors = Path(request["errors"]).read_text(errors="replace")
            return subprocess.CompletedProcess(
                request["argv"], ended.code, ended.output, errors
            )

    def close(self) -> None:
        """Ends the zygote, and kills its remaining workers."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT)
        self._compiled.cleanup()


def _python_path() -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([given] if given else [])])


class Worker:
    """A started process: its output so far, and its exit."""

    def __init__(self, pid: int, log: Path, told_exit: Path) -> None:
        self.pid = pid
        self._log = log
        self._told_exit = told_exit

    @property
    def output(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def lines(self, word: str) -> list[list[str]]:
        """Returns the complete lines that begin with a word, without the word."""
        whole, _, _ = self.output.rpartition("\n")
        found = (
            line for line in whole.split("\n") if f"{line} ".startswith(f"{word} ")
        )
        return [line.split()[1:] for line in found]

    def wait_line(self, word: str, count: int = 1, limit: float = LIMIT) -> list[str]:
        """Waits for line number `count` that begins with a word; returns its values."""

        def found() -> list[list[str]]:
            lines = self.lines(word)
            if len(lines) < count and self.code is not None:
                raise AssertionError(
                    f"ended with {self.code} before {word!r}:\n{self.output[-6000:]}"
                )
            return lines if len(lines) >= count else []

        try:
            return wait_until(found, f"line {word!r}", limit)[count - 1]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-6000:]}") from None

    def wait_text(self, text: str) -> None:
        """Waits until the output contains a text."""
        wait_until(lambda: text in self.output, repr(text), say=self.output[-6000:])

    def send(self, signum: int) -> float:
        """Sends a signal; returns the wall time just before."""
        now = time.time()
        os.kill(self.pid, signum)
        return now

    @property
    def code(self) -> int | None:
        """Exit code of the process; None while the process runs."""
        if not self._told_exit.exists():
            return None
        return int(self._told_exit.read_text())

    @property
    def ended_at(self) -> float:
        """Time of the exit in wall seconds, comparable with `send`."""
        return self._told_exit.stat().st_mtime

    def result(self) -> dict[str, Any]:
        """Returns the JSON in the line that begins with `result`."""
        [line] = self.lines("result")
        value: dict[str, Any] = json.loads(" ".join(line))
        return value


class Cluster:
    """Workers that were started together."""

    def __init__(self, workers: Sequence[Worker], checkpoints: Path) -> None:
        self.workers = list(workers)
        self.checkpoints = checkpoints

    def __getitem__(self, index: int) -> Worker:
        return self.workers[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    def wait(self, limit: float = LIMIT) -> list[int]:
        """Waits until all workers have ended; returns their exit codes in order."""

        def codes() -> list[int] | None:
            found = [worker.code for worker in self.workers]
            return None if None in found else [c for c in found if c is not None]

        try:
            return wait_until(codes, "all workers end", limit)
        except AssertionError as error:
            for worker in self.workers:
                if worker.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGABRT)  # faulthandler: the stacks
            time.sleep(1.0)
            raise AssertionError(f"{error}\n{self.story()}") from None

    def expect(self, *codes: int | Collection[int], limit: float = LIMIT) -> None:
        """Waits for all workers; checks their exit codes, or sets of allowed codes."""
        found = self.wait(limit)
        allowed = [{code} if isinstance(code, int) else code for code in codes]
        are_right = [f in each for f, each in zip(found, allowed, strict=True)]
        assert all(are_right), f"{found}\n{self.story()}"

    def story(self) -> str:
        """Returns the output of every worker, for error messages."""
        return "\n".join(
            f"--- worker {i}, pid {w.pid}, code {w.code}\n{w.output[-5000:]}"
            for i, w in enumerate(self.workers)
        )

    def results(self) -> list[dict[str, Any]]:
        """Returns the result of every worker."""
        return [worker.result() for worker in self.workers]

    def wait_record(self, event: str, **fields: Any) -> dict[str, Any]:
        """Waits for a journal record (see `records`); returns the newest record."""
        try:
            return wait_until(
                lambda: records(self.checkpoints, event, **fields), f"{event} {fields}"
            )[-1]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None


def records(checkpoints: Path, event: str, **fields: Any) -> list[dict[str, Any]]:
    """Returns the journal's records of an event with these fields, by wall time."""
    return [
        record
        for record in read_journal(journal_directory(checkpoints))
        if record["event"] == event
        and all(record.get(name) == value for name, value in fields.items())
    ]


class Place:
    """A directory in memory for one run and all its restarts; starts clusters in it."""

    def __init__(self, zygote: Zygote, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "ckpt"
        self.framework = zygote.framework
        self._zygote = zygote
        self._clusters: list[Cluster] = []
        self._started = 0

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Returns the environment of a process of this run."""
        framework = {"TOY_FRAMEWORK": self.framework, "JAX_PLATFORMS": "cpu"}
        return worker_environment(self.path, framework | (more or {}))

    def hold(self, *names: str) -> None:
        """Makes workers block when they reach a hold of this name, until `release`."""
        for name in names or ("step",):
            (self.path / f"hold-{name}").touch()

    def release(self, name: str = "step") -> None:
        """Lets the blocked workers continue."""
        (self.path / f"hold-{name}").unlink()

    def start(
        self,
        program: str,
        *arguments: object,
        world: int = 1,
        tf_config: bool | None = None,
        each: Callable[[int], Sequence[object]] = lambda worker: (),
        env: dict[str, str] | None = None,
    ) -> Cluster:
        """Starts a program as a cluster.

        Args:
            program: file name under programs/.
            *arguments: arguments of all workers, after the checkpoint directory.
            world: number of workers.
            tf_config: whether TF_CONFIG is set, or the variables of JAX's processes; by
                default for more than one worker.
            each: returns more arguments for a worker.
            env: more environment variables.
        """
        has_config = world > 1 if tf_config is None else tf_config
        ports = free_ports(world) if has_config else []
        workers = []
        for index in range(world):
            self._started += 1
            stem = self.path / f"process-{self._started}"
            environment = self.environment(env)
            if has_config:
                environment |= cluster_environment(self.framework, ports, index)
            request = {
                "argv": [
                    str(PROGRAMS / program),
                    str(self.checkpoints),
                    *map(str, arguments),
                    *map(str, each(index)),
                ],
                "env": environment,
                "cwd": str(self.path),
                "log": f"{stem}.log",
                "pid": f"{stem}.pid",
                "exit": f"{stem}.exit",
            }
            pid = self._zygote.fork(request)
            workers.append(Worker(pid, Path(f"{stem}.log"), Path(f"{stem}.exit")))
        cluster = Cluster(workers, self.checkpoints)
        self._clusters.append(cluster)
        return cluster

    def slow_down(self) -> None:
        """Makes each step take `HEARD_WITHIN`, in programs that print their steps.

        Call the method just before a signal. Then few steps begin after the signal, and
        the steps before the signal have their usual speed. `speed_up` ends the effect.
        """
        # Renamed into place, because running steps read the file.
        part = self.path / "slow.part"
        part.write_text(f"{HEARD_WITHIN}")
        part.rename(self.path / "slow")

    def speed_up(self) -> None:
        """Ends the effect of `slow_down`."""
        (self.path / "slow").unlink(missing_ok=True)

    def train(self, strategy: str, world: int, *more: object) -> Cluster:
        """Starts train.py."""
        return self.start(
            "train.py",
            "--strategy",
            strategy,
            *more,
            world=world,
            tf_config=strategy == "mwms",
        )

    def close(self) -> None:
        """Kills the running workers, and removes the directory."""
        for cluster in self._clusters:
            for worker in cluster:
                if worker.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
                    wait_until(lambda w=worker: w.code is not None, "a killed worker")
        shutil.rmtree(self.path, ignore_errors=True)


def cluster_environment(
    framework: str, ports: Sequence[int], index: int
) -> dict[str, str]:
    """Returns the variables with the addresses of all workers, on this machine."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    if framework == "jax":
        return {
            "JAX_COORDINATOR_ADDRESS": addresses[0],
            "JAX_NUM_PROCESSES": str(len(ports)),
            "JAX_PROCESS_ID": str(index),
        }
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def worker_environment(
    path: Path, more: dict[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment of a worker that runs in a directory."""
    environment = {
        name: value
        # pytest sets a variable for each test, and cases run in threads.
        for name, value in ((each, os.environ.get(each, "")) for each in os.environ)
        if not name.startswith(("TFPREEMPT_", "TF_CONFIG", "PYTEST_"))
    }
    environment["TFPREEMPT_PLATFORM"] = "generic"  # no metadata server is asked
    environment["PYTHONPATH"] = _python_path()
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    environment["HOLD_DIRECTORY"] = str(path)
    return environment | (more or {})


@contextlib.contextmanager
def place(zygote: Zygote) -> Iterator[Place]:
    """Context manager: a new directory for a run, removed at the end."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = Place(zygote, Path(tempfile.mkdtemp(prefix="tfpreempt-test-", dir=memory)))
    try:
        yield made
    finally:
        made.close()


def payload_files(directory: Path) -> list[str]:
    """Returns the data files of TensorFlow's checkpoints below a directory."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*.data-*"))
