"""`PyTreeState`: a ready-made State for a pytree of JAX arrays and plain values.

A leaf is saved under its key path, such as "['dense']['kernel']", with dtype and shape.
No Python object is pickled: the program builds the tree again, and a load replaces the
leaves.

Process 0 saves the plain values, and the arrays of which every process holds every
element. If the elements of an array are divided among the processes (a divided array),
each process saves the shards on its devices, in a second State (`Shards`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import jax

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    decode,
    encode,
    read_header,
    read_parts,
    readable,
)
from tfpreempt.checkpoint.state.state import (
    REGISTRY,
    Capture,
    State,
    StateRegistry,
)
from tfpreempt.core import private_api
from tfpreempt.jax.shards import (
    DividedArray,
    HostCopies,
    SavedArray,
    Shards,
    body,
    is_whole,
    unread,
    write,
)

_log = logging.getLogger(__name__)

_KIND = "pytree"


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


_OF_FUNCTIONS = {"builtins", "functools", "numpy", "jax", _package(jax.jit(len))}
"""Packages with the classes of functions. A callable object of another class, such as a
layer or a schedule, may have state."""
_MOST_NAMED = 5  # maximum number of leaves that an error names


class PyTreeState(State):
    """Saves a pytree: JAX arrays and random keys, NumPy arrays, Python scalars.

    Every leaf is restored bit for bit, with its dtype (also bfloat16 and float8), shape
    and weak type. A JAX array is restored with the sharding that the array at the same
    path has in the program. So build the tree as at the first start: the paths, shapes
    and dtypes must be equal.

    With several processes (`jax.distributed`), the elements of an array may be divided
    among the processes. Then every process saves its shards. A restart with the same
    number of processes must divide the array as before; a restart with another number
    of processes may divide the array in any way. `save_state` raises an error for such
    a tree, and `load_state` does not load the shards.

    Args:
        name: name of the State, unique among the existing States.
        value: the initial pytree, which a load replaces.
        per_worker: whether each process saves its own tree; by default the tree is
            equal on every process, and process 0 saves the tree.
        registry: registry to which the State is added; with None, commits do not
            include the State.

    Raises:
        ConfigurationError: two leaves have the same key path.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        *,
        per_worker: bool = False,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        private_api.check_available("jax_arrays")
        super().__init__(name, per_worker, registry=registry)
        self._value = value
        self._copies = HostCopies()
        self._missing: list[str] = []  # divided arrays whose shards are not loaded
        # Whether the program has not read the loaded value; None without a load. And
        # whether the program has replaced the value unread: a later read is too late.
        self._is_unread: bool | None = None
        self._is_replaced = False
        self._structure: Any = None  # the tree without its leaves, after the first step
        # States are loaded in name order, so the tree is loaded before the shards.
        self._shards = Shards(f"{self.name}.shards", self, registry)
        self._leaves()

    @property
    def value(self) -> Any:
        """The current pytree. After each step the program must assign the new pytree.

        Raises:
            CheckpointMismatchError: the restored commit has no shards for this process.
        """
        if self._missing:
            raise errors.CheckpointMismatchError(
                f"{self!r} was loaded without {_named(self._missing)}. Their elements "
                "are divided among the processes, and the shards of this process are "
                "missing. Restore a commit by a PreemptionCheckpointHandler."
            )
        if self._is_unread and not self._is_replaced:
            self._is_unread = False
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._is_replaced = True
        self._value = value

    def unregister(self) -> None:
        """Excludes the State from later commits."""
        super().unregister()
        self._shards.unregister()

    def save(self, fileobj: IO[bytes]) -> None:
        write(fileobj, *self._contents())

    def _capture(self) -> Capture | None:
        if type(self).save is not PyTreeState.save:  # a subclass writes other bytes
            return None
        return self._copies.capture(self, *self._contents())

    def _contents(self) -> tuple[dict[str, Any], list[Any]]:
        """Returns the header of the file, and the arrays, which are not read yet."""
        before = self._structure
        try:
            now = jax.tree.structure(self._value)
            has_changed = before is not None and before != now
        except Exception:  # noqa: BLE001 - of a comparison of static fields
            has_changed, self._structure = False, None
        if has_changed:
            self._structure = None  # warn once
            _log.warning(
                "the structure of %r (key paths or static fields) has changed since "
                "the first step, and a commit contains only the leaves. After a "
                "restart, static fields have their initial values, and the restore "
                "fails if the key paths differ. Keep values that change in leaves, and "
                "create all leaves at the start",
                self,
            )
        arrays: list[Any] = []
        saved = {
            path: self._encoded(path, leaf, arrays)
            for path, leaf in self._leaves().items()
        }
        return {"kind": _KIND, "leaves": saved}, arrays

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            header, parts = read_parts(fileobj)
            saved: dict[str, Any] = body(header, _KIND)
        here = self._leaves()
        self._check_paths(saved, here)
        loaded = {}
        for path, leaf in here.items():
            with readable(self):
                if "value" in saved[path]:
                    loaded[path] = decode(saved[path]["value"], parts)
                    continue
                head = SavedArray.of(saved[path]["jax"])
                whole = head.numpy(parts)
            head.check(self.described(path), leaf)
            if whole is not None:
                loaded[path] = head.place(whole.__getitem__, leaf)
        self._missing = [path for path in here if path not in loaded]
        self._assign(loaded)
        self._is_unread, self._is_replaced = True, False

    def validate(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            body(read_header(fileobj)[0], _KIND)

    def _needs_every_worker(self) -> bool:
        return bool(self.divided())

    def _try_save(self) -> None:
        self._structure = jax.tree.structure(self._value)
        self._warn_of_unread()
        # Check the leaves without reading the bytes of arrays.
        for path, leaf in self._leaves().items():
            if isinstance(leaf, jax.Array):
                SavedArray.of_array(leaf, self.described(path))
            else:
                self._encoded(path, leaf, [])

    def _warn_of_unread(self) -> None:
        """Warns after the first step if the program has not read a restored value.

        Logs no warning if the program has read another PyTreeState, because a value
        such as the best weights may be read only at the end.
        """
        known = () if self._registry is None else self._registry.in_order()
        trees = [each for each in known if isinstance(each, PyTreeState)]
        if self._is_unread and all(each._is_unread is not False for each in trees):
            _log.warning(
                "the first step has not read `value` of %r, which was restored. If the "
                "step trains other arrays, training has started from scratch, and the "
                "next commit overwrites the restored value. Read `value` after the "
                "handler is created; for Flax NNX, call nnx.update(model, state.value)",
                self,
            )

    # --- the leaves ------------------------------------------------------------------

    def _leaves(self) -> dict[str, Any]:
        """Returns the leaves of the tree by key path.

        Raises:
            ConfigurationError: two leaves have the same key path.
        """
        found: dict[str, Any] = {}
        for keys, leaf in jax.tree_util.tree_flatten_with_path(self._value)[0]:
            path = jax.tree_util.keystr(keys)
            if _is_function(leaf):  # the program makes the function again
                continue
            if path in found:
                raise errors.ConfigurationError(
                    f"{self!r} has two leaves with the key path {path!r}; expected "
                    "one. Rename one of the keys."
                )
            found[path] = leaf
        return found

    def divided(self) -> dict[str, jax.Array]:
        """Returns the arrays whose elements are divided among the processes, by key
        path."""
        return {
            path: leaf
            for path, leaf in self._leaves().items()
            if isinstance(leaf, jax.Array) and not is_whole(leaf)
        }

    def described(self, path: str) -> str:
        """Returns a text for errors that describes a leaf."""
        return f"The leaf {path} of {self!r}"

    def take(self, loaded: Mapping[str, DividedArray]) -> None:
        """Takes the divided arrays of a commit, by key path."""
        here, made = self._leaves(), {}
        for path, array in loaded.items():
            if path in here:  # otherwise the load of the tree has raised an error
                array.saved.check(self.described(path), here[path])
                made[path] = array.saved.place(array.at, here[path])
        self._assign(made)

    def _assign(self, loaded: dict[str, Any]) -> None:
        """Replaces leaves of the tree.

        Args:
            loaded: new leaves by key path; the remaining leaves are kept.
        """
        self._value = jax.tree_util.tree_map_with_path(
            lambda keys, leaf: loaded.get(jax.tree_util.keystr(keys), leaf),
            self._value,
        )
        self._missing = [path for path in self._missing if path not in loaded]

    def _encoded(self, path: str, leaf: Any, arrays: list[Any]) -> Any:
        """Returns the JSON-able description of a leaf for the header of the file;
        appends the array, or the bytes of the leaf, to `arrays`."""
        what = self.described(path)
        if not isinstance(leaf, jax.Array):
            return {"value": encode(leaf, what, arrays)}
        head = SavedArray.of_array(leaf, what)
        if is_whole(leaf):
            head.array = len(arrays)
            arrays.append(unread(leaf))
        return {"jax": dataclasses.asdict(head)}

    def _check_paths(self, saved: Iterable[str], here: Iterable[str]) -> None:
        """Raises CheckpointMismatchError if the key paths of the saved tree differ from
        the key paths of the program's tree (`here`)."""
        lacking = [path for path in here if path not in set(saved)]
        unknown = [path for path in saved if path not in set(here)]
        if lacking or unknown:
            texts = [
                *([f"the commit has no {_named(lacking)}"] if lacking else []),
                *([f"the program has no {_named(unknown)}"] if unknown else []),
            ]
            raise errors.CheckpointMismatchError(
                f"{self!r} was saved from another tree: {'; '.join(texts)}. Build the "
                "tree as the interrupted run did, or use another checkpoint directory."
            )


def _named(paths: Sequence[str]) -> str:
    more = len(paths) - _MOST_NAMED
    shown = ", ".join(paths[:_MOST_NAMED]) or "the tree itself"
    return f"{shown} and {more} more" if more > 0 else shown


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and _package(leaf) in _OF_FUNCTIONS
