"""Replaces itself by a worker's command; the kernel sends SIGTERM if the parent ends.

A separate script, run by path and without site packages, because the kernel's setting
belongs to the process that makes it, and because code between fork and exec of a larger
process (`preexec_fn`) is unsafe.

Usage: exec_with_pdeathsig.py PARENT_PID COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and replaces the process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit(128 + signal.SIGTERM)
    # The supervisor blocks the signals it waits for, and a signal mask survives exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Python ignores the first two, and the supervisor's caller may ignore the third;
    # an ignored signal stays ignored through exec.
    for name in ("SIGPIPE", "SIGXFSZ", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"tfpreempt: cannot start {command[0]!r}: {error}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
