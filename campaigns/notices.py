"""Notices in every phase of a program, one or many at once."""

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
"""By weight. "mwms" is the multi-worker one of one worker."""

WORDS = ("whole", "asynchronous", "no service")
"""Each of them is drawn for half of the programs on JAX; see programs/jax_model.py."""

STARTS = ("import", "strategy", "construct")
ENDS = ("after", "export")
TRAINS_ONCE = ("trace", "last")
TRAINS = ("step", "validation", "between", "callbacks", "save")
WRITES = "write"
"""Phases, see programs/noticed.py; a start comes to the last ones more than once. On
JAX nothing is written by tensor in a loop."""

SENT = ("one", "two", "ten", "burst")
BURST = 0.05
MOMENT = 0.1
"""Seconds: at most so long a phase lasts, and a notice waits, from its beginning."""

DECIDED_WITHIN = 0.1
"""Seconds from the record of a notice until a boundary sees it: another thread decides
meanwhile. A step that was asked for by then is the last one."""

FRAMEWORK_TELLS_WITHIN = 2.0
"""Seconds from a signal between the strategy and the handler, which the framework's
code hears."""

LIMIT = 120.0
KILLED = -signal.SIGTERM


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is run.

    Attributes:
        way: of training.
        strategy: of STRATEGIES.
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
    """What was so when the first signal was sent."""

    at: float  # monotonic, which all processes of a machine share
    is_heard: bool  # whether a handler listened by then


def draw(rng: random.Random, by_weight: dict[str, int]) -> str:
    return rng.choices(list(by_weight), list(by_weight.values()))[0]


@functools.cache
def undisturbed(zygote: Zygote, program: Program) -> list[dict[str, Any]]:
    """The results of a program that nobody tells to go."""
    with place(zygote) as here:
        cluster = program.start(here)
        cluster.expect(*[0] * program.world)
        return cluster.results()


class Run:
    """A program that is started again and again, and the steps that it has trained.

    Args:
        here: where it runs.
        program: what.
        rng: draws everything.
    """

    def __init__(self, here: Place, program: Program, rng: random.Random) -> None:
        self._here = here
        self._program = program
        self._rng = rng
        self._trained = 0
        self._sent = rng.choice(SENT)
        self.counted = Counter[str]()

    def start(self, *more: str) -> Cluster:
        """Starts it, and lets it come to its end."""
        cluster = self._start(*more)
        self._check(cluster, None)
        return cluster

    def _start(self, *more: str) -> Cluster:
        self._here.speed_up()
        return self._program.start(self._here, *more)

    def notice(self) -> str | None:
        """Starts it, and tells some of its workers to go.

        Returns:
            In which phase; None where it had ended before.
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
            worker.wait_line("began")  # or it ends by the signal, as any program does
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
        """Those that the next start comes to."""
        found = [*STARTS, *ENDS]
        if self._trained > 0:
            found.append("restore")
        if self._trained < STEPS:
            found += [*TRAINS_ONCE, *TRAINS]
            found += [WRITES] * (self._here.framework == "tensorflow")
        return found

    def _send(self, workers: list[Worker]) -> Told | None:
        """Signals these workers, and their children; None where all had ended."""
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
        """How it ended, and that it trained the steps that were left, from the next.

        Once it was told it finishes the step that it is in, and begins none. It can end
        normally only if that was the last one.
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
        """The last step that a program may train which was told.

        A process alone makes none that it asked for once it had decided. Of
        two workers the one that is a step ahead decides, so what counts is where either
        asked whether to make a step: that may be before a save that both make.
        """
        limit = told.at + (HEARD_WITHIN if told.is_heard else FRAMEWORK_TELLS_WITHIN)
        if self._program.world > 1:
            # Who was not told may begin the first before the other has a handler.
            return newest(cluster, "enters", limit) or before + 1
        notices = records(self._here.checkpoints, "notice")
        heard = [each["monotonic"] for each in notices if each["monotonic"] >= told.at]
        decided = [each + DECIDED_WITHIN for each in heard]
        return newest(cluster, "enters", min([limit, *decided])) or before

    def _has_committed(self, told: Told, last: int) -> bool:
        """Whether the notice was served by a commit, after which it may train on.

        One that came in a periodic save is served by that: nothing is written twice.
        """
        return any(
            commit["monotonic"] >= told.at
            and commit["step"] <= last
            and (commit["because"] == "preemption" or commit["step"] >= last - 1)
            for commit in records(self._here.checkpoints, "commit")
        )


def newest(cluster: Cluster, word: str, limit: float) -> int:
    """The last step of which a worker has said this until then; 0 without one."""
    said = (each for worker in cluster for each in worker.lines(word))
    return max((int(number) for number, at in said if float(at) <= limit), default=0)


@contextlib.contextmanager
def prepare(framework: str) -> Iterator[Trial]:
    """The zygote that forks workers.

    Args:
        framework: of the programs.
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
