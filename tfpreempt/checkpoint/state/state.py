"""The class State: a named value, saved with the step and loaded after a restart."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TypeVar

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.state import encoding
from tfpreempt.core.compat import add_note
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files, LocalFiles, create

_log = logging.getLogger(__name__)

RESERVED = "tfpreempt."
_MOST_IN_MEMORY = 64 << 20  # bytes; `try_states` writes a larger State to the disk
_PIECE_BYTES = 1 << 23  # between two pieces of a file, a save may be cancelled
_MOST_STEPS = 1 << 63  # as in a manifest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """The contents of a State's file, copied while training waits, written later.

    Attributes:
        size: bytes of memory that the copies take.
        pieces: the bytes of the file, which another thread may read, once.
    """

    size: int
    pieces: Iterator[bytes | memoryview]


class StateRegistry:
    """The States that a commit includes, by name.

    Has only weak references: if the program drops a State, the State is no longer
    registered, and later commits lack the State. Methods may be called on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: weakref.WeakValueDictionary[str, State] = (
            weakref.WeakValueDictionary()
        )
        self._names: set[str] = set()  # includes names of garbage-collected States

    def add(self, state: State) -> None:
        """Registers a State.

        Raises:
            DuplicateStateError: a different registered State has the name.
        """
        with self._lock:
            if (other := self._by_name.setdefault(state.name, state)) is not state:
                raise errors.DuplicateStateError(
                    f"A State named {state.name!r} is already registered: {other!r}. "
                    "Names must be unique; rename one State, or call unregister() on "
                    "the older State first."
                )
            self._names.add(state.name)

    def remove(self, state: State) -> None:
        """Removes a State; ignores a State that is not registered."""
        with self._lock:
            if self._by_name.get(state.name) is state:
                del self._by_name[state.name]
                self._names.discard(state.name)

    def gone(self) -> list[str]:
        """Returns the names of States that were garbage-collected, if no new State has
        the name."""
        with self._lock:
            return sorted(self._names.difference(self._by_name.keys()))

    def in_order(self) -> tuple[State, ...]:
        """Returns the registered States in name order, equal on every worker."""
        with self._lock:
            return tuple(state for _, state in sorted(self._by_name.items()))


REGISTRY = StateRegistry()


class _Complete(abc.ABCMeta):
    """Metaclass of State; raises an error if an incomplete State is created.

    A State is incomplete if its class defines `save` without `load` or `load` without
    `save`, or if its `__init__` did not call `State.__init__`, which registers the
    State. Without the error, commits would lack the State, or a restore would skip it.
    """

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        if issubclass(cls, State) and (
            (cls.save is State.save) != (cls.load is State.load)
        ):
            has, lacks = (
                ("load", "save") if cls.save is State.save else ("save", "load")
            )
            raise errors.ConfigurationError(
                f"{cls.__name__} defines {has}() but not {lacks}(); expected both "
                "methods or neither, because a value that is saved must be loaded "
                f"after a restart. Define {lacks}()."
            )
        made: T = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if isinstance(made, State) and not hasattr(made, "_registry"):
            raise errors.ConfigurationError(
                f"{cls.__name__}.__init__() did not call super().__init__(name), so "
                "this State has no name and would not be saved. Call "
                f"super().__init__(name) in {cls.__name__}.__init__()."
            )
        return made


class State(metaclass=_Complete):
    """User-defined state that is saved with every checkpoint.

    Subclass State, implement `save()` and `load()`, and keep a reference to the object:
    as long as the object exists, it is part of every commit. In the base class `save`,
    `load` and `sync` do nothing.

    Args:
        name: name that is unique among the existing States, and usable as a file name.
        per_worker: whether every worker saves its own copy; by default only the chief's
            copy is saved, and restored on every worker.
        registry: registry to which the State is added, so that commits include the
            State; with None, commits do not include the State.

    Raises:
        DuplicateStateError: an existing State has this name.
        ConfigurationError: the name is not usable as a file name, or is reserved for
            tfpreempt.
    """

    _is_reserved = False  # True in tfpreempt's own States: allows RESERVED names
    _is_optional = False  # True: no warning is logged if a commit lacks the State

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
                f"State name {name!r} begins with {RESERVED!r}, which is reserved for "
                "the States of tfpreempt. Rename the State."
            )
        self.per_worker = per_worker
        self._registry = registry
        if registry is not None:
            registry.add(self)

    def save(self, fileobj: IO[bytes]) -> None:
        """Writes the state to a file.

        Called on the main thread: on the chief only, or on every worker for a State
        with `per_worker=True`.
        """

    def load(self, fileobj: IO[bytes]) -> None:
        """Restores the state from a file written by `save`.

        Called on the main thread.
        """

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores the state after the number of workers has changed.

        Called in place of `load`, only for a State with `per_worker=True`, on the main
        thread. A class must override the method if its state is to survive a restart
        with more or fewer workers.

        Args:
            files: file of every previous worker, in worker order; None for a missing
                file.
            worker: index of this worker.
            num_workers: current number of workers.

        Raises:
            CheckpointMismatchError: the class does not override the method.
        """
        raise no_rule(self, len(files), num_workers)

    def validate(self, fileobj: IO[bytes]) -> None:
        """Checks that `load` can read a file; does not change the State.

        Called on the chief before a restore. If the method raises an error for a State
        of the newest commit, an older commit is restored.

        Args:
            fileobj: file written by `save`.

        Raises:
            CheckpointCorruptedError: `load` could not read the file.
        """

    def sync(self) -> None:
        """Prepares the State for `save`, for example by averaging over the workers.

        Called on every worker, for the States in name order, so the method may use
        collective operations.
        """

    def should_save(self) -> bool:
        """Returns whether the next commit includes the State; called before `save`."""
        return True

    def _fit_is_committed(self) -> None:
        """Called after the last commit of a fit that has the State as a callback."""

    def _needs_every_worker(self) -> bool:
        """Returns whether a commit is useless if the file of a worker is missing.

        True for a State whose value is divided among the workers.
        """
        return False

    def _capture(self) -> Capture | None:
        """Returns a copy of the state, which is written while training continues; None
        if `save` is to be called at once. Called in place of `save`, on the main
        thread, in an asynchronous save."""
        return None

    def _try_save(self) -> None:
        """Calls `save` with a temporary file, to find out whether `save` raises an
        error."""
        with tempfile.SpooledTemporaryFile(_MOST_IN_MEMORY) as file:
            self.save(file)

    def unregister(self) -> None:
        """Excludes the State from later commits."""
        if self._registry is not None:
            self._registry.remove(self)

    def __repr__(self) -> str:
        kind = "per_worker" if self.per_worker else "replicated"
        return f"<{type(self).__name__} {self.name!r} {kind}>"


class WorkerSteps(State):
    """Number of steps that a worker has completed: workers may run different numbers of
    steps, and the step of a commit is the chief's number.

    Args:
        steps: the number to save; `load` replaces the number.
    """

    _is_reserved = True

    def __init__(self, steps: int) -> None:
        self.steps = steps
        super().__init__("tfpreempt.steps", per_worker=True, registry=None)

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(b"%d" % self.steps)

    def load(self, fileobj: IO[bytes]) -> None:
        text = fileobj.read(20)
        if not text.isdigit() or int(text) >= _MOST_STEPS:
            raise errors.CheckpointCorruptedError(
                f"The saved state of {self!r} begins with {text!r}; expected a number "
                "of steps."
            )
        self.steps = int(text)


def no_rule(state: State, before: int, now: int) -> errors.CheckpointMismatchError:
    """Returns the error for a per-worker State whose class does not override `reshard`.

    Args:
        state: the State.
        before: number of workers that wrote the commit.
        now: current number of workers.
    """
    return errors.CheckpointMismatchError(
        f"{state!r} was saved by {before} workers, and this run has {now} workers. The "
        f"State has no rule to change the number of workers. Start {before} workers; "
        "or override reshard() of the State; or call unregister() of the State before "
        "the restore, so that the State keeps the initial value of the program."
    )


def check_state(given: Any, call: str) -> None:
    """Checks that an argument is a State.

    Args:
        given: value passed by a user.
        call: name of the called function, for the error.

    Raises:
        ConfigurationError: the value is not a State.
    """
    if isinstance(given, State):
        return
    advice = "pass the State object that keeps the value"
    if isinstance(given, type) and issubclass(given, State):
        advice = f"create an instance first: {given.__name__}(...)"
    elif isinstance(given, str | os.PathLike):
        advice = "pass the State object, not its name or a path"
    raise errors.ConfigurationError(
        f"{call} got {given!r} as the State; expected a tfpreempt.State: {advice}."
    )


def write_states(
    directory: str,
    states: Iterable[State],
    root: str = "",
    captured: list[tuple[State, str, Capture]] | None = None,
) -> int:
    """Writes each State to a separate file.

    Args:
        directory: directory of the files; created with the first file.
        states: States to write.
        root: directory above `directory`: symbolic links below it are not followed. By
            default, links are followed.
        captured: in an asynchronous save, list to which the function adds the States
            that `write_captured` writes: State, path of the file, and contents.

    Returns:
        The number of files written or captured.

    Raises:
        OSError: the disk failed.
        Exception: any error raised by the `save` of a State.
    """
    count = 0
    for state in states:
        if not state.should_save():
            continue
        path = os.path.join(directory, state.name + layout.STATE_SUFFIX)
        count += 1
        if captured is not None:
            with naming(state, "save"):
                capture = state._capture()
            if capture is not None:
                LocalFiles(root).make_dirs(directory)
                captured.append((state, path, capture))
                continue
        with create(path, root) as file, naming(state, "save"):
            state.save(file)
    return count


def write_captured(
    files: Files,
    captured: list[tuple[State, str, Capture]],
    check: Callable[[], None],
) -> None:
    """Writes the States that `write_states` has captured; called on any thread.

    Args:
        files: file system operations that make the changes.
        captured: the captured States; removed from the list, to free their memory.
        check: function called between two pieces of a file; raises an error if the save
            was cancelled.
    """

    def checked(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        for each in pieces:
            for start in range(0, len(each), _PIECE_BYTES):
                check()
                yield memoryview(each)[start : start + _PIECE_BYTES]

    while captured:
        state, path, capture = captured.pop()
        with naming(state, "save"):
            files.write(path, checked(capture.pieces))


def try_states(states: Iterable[State]) -> None:
    """Calls `save` of each State with a temporary file, and logs a warning if `save`
    fails, so that the user knows about the error before the first real save.

    Skips a State that overrides `sync`, because `sync` must be called before `save`,
    and may need every worker.
    """
    for state in states:
        if state._is_reserved or type(state).sync is not State.sync:
            continue
        try:
            if state.should_save():
                state._try_save()
        except Exception as error:  # noqa: BLE001 - from user code
            text = f"{error}".rstrip(".")
            if f"{state!r}" not in text:
                text = f"{state!r} cannot be saved: {type(error).__name__}: {text}"
            _log.warning(
                "%s. Until this error is corrected, every save fails, at a preemption "
                "too.",
                text,
            )


def sync_states(states: Iterable[State]) -> None:
    """Calls `sync` of every State, in the given order."""
    for state in states:
        with naming(state, "sync"):
            state.sync()


def read_state(directory: str, state: State) -> bool:
    """Loads a State from a directory filled by `write_states`.

    Returns:
        Whether the directory has a file of the State.
    """
    path = os.path.join(directory, state.name + layout.STATE_SUFFIX)
    with naming(state, "load"):
        try:
            file = file_reading.open_file(path)
        except FileNotFoundError:
            return False
        with file:
            state.load(file)
    return True


def check_state_file(path: str, state: State | None) -> None:
    """Checks that the file of a State can be read; does not change the State.

    Args:
        path: path of the file.
        state: State that saved the file, whose `validate` is called; None if the
            program does not have the State.

    Raises:
        CheckpointCorruptedError: the file cannot be read.
    """
    try:
        with file_reading.open_file(path) as file:
            is_in_parts = file.read(len(encoding.MAGIC)) == encoding.MAGIC
            file.seek(0)
            if is_in_parts:
                encoding.read_header(file)
                file.seek(0)
            if state is not None:
                state.validate(file)
    except OSError as error:
        raise errors.CheckpointCorruptedError(
            f"The State in {path!r} cannot be read: {error}"
        ) from error


@contextlib.contextmanager
def naming(state: State, method: str) -> Iterator[None]:
    """Returns a context that adds a note to an exception raised by a State's method.

    The class of the exception is unchanged, because callers distinguish errors by
    class.

    Args:
        state: the State that the note names.
        method: name of the method that the body calls, such as "save".
    """
    try:
        yield
    except Exception as error:
        add_note(error, f"This was raised by {method}() of {state!r}.")
        raise
