"""The final vote: either every worker exits with 0, or every worker is restarted.

No platform restarts a worker after exit code 0. If only some workers exited with 0, a
restarted worker would wait for its peers for ever. So after the final save the chief
asks every worker for a vote: did the final save of the worker succeed? The chief then
inserts the outcome of all votes under the key `word` of the key-value store, and every
worker follows the outcome.

The key is insert-once. A worker that has no time to wait for the outcome inserts the
outcome "lost", and follows the value that the key then has: the first inserted outcome.
The chief hosts the key-value store, so the chief exits last, after every worker has
read the outcome.

(The protocol is a two-phase commit. A crash of a worker between its vote and the
outcome, the time of one message, is not covered.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue

from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import MAX_TIMEOUTS, Coordinator
from tfpreempt.coordination.key_gather import KeyGather
from tfpreempt.coordination.protocol_types import Key, Tombstone, WatcherState
from tfpreempt.coordination.store_executor import call_and_wait
from tfpreempt.core.cluster import Cluster

_TICK_SECONDS = 0.05  # time between two checks of the deadline
_RESERVE = 0.5  # seconds of a grace period reserved for the outcome
_INSERT_TIMEOUT = 5.0  # seconds allowed for the insert of a key
_LONGEST = 500  # maximum number of characters of a worker's vote
_MOST = 3  # maximum number of failures named in the outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """The outcome of the vote, equal on every worker.

    Attributes:
        failed: text that names the workers whose final save failed, with the errors; ""
            if every final save succeeded.
        lost: text that names the lost or preempted workers; "" if there are none.
        is_committed: whether the chief is known to have committed the final state.
    """

    failed: str = ""
    lost: str = ""
    is_committed: bool = False


@dataclasses.dataclass(eq=False)
class FinalVote:
    """Votes for this worker, and finds the common outcome.

    The main thread calls the methods.

    Args:
        cluster: the workers.
        incarnation: namespace of the keys, which identifies this start of all workers.
        coordinator: coordinator of this worker; gives the deadlines and the key-value
            store, and reports a loss of the store.

    Attributes:
        failures: by token of the run, the error of the final save or None, for runs
            that were closed before the last open run.
    """

    cluster: Cluster
    incarnation: str
    coordinator: Coordinator
    failures: dict[str, Exception | None] = dataclasses.field(default_factory=dict)
    _ends: int = 0  # number of votes begun so far; equal on every worker

    def start(self) -> None:
        """Begins a new vote, with new keys; called after the last step."""
        self._ends += 1

    def run(self, failed: str) -> TrainingOutcome | None:
        """Votes on the final save of this worker, and returns the common outcome.

        Args:
            failed: error of the final save on this worker; "" after a successful save.

        Returns:
            The outcome; None if the chief was lost before the outcome was known.
        """
        mine = ""
        if failed:
            mine = f"worker {self.cluster.worker}: {failed}"[:_LONGEST]
        return self._lead(mine) if self.cluster.is_chief else self._follow(mine)

    def leave(self) -> None:
        """Ends this worker's part in the vote, without waiting for the outcome.

        Called if this worker stops waiting for workers that still train. On a worker
        other than the chief, the method votes for success, so the workers that still
        train can later exit with 0. On the chief, the method inserts a failure as the
        outcome.
        """
        if self.cluster.is_chief:
            me = "worker 0 did not wait for the workers that still train"
            self._insert_outcome(TrainingOutcome(failed=me), _INSERT_TIMEOUT)
        else:
            self._insert("here")
            self._insert("bye")

    def abort(self, lost: str) -> None:
        """Inserts "lost" as the outcome, so that the peers stop waiting.

        Args:
            lost: text with the reason, for people.
        """
        self._insert_outcome(TrainingOutcome(lost=lost), _INSERT_TIMEOUT)
        if not self.cluster.is_chief:
            self.leave()

    # --- the chief -------------------------------------------------------------------

    def _lead(self, mine: str) -> TrainingOutcome | None:
        executor, asks = self.coordinator.executor, self._name("asks")
        executor.insert(asks, keys.encode(True), lambda held: None)
        here = self._gather(Key.DONE, "here")
        failures = [mine, *(str(extra.get("failed", "")) for _, extra in here.values())]
        is_committed = not mine
        end = self._insert_outcome(
            TrainingOutcome(
                failed=_first(list(filter(None, failures))),
                lost=_lost(here),
                is_committed=is_committed,
            ),
            MAX_TIMEOUTS * self.coordinator.deadlines.peer_timeout,
        )
        self._gather(Key.BYE, "bye")
        return end and dataclasses.replace(end, is_committed=is_committed)

    def _gather(self, key: Key, name: str) -> dict[int, tuple[object, keys.Extra]]:
        """Waits for a key of every peer; returns value and extra fields, by worker.

        For a peer without an answer, the value is a tombstone.

        Args:
            key: kind of the keys, which determines how a value is decoded.
            name: "here" for the votes; "bye" for the reports of workers that have read
                the outcome.
        """
        others = range(1, self.cluster.num_workers)
        missing: tuple[object, keys.Extra] = (Tombstone(), {})
        answers = dict.fromkeys(others, missing)

        def then(worker: int, value: object, extra: keys.Extra) -> None:
            answers[worker] = value, extra

        names = {j: self._name(f"{name}/{j}") for j in others}
        executor = self.coordinator.executor
        gathering = KeyGather(executor, key, names, by=0, then=then)
        began = self.coordinator.clock.monotonic()
        while gathering.wait(_TICK_SECONDS) and not self._is_gone:
            if self._is_late(began):
                gathering.give_up(
                    gathering.missing, "the worker did not answer in time"
                )
                gathering.wait(_RESERVE / 2)  # receive the tombstones or late answers
                break
        return answers

    # --- the others ------------------------------------------------------------------

    def _follow(self, mine: str) -> TrainingOutcome | None:
        given: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        names = [self._name("asks"), self._name("word")]
        self.coordinator.executor.get_each(names, lambda i, text: given.put((i, text)))
        began = self.coordinator.clock.monotonic()
        end = None
        while end is None:
            with contextlib.suppress(queue.Empty):
                is_word, text = given.get(timeout=_TICK_SECONDS)
                if is_word:
                    end = _read(text)
                else:
                    self._insert("here", mine)
                continue
            if self._is_gone:
                return None
            if self._is_late(began):
                end = self._decline(mine)
                if end is None:
                    return None
        self._insert("bye")
        return end

    def _decline(self, mine: str) -> TrainingOutcome | None:
        """Inserts "lost" as the outcome, because no time is left to wait.

        Then inserts this worker's vote, because the chief waits for the vote. Returns
        the outcome that counts, as in `_insert_outcome`.

        Args:
            mine: error of this worker's final save; "" after a successful save.
        """
        lost = f"worker {self.cluster.worker} ran out of time in the final save"
        end = self._insert_outcome(TrainingOutcome(lost=lost), _RESERVE / 2)
        self._insert("here", mine, seconds=0.0)  # no time is left for a wait
        return end

    # --- all -------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        return f"tfpreempt/{self.incarnation}/end/{self._ends}/{what}"

    def _insert(
        self, what: str, failed: str = "", seconds: float = _INSERT_TIMEOUT
    ) -> None:
        key = self._name(f"{what}/{self.cluster.worker}")
        text = keys.encode(not failed, {"failed": failed})
        insert = functools.partial(self.coordinator.executor.insert, key, text)
        call_and_wait(insert, seconds)

    def _insert_outcome(
        self, end: TrainingOutcome, seconds: float
    ) -> TrainingOutcome | None:
        """Inserts an outcome under the key `word`, where only the first insert counts.

        Returns the outcome that counts, perhaps of another worker; None if the
        key-value store is lost, or does not answer in time.

        Args:
            end: outcome as seen by this worker.
            seconds: time limit of the insert.
        """
        if self._is_gone:
            return None
        is_well = not (end.failed or end.lost)
        text = keys.encode(is_well, dataclasses.asdict(end))
        insert, word = self.coordinator.executor.insert, self._name("word")
        held = call_and_wait(functools.partial(insert, word, text), seconds)
        return None if held is None else _read(held)

    @property
    def _is_gone(self) -> bool:
        return self.coordinator.state.watch is WatcherState.GONE

    def _is_late(self, since: float) -> bool:
        """Returns whether a wait must end now.

        With a known deadline, the wait ends when only `_RESERVE` seconds are left.
        Without a deadline, the chief waits a few times the peer timeout, and the other
        workers wait without a limit, because the commit of the chief may take any time.
        (`StoreExecutor.watch_store` detects a crash of the chief.)

        Args:
            since: monotonic seconds at which the wait began.
        """
        c = self.coordinator
        if c.deadlines.terminates_at is not None:
            return c.deadlines.left <= _RESERVE
        longest = MAX_TIMEOUTS * c.deadlines.peer_timeout
        return self.cluster.is_chief and c.clock.monotonic() - since > longest


def _read(text: str) -> TrainingOutcome:
    _, record = keys.decode(Key.DONE, text)
    return TrainingOutcome(
        failed=str(record["failed"]),
        lost=str(record["lost"]),
        is_committed=record["is_committed"] is True,
    )


def _first(failures: list[str]) -> str:
    more = len(failures) - _MOST
    return "; ".join(failures[:_MOST]) + (f"; and {more} more" if more > 0 else "")


def _lost(answers: dict[int, tuple[object, keys.Extra]]) -> str:
    """Returns a text that names each worker without a vote and the reason; "" if every
    worker has voted.

    Args:
        answers: by worker, the vote and its extra fields, from `FinalVote._gather`.
    """
    whys = {
        j: str(extra.get("reason") or "the worker did not answer in time").rpartition(
            ": "
        )[2]
        for j, (value, extra) in answers.items()
        if isinstance(value, Tombstone)
    }
    if not whys:
        return ""
    workers, were = ("workers", "were") if len(whys) > 1 else ("worker", "was")
    names, why = ", ".join(map(str, whys)), next(iter(whys.values()))
    return f"{workers} {names} {were} lost in the final save ({why})"
