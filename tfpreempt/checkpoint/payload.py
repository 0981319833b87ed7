"""What a checkpoint holds of one worker, and what a saver asks of TensorFlow's part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.state import REGISTRY, State, StateRegistry
from tfpreempt.core.cluster import Cluster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a payload wrote on this worker.

    Attributes:
        number: the directory number in the own form.
        prefix: where a flat checkpoint lies; None in the own form.
        is_empty: a save_fn returned None: there is nothing to commit.
    """

    number: int
    prefix: str | None = None
    is_empty: bool = False


class Payload(Protocol):
    """The part of a checkpoint that TensorFlow, or a save_fn, writes."""

    def write(
        self,
        directory: str,
        step: int,
        prepare: Callable[[], None],
        declare: Callable[[str], None],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Written:
        """Takes part in the save on this worker; the chief writes.

        What needs all workers is done even where the rest fails: peers wait for it.

        Args:
            directory: where the own form goes.
            step: the step that is saved.
            prepare: makes the directory; to be called before anything is written. It
                may fail.
            declare: to be called with a flat prefix before anything is written there.
            args: the user's arguments for the save.
            kwargs: the user's keyword arguments for the save.
        """
        ...

    def committed(self) -> None:
        """Deletes what a user's manager no longer wants; on the chief."""
        ...

    def check(self, prefix: str) -> None:
        """Reads what `restore` reads first, and assigns nothing.

        Args:
            prefix: TensorFlow's files.

        Raises:
            CheckpointDamagedError: TensorFlow cannot read them.
        """
        ...

    def restore(self, prefix: str, *, with_data: bool = True) -> None:
        """Compares the structure, then restores this worker's objects.

        Args:
            prefix: TensorFlow's files.
            with_data: whether the dataset iterators in them are this worker's.
        """
        ...

    def restored(self, candidate: Entry) -> None:
        """Lets a user's manager go on from the restored checkpoint."""
        ...

    def needs_peers(self) -> bool:
        """Whether `write` needs all workers at once (a collective read)."""
        ...

    def shard_states(self) -> Sequence[State]:
        """Per-worker States that belong to the payload."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds of one worker.

    Attributes:
        cluster: who the workers are, and which one this is.
        payload: what TensorFlow or a save_fn writes; None for named States alone.
        random_state: this worker's random generators; None where they are not kept.
        registry: the named States that go along.
    """

    cluster: Cluster
    payload: Payload | None = None
    random_state: State | None = None
    registry: StateRegistry = REGISTRY

    @property
    def payload_states(self) -> Sequence[State]:
        """What this worker keeps apart of TensorFlow's part."""
        return [] if self.payload is None else self.payload.shard_states()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One worker's part of a save, durable but not committed.

    Attributes:
        step: the step that is saved.
        attempt: the save's identity, equal on all workers.
        directory: the staging directory.
        number: the directory number in the own form.
        prefix: where a flat checkpoint lies; None in the own form.
        is_empty: there is nothing to commit (save_fn returned None).
        started_at: monotonic seconds at which writing started.
    """

    step: int
    attempt: str
    directory: str
    number: int
    prefix: str | None
    is_empty: bool
    started_at: float
