"""A fit that is interrupted at random moments, until it is complete."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.multiprocess.fits import Fit, trained
from tests.multiprocess.harness import (
    HEARD_WITHIN,
    RESTART,
    Cluster,
    Place,
    Worker,
    wait_until,
)

PAUSE = 0.02
"""Seconds of each batch, so that signals can come during a batch."""
MOMENTS = {"start": 1, "fit": 2, "batch": 5, "validation": 2}
"""Events after which a signal comes, with weights."""
SECONDS = {"start": 1.0, "fit": 1.5, "batch": 2 * PAUSE, "validation": 2 * PAUSE}
"""Longest delay of the signal: as long as imports, or the restore and traces, take."""
WORDS = {"fit": ("began", 1), "batch": ("trained", 8), "validation": ("validates", 3)}
"""Word that the program prints, and the largest number of such lines to wait for."""
KILLS = 0.2
"""Share of the signals that are SIGKILL."""
EARLY = -signal.SIGTERM
"""SIGTERM ends a process before its fit has a callback, and when the fit is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """The state of the run when SIGTERM was sent."""

    at: float  # monotonic time, equal in all processes of a machine
    listening: tuple[Worker, ...]  # the signalled workers with a handler


class Storm:
    """A fit, its interruptions, and the steps that must not be lost.

    Args:
        here: directory of the run.
        fit: fit of one process or several.
        rng: source of all random choices.

    Attributes:
        ends: number of each kind of end after SIGTERM.
    """

    def __init__(self, here: Place, fit: Fit, rng: random.Random) -> None:
        self._here = here
        self._fit = fit
        self._rng = rng
        self._steps = fit.steps()
        self._save_freq = rng.choice((3, fit.batches))
        self._next_step = 0
        self._may_be_lost = 0
        self.ends = Counter[str]()

    def run(self, cycles: int) -> int:
        """Interrupts at most `cycles` times; returns the number of interruptions."""
        for done in range(cycles):
            cluster = self._start()
            if self._is_finished_after(cluster, self._interrupt(cluster)):
                return done
        assert self._is_finished_after(self._start(), None)
        return cycles

    def _start(self) -> Cluster:
        self._here.speed_up()
        more = (f"--pause={PAUSE}", f"--save-freq={self._save_freq}")
        self.last = self._fit.start(self._here, *more)
        return self.last

    def _say(self, *words: object) -> None:
        """Prints a line for the report of a failed test."""
        print(self._here.path.name, *words, file=sys.stderr)

    # --- one interruption ------------------------------------------------------------

    def _interrupt(self, cluster: Cluster) -> Told | None:
        """Sends SIGTERM to some workers, or SIGKILL to all, at a random moment.

        Returns:
            The state at SIGTERM; None without SIGTERM to a running worker.
        """
        rng, everyone = self._rng, list(cluster)
        moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        is_kill = rng.random() < KILLS
        victims = rng.choice([everyone, *([each] for each in everyone)])
        signum = signal.SIGKILL if is_kill else signal.SIGTERM
        self._say(moment, signum.name, *map(everyone.index, victims))
        self._await(moment, everyone)
        told = None
        if is_kill:
            send(victims, signum)
            time.sleep(rng.uniform(0, 0.3))  # then all are killed, as by a platform
        else:
            told = self._tell(victims)
            wait_until(
                lambda: have_ended(everyone) or any(w.code == EARLY for w in victims),
                "the end after SIGTERM",
                say=cluster.story(),
            )
        send(everyone, signal.SIGKILL)
        return told

    def _tell(self, victims: Sequence[Worker]) -> Told | None:
        self._here.slow_down()
        listening = tuple(worker for worker in victims if worker.lines("listens"))
        is_sent = send(victims, signal.SIGTERM)
        return Told(time.monotonic(), listening) if is_sent else None

    def _await(self, moment: str, everyone: Sequence[Worker]) -> None:
        if moment in WORDS:
            word, most = WORDS[moment]
            count, worker = self._rng.randint(1, most), self._rng.choice(everyone)
            wait_until(
                lambda: len(worker.lines(word)) >= count or have_ended(everyone), word
            )
        time.sleep(self._rng.uniform(0, SECONDS[moment]))

    # --- checks ----------------------------------------------------------------------

    def _is_finished_after(self, cluster: Cluster, told: Told | None) -> bool:
        """Checks exit codes and steps of a cluster that ends."""
        codes = cluster.wait()
        self._say(codes, "from", self._next_step, *(len(trained([w])) for w in cluster))
        committed = codes == [RESTART] * len(codes)
        finished = codes == [0] * len(codes)
        by_signal = {EARLY, -signal.SIGKILL} & set(codes)
        assert (committed and told) or finished or by_signal, cluster.story()
        has_trained = self._check_steps(cluster)
        if told is not None:
            self._check_told(cluster, told)
            ends = "restarted" if committed else "finished"
            self.ends["ended by SIGTERM" if by_signal else ends] += 1
        # Steps lost by an earlier SIGKILL stay lost until a step of a later cluster.
        if has_trained and (committed or finished):
            self._may_be_lost = 0
        if finished:
            assert self._next_step == len(self._steps), cluster.story()
        return finished

    def _check_told(self, cluster: Cluster, told: Told) -> None:
        """Checks that workers finish only the current step after SIGTERM.

        So training may end only if the current step was the last step.
        """
        is_over = self._next_step == len(self._steps)
        by_signal = [worker for worker in told.listening if worker.code == EARLY]
        assert is_over or not by_signal, cluster.story()
        longest = max((trained([worker]) for worker in cluster), key=len)
        began = first_times(cluster)
        late = [step for step in longest if began[step] > told.at + HEARD_WITHIN]
        # Without an earlier step, a worker without SIGTERM may begin a step before the
        # other worker's handler listens.
        most = int(self._fit.world > 1 and late == longest)
        assert len(late) <= most, (
            f"{cluster.story()}\ntold at {told.at}, and began {late}"
        )

    def _check_steps(self, cluster: Cluster) -> bool:
        """Checks that no step is skipped, and no committed step is repeated.

        Returns:
            Whether the cluster trained a step.
        """
        found = [trained([worker]) for worker in cluster]
        longest = max(found, key=len)
        if not longest:
            return False
        first = self._steps.index(longest[0])
        earliest = self._next_step - self._may_be_lost
        assert earliest <= first <= self._next_step, cluster.story()
        for steps in found:
            assert steps == self._steps[first : first + len(steps)], cluster.story()
        self._next_step = first + len(longest)
        # A save is written during later steps, and protects only after its commit.
        self._may_be_lost = 2 * self._save_freq
        return True


def have_ended(workers: Sequence[Worker]) -> bool:
    return all(worker.code is not None for worker in workers)


def first_times(workers: Iterable[Worker]) -> dict[tuple[int, int], float]:
    """Returns the time of each step, on the first worker that began it."""
    found: dict[tuple[int, int], float] = {}
    for worker in workers:
        for epoch, batch, at in worker.lines("begins"):
            step = int(epoch), int(batch)
            found[step] = min(float(at), found.get(step, math.inf))
    return found


def send(workers: Sequence[Worker], signum: int) -> bool:
    """Signals the running workers; returns whether any was running."""
    is_sent = False
    for worker in workers:
        if worker.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signum)
                is_sent = True
    return is_sent
