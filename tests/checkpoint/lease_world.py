"""Processes that share a directory, in every order of their file operations.

Each process runs the shipped code on a disk that stops the process before every
operation. A process is the list of the results of its operations so far: for the next
operation, its program runs again from the start with these results. So a world is one
value. Equal worlds are explored once, and all worlds are explored. A process without
further steps was killed, and a process with a late step was frozen. The search freely
chooses whether a holder counts as crashed, so every possible error of clocks and
counters is included.

The disk acts like a network file system: a process uses a directory that it has opened,
even under a new name, until the directory is removed.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfpreempt.checkpoint.directory import layout

Program = Callable[["Disk"], str]
"""The code of a process; returns the final word of the process."""

Nodes = frozenset[tuple[int, str, int, bytes | None]]
"""Directory, name, number and content (None: a directory). Number 0 is the root."""

Said = tuple[Any, ...]
"""Results of the operations of a process so far."""

CHOICES = (False, True)


class Process(NamedTuple):
    """A process after some of its operations."""

    said: Said = ()
    opened: frozenset[tuple[str, int]] = frozenset()  # directories, by path
    word: str | None = None  # at its end


class World(NamedTuple):
    """The disk, and the states of all processes."""

    nodes: Nodes
    processes: tuple[Process, ...]
    holder: int | None = None  # process that last acquired the lease
    wrong: str = ""  # the violated promise


class Stopped(BaseException):
    """Raised before an operation; the argument describes the operation."""


class Disk:
    """Repeats recorded results, and stops the process at the next operation."""

    def __init__(self, said: Said) -> None:
        self._said = list(said)

    def _do(self, *operation: Any) -> Any:
        if not self._said:
            raise Stopped(operation)
        said = self._said.pop(0)
        if isinstance(said, int) and not isinstance(said, bool):
            raise OSError(said, os.strerror(said), operation[1])
        return said

    def choose(self) -> bool:
        return bool(self._do("choose", ""))

    def names(self, path: str) -> list[str]:
        return list(self._do("names", path))

    def read(self, path: str) -> bytes:
        found: bytes = self._do("read", path)
        return found

    def write(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        self._do("write", path, b"".join(data))

    def make_dirs(self, path: str) -> None:
        above = os.path.dirname(path)
        for each in (path,) if above == "/" else (above, path):
            try:
                self._do("make_dir", each)
            except FileExistsError:
                pass

    def rename(self, source: str, target: str) -> None:
        self._do("rename", source, target)

    def remove(self, path: str) -> None:
        try:
            self._do("remove", path)
        except FileNotFoundError:
            pass

    def remove_dir(self, path: str) -> None:
        try:
            self._do("remove_dir", path)
        except FileNotFoundError:
            pass

    def sync_file(self, path: str) -> None:
        """Does nothing, because other processes see no difference."""

    def sync_dir(self, path: str) -> None:
        """Does nothing, see `sync_file`."""


@functools.cache
def next_operation(program: Program, said: Said) -> tuple[Any, ...] | str:
    """Returns the next operation of a process, or its final word."""
    try:
        return program(Disk(said))
    except Stopped as stopped:
        operation: tuple[Any, ...] = stopped.args[0]
        return operation


def moves(programs: Sequence[Program], world: World) -> list[World]:
    """Returns all worlds that follow this world.

    An operation that no other process can see or undo is explored alone, because its
    time does not matter.
    """
    found = []
    for i, process in enumerate(world.processes):
        if process.word is None:
            operation = next_operation(programs[i], process.said)
            after = list(_moved(world, i, operation))
            if isinstance(operation, str) or _is_private(*operation):
                return after
            found += after
    return found


def _is_private(kind: str, path: str, *more: Any) -> bool:
    in_the_making = path.startswith(f"/{layout.LEASE}.") and kind != "rename"
    return kind == "choose" or in_the_making


def _moved(world: World, i: int, operation: Any) -> Iterator[World]:
    """Yields the worlds after the next operation of one process."""
    process = world.processes[i]
    if isinstance(operation, str):
        yield _with(world, i, Process(word=operation))
        return
    kind, *arguments = operation
    if kind == "choose":
        for chosen in CHOICES:
            yield _with(world, i, process._replace(said=(*process.said, chosen)))
        return
    nodes, opened, said = _apply(world.nodes, process.opened, kind, *arguments)
    process = process._replace(said=(*process.said, said), opened=opened)
    after = _with(world, i, process)._replace(nodes=nodes)
    if kind == "rename" and said is None:
        name = os.path.basename(arguments[1])
        if layout.LEASE in (name, os.path.basename(os.path.dirname(arguments[1]))):
            after = after._replace(holder=i)
        elif name == layout.MARKER and i != world.holder:
            after = after._replace(wrong=f"{i} commits after {world.holder} took over")
        elif name == layout.MARKER and not _is_of(i, nodes, arguments[1]):
            after = after._replace(wrong=f"{i} commits what another one wrote")
    yield _forget_removed(after)


def marker_of(i: int) -> bytes:
    """Returns the contents of the markers of a process."""
    return b"%d" % i


def _is_of(i: int, nodes: Nodes, path: str) -> bool:
    found = _find(nodes, path)
    return found is not None and found[3] == marker_of(i)


def _forget_removed(world: World) -> World:
    """Removes deleted directories from the opened directories of all processes."""
    numbers = {node[2] for node in world.nodes} | {_ROOT}
    processes = tuple(
        each._replace(opened=frozenset(o for o in each.opened if o[1] in numbers))
        for each in world.processes
    )
    return world._replace(processes=processes)


def _with(world: World, i: int, process: Process) -> World:
    processes = (*world.processes[:i], process, *world.processes[i + 1 :])
    return world._replace(processes=processes)


# --- the disk ------------------------------------------------------------------------

Opened = frozenset[tuple[str, int]]
_ROOT = 0


def _find(
    nodes: Nodes, path: str, opened: Opened = frozenset()
) -> tuple[int, str, int, bytes | None] | None:
    """Returns the node of a path, through opened directories that still exist."""
    folder, name = os.path.split(path)
    number = _folder(nodes, folder, opened)
    return next((n for n in nodes if n[:2] == (number, name)), None)


def _folder(nodes: Nodes, path: str, opened: Opened) -> int | None:
    if path in ("", "/"):
        return _ROOT
    known = dict(opened).get(path)
    if known is not None and any(n[2] == known for n in nodes):
        return known
    found = _find(nodes, path, opened)
    return found[2] if found is not None and found[3] is None else None


def _apply(
    nodes: Nodes, opened: Opened, kind: str, path: str, *more: Any
) -> tuple[Nodes, Opened, Any]:
    """Applies an operation; returns the disk, the opened directories and the result."""
    folder, name = os.path.split(path)
    number = _folder(nodes, folder if kind != "names" else path, opened)
    if number is None:
        return nodes, opened, errno.ENOENT
    opened = _with_opened(opened, folder if kind != "names" else path, number)
    there = next((n for n in nodes if n[:2] == (number, name)), None)
    match kind:
        case "names":
            return nodes, opened, tuple(sorted(n[1] for n in nodes if n[0] == number))
        case "read":
            said = errno.ENOENT if there is None else there[3]
            return nodes, opened, said
        case "write":
            new = (number, name, _new_number(nodes), more[0])
            return (nodes - {there}) | {new}, opened, None
        case "make_dir":
            if there is not None:
                return nodes, opened, errno.EEXIST
            return nodes | {(number, name, _new_number(nodes), None)}, opened, None
        case "remove":
            if there is None:
                return nodes, opened, errno.ENOENT
            return nodes - {there}, opened, None
        case "remove_dir":
            if there is None:
                return nodes, opened, errno.ENOENT
            if any(n[0] == there[2] for n in nodes):
                return nodes, opened, errno.ENOTEMPTY
            return nodes - {there}, opened, None
        case "rename":
            return _rename(nodes, opened, there, more[0])
    raise AssertionError(kind)


def _rename(
    nodes: Nodes, opened: Opened, source: Any, target: str
) -> tuple[Nodes, Opened, Any]:
    folder, name = os.path.split(target)
    number = _folder(nodes, folder, opened)
    if source is None or number is None:
        return nodes, opened, errno.ENOENT
    opened = _with_opened(opened, folder, number)
    there = next((n for n in nodes if n[:2] == (number, name)), None)
    if there is not None and any(n[0] == there[2] for n in nodes):
        return nodes, opened, errno.ENOTEMPTY
    moved = (number, name, *source[2:])
    return (nodes - {source, there}) | {moved}, opened, None


def _with_opened(opened: Opened, path: str, number: int) -> Opened:
    if os.path.basename(path) == layout.LEASE or f"{layout.LEASE}/" in path:
        opened = frozenset(each for each in opened if each[0] != path)
        opened |= {(path, number)}
    return opened  # other directories are never replaced


def _new_number(nodes: Nodes) -> int:
    """Returns the lowest free number, so that equal worlds have equal numbers."""
    used = {n[2] for n in nodes}
    return next(i for i in range(1, len(used) + 2) if i not in used)
