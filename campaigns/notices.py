"""Notices in every phase of a program: one or many, to one worker or to several."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.harness import (
    HEARD_WITHIN,
    RESTART,
    STEPS,
    Cluster,
    Place,
    Worker,
    Zygote,
    place,
    records,
    wait_until,
)

WAYS = {
    "tensorflow": {"run": 2, "scope": 2, "keras": 1, "tf_keras": 1},
    "jax": {"run": 1, "scope": 1},
}
STRATEGIES = {
    "tensorflow": {"none": 4, "mirrored": 2, "mwms": 1, "two workers": 3},
    "jax": {"none": 1, "two workers": 4},
}
"""Strategies, with weights. "mwms" is MultiWorkerMirroredStrategy with one worker."""

WORDS = ("whole", "asynchronous", "no service")
"""Words for programs on JAX, each with probability 1/2; see programs/jax_model.py."""

STARTS = ("import", "strategy", "construct")
ENDS = ("after", "export")
TRAINS_ONCE = ("trace", "last")
TRAINS = ("step", "validation", "between", "callbacks", "save")
WRITES = "write"
"""Phases, see programs/noticed.py. A start reaches the phases of TRAINS and WRITES
several times. Loops on JAX do not have the phase WRITES (a write of one tensor)."""

SENT = ("one", "two", "ten", "burst")
BURST = 0.05
MOMENT = 0.1
"""Longest duration of a phase, and longest delay of a notice in it, in seconds."""

DECIDED_WITHIN = 0.1
"""Seconds from the record of a notice until a boundary sees the decision, which another
thread makes. A step that the program entered by then is the last step."""

FRAMEWORK_TELLS_WITHIN = 2.0
"""Seconds from a signal to its notice, if the signal came after the strategy and before
the handler was created. The code of the framework receives such a signal."""

LIMIT = 120.0
KILLED = -signal.SIGTERM


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program under test.

    Attributes:
        way: way of training, of WAYS.
        strategy: name in STRATEGIES.
        words: more words of the strategy, on JAX.
    """

    way: str
    strategy: str
    words: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return 2 if self.strategy == "two workers" else 1

    def start(self, here: Place, *more: str) -> Cluster:
        name = "mwms" if self.world > 1 else self.strategy
        options = (f"--way={self.way}", f"--strategy={','.join([name, *self.words])}")
        config = name == "mwms"
        return here.start(
            "noticed.py", *options, *more, world=self.world, tf_config=config
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """The state of the run when the first signal was sent."""

    at: float  # time of the monotonic clock, which all processes of a machine share
    is_heard: bool  # whether a handler was listening at that time


def draw(rng: random.Random, by_weight: dict[str, int]) -> str:
    return rng.choices(list(by_weight), list(by_weight.values()))[0]


@functools.cache
def undisturbed(zygote: Zygote, program: Program) -> list[dict[str, Any]]:
    """Returns the results of a program without a notice."""
    with place(zygote) as here:
        cluster = program.start(here)
        cluster.expect(*[0] * program.world)
        return cluster.results()


class Run:
    """A program that is started repeatedly, and the number of trained steps.

    Args:
        here: directory of the run.
        program: the program.
        rng: source of all random choices.
    """

    def __init__(self, here: Place, program: Program, rng: random.Random) -> None:
        self._here = here
        self._program = program
        self._rng = rng
        self._trained = 0
        self._sent = rng.choice(SENT)
        self.counted = Counter[str]()

    def start(self, *more: str) -> Cluster:
        """Starts the program, and waits for its normal end."""
        cluster = self._start(*more)
        self._check(cluster, None)
        return cluster

    def _start(self, *more: str) -> Cluster:
        self._here.speed_up()
        return self._program.start(self._here, *more)

    def notice(self) -> str | None:
        """Starts the program, and sends signals to some of its workers.

        Returns:
            The phase of the first signal; None if all workers had ended before.
        """
        rng, world = self._rng, self._program.world
        phase = rng.choice(self._phases())
        is_protected = world > 1 or rng.random() < 0.75
        more = [
            f"--phase={phase}",
            f"--count={rng.randint(1, 3) if phase in (*TRAINS, WRITES) else 1}",
            f"--linger={rng.uniform(0, MOMENT):.3f}",
        ]
        if not is_protected:
            more.append("--unprotected")
        if has_grace := rng.random() < 0.25:
            more.append("--grace=30")
        if rng.random() < 0.5 and phase != WRITES:
            more.append("--sync-saves")
        if rng.random() < 0.25:
            more.append("--children")
        cluster = self._start(*more)
        workers = rng.sample(list(cluster), rng.randint(1, world))
        watched = rng.choice(workers)
        for worker in workers:
            worker.wait_line("began")  # earlier signals end the process
        wait_until(
            lambda: watched.lines("in") or watched.code is not None,
            f"in {phase}",
            say=cluster.story(),
        )
        told = None
        if watched.lines("in"):
            time.sleep(rng.uniform(0, MOMENT))
            told = self._send(workers)
        self._check(cluster, told, is_protected=is_protected, has_grace=has_grace)
        return phase if told else None

    def _phases(self) -> list[str]:
        """Returns the phases that the next start reaches."""
        found = [*STARTS, *ENDS]
        if self._trained > 0:
            found.append("restore")
        if self._trained < STEPS:
            found += [*TRAINS_ONCE, *TRAINS]
            found += [WRITES] * (self._here.framework == "tensorflow")
        return found

    def _send(self, workers: list[Worker]) -> Told | None:
        """Signals the workers and their children; returns None if all had ended."""
        rng = self._rng
        counts = {"one": 1, "two": 2, "ten": 10, "burst": rng.randint(3, 20)}
        count = counts[self._sent]
        pauses = [BURST / count if self._sent == "burst" else 0.0] * count
        told = None
        is_heard = any(worker.lines("listens") for worker in workers)
        self._here.slow_down()
        for pause in pauses:
            for worker in workers:
                children = [int(pid) for (pid,) in worker.lines("child")]
                for pid in rng.sample([worker.pid, *children], len(children) + 1):
                    if worker.code is None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGTERM)
                            self.counted["signals"] += 1
                            if pid == worker.pid and told is None:
                                told = Told(time.monotonic(), is_heard)
            time.sleep(pause)
        self.counted["notices"] += told is not None
        return told

    def _check(
        self,
        cluster: Cluster,
        told: Told | None,
        *,
        is_protected: bool = True,
        has_grace: bool = False,
    ) -> None:
        """Checks how the workers ended, and that they trained the next steps in order.

        After a notice a worker finishes the current step, and begins no further step. A
        worker may end normally only after the last step of the program.
        """
        codes, before = cluster.wait(LIMIT), self._trained
        for worker in cluster:
            steps = [int(number) for (number,) in worker.lines("step")]
            assert steps == [*range(before + 1, before + len(steps) + 1)], (
                f"{cluster.story()}\nsteps {steps} after step {before}"
            )
            self._trained = max(self._trained, before + len(steps))
        allowed = {0} if told is None else {0, RESTART}
        is_over = self._trained == STEPS
        if told and not is_protected and (is_over or not told.is_heard):
            allowed.add(KILLED)
        assert set(codes) <= allowed, f"{cluster.story()}\n{codes}"
        if 0 in codes:
            assert is_over, f"{cluster.story()}\n{codes}"
        if told is not None:
            last = self._last_step(cluster, told, before)
            trains_on = self._trained > last
            may_train_on = has_grace and self._has_committed(told, last)
            assert may_train_on or not trains_on, (
                f"{cluster.story()}\n{codes}, told at {told.at}: no step after {last} "
                "was to begin"
            )
            self.counted["trained on"] += trains_on
        ends = {0: "finished", RESTART: "restarted", KILLED: "killed"}
        self.counted.update(ends[code] for code in codes)

    def _last_step(self, cluster: Cluster, told: Told, before: int) -> int:
        """Returns the last step that a program may train after a notice.

        A process alone begins no step after its decision. Of two workers the worker
        that is a step ahead decides. So the newest step that either worker has entered
        counts, even if the worker is still in the collective save before that step.
        """
        limit = told.at + (HEARD_WITHIN if told.is_heard else FRAMEWORK_TELLS_WITHIN)
        if self._program.world > 1:
            # A worker without a signal may enter its first step early.
            return newest(cluster, "enters", limit) or before + 1
        notices = records(self._here.checkpoints, "notice")
        heard = [each["monotonic"] for each in notices if each["monotonic"] >= told.at]
        decided = [each + DECIDED_WITHIN for each in heard]
        return newest(cluster, "enters", min([limit, *decided])) or before

    def _has_committed(self, told: Told, last: int) -> bool:
        """Returns whether a commit served the notice, so that training may continue.

        A periodic save that was running at the time of the notice also serves the
        notice: nothing is written twice.
        """
        return any(
            commit["monotonic"] >= told.at
            and commit["step"] <= last
            and (commit["because"] == "preemption" or commit["step"] >= last - 1)
            for commit in records(self._here.checkpoints, "commit")
        )


def newest(cluster: Cluster, word: str, limit: float) -> int:
    """Returns the newest step with this word in a worker's output by `limit`, or 0."""
    said = (each for worker in cluster for each in worker.lines(word))
    return max((int(number) for number, at in said if float(at) <= limit), default=0)


@contextlib.contextmanager
def prepare(framework: str) -> Iterator[Trial]:
    """Context manager: runs the zygote process that forks workers.

    Args:
        framework: framework of the programs.
    """
    zygote = Zygote(framework)
    more = WORDS if framework == "jax" else ()

    def trial(rng: random.Random) -> Facts:
        way, strategy = draw(rng, WAYS[framework]), draw(rng, STRATEGIES[framework])
        words = tuple(word for word in more if rng.random() < 0.5)
        program = Program(way, strategy, words)
        with place(zygote) as here:
            run = Run(here, program, rng)
            phases = {"first in": run.notice(), "then in": run.notice()}
            results = run.start().results()
            assert results == undisturbed(zygote, program)
        return {
            "way": program.way,
            "strategy": program.strategy,
            **({"words": ", ".join(words) or "none"} if more else {}),
            **{when: phase for when, phase in phases.items() if phase},
            **run.counted,
        }

    with contextlib.closing(zygote):
        yield trial


CAMPAIGN = Campaign(
    name="notices",
    promise=(
        "SIGTERM reaches a program of one worker, or one of two workers. The "
        "program uses `run()`, a watch scope or `model.fit`. The signal comes once, "
        "twice, ten times at once or in a burst, to the process alone or to its "
        "children too. The moments are: imports, the strategy, the handler, the "
        "restore, the first trace, a step, a validation, between epochs, other "
        "callbacks, a periodic or an asynchronous save, the last step, after the "
        "last step, and an export.\n\n"
        "The process finishes the running step, begins no new step, and exits with "
        "the restart code; the restarted process trains the next step. With two "
        "workers, both finish the step that either worker is in. With a grace "
        "period of 30 s the process may continue training after the commit of that "
        "step. Only a signal during or after the last step allows a normal end. At "
        "the end all values are bit for bit those of an uninterrupted run. Without "
        "`handle_early_notices()` the signal itself may end a process that has no "
        "handler yet, or that has finished training."
    ),
    trials=260,
    short=3,
    mark="multiprocess",
    prepare=functools.partial(prepare, "tensorflow"),
    fixed=(
        "Under `handle_early_notices()`, a signal that arrived while Python was "
        "shutting down changed the exit code. Fixed "
        "(`handler/test_early_notice_processes.py`).",
        "If a process of a multiprocessing pool got two SIGTERMs, one from its pool "
        "and one from outside, the program never ended. The same happened if a signal "
        "killed a process of the pool while the process held the lock of the pool's "
        "queue. Fixed (`notice/test_signal_processes.py`).",
    ),
    labels={
        "signals": "signals to a process",
        "notices": "runs with a notice",
        "trained on": "runs that continued training after the commit",
        "restarted": "exits with the restart code",
        "finished": "normal ends",
        "killed": "ends by the signal itself",
        "way": "way of training",
        "first in": "phase of the first notice",
        "then in": "phase of the second notice",
    },
)

JAX_CAMPAIGN = dataclasses.replace(
    CAMPAIGN,
    name="jax-notices",
    promise=(
        "The same as `notices`, for loops on JAX: a jitted step with random keys, a "
        "`PyTreeState`, and a position in the data; in one process, or in two "
        "processes of `jax.distributed`. In half of the programs an array is divided "
        "among the processes, in half the steps end before they are computed, and "
        "in half JAX's preemption service is off. At the end all values are bit for "
        "bit those of an uninterrupted run."
    ),
    trials=120,
    short=2,
    prepare=functools.partial(prepare, "jax"),
    fixed=(
        "A single process that had called `jax.distributed.initialize()` lost a "
        "notice that arrived before the handler existed. Fixed "
        "(`multiprocess/test_moments.py::test_before_the_handler`).",
        "Under `handle_early_notices()`, a process that got a notice before "
        "`jax.distributed.initialize()` exited at once, and the other processes "
        "waited five minutes for this process. Fixed "
        "(`multiprocess/test_early_notices.py`).",
        "After training, a notice for process 0 ended process 0 at once. JAX then "
        "aborted the other process, which was about to exit. Fixed "
        "(`multiprocess/test_early_notices.py`).",
    ),
    again=((20261129, 43),),
    labels=CAMPAIGN.labels | {"words": "kind of program"},
)
