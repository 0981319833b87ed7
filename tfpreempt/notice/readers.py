"""Children that multiprocessing forks outlive a signal to the whole group.

systemd, Slurm and a shell with job control send SIGTERM to all processes, and readers
of data that die of it take the batch along that the last step needs. So such a child
looks who sent the signal: its parent (`Process.terminate()`, `Pool.terminate()`) or
itself, then it is as if nobody looked; anybody else, then it is ignored, because the
parent has heard it too; it is made up for when the parent has been on its way out for a
moment, and may wait for the child. Not at once: a pool's child that dies then takes the
lock of its queue along, and the pool's own end, which is that moment, waits for this. A
child goes with the parent in any case.

Only a thread that waits for a blocked signal learns who sent it. Rejected: SIG_IGN,
with which `terminate()` and `join()` hang; a group of its own, which systemd and Slurm
don't look at; PR_SET_PDEATHSIG, which goes by the thread that forked; a guard that
goes on after a program was started, because multiprocessing's resource tracker, one of
them, unblocks SIGTERM in who starts it. An audit hook sees the start of a program,
because subprocess calls no hook of `os.register_at_fork`, and a program that inherits
the blocked signal cannot be terminated.
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

LOOKS_EVERY = 0.5  # seconds in which a child sees that its parent is gone, or going

ENDS_AFTER = 2.0
"""Seconds in which a parent that is going ends its children itself."""

_WAKE = signal.SIGURG  # for nothing but to interrupt the main thread; else ignored
_STARTS_PROGRAMS = ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec")
_BY_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # to the whole group
_guarded: set[signal.Signals] = set()
_leaving = mmap.mmap(-1, 1)  # one byte that is shared with the children
_parents = _leaving  # that of the process that forked this one


def _look_at_the_parent() -> None:
    """A forked child that trains itself has children of its own, and its own byte."""
    global _leaving, _parents
    _parents, _leaving = _leaving, mmap.mmap(-1, 1)


os.register_at_fork(after_in_child=_look_at_the_parent)


def guard_children(signum: signal.Signals) -> None:
    """From now on, children that multiprocessing forks are guarded against a signal."""
    if not _guarded:
        util.register_after_fork(guard_children, _begin)
    _guarded.add(signum)


def release_children(is_leaving: bool) -> None:
    """The parent is on its way out, or stays after all; any thread."""
    _leaving[0] = is_leaving


def _begin(_: object) -> None:
    """On the child's main thread, before its own work."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    signal.signal(_WAKE, _end)
    # What it forks or starts would inherit the mask, without the thread.
    os.register_at_fork(after_in_child=_end)
    sys.addaudithook(lambda event, args: _end() if event in _STARTS_PROGRAMS else None)
    util.spawnv_passfds = _ending_before(util.spawnv_passfds)  # which is not audited
    # Before the mask: where no thread can be started, there is no guard.
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
    """The calling thread, usually the main one, takes signals as it would."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _guarded)


def _guard(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _guarded)
    signum = _wait_for_the_end(parent)
    if signal.getsignal(signum) is signal.SIG_DFL:
        _end()  # of this thread's: the main one may be inside a long operation
    os.kill(os.getpid(), signum)
    while signum in signal.sigpending():  # one may come just before it begins to wait
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
        time.sleep(0.01)


def _wait_for_the_end(parent: int) -> int:
    """The signal to end by."""
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
    by_kernel = info.si_code > 0  # as at the limit of CPU time, in each process apart
    if by_kernel:
        return info.si_signo not in _BY_TERMINAL
    return info.si_pid in (parent, os.getpid())
