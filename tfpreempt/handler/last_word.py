"""The last word of a training: all workers end well, or all are started again.

Who ends with 0 is started by nobody again. Where one worker ended so, and another did
not, that one would come back and wait for it for ever. So each says how its final save
went, the chief gives the word when all have, and stays until all have heard it: the
store goes with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Iterator

from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.events import Key, Tombstone, Watch
from tfpreempt.coordination.gathering import Gathering
from tfpreempt.coordination.runtime import Runtime, answer
from tfpreempt.core.cluster import Cluster

SILENT = 10.0
"""Seconds after which TensorFlow takes a worker for lost that sends no heartbeat."""

_TICK_SECONDS = 0.05  # between two looks whether the word can still come
_SAID_WITHIN = 5.0  # seconds that a key may take to be there; the process ends then


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a training ended, for all workers.

    Attributes:
        failed: whose final save failed, and by what; "" if none did.
        lost: who was lost meanwhile; "" if nobody was.
    """

    failed: str = ""
    lost: str = ""


@dataclasses.dataclass(eq=False)
class LastWord:
    """How the workers of one process's cluster come to it. Main thread.

    Args:
        cluster: who the workers are.
        incarnation: namespace of the keys.
        runtime: access to the store.
        coordinator: this worker's; knows of a notice, and whether the store is gone.
    """

    cluster: Cluster
    incarnation: str
    runtime: Runtime
    coordinator: Coordinator
    _ends: int = 0  # that this process has come to; equal on all workers

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Where no step, and perhaps no deadline, ends a wait for the chief.

        Inside, the store is taken for gone if the chief falls silent.
        """
        is_over = threading.Event()
        if not self.cluster.is_chief:
            key = f"tfpreempt/{self.incarnation}/finishes/{self.cluster.worker}"
            self.runtime.watch_store(key, is_over, SILENT)
        try:
            yield
        finally:
            is_over.set()

    def agree(self, failed: str) -> End | None:
        """Says how this worker's final save went, and learns how it went for all.

        Args:
            failed: by what it failed here; "" if it did not.

        Returns:
            The chief's word; None where the chief was lost before it gave that.
        """
        self._ends += 1
        prefix = f"tfpreempt/{self.incarnation}/end/{self._ends}"
        mine = f"worker {self.cluster.worker}: {failed}" if failed else ""
        if self.cluster.is_chief:
            return self._give(prefix, mine)
        with self.listening():
            self._say(f"{prefix}/saved", mine)
            word = self._hear(f"{prefix}/word")
        if word is not None:
            self._say(f"{prefix}/bye", "")
        return word

    def _give(self, prefix: str, mine: str) -> End:
        """On the chief: hears of all, gives the word, and stays until all have it.

        Who is only slow is waited for: it may have the word, and end well.
        """
        deadlines = self.coordinator.deadlines
        told = self._gather(Key.DONE, f"{prefix}/saved", deadlines.left)
        failures = [mine, *(extra.get("failed", "") for _, extra in told.values())]
        failed = "; ".join(filter(None, failures))
        end = End(failed=failed, lost=_lost(told, "the final save"))
        text = keys.encode(end == End(), dataclasses.asdict(end))
        give = functools.partial(self.runtime.insert, f"{prefix}/word", text)
        answer(give, deadlines.left)
        byes = self._gather(Key.BYE, f"{prefix}/bye", deadlines.left)
        return dataclasses.replace(end, lost=end.lost or _lost(byes, "the exit"))

    def _gather(self, key: Key, name: str, seconds: float) -> dict[int, Answer]:
        """What each of the others says under a key, within so many seconds."""
        answers: dict[int, Answer] = {}

        def then(worker: int, value: object, extra: keys.Extra) -> None:
            answers[worker] = value, extra

        others = range(1, self.cluster.world)
        names = {j: f"{name}/{j}" for j in others}
        gathering = Gathering(self.runtime, key, names, by=0, then=then)
        late = gathering.wait(seconds)
        gathering.give_up(late, f"no answer within {seconds:.1f} s")
        return {j: answers.get(j, (Tombstone(), {})) for j in others}

    def _say(self, name: str, failed: str) -> None:
        key = f"{name}/{self.cluster.worker}"
        text = keys.encode(not failed, {"failed": failed})
        answer(functools.partial(self.runtime.insert, key, text), _SAID_WITHIN)

    def _hear(self, name: str) -> End | None:
        """The chief's word; None where it is lost.

        A worker that is told to go has no time to wait for it longer than its grace,
        and has done its part: it ends as if all went well.
        """
        given: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.runtime.get_each([name], lambda _, text: given.put(text))
        c = self.coordinator
        while True:
            with contextlib.suppress(queue.Empty):
                _, told = keys.decode(Key.DONE, given.get(timeout=_TICK_SECONDS))
                return End(failed=str(told["failed"]), lost=str(told["lost"]))
            if c.state.watch is Watch.GONE:
                return None
            if c.is_told_to_go and c.deadlines.left <= 0:
                return End()


Answer = tuple[object, keys.Extra]
"""A worker's value, or a tombstone, and what travels beside it."""


def _lost(answers: dict[int, Answer], where: str) -> str:
    """Who has not answered, for people."""
    lost = [j for j, (value, _) in answers.items() if isinstance(value, Tombstone)]
    if not lost:
        return ""
    workers, were = ("workers", "were") if len(lost) > 1 else ("worker", "was")
    return f"{workers} {', '.join(map(str, lost))} {were} lost in {where}"
