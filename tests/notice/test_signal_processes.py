"""Signals to real processes: long operations, forked children, ends of processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a new interpreter for each

ROOT = Path(__file__).parents[2]

PRELUDE = """
    import hashlib, json, multiprocessing, os, select, signal, sys, threading, time
    from tfpreempt.notice.signals import SignalSource

    heard = []
    source = SignalSource("SIGTERM")
    source.start(lambda detail: heard.append(time.monotonic()))

    def tell(**values):
        print(json.dumps(values), flush=True)
"""


def run(
    program: str, expected: int = 0, *, blocked: Sequence[signal.Signals] = ()
) -> dict[str, object]:
    """Runs a program after the prelude; returns the JSON of its last line."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    command = [sys.executable, "-c", code]
    if blocked:
        numbers = [int(each) for each in blocked]
        block = f"signal.pthread_sigmask(signal.SIG_BLOCK, {numbers})"
        start = f"import os, signal, sys; {block}; os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", start, *command]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expected, done.stderr
    assert "Exception ignored" not in done.stderr
    lines = done.stdout.splitlines()
    found: dict[str, object] = json.loads(lines[-1]) if lines else {}
    return found


@pytest.mark.parametrize(
    "operation",
    [
        # Never looks at signals while it runs, as TensorFlow's ops do not.
        "hashlib.pbkdf2_hmac('sha256', b'p', b's', 2_000_000)",
        "time.sleep(1.5)",
    ],
)
def test_a_signal_is_received_while_the_main_thread_runs_c_code(operation: str) -> None:
    told = run(
        f"""
        sent = []
        def kill():
            time.sleep(0.2)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=kill).start()
        {operation}
        ended = time.monotonic()
        tell(latency=heard[0] - sent[0], left=ended - heard[0], count=len(heard))
        """
    )
    print("latency:", told["latency"])
    assert told["count"] == 1
    # The point: not when the operation ended, but while it ran.
    assert float(str(told["left"])) > 0.05


def test_sigterm_ends_a_forked_child_without_a_notice_in_the_parent() -> None:
    told = run(
        """
        context = multiprocessing.get_context("fork")
        codes = []
        for _ in range(20):
            child = context.Process(target=time.sleep, args=(30,))
            child.start()
            child.terminate()  # at once: it may not have let go of our socket yet
            child.join(20)
            codes.append(child.exitcode)
        time.sleep(0.05)
        during = len(heard)
        os.kill(os.getpid(), signal.SIGTERM)  # and the parent still hears its own
        while not heard: time.sleep(0.001)
        tell(codes=sorted(set(codes)), during=during, after=len(heard))
        """
    )
    assert told == {"codes": [-15], "during": 0, "after": 1}


def test_a_child_forked_by_another_thread_is_free_too() -> None:
    told = run(
        """
        status = []
        def fork():
            pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
                os._exit(0)
            status.append(os.waitpid(pid, 0)[1])
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        tell(ended_by=os.WTERMSIG(status[0]), heard=len(heard))
        """
    )
    assert told == {"ended_by": 15, "heard": 0}


def test_a_child_has_the_handler_and_wakeup_fd_from_before() -> None:
    told = run(
        """
        source.close()
        import socket
        a, b = socket.socketpair()
        b.setblocking(False)
        signal.set_wakeup_fd(b.fileno())
        signal.signal(signal.SIGTERM, lambda *args: os._exit(9))
        source = SignalSource("TERM")
        source.start(lambda detail: heard.append(detail))
        pid = os.fork()
        if pid == 0:
            is_back = signal.set_wakeup_fd(-1) == b.fileno()
            source.close()  # inherited; does nothing
            if is_back:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        tell(code=os.WEXITSTATUS(status), heard=len(heard))
        source.close()
        """
    )
    assert told == {"code": 9, "heard": 0}


def test_a_child_can_watch_for_itself() -> None:
    told = run(
        """
        pid = os.fork()
        if pid == 0:
            mine = []
            own = SignalSource("TERM")
            own.start(mine.append)
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 10
            while not mine and time.monotonic() < end: time.sleep(0.001)
            os._exit(len(mine))
        status = os.waitpid(pid, 0)[1]
        tell(code=os.WEXITSTATUS(status), heard=len(heard))
        """
    )
    assert told == {"code": 1, "heard": 0}


def test_the_forking_thread_can_be_signalled_afterwards() -> None:
    told = run(
        """
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        tell(blocked=[int(each) for each in blocked])
        """
    )
    assert told == {"blocked": []}


def test_a_signal_that_is_blocked_in_the_inherited_mask_is_a_notice() -> None:
    """Threads, forked children and started programs keep the mask that they had."""
    told = run(
        """
        def is_blocked():
            return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        def blocks(number):
            mask = open(f"/proc/{number}/status").read().split("SigBlk:")[1].split()[0]
            return bool(int(mask, 16) >> signal.SIGTERM - 1 & 1)
        def wait(condition):
            end = time.monotonic() + 10
            while not condition() and time.monotonic() < end: time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        wait(lambda: len(heard) == 1)
        masks = []
        thread = threading.Thread(target=lambda: masks.append(is_blocked()))
        thread.start(); thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(is_blocked())
        masks.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1)
        import subprocess
        program = subprocess.Popen(["sleep", "60"])
        masks.append(blocks(program.pid))
        program.kill(); program.wait()
        masks.append(is_blocked())
        source.rearm()
        os.kill(os.getpid(), signal.SIGTERM)
        wait(lambda: len(heard) == 2)
        source.close()
        names = [each.name for each in threading.enumerate()]
        os.kill(os.getpid(), signal.SIGTERM)  # is held back, as before
        tell(heard=len(heard), masks=masks, threads=names)
        """,
        blocked=[signal.SIGTERM],
    )
    assert told == {"heard": 2, "masks": [True] * 4, "threads": ["MainThread"]}


def test_a_blocked_signal_that_is_pending_at_the_start_is_a_notice() -> None:
    told = run(
        """
        os.kill(os.getpid(), signal.SIGUSR1)
        early = SignalSource("SIGUSR1")
        early.start(lambda detail: heard.append(time.monotonic()))
        end = time.monotonic() + 10
        while not heard and time.monotonic() < end: time.sleep(0.001)
        tell(heard=len(heard))
        """,
        blocked=[signal.SIGTERM, signal.SIGUSR1],
    )
    assert told == {"heard": 1}


def test_after_close_sigterm_ends_the_process() -> None:
    run("source.close(); os.kill(os.getpid(), signal.SIGTERM)", expected=-15)


def test_after_close_on_another_thread_sigterm_ends_the_process() -> None:
    run(
        """
        thread = threading.Thread(target=source.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        """,
        expected=-15,
    )


def test_on_the_way_out_a_close_on_another_thread_changes_no_exit_code() -> None:
    run(
        """
        from tfpreempt.notice._signal_registry import REGISTRY
        REGISTRY.leave()
        thread = threading.Thread(target=source.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(3)
        """,
        expected=3,
    )


def test_an_open_source_does_not_hold_up_the_end() -> None:
    run("sys.exit(3)", expected=3)


def test_a_signal_is_received_beside_asyncio() -> None:
    told = run(
        """
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            got = asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, got.set)  # takes the wake-up fd
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            first = len(heard)
            source.rearm()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(got.wait(), 10)
            return first
        first = asyncio.run(main())
        tell(first=first, then=len(heard))
        """
    )
    assert told == {"first": 1, "then": 2}


# --- children of multiprocessing -----------------------------------------------------

CHILDREN = """
    import subprocess
    context = multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    def read(before=lambda: None):
        before()
        ready.release()
        while True: time.sleep(30)
    def child(before=lambda: None):
        made = context.Process(target=read, args=(before,))
        made.start()
        assert ready.acquire(timeout=20)
        return made
    def kill_as_a_stranger(pid, signum):
        kill = f"import os; os.kill({pid}, {int(signum)})"
        subprocess.run([sys.executable, "-c", kill], start_new_session=True)
"""


def with_children(body: str) -> dict[str, object]:
    return run(textwrap.dedent(CHILDREN) + textwrap.dedent(body))


def test_a_signal_to_the_group_leaves_readers_alive_for_their_parent_to_end() -> None:
    told = with_children(
        """
        os.setpgid(0, 0)
        pool = context.Pool(2, ready.release)
        for _ in range(2): assert ready.acquire(timeout=20)
        readers = [child(), child()]
        kill_as_a_stranger(-os.getpid(), signal.SIGTERM)
        while not heard: time.sleep(0.001)
        number = pool.apply(int, ("3",))
        alive = [reader.is_alive() for reader in readers]
        for reader in readers: reader.terminate(); reader.join(20)
        pool.terminate(); pool.join()
        tell(alive=alive, number=number, codes=[each.exitcode for each in readers])
        """
    )
    assert told == {"alive": [True, True], "number": 3, "codes": [-15, -15]}


def test_a_data_reader_ends_with_its_parent() -> None:
    told = with_children(
        """
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            SignalSource("TERM").start(print)
            os.write(theirs, str(child().pid).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        grandchild = int(os.read(ours, 100))
        os.close(theirs)
        # It can be read from when nobody holds the other end any more.
        while not select.select([ours], [], [], 0.05)[0]:
            os.kill(grandchild, signal.SIGTERM)  # from a stranger: no reason to end
        tell(gone=True)
        """
    )
    assert told == {"gone": True}


def test_a_readers_own_handler_and_programs_are_as_without_a_guard() -> None:
    told = with_children(
        """
        def handle(): signal.signal(signal.SIGTERM, lambda *args: sys.exit(7))
        def start():
            global program
            program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
            program.terminate()
            os._exit(-program.wait(20))
        handles = child(handle)
        handles.terminate(); handles.join(20)
        starts = context.Process(target=start)
        starts.start(); starts.join(20)
        tell(codes=[handles.exitcode, starts.exitcode])
        """
    )
    assert told == {"codes": [7, 15]}


def test_no_child_is_left_that_terminate_cannot_end() -> None:
    """A child of a reader, and a process where no thread could be started."""
    told = with_children(
        """
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()
        def spawn():
            spawned = multiprocessing.get_context("spawn").Process(
                target=time.sleep, args=(600,))
            spawned.start(); spawned.terminate(); spawned.join(20)
            os._exit(-(spawned.exitcode or 0))
        spawns = context.Process(target=spawn)
        spawns.start(); spawns.join(30)
        threading.stack_size(1 << 46)  # more than any machine has
        alone = child()
        alone.terminate(); alone.join(20)
        tell(codes=[spawns.exitcode, alone.exitcode])
        for each in multiprocessing.active_children(): each.kill()
        """
    )
    assert told == {"codes": [15, -15]}


def test_a_reader_ends_by_a_signal_from_the_kernel_that_is_its_own() -> None:
    told = with_children(
        """
        SignalSource("ALRM").start(print)
        reader = child(lambda: signal.alarm(1))
        reader.join(20)
        tell(code=reader.exitcode)
        reader.kill()
        """
    )
    assert told == {"code": -14}


def test_a_fork_during_the_exit_keeps_no_reader_alive() -> None:
    told = with_children(
        """
        from tfpreempt.notice._signal_registry import REGISTRY
        reader = child()
        REGISTRY.leave()
        forked = context.Process(target=int)
        forked.start(); forked.join()
        kill_as_a_stranger(reader.pid, signal.SIGTERM)
        reader.join(20)
        tell(code=reader.exitcode)
        reader.kill()
        """
    )
    assert told == {"code": -15}


def test_a_reader_that_passed_a_signal_over_ends_with_the_interpreter() -> None:
    """The interpreter waits for its children, and may send them the same signal."""
    told = with_children(
        """
        reader = child()
        kill_as_a_stranger(reader.pid, signal.SIGTERM)
        reader.join(1.0)
        tell(alive=reader.is_alive())
        """
    )
    assert told == {"alive": True}


def test_a_pool_that_passed_a_signal_over_ends_with_the_interpreter() -> None:
    """Its children wait with a lock that the end of the pool needs."""
    told = with_children(
        """
        from multiprocessing import util
        pool = context.Pool(2, ready.release)
        for _ in range(2): assert ready.acquire(timeout=20)
        for reader in context.active_children():
            kill_as_a_stranger(reader.pid, signal.SIGTERM)
        util.Finalize(None, time.sleep, (1.0,), exitpriority=100)  # before the pool's
        tell(ends=True)
        """
    )
    assert told == {"ends": True}


def test_a_child_on_its_way_out_frees_no_reader_of_its_parents() -> None:
    told = with_children(
        """
        from tfpreempt.notice._signal_registry import REGISTRY
        reader = child()
        trains = context.Process(target=REGISTRY.leave)
        trains.start(); trains.join()
        kill_as_a_stranger(reader.pid, signal.SIGTERM)
        reader.join(1.5)
        tell(code=reader.exitcode)
        reader.kill()
        """
    )
    assert told == {"code": None}


def test_a_callback_guards_against_the_signals_of_its_config() -> None:
    told = with_children(
        """
        import tempfile
        from tfpreempt import TerminationConfig
        from tfpreempt.keras import PreemptionCallback
        config = TerminationConfig(signals=("USR1",))
        with tempfile.TemporaryDirectory() as directory:
            PreemptionCallback(directory, termination_config=config)
            reader = child()
            kill_as_a_stranger(reader.pid, signal.SIGUSR1)
            reader.join(0.5)
            reader.terminate(); reader.join(20)
        tell(code=reader.exitcode)
        """
    )
    assert told == {"code": -15}
