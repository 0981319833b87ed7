"""A fit that is interrupted at random, again and again, until it comes to its end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence

from tests.multiprocess.fits import Fit, trained
from tests.multiprocess.harness import RESTART, Cluster, Place, Worker, wait_until

PAUSE = 0.02
"""Seconds of each batch, so that there are moments within."""
MOMENTS = {"start": 1, "fit": 2, "batch": 5, "validation": 2}
"""After what a signal comes, by weight."""
SECONDS = {"start": 1.0, "fit": 1.5, "batch": 2 * PAUSE, "validation": 2 * PAUSE}
"""How long after it at most: imports take so long, and the restore and traces."""
WORDS = {"fit": ("began", 1), "batch": ("trained", 8), "validation": ("validates", 3)}
"""What the program prints, and how often at most it is awaited."""
KILLS = 0.2
"""Share of the signals that are SIGKILL."""
EARLY = -signal.SIGTERM
"""SIGTERM ends a process before its fit has a callback, and when the fit is over."""


class Storm:
    """One fit, its interruptions, and what it must have kept of its steps.

    Args:
        here: where it runs.
        fit: of one process or several.
        rng: draws everything.
    """

    def __init__(self, here: Place, fit: Fit, rng: random.Random) -> None:
        self._here = here
        self._fit = fit
        self._rng = rng
        self._steps = fit.steps()
        self._save_every = rng.choice((3, fit.batches))
        self._next_step = 0
        self._may_be_lost = 0

    def run(self, cycles: int) -> int:
        """Interrupts so often at most, then not any more; returns how often it did."""
        for done in range(cycles):
            if self._is_finished_after(self._interrupt(self._start())):
                return done
        assert self._is_finished_after(self._start())
        return cycles

    def _start(self) -> Cluster:
        more = (f"--pause={PAUSE}", f"--save-every={self._save_every}")
        self.last = self._fit.start(self._here, *more)
        return self.last

    def _say(self, *words: object) -> None:
        """For the report of a test that failed."""
        print(self._here.path.name, *words, file=sys.stderr)

    # --- one interruption ------------------------------------------------------------

    def _interrupt(self, cluster: Cluster) -> Cluster:
        """SIGTERM to some workers, or SIGKILL to all of them, at a random moment."""
        rng, everyone = self._rng, list(cluster)
        moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        is_kill = rng.random() < KILLS
        victims = rng.choice([everyone, *([each] for each in everyone)])
        signum = signal.SIGKILL if is_kill else signal.SIGTERM
        self._say(moment, signum.name, *map(everyone.index, victims))
        self._await(moment, everyone)
        send(victims, signum)
        if is_kill:  # whoever started them ends the others
            time.sleep(rng.uniform(0, 0.3))
        else:
            wait_until(
                lambda: have_ended(everyone) or any(w.code == EARLY for w in victims),
                "the end after SIGTERM",
                say=cluster.story(),
            )
        send(everyone, signal.SIGKILL)
        return cluster

    def _await(self, moment: str, everyone: Sequence[Worker]) -> None:
        if moment in WORDS:
            word, most = WORDS[moment]
            count, worker = self._rng.randint(1, most), self._rng.choice(everyone)
            wait_until(
                lambda: len(worker.lines(word)) >= count or have_ended(everyone), word
            )
        time.sleep(self._rng.uniform(0, SECONDS[moment]))

    # --- what it left ----------------------------------------------------------------

    def _is_finished_after(self, cluster: Cluster) -> bool:
        """Checks exit codes and steps of a cluster that ends."""
        codes = cluster.wait()
        self._say(codes, "from", self._next_step, *(len(trained([w])) for w in cluster))
        committed = codes == [RESTART] * len(codes)
        finished = codes == [0] * len(codes)
        by_signal = {EARLY, -signal.SIGKILL} & set(codes)
        assert committed or finished or by_signal, cluster.story()
        has_trained = self._check_steps(cluster)
        # Without a step of its own, what a SIGKILL lost before is still lost.
        if has_trained and (committed or finished):
            self._may_be_lost = 0
        if finished:
            assert self._next_step == len(self._steps), cluster.story()
        return finished

    def _check_steps(self, cluster: Cluster) -> bool:
        """No step is left out, and none is repeated that was committed.

        Returns whether there were any.
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
        # A save is written while steps go on, and is none before it is committed.
        self._may_be_lost = 2 * self._save_every
        return True


def have_ended(workers: Sequence[Worker]) -> bool:
    return all(worker.code is not None for worker in workers)


def send(workers: Sequence[Worker], signum: int) -> None:
    """Signals those that live."""
    for worker in workers:
        if worker.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signum)
