"""What a handler adds to each step: `handler.run(noop)` over a bare `noop()`.

A second row has what `handler.check_preemption()` costs, which stands at each batch of
an evaluation; TensorFlow's handler has none, so it is held against a `run` of that.

Both handlers live in this process and are measured in turn, many short rounds each, so
that a slow moment of the machine hits all three loops. The median of the differences is
compared; `raw` is the bare call.

What ours does in a step while all is quiet, by its source (`handler.run`): one integer
is counted up, two flags and one number are looked at, a flag is set and cleared around
the call, a second integer is counted up. All are attributes of objects of this process
that only the main thread writes, except the flag, which a watcher thread assigns once.
There is no key of the store, no lock, no collective, no tensor and no clock in it. The
row's `functions_called` shows it by measurement: it counts, with a profile hook, the
functions (Python or C) that one quiet `run(noop)` calls, besides itself and `noop`. A
check reads the clock, so that what lies between two of them is not taken for a step's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.row import compare

CALLS = 5_000
BAR = 0.3


def rows(rounds: int = 61) -> Iterator[dict[str, Any]]:
    """A row for `run` and one for `check`; both handlers are in this process.

    Args:
        rounds: of each of the four loops.
    """
    import tensorflow as tf

    import tfpreempt

    # TensorFlow's handler asks whether this is Google's cloud; here it gets no answer.
    os.environ.setdefault("GCE_METADATA_IP", "127.0.0.1:9")
    with tempfile.TemporaryDirectory() as directory:
        their_state = tf.train.Checkpoint(v=tf.Variable(0.0))
        theirs = tf.distribute.experimental.PreemptionCheckpointHandler(
            None, their_state, os.path.join(directory, "theirs")
        )
        our_state = tf.train.Checkpoint(v=tf.Variable(0.0))
        ours = tfpreempt.PreemptionCheckpointHandler(
            None, our_state, os.path.join(directory, "ours")
        )
        for _ in range(1_000):
            ours.run(noop)
            theirs.run(noop)
        calls = count_calls(lambda: ours.run(noop))
        calls_in_check = count_calls(ours.check_preemption) - 1  # besides itself
        bare, added_ours, added_theirs, checks = [], [], [], []
        for _ in range(rounds):
            base = loop_bare()
            bare.append(base)
            added_ours.append(loop(ours.run) - base)
            added_theirs.append(loop(theirs.run) - base)
            checks.append(loop_checks(ours.check_preemption))
        ours.close()

    for call, added, functions_called in (
        ("run", added_ours, calls),
        ("check", checks, calls_in_check),
    ):
        yield compare(
            "step_overhead",
            [1e6 * seconds for seconds in added],
            [1e6 * seconds for seconds in added_theirs],
            raw=[1e6 * seconds for seconds in bare],
            unit="us",
            bar=BAR,
            call=call,
            calls_per_round=CALLS,
            functions_called=functions_called,
        )


def noop() -> None:
    """The step."""


def loop_bare() -> float:
    """Seconds of one bare call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        noop()
    return (time.perf_counter() - began) / CALLS


def loop(run: Callable[[Callable[[], None]], None]) -> float:
    """Seconds of one call through a handler."""
    began = time.perf_counter()
    for _ in range(CALLS):
        run(noop)
    return (time.perf_counter() - began) / CALLS


def loop_checks(check: Callable[[], None]) -> float:
    """Seconds of one check, that of the loop included."""
    began = time.perf_counter()
    for _ in range(CALLS):
        check()
    return (time.perf_counter() - began) / CALLS


def count_calls(call: Callable[[], Any]) -> int:
    """How many functions a call enters, besides `run` and `noop` themselves."""
    entered: list[str] = []

    def hook(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)
        elif event == "c_call":
            entered.append(argument.__name__)

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    known = {"<lambda>", "run", "noop", "setprofile"}
    return len([name for name in entered if name not in known])
