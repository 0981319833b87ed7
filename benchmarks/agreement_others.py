"""The agreement protocols of TensorFlow's handler and of JAX, on the simulated store.

This module has only the messages, as the sources of TensorFlow and JAX send them, and
no boundary and no save. In both protocols each worker receives decisions on one thread,
so one simulated process is one worker.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from tests.cluster.simulated_store import Request, SimulatedStore
from tests.cluster.timeline import Process, Timeline

TRAVEL_MS = 1
MESSAGES_A_MS = 20
VALUES_A_MESSAGE = 500
"""Values that travel while the store serves one message: in 50 us a line of 10 Gbit/s
carries 62 KB, and a key with its value has about 120 bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Faults and the notice of a simulated cluster.

    Attributes:
        workers: number of workers; worker 0 runs the store.
        noticed: the worker that receives the notice.
        at_ms: time of the notice in milliseconds.
        dead: workers that crashed before the notice, as the service reports.
        seed: seed of all other random choices.
    """

    workers: int
    noticed: int
    at_ms: int
    dead: frozenset[int] = frozenset()
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Result of an agreement; times are seconds since the notice.

    Attributes:
        known: time at which the last living worker knew the step; None: never.
        through: time at which the worker with the notice continued; None: never.
        messages: messages that the store served, per worker of the cluster.
        values: number of values that each worker has read from other workers.
    """

    known: float | None
    through: float | None
    messages: float
    values: int


class _Protocol:
    """Simulates workers that exchange messages through one store after the notice."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.processes = [Process() for _ in range(scenario.workers)]
        self.store = SimulatedStore(
            self.timeline,
            self.processes[0],
            lambda: TRAVEL_MS,
            lambda: False,
            MESSAGES_A_MS,
        )
        self.alive = [j for j in range(scenario.workers) if j not in scenario.dead]
        self.known: dict[int, int] = {}
        self.through: int | None = None

    def run(self) -> Agreed:
        """Runs the workers until the notice, and then until they agree."""
        self.listen()
        while self.timeline.step(self.scenario.at_ms):
            pass
        before = self.store.served
        self.timeline.at(self.scenario.at_ms, self.notice)
        while self.timeline.step(10**9):
            pass
        all_know = len(self.known) == len(self.alive)
        return Agreed(
            known=self._since(max(self.known.values())) if all_know else None,
            through=None if self.through is None else self._since(self.through),
            messages=(self.store.served - before) / self.scenario.workers,
            values=self.values(),
        )

    def listen(self) -> None:
        """Sends the requests that the workers make before the notice."""
        raise NotImplementedError

    def notice(self) -> None:
        """Delivers the notice to one worker."""
        raise NotImplementedError

    def values(self) -> int:
        """Returns the number of values that each worker reads."""
        raise NotImplementedError

    def get(self, worker: int, key: str, then: Callable[[], None]) -> None:
        """Sends a read that waits until the key exists."""
        self._send(worker, key, None, then)

    def insert(self, worker: int, key: str, then: Callable[[], None]) -> None:
        """Sends an insert; the inserted value does not matter."""
        self._send(worker, key, "1", then)

    def _send(
        self, worker: int, key: str, value: str | None, then: Callable[[], None]
    ) -> None:
        process = self.processes[worker]
        answered = functools.partial(_forget, then)
        self.store.send(Request(process, key, value, answered, lambda: None))

    def _since(self, ms: int) -> float:
        return (ms - self.scenario.at_ms) / 1000


def _forget(then: Callable[[], None], text: str) -> None:
    then()


class TensorFlow(_Protocol):
    """`tf.distribute.experimental.PreemptionCheckpointHandler`.

    The worker with the notice decides alone, by its own counter. Then the worker reads
    the acknowledgements of all workers on the training thread, in sequence, without a
    timeout (failure_handling.py of TensorFlow 2.21). The protocol assumes that all
    workers are within one step of each other.
    """

    def listen(self) -> None:
        for worker in self.alive:
            heard = functools.partial(self._hear, worker)
            self.get(worker, "RUN_TO_CHECKPOINT", heard)

    def notice(self) -> None:
        first = functools.partial(self._read, 0)
        self.insert(self.scenario.noticed, "RUN_TO_CHECKPOINT", first)

    def values(self) -> int:
        return 1

    def _hear(self, worker: int) -> None:
        self.known[worker] = self.timeline.now
        self.insert(worker, f"RECEIVED_SIGNAL/{worker}", lambda: None)

    def _read(self, worker: int) -> None:
        if worker == self.scenario.workers:
            self.through = self.timeline.now
            return
        following = functools.partial(self._read, worker + 1)
        self.get(self.scenario.noticed, f"RECEIVED_SIGNAL/{worker}", following)


class Jax(_Protocol):
    """The preemption sync manager of JAX and XLA.

    All workers insert their counters and wait at a barrier of the service. Then each
    worker reads all counters, in one reply (preemption_sync_manager.cc). If a worker
    does not reach the barrier, the barrier fails for all workers after three minutes.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._at_barrier: list[int] = []

    def listen(self) -> None:
        for worker in self.alive:
            self.get(worker, "NOTICE", functools.partial(self._hear, worker))

    def notice(self) -> None:
        self.insert(self.scenario.noticed, "NOTICE", lambda: None)

    def values(self) -> int:
        return self.scenario.workers

    def _hear(self, worker: int) -> None:
        meet = functools.partial(self._ask, 1, functools.partial(self._meet, worker))
        self.insert(worker, f"COUNTER/{worker}", meet)

    def _meet(self, worker: int) -> None:
        self._at_barrier.append(worker)
        if len(self._at_barrier) < self.scenario.workers:
            return
        length = 1 + self.scenario.workers // VALUES_A_MESSAGE
        for each in self._at_barrier:
            answer = functools.partial(self._answer, each)
            read = functools.partial(self._ask, length, answer)
            self.timeline.after(self.store.serve() + TRAVEL_MS, read)

    def _answer(self, worker: int) -> None:
        self.timeline.after(TRAVEL_MS, functools.partial(self._know, worker))

    def _know(self, worker: int) -> None:
        self.known[worker] = self.timeline.now
        if worker == self.scenario.noticed:
            self.through = self.timeline.now

    def _ask(self, length: int, served: Callable[[], None]) -> None:
        """Sends a call of the service other than a read or an insert of one key."""

        def arrive() -> None:
            self.timeline.after(self.store.serve(length), served)

        self.timeline.after(TRAVEL_MS, arrive)
