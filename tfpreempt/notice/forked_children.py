"""Keeps children of multiprocessing alive if a signal is sent to the process group.

systemd, Slurm and a shell with job control send SIGTERM to every process of a job. If
the signal killed a child that reads data, a batch that the last step needs would be
lost. So children forked by multiprocessing are guarded: a guarded child checks which
process has sent a signal. A signal from the parent (`Process.terminate()`,
`Pool.terminate()`) or from the child itself has the usual effect. The child ignores a
signal from another process, because the parent has received that signal, too.

A child that has ignored a signal ends when its parent has been exiting for `ENDS_AFTER`
seconds, because the parent may be waiting for the child. The child does not end at
once: a child of a pool might hold the lock of the pool's queue, and the pool's
termination waits for that lock. A child always ends when the parent has ended.

The guard is a thread of the child that waits for the blocked signal, because only
`sigwaitinfo` and similar functions return the sender. The guard is switched off when
the child starts a program: the program would inherit the blocked signal, and could not
be terminated. An audit hook detects the start of a program, because subprocess does not
call the hooks of `os.register_at_fork`.

Rejected: SIG_IGN, because `terminate()` and `join()` would hang; a process group for
the children, because systemd and Slurm ignore groups; PR_SET_PDEATHSIG, because the
signal comes when the forking thread ends, not the parent; keeping the guard after a
program was started, because multiprocessing's resource tracker is such a program, and
its start unblocks SIGTERM.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from typing import Any

# Seconds between two checks whether the parent has ended or is exiting.
LOOKS_EVERY = 0.5

ENDS_AFTER = 2.0
"""Seconds that an exiting parent has to end a child. Afterwards a child that has
ignored a signal ends itself."""

# Sent only to interrupt the main thread; otherwise without effect.
_WAKE = signal.SIGURG
_STARTS_PROGRAMS = ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec")
# Signals that a terminal sends to the whole group.
_BY_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_guarded: set[signal.Signals] = set()
# A byte of memory that this process shares with its children: 1 while this process
# exits.
_leaving = mmap.mmap(-1, 1)
_parents = _leaving  # the byte that the parent shares with this process


def _look_at_the_parent() -> None:
    """Called in a forked child: keeps the byte in which the parent shows its exit, and
    creates a new byte, which the child shares with its own children.
    """
    global _leaving, _parents
    _parents, _leaving = _leaving, mmap.mmap(-1, 1)


os.register_at_fork(after_in_child=_look_at_the_parent)


def guard_children(signum: signal.Signals) -> None:
    """Guards the children that multiprocessing forks from now on against a signal."""
    if not _guarded:
        util.register_after_fork(guard_children, _begin)
    _guarded.add(signum)


def release_children(is_leaving: bool) -> None:
    """Shows the guarded children whether this process is exiting. Any thread may call
    the function.

    Args:
        is_leaving: whether this process is exiting. If True, children that have ignored
            a signal end after `ENDS_AFTER` seconds.
    """
    _leaving[0] = is_leaving


def _begin(_: object) -> None:
    """Starts the guard (the thread `_guard`) in a child that multiprocessing forked.

    multiprocessing calls the function on the child's main thread, before the target.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    signal.signal(_WAKE, _end)
    # A child of this child inherits the signal mask, but not the guard's thread. So
    # unblock the signals there.
    os.register_at_fork(after_in_child=_end)
    sys.addaudithook(lambda event, args: _end() if event in _STARTS_PROGRAMS else None)
    # multiprocessing starts programs with this function, which raises no audit event.
    util.spawnv_passfds = _ending_before(util.spawnv_passfds)
    # Start the thread before the signals are blocked: if the start fails, the child has
    # no guard, and must not block the signals.
    threading.Thread(
        target=_guard, args=(parent.pid,), name="tfpreempt-guard", daemon=True
    ).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, _guarded)


def _ending_before(start: Callable[..., int]) -> Callable[..., int]:
    def ended(*args: Any) -> int:
        _end()
        return start(*args)

    return ended


def _end(*_: object) -> None:
    """Ends the guard's protection: unblocks the guarded signals in the calling thread,
    which is usually the main thread of the child.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _guarded)


def _guard(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _guarded)
    signum = _wait_for_the_end(parent)
    if signal.getsignal(signum) is signal.SIG_DFL:
        # Unblock the signal in this thread, too: the main thread may be inside a long
        # operation.
        _end()
    os.kill(os.getpid(), signum)
    # Repeat `_WAKE`, because it has no effect if it arrives just before the main thread
    # begins to wait.
    while signum in signal.sigpending():
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
        time.sleep(0.01)


def _wait_for_the_end(parent: int) -> int:
    """Waits, on the guard's thread of a child, until the child must end.

    The child must end in one of three cases:

    - A signal arrives that the child must not ignore.
    - The parent has ended.
    - The child has ignored a signal, and the parent has been exiting for `ENDS_AFTER`
      seconds.

    Args:
        parent: process id of the parent.

    Returns:
        The signal with which the child ends itself.
    """
    ignored = 0
    stays_until = time.monotonic() + ENDS_AFTER
    while True:
        info = signal.sigtimedwait(_guarded, LOOKS_EVERY)
        if info is not None and _is_for_the_child(info, parent):
            return info.si_signo
        if info is not None:
            ignored = info.si_signo
        if os.getppid() != parent:
            return signal.SIGTERM
        now = time.monotonic()
        if not (ignored and _parents[0]):
            stays_until = now + ENDS_AFTER
        elif now >= stays_until:
            return ignored


def _is_for_the_child(info: signal.struct_siginfo, parent: int) -> bool:
    by_kernel = info.si_code > 0  # e.g. SIGXCPU, sent to every process individually
    if by_kernel:
        return info.si_signo not in _BY_TERMINAL
    return info.si_pid in (parent, os.getpid())
