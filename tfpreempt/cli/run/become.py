"""Waits with modules imported ahead, then becomes a worker's program.

A script of its own, run by path with the interpreter and the options of the worker's
command. It says what it takes, waits for the environment of the next start, and runs
the program as the interpreter itself would have run it: same arguments, paths and
`__main__`, in a process that was started as every worker is.

What was imported ahead is out of the program's sight until the program imports it. It
gets it only if that import would have been the same: the same files, unchanged, and
no variable changed meanwhile that such libraries read when they are imported. Otherwise
this process replaces itself by the command. So a program gets what it asks for if it
sets TF_ENABLE_ONEDNN_OPTS in its first lines; they are run twice then.

Usage: become.py CHANNEL MODULES COUNT COMMAND [ARGUMENT ...]

CHANNEL is a descriptor of a socket to the supervisor, MODULES are separated by commas,
and COUNT words of the command are the interpreter with its options. A message is a JSON
object: `ready` or `refused` to the supervisor, `environment` from it, and then `taken`,
and `cold` where the command had to be started after all.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Beginnings of the names that TensorFlow, and what it imports, read when imported.
_READ_AT_IMPORT = (
    *("ABSL_", "CUDA_", "CUDNN_", "DNNL_", "GOMP_", "GOTO_", "GRPC_", "HDF5_", "HIP_"),
    *("HSA_", "JOBLIB_", "KERAS_", "KMP_", "MKL_", "MPL", "NCCL_", "NPY_", "NUMPY_"),
    *("NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PROTOCOL_BUFFERS_", "ROCM_"),
    *("SCIPY_", "SKLEARN_", "TF2_", "TF_", "TPU_", "XLA_"),
)
_NOT_READ = "TF_CONFIG"  # each start has another one; a resolver reads it
# Whoever imports one of these uses TensorFlow, which it may have imported long ago.
_KERAS = ("keras", "tf_keras")
_SECOND_NAME = "__mp_main__"  # of `__main__`, by multiprocessing
_DEVICES = ("/dev/nvidia", "/dev/accel", "/dev/vfio", "/dev/kfd", "/dev/dri")
_MESSAGE_BYTES = 1 << 20  # none is longer: a socket takes no more at once
_FIRST_VICTIM = "1000"  # of the kernel, if memory runs out
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main() -> None:
    """Waits, and becomes the program."""
    channel = Channel(int(sys.argv[1]))
    names, count, command = sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4:]
    program = command[count:]
    sys.orig_argv = command
    sys.argv = program if program[0] != "-m" else ["-m", *program[2:]]
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = first_path(program)
    score = _first_to_go()
    with _output_kept() as kept:
        before, given = set(sys.modules), dict(os.environ)
        try:
            for name in names:
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # told, and no worker
            channel.say(refused=f"importing {name} raised {error!r}")
            sys.exit(1)
        imported = Imported.since(before, given)
        if held := open_device():
            channel.say(refused=f"importing {','.join(names)} has opened {held}")
            sys.exit(1)
        channel.say(ready=_memory())
        told = channel.hear()
        if told is None:
            os._exit(0)  # the supervisor has no use for it any more, or has ended
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(score, encoding="ascii")

    environment: dict[str, str] = told["environment"]
    _set_environment(environment)
    cold = ColdStart(command, environment)

    process = os.getpid()

    def start_cold(why: str) -> None:
        if os.getpid() != process:  # a child of the program is none to start it again
            _print(f"a child gets what was imported ahead, although {why}")
            return
        _print(f"a cold start after all: {why}")
        channel.say(cold=why)
        cold.begin()

    def begin() -> None:
        channel.close()
        with contextlib.suppress(OSError):
            _write_all(2, kept)

    roots = {name.partition(".")[0] for name in names}.union(_KERAS)
    sys.meta_path.insert(0, Ahead(imported, roots, begin, start_cold))
    importlib.invalidate_caches()
    channel.say(taken=True)
    if program[0] != "-m" and not os.path.isfile(program[0]):
        start_cold(f"there is no {program[0]} any more")
    run(program)


def first_path(program: Sequence[str]) -> str:
    """What the interpreter puts first into `sys.path`."""
    if program[0] == "-m":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(program[0]))


def run(program: Sequence[str]) -> None:
    """Runs it as `__main__`; this script's own names are not in its way."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = module
    if _SECOND_NAME in sys.modules:
        sys.modules[_SECOND_NAME] = module
    if program[0] == "-m":
        # What the interpreter itself calls; `run_module` takes `__main__` away at the
        # end, while threads and exit handlers still need it.
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), program[0])
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


class ColdStart:
    """Starts a command in this process, as it was when this was made.

    Args:
        command: what to start.
        environment: of the command.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._directory = os.open(".", os.O_PATH)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        # Python ignores two by itself, and what is ignored stays so through exec.
        self._ignored = _ignored() - {signal.SIGPIPE, signal.SIGXFSZ}

    def begin(self) -> NoReturn:
        """Replaces this process."""
        os.fchdir(self._directory)
        with contextlib.suppress(ValueError):  # in a thread, where nobody may
            for number in _ignored() - self._ignored:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        # What stands in the program's buffers is not flushed: it is written again.
        os.execvpe(self._command[0], self._command, self._environment)


class Channel:
    """Messages to the supervisor, and the one from it.

    Args:
        descriptor: of a connected socket that keeps messages apart.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)

    def say(self, **message: Any) -> None:
        """Sends it; a supervisor that has gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode())

    def hear(self) -> dict[str, Any] | None:
        """Waits for a message; None where there will be none."""
        data = self._socket.recv(_MESSAGE_BYTES)
        return json.loads(data) if data else None

    def close(self) -> None:
        """Nothing more will be said."""
        self._socket.close()


class Imported:
    """Modules that were imported ahead, and what their import depended on and changed.

    Args:
        modules: by name.
        given: the environment at their import.
        changed: the variables that it has set.
    """

    def __init__(
        self,
        modules: Mapping[str, types.ModuleType],
        given: Mapping[str, str],
        changed: Mapping[str, str],
    ) -> None:
        self.modules = dict(modules)
        self.specs = {name: _spec(module) for name, module in modules.items()}
        self._given = given
        self._changed = changed
        packages = [name for name in modules if "." not in name]
        self._origins = {package: _origin(package) for package in packages}
        files = [
            getattr(module, "__file__", None)  # a namespace package has no file itself
            for name, module in modules.items()
            if self._origins.get(name.partition(".")[0]) is None
        ]
        self._stamps = {
            path: _stamp(path) for path in (*self._origins.values(), *files) if path
        }

    @classmethod
    def since(cls, before: set[str], given: Mapping[str, str]) -> Imported:
        """Takes away all that was imported since, but for the standard library."""
        names = [
            name
            for name in sys.modules
            if name not in before
            and name != _SECOND_NAME
            and name.partition(".")[0] not in sys.stdlib_module_names
        ]
        modules = {name: sys.modules.pop(name) for name in names}
        changed = {k: v for k, v in os.environ.items() if given.get(k) != v}
        return cls(modules, given, changed)

    def difference(self) -> str | None:
        """Why the import would not be the same now; None where it would be."""
        names = sorted({*os.environ, *self._given})
        set_now = [name for name in names if self._is_changed(name)]
        if read := [name for name in set_now if is_read_at_import(name)]:
            return f"the program has set {', '.join(read)} before its imports"
        for package, path in self._origins.items():
            found = _origin(package)
            if found != path:
                return f"{package} would be imported from {found}, not from {path}"
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        return None

    def apply_changes(self) -> None:
        """Sets the variables that the import sets."""
        for name, value in self._changed.items():
            if not self._is_changed(name):
                os.environ[name] = value

    def _is_changed(self, name: str) -> bool:
        return os.environ.get(name) != self._given.get(name)


class Ahead(importlib.abc.MetaPathFinder):
    """Hands out what was imported ahead, where the program imports it.

    It is done with the first of the roots: then all is there as after their import.
    Any thread may import.

    Args:
        imported: what to hand out.
        roots: the packages that were to be imported; the others are theirs.
        begin: called at the first of the roots.
        start_cold: called with the reason where the import would not be the same. Where
            it returns, the program gets what there is.
    """

    def __init__(
        self,
        imported: Imported,
        roots: set[str],
        begin: Callable[[], None],
        start_cold: Callable[[str], None],
    ) -> None:
        self.imported = imported
        self._roots = roots
        self._begin = begin
        self._start_cold = start_cold
        self._lock = threading.RLock()
        self._is_looking = False
        self._shown: set[str] = set()  # packages

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds what was imported ahead."""
        if fullname not in self.imported.modules:
            return None
        with self._lock:
            if self._is_looking:  # where others would find it
                return None
            # What another thread was shown meanwhile is never imported once more.
            if fullname.partition(".")[0] not in self._shown:
                self._look()
        return self._spec(fullname)

    def show(self, package: str) -> None:
        """Puts a package, or with a root everything, where imports put it."""
        with self._lock:
            if package in self._shown:
                return
            is_root = package in self._roots
            for name, module in self.imported.modules.items():
                top = name.partition(".")[0]
                if is_root or top == package:
                    sys.modules[name] = module
                    self._shown.add(top)
            if is_root:
                sys.meta_path.remove(self)
                self.imported.apply_changes()
                self._begin()

    def _spec(self, name: str) -> importlib.machinery.ModuleSpec:
        """As its own importer has it, for who only asks where a module is."""
        spec = importlib.machinery.ModuleSpec(name, HandOut(self))
        if (own := self.imported.specs[name]) is not None:
            spec.origin, spec.has_location = own.origin, own.has_location
            spec.cached = own.cached
            spec.submodule_search_locations = own.submodule_search_locations
        return spec

    def _look(self) -> None:
        self._is_looking = True
        try:
            why = self.imported.difference()
        except Exception as error:  # noqa: BLE001  # finders of others: start without
            why = f"looking for them raised {error!r}"
        self._is_looking = False
        if why is not None:
            self._start_cold(why)


class HandOut(importlib.abc.Loader):
    """Loads one module that was imported ahead: it is all there.

    Args:
        ahead: who has it.
    """

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._name = ""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module itself."""
        self._name = spec.name
        return self._ahead.imported.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Undoes what the import system has written on it; shows its package."""
        module.__spec__ = self._ahead.imported.specs[self._name]
        self._ahead.show(self._name.partition(".")[0])


def is_read_at_import(name: str) -> bool:
    """Whether libraries read this variable when they are imported."""
    return name.startswith(_READ_AT_IMPORT) and name != _NOT_READ


@contextlib.contextmanager
def _output_kept() -> Iterator[int]:
    """Keeps what is written meanwhile in memory; yields the descriptor of that.

    A cold start writes it at its imports, and so does this process then.
    """
    kept = os.memfd_create("standby")
    saved = os.dup(1), os.dup(2)
    for descriptor in (1, 2):
        os.dup2(kept, descriptor)
    try:
        yield kept
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"tfpreempt: standby: {text}\n".encode(errors="backslashreplace"))


def _write_all(descriptor: int, source: int) -> None:
    """Writes all that stands in a file to a descriptor; a child may do so too."""
    data = os.pread(source, os.fstat(source).st_size, 0)
    while data:
        data = data[os.write(descriptor, data) :]


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _first_to_go() -> str:
    """Has the kernel end this process before a worker; returns what to put back."""
    try:
        score = _OOM_SCORE.read_text(encoding="ascii")
        _OOM_SCORE.write_text(_FIRST_VICTIM, encoding="ascii")
    except OSError:
        return "0"
    return score


def _memory() -> int:
    """Bytes that only this process has; the files of the libraries are shared."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def open_device(kinds: tuple[str, ...] = _DEVICES) -> str | None:
    """A device that this process has open, which a worker could miss; None of none.

    Args:
        kinds: beginnings of their paths.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(kinds):
                return target
    return None


def _origin(package: str) -> str | None:
    """Where an import finds it; None where that is no file, or nowhere."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


def _spec(module: types.ModuleType) -> importlib.machinery.ModuleSpec | None:
    return getattr(module, "__spec__", None)


def _ignored() -> set[int]:
    numbers = signal.valid_signals()
    return {int(n) for n in numbers if signal.getsignal(n) == signal.SIG_IGN}


def _stamp(path: str) -> tuple[int, ...] | None:
    """Tells a file from one that has taken its place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


if __name__ == "__main__":
    main()
