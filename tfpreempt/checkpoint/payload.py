"""What a saver asks of the part that TensorFlow, or a save_fn, writes."""

from __future__ import annotations

import dataclasses
import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpreempt import errors
from tfpreempt.checkpoint.restore import Candidate
from tfpreempt.checkpoint.state import State

_SAVE_PARAMETERS = ("checkpoint_number", "check_interval", "options")


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

    def restored(self, candidate: Candidate) -> None:
        """Lets a user's manager go on from the restored checkpoint."""
        ...

    def needs_peers(self) -> bool:
        """Whether `write` needs all workers at once (a collective read)."""
        ...

    def shard_states(self) -> Sequence[State]:
        """Per-worker States that belong to the payload."""
        ...


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
        has_shard: this worker wrote a shard.
        started_at: monotonic seconds at which writing started.
        stage_seconds: how long it took on this worker.
    """

    step: int
    attempt: str
    directory: str
    number: int
    prefix: str | None
    is_empty: bool
    has_shard: bool
    started_at: float
    stage_seconds: float


def save_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `tf.train.CheckpointManager.save` by name, as far as given.

    Raises:
        ConfigurationError: it has no such arguments.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(name, kind) for name in _SAVE_PARAMETERS]
    )
    try:
        return dict(signature.bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        raise errors.ConfigurationError(
            "Arguments for the save are those of tf.train.CheckpointManager.save "
            f"({', '.join(_SAVE_PARAMETERS)}); got {args!r}, {dict(kwargs)!r}: {error}"
        ) from error


def whole_number(value: Any) -> int:
    """A number, or the value of a variable or tensor."""
    return int(value.numpy() if hasattr(value, "numpy") else value)


def versions() -> dict[str, str]:
    """What is running now, by name; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in ("tensorflow", "keras", "tf_keras", "numpy"):
        if module := sys.modules.get(name):
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found
