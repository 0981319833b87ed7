"""Executes a worker's command, so that the worker gets SIGTERM if its parent ends.

The kernel sends this signal to a process that has made a request (prctl
PR_SET_PDEATHSIG). So the supervisor starts this script, which makes the request, and
then executes the command in the same process. The alternative, code that the supervisor
runs between fork and exec (`preexec_fn`), is unsafe in a process with threads. The
script is run by its path, without site packages.

Usage: exec_with_pdeathsig.py PARENT_PID COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Requests SIGTERM at the end of the parent, and executes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the request
        sys.exit(128 + signal.SIGTERM)
    # Unblock all signals: the supervisor blocks some, and this process has inherited
    # the supervisor's signal mask.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Do not let the command inherit ignored signals. Python ignores the first two, and
    # the caller of the supervisor may ignore SIGTERM.
    for name in ("SIGPIPE", "SIGXFSZ", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"tfpreempt: cannot start {command[0]!r}: {error}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
