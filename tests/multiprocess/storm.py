"""A fit that is interrupted at random, again and again, until it comes to its end."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What was so when SIGTERM was sent."""

    at: float  # monotonic, which all processes of a machine share
    listening: tuple[Worker, ...]  # of those it was sent to


class Storm:
    """One fit, its interruptions, and what it must have kept of its steps.

    Args:
        here: where it runs.
        fit: of one process or several.
        rng: draws everything.

    Attributes:
        ends: how often which end followed SIGTERM.
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
        """Interrupts so often at most, then not any more; returns how often it did."""
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
        """For the report of a test that failed."""
        print(self._here.path.name, *words, file=sys.stderr)

    # --- one interruption ------------------------------------------------------------

    def _interrupt(self, cluster: Cluster) -> Told | None:
        """SIGTERM to some workers, or SIGKILL to all of them, at a random moment.

        Returns:
            None unless somebody lived who was told.
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
            time.sleep(rng.uniform(0, 0.3))  # whoever started them ends the others
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

    # --- what it left ----------------------------------------------------------------

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
        # Without a step of its own, what a SIGKILL lost before is still lost.
        if has_trained and (committed or finished):
            self._may_be_lost = 0
        if finished:
            assert self._next_step == len(self._steps), cluster.story()
        return finished

    def _check_told(self, cluster: Cluster, told: Told) -> None:
        """Who was told finishes the step that it is in, and begins none.

        So it can come to its end only where that was the last one.
        """
        is_over = self._next_step == len(self._steps)
        by_signal = [worker for worker in told.listening if worker.code == EARLY]
        assert is_over or not by_signal, cluster.story()
        longest = max((trained([worker]) for worker in cluster), key=len)
        began = first_times(cluster)
        late = [step for step in longest if began[step] > told.at + HEARD_WITHIN]
        # If none began before, who was not told may begin one before the other listens.
        most = int(self._fit.world > 1 and late == longest)
        assert len(late) <= most, (
            f"{cluster.story()}\ntold at {told.at}, and began {late}"
        )

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
        self._may_be_lost = 2 * self._save_freq
        return True


def have_ended(workers: Sequence[Worker]) -> bool:
    return all(worker.code is not None for worker in workers)


def first_times(workers: Iterable[Worker]) -> dict[tuple[int, int], float]:
    """When each step began, on the worker that was first."""
    found: dict[tuple[int, int], float] = {}
    for worker in workers:
        for epoch, batch, at in worker.lines("begins"):
            step = int(epoch), int(batch)
            found[step] = min(float(at), found.get(step, math.inf))
    return found


def send(workers: Sequence[Worker], signum: int) -> bool:
    """Signals those that live; returns whether there were any."""
    is_sent = False
    for worker in workers:
        if worker.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signum)
                is_sent = True
    return is_sent
