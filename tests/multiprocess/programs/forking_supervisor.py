"""`tfpreempt run`, whose workers are forks of a process that has TensorFlow imported.

Usage: forking_supervisor.py CHECKPOINT_DIR ARGUMENT...

The zygote runs this program. A start of Python with an import of TensorFlow takes most
of the processor time of a short training. All else is as in a run of the command line:
each worker is a child of the supervisor, in a session of the worker's own, gets SIGTERM
if the supervisor ends, and has the command, environment and output that the supervisor
gives. `ps` shows another command line, and /proc another environment; so a worker first
prints `snapshots DIRECTORY`. Other tests start workers by their command.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.multiprocess.zygote import become
from tfpreempt.cli import main
from tfpreempt.cli.run import worker_group

REQUEST_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1


def serve(requests: socket.socket) -> dict[str, Any]:
    """Forks workers on request; returns, in a worker, the worker's request."""
    supervisor = os.getppid()
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, REQUEST_BYTES, 1)
        if not message:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for each in descriptors:
                os.close(each)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)  # so the supervisor adopts the worker
        while os.getppid() == between:
            time.sleep(0.0005)
        os.setsid()
        requests.send(str(os.getpid()).encode())
        requests.close()
        [output] = descriptors
        log = {"log": f"/proc/self/fd/{output}", "output": output}
        return json.loads(message) | log | {"supervisor": supervisor}


def start(requests: socket.socket) -> None:
    """Makes the supervisor fork its workers; other processes start as usual."""

    def popen(command: Sequence[str], **options: Any) -> Any:
        words = [str(word) for word in command]
        script = [word.endswith("/exec_with_pdeathsig.py") for word in words]
        if True not in script:
            return subprocess.Popen(command, **options)
        python, *argv = words[script.index(True) + 2 :]
        assert python == sys.executable, words
        environment = dict(options["env"])
        request = {"argv": argv, "env": environment, "cwd": os.getcwd()}
        message = json.dumps(request).encode()
        socket.send_fds(requests, [message], [options["stdout"]])
        # The supervisor uses only the process id of a worker.
        return SimpleNamespace(pid=int(requests.recv(64)))

    class Forking:
        """The module `subprocess`, but for `Popen`."""

        Popen = staticmethod(popen)

        def __getattr__(self, name: str) -> Any:
            return getattr(subprocess, name)

    worker_group.subprocess = Forking()  # type: ignore[assignment]


ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork():
    theirs.close()
    start(ours)
    main(["run", "--checkpoint-dir", *sys.argv[1:]], prog_name="tfpreempt")
ours.close()
request = serve(theirs)
become(request)
os.close(request["output"])
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != request["supervisor"]:
    sys.exit(128 + signal.SIGTERM)
print("snapshots", os.environ.get("TFPREEMPT_SNAPSHOT_DIR", ""), flush=True)
__file__ = sys.argv[0]
with open(__file__, encoding="utf-8") as program:
    exec(compile(program.read(), __file__, "exec"))
