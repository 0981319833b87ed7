"""A process that has imported a framework, and forks workers on request.

Usage: zygote.py tensorflow|jax|keras-jax

The import of TensorFlow takes most of the time of a small test. A fork of a process
that has only imported TensorFlow takes almost no time. Every worker is a real process
with its own TensorFlow runtime or JAX backend. Requests come on stdin, one JSON object
per line; the zygote writes the exit code of a worker to the file that the request
names.

For a test, a fork is equal to a new Python process, except for the command line in
`ps`. Options of the interpreter (-c, -m, -W) need a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

PRELOADED = {
    "tensorflow": (
        "tensorflow",
        "tfpreempt.handler.handler",
        "tfpreempt.handler.tensorflow_adapter",
        "tfpreempt.checkpoint.tensors.tensor_contents",
    ),
    "jax": ("jax", "tfpreempt.handler.handler", "tfpreempt.jax.pytree_state"),
    "keras-jax": ("keras", "tfpreempt.keras", "tfpreempt.handler.handler"),
}

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.01

Request = dict[str, Any]

kept: dict[str, Any] = {}
"""Modules of other packages that were imported before the first fork."""


def serve() -> Request:
    """Serves requests until stdin ends; returns, in a worker, the worker's request."""
    children: dict[int, str] = {}
    buffered = b""
    while True:
        timeout = _POLL_SECONDS if children else None
        readable, _, _ = select.select([0], [], [], timeout)
        if readable:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return request
                children[pid] = request["exit"]
                _write(request["pid"], str(pid))
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                _write(children.pop(pid), str(code))


def keep_modules() -> None:
    """Notes the imported modules, except the modules of Python and tfpreempt."""
    own = {"__main__", "tfpreempt", "tests", *sys.stdlib_module_names}
    for name, module in sys.modules.items():
        if name.partition(".")[0] not in own:
            kept[name] = module
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # never freed


def leave_modules() -> None:
    """Keeps Python from freeing the objects of the noted modules at the exit.

    Freeing is most of the processor time of a small worker, because each page of memory
    is shared with the zygote and would be copied. All other objects are freed, and
    threads end, as in each program.
    """
    for name in kept:
        sys.modules.pop(name, None)


def keep_compiled() -> None:
    """Lets all processes of a cluster write into the zygote's cache of functions.

    JAX lets process 0 alone write, so the others would compile their functions again in
    each test. A program with a cache of its own runs as JAX made it.
    """
    import jax
    from jax._src import compilation_cache, compiler, distributed

    directory = jax.config.jax_compilation_cache_dir
    write = compiler._cache_write

    def write_in_each(
        key: str, seconds: float, name: str, backend: Any, compiled: Any, *calls: Any
    ) -> None:
        # `calls` has the host callbacks; since JAX 0.12 the argument does not exist.
        is_of_zygote = jax.config.jax_compilation_cache_dir == directory
        if distributed.global_state.process_id == 0 or any(calls) or not is_of_zygote:
            write(key, seconds, name, backend, compiled, *calls)
        else:
            compilation_cache.put_executable_and_time(
                key, name, compiled, backend, int(seconds)
            )

    compiler._cache_write = write_in_each


def _write(path: str, text: str) -> None:
    # A test that has given up has removed the directory.
    with contextlib.suppress(FileNotFoundError):
        with open(path + ".part", "w") as file:
            file.write(text)
        os.rename(path + ".part", path)


def become(request: Request) -> None:
    """Makes this fork equal to a newly started program."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for descriptor in (null, log):
        os.close(descriptor)
    if errors := request.get("errors"):
        own = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(own, 2)
        os.close(own)
    faulthandler.enable()  # SIGABRT shows where every thread is
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(request["argv"][0])


if __name__ == "__main__":
    atexit.register(leave_modules)  # registered first, so called last
    for name in PRELOADED[sys.argv[1]]:
        importlib.import_module(name)
    if sys.argv[1] != "tensorflow":
        keep_compiled()
    keep_modules()
    gc.freeze()  # otherwise each worker copies shared pages in order to free objects

    become(serve())
    # Like the interpreter: in this module, whose globals exist until the exit.
    __file__ = sys.argv[0]
    with open(__file__, encoding="utf-8") as _program:
        exec(compile(_program.read(), __file__, "exec"))
