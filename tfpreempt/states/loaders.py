"""`LoaderState`: a ready-made State for the position of a data loader.

A loader is an object with `get_state()` and `set_state(state)`, like Grain's iterators,
or with `state_dict()` and `load_state_dict(state)`, like torchdata's loaders. The saved
position is the position after the last element that the program has received. A loader
that reads ahead must itself subtract the elements that the program has not received.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
import re
from collections.abc import Callable
from typing import IO, Any

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    decode,
    encode,
    read_parts,
    readable,
    write_parts,
)
from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry

_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_KIND = "loader"
_ADDRESS = re.compile(r"<[\w.<>]{1,99} object at 0x\w+>")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAccessor:
    """The two methods that read and set the position of a loader.

    Attributes:
        get: method that returns the state of the loader.
        set: method that sets the state of the loader; may raise any exception.
    """

    get: Callable[[], Any]
    set: Callable[[Any], object]

    def restore(self, state: Any, loader: str) -> None:
        """Sets the loader to a saved state.

        Args:
            state: saved result of `get`.
            loader: description of the loader for an error message.

        Raises:
            CheckpointMismatchError: the loader does not accept the state.
        """
        try:
            self.set(state)
        except Exception as error:
            raise errors.CheckpointMismatchError(
                f"{loader} does not accept the saved state: {type(error).__name__}: "
                f"{error}. Build the loader as the interrupted run did, or use another "
                "checkpoint directory."
            ) from error


def accessor_of(loader: Any) -> LoaderAccessor | None:
    """Returns the two methods of a loader; None if the object is not a loader."""
    if isinstance(loader, type):
        return None
    for names in _PAIRS:
        get, put = (getattr(loader, name, None) for name in names)
        if callable(get) and callable(put):
            return LoaderAccessor(get=get, set=put)
    return None


class LoaderState(State):
    """Saves the position of a data loader, such as an iterator of Grain.

    The State can be loaded before or after the first element is read, if the loader
    supports both. Build the loader with the same data and options as before the
    restart: most loaders save little more than a number, and do not detect other data.

    Args:
        name: name of the State, unique among the existing States.
        loader: an object with `get_state()` and `set_state(state)`, or `state_dict()`
            and `load_state_dict(state)`. For Grain, the iterator: `iter(dataset)`.
        per_worker: whether each worker saves its own position; False: the chief's
            position is restored on every worker.
        registry: registry of States; None does not register the State.

    Attributes:
        loader: the loader; assign the new iterator after each `iter(dataset)`. The
            loader's state may consist of None, bools, numbers, strings, bytes, NumPy
            arrays, and lists, tuples and dicts of these values.

    Raises:
        ConfigurationError: the object has neither of the two pairs of methods.
    """

    def __init__(
        self,
        name: str,
        loader: Any,
        *,
        per_worker: bool = True,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        _check(loader, f"LoaderState {name!r}")
        super().__init__(name, per_worker, registry=registry)
        self.loader = loader

    def save(self, fileobj: IO[bytes]) -> None:
        arrays: list[bytes] = []
        what = f"The state of the loader of {self!r}"
        state = _check(self.loader, repr(self)).get()
        try:
            encoded = encode(state, what, arrays, takes_bytes=True)
        except RecursionError:
            raise errors.SaveError(
                f"{what} is nested too deep, or contains itself; expected numbers, "
                "strings, arrays, lists and dicts without a cycle."
            ) from None
        write_parts(fileobj, {"kind": _KIND, "state": encoded}, arrays)

    def _try_save(self) -> None:
        file = io.BytesIO()
        self.save(file)
        if found := _ADDRESS.search(file.getvalue().decode("latin-1")):
            _log.warning(
                "the state of the loader of %r contains %r, with the address of an "
                "object, which differs in every process, so a restart may refuse the "
                "state. Define __repr__ in the class of the object",
                self,
                found[0],
            )

    def load(self, fileobj: IO[bytes]) -> None:
        state = self._read(fileobj)
        accessor = _check(self.loader, repr(self))
        accessor.restore(state, f"The loader of {self!r}")

    def validate(self, fileobj: IO[bytes]) -> None:
        self._read(fileobj)

    def _read(self, fileobj: IO[bytes]) -> Any:
        header, arrays = read_parts(fileobj)
        with readable(self):
            if header["kind"] != _KIND:
                raise ValueError(
                    f"expected the kind {_KIND!r}, got {str(header['kind'])[:80]!r}"
                )
            return decode(header["state"], arrays)


def _check(loader: Any, what: str) -> LoaderAccessor:
    """Returns the two methods of a loader.

    Args:
        loader: the loader.
        what: description of the State for an error message.

    Raises:
        ConfigurationError: the object has neither of the two pairs of methods.
    """
    if (accessor := accessor_of(loader)) is not None:
        return accessor
    received = f"{what} got {loader!r} of type {type(loader).__name__}"
    advice = "add two such methods to the class, or write a subclass of State"
    if isinstance(loader, type):
        received = f"{what} got the class {loader.__name__}"
        advice = f"create an instance first: {loader.__name__}(...)"
    else:
        for names in _PAIRS:
            if has := [n for n in names if callable(getattr(loader, n, None))]:
                (lacks,) = {*names} - {*has}
                received += f", which has {has[0]}() but not {lacks}()"
        if callable(getattr(loader, "__iter__", None)) and not hasattr(
            loader, "__next__"
        ):
            advice = (
                "the iterator may have these methods: pass iter(loader), and read "
                "from this iterator"
            )
        elif inspect.isgenerator(loader):
            advice = (
                "the position of a Python generator cannot be read: write a class "
                "with __next__ and these methods"
            )
    raise errors.ConfigurationError(
        f"{received}; expected an object with get_state() and set_state(state), or "
        f"with state_dict() and load_state_dict(state): {advice}."
    )
