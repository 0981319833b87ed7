"""A State: a named thing that is saved with the step and loaded after a restart."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TypeVar

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.state import encoding
from tfpreempt.core.python import add_note
from tfpreempt.storage import reading
from tfpreempt.storage.files import create

_log = logging.getLogger(__name__)

RESERVED = "tfpreempt."
_MOST_IN_MEMORY = 64 << 20  # bytes of a State that is only tried

T = TypeVar("T")


class StateRegistry:
    """The States that a commit takes along, by name; holds them weakly.

    Any thread may call it. A State that is garbage-collected disappears from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: weakref.WeakValueDictionary[str, State] = (
            weakref.WeakValueDictionary()
        )
        self._names: set[str] = set()  # of those too that were garbage-collected

    def add(self, state: State) -> None:
        """Registers a State.

        Raises:
            DuplicateStateError: its name is taken by another living State.
        """
        with self._lock:
            if (other := self._by_name.setdefault(state.name, state)) is not state:
                raise errors.DuplicateStateError(
                    f"A State named {state.name!r} is registered already: {other!r}. "
                    "Names must be unique; rename one, or call unregister() on the "
                    "old one first."
                )
            self._names.add(state.name)

    def remove(self, state: State) -> None:
        """Forgets a State; one that isn't registered is fine."""
        with self._lock:
            if self._by_name.get(state.name) is state:
                del self._by_name[state.name]
                self._names.discard(state.name)

    def gone(self) -> list[str]:
        """Names of the States that were garbage-collected, where none is left."""
        with self._lock:
            return sorted(self._names.difference(self._by_name.keys()))

    def in_order(self) -> tuple[State, ...]:
        """The living States in name order, which is the same on all workers."""
        with self._lock:
            return tuple(state for _, state in sorted(self._by_name.items()))


REGISTRY = StateRegistry()


class _Complete(abc.ABCMeta):
    """Refuses an object that would be missing from commits or restores, unnoticed.

    Either State's own `__init__` was not called, so that the object is registered
    nowhere, or its class has only one of `save` and `load`.
    """

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        if issubclass(cls, State) and (
            (cls.save is State.save) != (cls.load is State.load)
        ):
            has, lacks = (
                ("load", "save") if cls.save is State.save else ("save", "load")
            )
            raise errors.ConfigurationError(
                f"{cls.__name__} defines {has}() and not {lacks}(), so its value would "
                f"not survive a restart; expected both, or neither. Define {lacks}()."
            )
        made: T = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if isinstance(made, State) and not hasattr(made, "_registry"):
            raise errors.ConfigurationError(
                f"{cls.__name__}.__init__() did not call super().__init__(name), so "
                "this State has no name and would not be saved; call it there."
            )
        return made


class State(metaclass=_Complete):
    """A named thing with `save`, `load` and `sync`.

    Subclass it, keep a reference to the object, and every commit takes it along. The
    three methods of State itself do nothing.

    Args:
        name: unique among the living States; becomes a file name.
        per_worker: each worker saves its own; otherwise the chief's is the truth.
        registry: where to register; None keeps it to the caller.

    Raises:
        DuplicateStateError: a living State has this name.
        ConfigurationError: the name cannot be a file name, or is one of tfpreempt's.
    """

    _is_reserved = False  # True of tfpreempt's own, whose names begin with RESERVED

    def __init__(
        self,
        name: str,
        per_worker: bool = False,
        *,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        self.name = layout.check_state_name(name)
        if name.startswith(RESERVED) and not self._is_reserved:
            raise errors.ConfigurationError(
                f"State name {name!r} begins with {RESERVED!r}, as tfpreempt's own do. "
                "Rename the State."
            )
        self.per_worker = per_worker
        self._registry = registry
        if registry is not None:
            registry.add(self)

    def save(self, fileobj: IO[bytes]) -> None:
        """Writes the state, on the main thread of the worker whose state it is."""

    def load(self, fileobj: IO[bytes]) -> None:
        """Takes over what `save` wrote, on the main thread."""

    def fold(self, files: Sequence[IO[bytes] | None], worker: int, world: int) -> None:
        """Takes over what another number of workers saved, in place of `load`.

        Only of a State with `per_worker=True`; main thread. A State that is to survive
        a restart with more workers or fewer overrides this with its rule.

        Args:
            files: what each of those workers wrote, in their order; None of one whose
                part is not there.
            worker: index of this worker.
            world: number of workers now.

        Raises:
            CheckpointMismatchError: there is no rule, as here by default.
        """
        raise no_rule(self, len(files), world)

    def check_saved(self, fileobj: IO[bytes]) -> None:
        """Reads what `load` would read, and changes nothing.

        The start calls it on the chief, before anything is restored: a commit in which
        a State cannot be read is passed over for an older one.

        Raises:
            CheckpointDamagedError: `load` could not read it.
        """

    def sync(self) -> None:
        """Makes workers equal before `save`; called on all of them in name order."""

    def is_wanted(self) -> bool:
        """Whether there is anything to save now."""
        return True

    def unregister(self) -> None:
        """Takes the State out of later commits."""
        if self._registry is not None:
            self._registry.remove(self)

    def __repr__(self) -> str:
        kind = "per_worker" if self.per_worker else "replicated"
        return f"<{type(self).__name__} {self.name!r} {kind}>"


def no_rule(state: State, before: int, now: int) -> errors.CheckpointMismatchError:
    """Why what so many workers saved for themselves is not restored."""
    return errors.CheckpointMismatchError(
        f"{state!r} was saved by each of {before} workers, now there are {now}, and it "
        f"has no rule for that. Start {before} workers; or override fold() of the "
        "State, or call unregister() on it before the restore if the new workers are "
        "to begin it anew."
    )


def check_state(given: Any, call: str) -> None:
    """Refuses what is no State.

    Args:
        given: what a user passed.
        call: to what, for the error.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(given, State):
        return
    advice = "pass the object that keeps the value"
    if isinstance(given, type) and issubclass(given, State):
        advice = f"make one of this class first: {given.__name__}(...)"
    elif isinstance(given, str | os.PathLike):
        advice = "pass the State itself, not its name or a path"
    raise errors.ConfigurationError(
        f"{call} got {given!r} as the State; expected a tfpreempt.State: {advice}."
    )


def write_states(directory: str, states: Iterable[State], root: str = "") -> int:
    """Writes each State into a file of its own.

    Args:
        directory: made if need be, and only if there is something to write.
        states: those to write.
        root: the directory below which no link is followed.

    Returns:
        The number of files written.

    Raises:
        OSError: the disk; anything that a State's own `save` raises.
    """
    count = 0
    for state in states:
        if not state.is_wanted():
            continue
        path = os.path.join(directory, state.name + layout.STATE_SUFFIX)
        with create(path, root) as file, naming(state, "save"):
            state.save(file)
        count += 1
    return count


def try_states(states: Iterable[State]) -> None:
    """Warns of States that cannot be saved as they are; nothing is kept.

    One with a `sync` of its own is left out, because that may need all workers.
    """
    for state in states:
        if state._is_reserved or type(state).sync is not State.sync:
            continue
        try:
            if state.is_wanted():
                with tempfile.SpooledTemporaryFile(_MOST_IN_MEMORY) as file:
                    state.save(file)
        except Exception as error:  # noqa: BLE001 - of the user's code
            _log.warning(
                "tfpreempt: %r cannot be saved: %s: %s. As long as that is so no save "
                "succeeds, at a preemption neither. Mend its save().",
                state,
                type(error).__name__,
                error,
            )


def sync_states(states: Iterable[State]) -> None:
    """Calls `sync` of each State, in the order given."""
    for state in states:
        with naming(state, "sync"):
            state.sync()


def read_state(directory: str, state: State) -> bool:
    """Loads one State from the directory that `write_states` filled.

    Returns:
        Whether there was something to load.
    """
    path = os.path.join(directory, state.name + layout.STATE_SUFFIX)
    with naming(state, "load"):
        try:
            file = reading.open_file(path)  # absent is an answer
        except FileNotFoundError:
            return False
        with file:
            state.load(file)
    return True


def check_state_file(path: str, state: State | None) -> None:
    """Tries whether a State's file can be read; nothing is changed.

    Args:
        path: the file.
        state: what it was saved from, if that is known.

    Raises:
        CheckpointDamagedError: it cannot.
    """
    try:
        with reading.open_file(path) as file:
            is_in_parts = file.read(len(encoding.MAGIC)) == encoding.MAGIC
            file.seek(0)
            if is_in_parts:
                encoding.read_header(file)
                file.seek(0)
            if state is not None:
                state.check_saved(file)
    except OSError as error:
        raise errors.CheckpointDamagedError(
            f"The State in {path!r} cannot be read: {error}"
        ) from error


@contextlib.contextmanager
def naming(state: State, method: str) -> Iterator[None]:
    """Adds to an exception of the body which State it comes from.

    The exception stays what it is, because callers tell errors apart by their class.
    """
    try:
        yield
    except Exception as error:
        add_note(error, f"This was raised by {method}() of {state!r}.")
        raise
