"""The last word of a training: all workers end well, or all are started again.

Who ends with 0 is started by nobody again. Where one worker ended so, and another did
not, that one would come back and wait for it for ever. So the chief, once its final
save is over, asks who is there; each says how its own went; and then there is a word,
which all obey. It is a key that is inserted once: whoever has no time left inserts that
it is lost, and obeys what stands there. The chief stays until all have read it, for the
store goes with it. (The two phases of a distributed commit: what is left is a worker
that goes between its answer and the word, which is one message.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue

from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import PATIENCE, Coordinator
from tfpreempt.coordination.events import Key, Tombstone, Watch
from tfpreempt.coordination.gathering import Gathering
from tfpreempt.coordination.runtime import Runtime, answer
from tfpreempt.core.cluster import Cluster

_TICK_SECONDS = 0.05  # between two looks at the deadline
_RESERVE = 0.5  # seconds of a grace that the word itself may take
_SAID_WITHIN = 5.0  # seconds that a key may take to be there
_LONGEST = 500  # characters of what one worker says
_MOST = 3  # workers whose failures are told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a training ended, for all workers.

    Attributes:
        failed: whose final save failed, and by what; "" if none did.
        lost: who was lost, or had to go; "" if nobody was.
        is_committed: whether the chief's commit of the end is known to stand.
    """

    failed: str = ""
    lost: str = ""
    is_committed: bool = False


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

    def begin(self) -> None:
        """This worker has made its last step, of this training."""
        self._ends += 1

    def agree(self, failed: str) -> End | None:
        """Says how this worker's final save went, and learns how it went for all.

        Args:
            failed: by what it failed here; "" if it did not.

        Returns:
            What all obey; None where the chief was lost before it was said.
        """
        mine = ""
        if failed:
            mine = f"worker {self.cluster.worker}: {failed}"[:_LONGEST]
        return self._give(mine) if self.cluster.is_chief else self._hear(mine)

    def leave_early(self) -> None:
        """This worker does not wait for the others: they can end well without it,
        if it is not the chief."""
        if self.cluster.is_chief:
            me = "worker 0 has not waited for those who still train"
            self._decide(End(failed=me), _SAID_WITHIN)
        else:
            self._say("here")
            self._say("bye")

    def break_off(self, lost: str) -> None:
        """There is no common end, and this is why; nobody waits for this worker."""
        self._decide(End(lost=lost), _SAID_WITHIN)
        if not self.cluster.is_chief:
            self.leave_early()

    # --- the chief -------------------------------------------------------------------

    def _give(self, mine: str) -> End | None:
        self.runtime.insert(self._name("asks"), keys.encode(True), lambda held: None)
        here = self._gather(Key.DONE, "here")
        failures = [mine, *(str(extra.get("failed", "")) for _, extra in here.values())]
        is_committed = not mine
        end = self._decide(
            End(
                failed=_first(list(filter(None, failures))),
                lost=_lost(here),
                is_committed=is_committed,
            ),
            PATIENCE * self.coordinator.deadlines.save_timeout,
        )
        self._gather(Key.BYE, "bye")
        return end and dataclasses.replace(end, is_committed=is_committed)

    def _gather(self, key: Key, name: str) -> dict[int, tuple[object, keys.Extra]]:
        """What each of the others says: a value, or a tombstone, and what is beside."""
        others = range(1, self.cluster.world)
        missing: tuple[object, keys.Extra] = (Tombstone(), {})
        answers = dict.fromkeys(others, missing)

        def then(worker: int, value: object, extra: keys.Extra) -> None:
            answers[worker] = value, extra

        names = {j: self._name(f"{name}/{j}") for j in others}
        gathering = Gathering(self.runtime, key, names, by=0, then=then)
        began = self.coordinator.clock.monotonic()
        while gathering.wait(_TICK_SECONDS) and not self._is_gone:
            if self._is_late(began):
                gathering.give_up(gathering.missing, "it did not answer in time")
                gathering.wait(_RESERVE / 2)  # an answer may have come first
                break
        return answers

    # --- the others ------------------------------------------------------------------

    def _hear(self, mine: str) -> End | None:
        given: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        names = [self._name("asks"), self._name("word")]
        self.runtime.get_each(names, lambda index, text: given.put((index, text)))
        began = self.coordinator.clock.monotonic()
        end = None
        while end is None:
            with contextlib.suppress(queue.Empty):
                is_word, text = given.get(timeout=_TICK_SECONDS)
                if is_word:
                    end = _read(text)
                else:
                    self._say("here", mine)
                continue
            if self._is_gone:
                return None
            if self._is_late(began):
                end = self._decline(mine)
                if end is None:
                    return None
        self._say("bye")
        return end

    def _decline(self, mine: str) -> End | None:
        """No time is left: the word is that, if there is none yet."""
        lost = f"worker {self.cluster.worker} had no more time in the final save"
        end = self._decide(End(lost=lost), _RESERVE / 2)
        here = keys.encode(not mine, {"failed": mine})
        name = self._name(f"here/{self.cluster.worker}")
        self.runtime.insert(name, here, lambda held: None)  # it is waited for no more
        return end

    # --- all -------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        return f"tfpreempt/{self.incarnation}/end/{self._ends}/{what}"

    def _say(self, what: str, failed: str = "") -> None:
        key = self._name(f"{what}/{self.cluster.worker}")
        text = keys.encode(not failed, {"failed": failed})
        answer(functools.partial(self.runtime.insert, key, text), _SAID_WITHIN)

    def _decide(self, end: End, seconds: float) -> End | None:
        """Inserts the word; what it holds now, or None after so many seconds."""
        if self._is_gone:
            return None
        is_well = not (end.failed or end.lost)
        text = keys.encode(is_well, dataclasses.asdict(end))
        insert = functools.partial(self.runtime.insert, self._name("word"), text)
        held = answer(insert, seconds)
        return None if held is None else _read(held)

    @property
    def _is_gone(self) -> bool:
        return self.coordinator.state.watch is Watch.GONE

    def _is_late(self, since: float) -> bool:
        """Whether a wait that began then is over: a grace is, or the chief's patience.

        Without a grace a chief that lives may commit for as long as that takes it;
        one that falls silent is found out otherwise.
        """
        c = self.coordinator
        if c.deadlines.told is not None:
            return c.deadlines.left <= _RESERVE
        longest = PATIENCE * c.deadlines.save_timeout
        return self.cluster.is_chief and c.clock.monotonic() - since > longest


def _read(text: str) -> End:
    _, told = keys.decode(Key.DONE, text)
    return End(
        failed=str(told["failed"]),
        lost=str(told["lost"]),
        is_committed=told["is_committed"] is True,
    )


def _first(failures: list[str]) -> str:
    more = len(failures) - _MOST
    return "; ".join(failures[:_MOST]) + (f"; and {more} more" if more > 0 else "")


def _lost(answers: dict[int, tuple[object, keys.Extra]]) -> str:
    """Who has not answered, for people, and why that was not waited for."""
    whys = {
        j: str(extra.get("reason") or "it did not answer in time").rpartition(": ")[2]
        for j, (value, extra) in answers.items()
        if isinstance(value, Tombstone)
    }
    if not whys:
        return ""
    workers, were = ("workers", "were") if len(whys) > 1 else ("worker", "was")
    names, why = ", ".join(map(str, whys)), next(iter(whys.values()))
    return f"{workers} {names} {were} lost in the final save ({why})"
