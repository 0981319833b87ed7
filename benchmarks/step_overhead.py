"""Measures the time that a handler adds to a step: `handler.run(noop)` less `noop()`.

A second row has the cost of `handler.check_preemption()`, which is called at each batch
of an evaluation. TensorFlow's handler has no such method, so the row is compared with a
`run` of TensorFlow's handler.

Both handlers are in this process and are measured in turn, in many short rounds, so
that a slow moment of the machine affects all three loops. The median of the differences
is compared; `raw` is the bare call.

According to its source (`handler.run`), a step of tfpreempt without a notice increments
one integer, reads two flags and one number, sets and clears a flag around the call, and
increments a second integer. All are attributes of objects of this process that only the
main thread writes, except the flag, which a watcher thread assigns once. The step reads
no key of the store and no clock, and uses no lock, collective or tensor. The row's
`functions_called` is measured: a profile hook counts the functions (Python or C) that
one `run(noop)` calls, besides itself and `noop`. A check reads the clock, so that the
time between two checks is not counted as the time of a step.
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
    """Yields a row for `run` and a row for `check_preemption`.

    Args:
        rounds: number of rounds of each of the four loops.
    """
    import tensorflow as tf

    import tfpreempt

    # TensorFlow's handler queries Google's metadata server; here without an answer.
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
    """Returns the seconds of one bare call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        noop()
    return (time.perf_counter() - began) / CALLS


def loop(run: Callable[[Callable[[], None]], None]) -> float:
    """Returns the seconds of one call through a handler."""
    began = time.perf_counter()
    for _ in range(CALLS):
        run(noop)
    return (time.perf_counter() - began) / CALLS


def loop_checks(check: Callable[[], None]) -> float:
    """Returns the seconds of one check, including the loop."""
    began = time.perf_counter()
    for _ in range(CALLS):
        check()
    return (time.perf_counter() - began) / CALLS


def count_calls(call: Callable[[], Any]) -> int:
    """Returns the number of functions that a call enters, besides `run` and `noop`."""
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
