"""Keeps children forked by multiprocessing alive after a signal to the whole group.

systemd, Slurm and a shell with job control send SIGTERM to every process. If the signal
kills a data reader, a batch needed by the last step is lost. So a guarded child checks
the sender of a signal. A signal from the parent (`Process.terminate()`,
`Pool.terminate()`) or from the child itself takes its usual effect. A signal from any
other process is ignored, because the parent received the signal too.

An ignored signal ends the child later, when the parent has been exiting for a moment
and may wait for the child. Not at once: a pool's child would end with its queue's lock
held, and the pool's own termination, at the same moment, waits for the lock. A child
always ends when the parent has ended.

Only a thread that waits for a blocked signal learns the sender. Rejected: SIG_IGN, with
which `terminate()` and `join()` hang; a process group for the children, which systemd
and Slurm ignore; PR_SET_PDEATHSIG, which depends on the forking thread; a guard that
continues after the child has started a program, because multiprocessing's resource
tracker is such a program and unblocks SIGTERM in the process that starts it. An audit
hook detects the start of a program, because subprocess calls no hook of
`os.register_at_fork`, and a program that inherits the blocked signal cannot be
terminated.
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

# seconds until a child notices that its parent has ended or is exiting
LOOKS_EVERY = 0.5

ENDS_AFTER = 2.0
"""Seconds within which an exiting parent ends the children itself."""

_WAKE = signal.SIGURG  # only to interrupt the main thread; else ignored
_STARTS_PROGRAMS = ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec")
_BY_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # sent to the whole group
_guarded: set[signal.Signals] = set()
_leaving = mmap.mmap(-1, 1)  # a byte shared with the children
_parents = _leaving  # the byte of the parent process


def _look_at_the_parent() -> None:
    """Keeps the parent's byte for reading, and allocates a byte for own children.

    A forked child may train and fork children itself.
    """
    global _leaving, _parents
    _parents, _leaving = _leaving, mmap.mmap(-1, 1)


os.register_at_fork(after_in_child=_look_at_the_parent)


def guard_children(signum: signal.Signals) -> None:
    """Guards children that multiprocessing forks from now on against a signal."""
    if not _guarded:
        util.register_after_fork(guard_children, _begin)
    _guarded.add(signum)


def release_children(is_leaving: bool) -> None:
    """Publishes to the guarded children whether this process is exiting. Any thread."""
    _leaving[0] = is_leaving


def _begin(_: object) -> None:
    """Starts the guard on the child's main thread, before the child's own work."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    signal.signal(_WAKE, _end)
    # A program or child of the child would inherit the mask, but not the thread.
    os.register_at_fork(after_in_child=_end)
    sys.addaudithook(lambda event, args: _end() if event in _STARTS_PROGRAMS else None)
    util.spawnv_passfds = _ending_before(util.spawnv_passfds)  # has no audit event
    # Before the mask: if no thread can be started, the child has no guard.
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
    """Unblocks the guarded signals in the calling thread, usually the main thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _guarded)


def _guard(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _guarded)
    signum = _wait_for_the_end(parent)
    if signal.getsignal(signum) is signal.SIG_DFL:
        _end()  # in this thread, as the main thread may be inside a long operation
    os.kill(os.getpid(), signum)
    # a signal may arrive just before the main thread begins to wait
    while signum in signal.sigpending():
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
        time.sleep(0.01)


def _wait_for_the_end(parent: int) -> int:
    """Returns the signal by which to end the child."""
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
    by_kernel = info.si_code > 0  # e.g. SIGXCPU, sent to each process individually
    if by_kernel:
        return info.si_signo not in _BY_TERMINAL
    return info.si_pid in (parent, os.getpid())
