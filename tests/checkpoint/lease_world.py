"""Processes that share a directory, in every order of their file operations.

Each runs the shipped code on a disk that stops it before every operation. A process is
the list of what its operations said so far: to move it on, its program is run anew up
to the next one. So a world is one value, worlds that are equal are looked at once, and
all of them are. A process that is never moved again was killed; one that is moved late
was frozen; and whether a holder counts as dead is chosen freely, so whatever clocks and
counters can make somebody believe is among it.

The disk is that of a network: a process goes on using a directory that it has opened,
whatever its name is by then, until that directory is removed.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfpreempt.checkpoint.directory import layout

Program = Callable[["Disk"], str]
"""What a process runs; its word at the end."""

Nodes = frozenset[tuple[int, str, int, bytes | None]]
"""Directory, name, number, and content; None of a directory. Number 0 is the root."""

Said = tuple[Any, ...]
"""What the operations of a process said so far."""

CHOICES = (False, True)


class Process(NamedTuple):
    """One process, after so many operations."""

    said: Said = ()
    opened: frozenset[tuple[str, int]] = frozenset()  # directories, by path
    word: str | None = None  # at its end


class World(NamedTuple):
    """The disk, and who is where."""

    nodes: Nodes
    processes: tuple[Process, ...]
    holder: int | None = None  # who took the lease last
    wrong: str = ""  # what must never be seen


class Stopped(BaseException):
    """Before an operation: what it is."""


class Disk:
    """Says again what was said; stops the process at the first operation after."""

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
        """Nothing that others could see."""

    def sync_dir(self, path: str) -> None:
        """Likewise."""


@functools.cache
def next_operation(program: Program, said: Said) -> tuple[Any, ...] | str:
    """What a process does next; its word if it ends."""
    try:
        return program(Disk(said))
    except Stopped as stopped:
        operation: tuple[Any, ...] = stopped.args[0]
        return operation


def moves(programs: Sequence[Program], world: World) -> list[World]:
    """All worlds that follow this one.

    An operation that no other process could see, or undo, is looked at alone: it does
    not matter when it happens.
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
    """What one process makes of a world by its next operation."""
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
    """What a process writes into the marker of its commits."""
    return b"%d" % i


def _is_of(i: int, nodes: Nodes, path: str) -> bool:
    found = _find(nodes, path)
    return found is not None and found[3] == marker_of(i)


def _forget_removed(world: World) -> World:
    """A directory that was removed is looked up anew by its path."""
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
    """What a path leads to, by directories that were opened if they are there still."""
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
    """One operation: the disk after it, what is opened, and what is said."""
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
    return opened  # no other one is ever removed and made anew


def _new_number(nodes: Nodes) -> int:
    """The lowest free one: so that worlds that differ in nothing else are equal."""
    used = {n[2] for n in nodes}
    return next(i for i in range(1, len(used) + 2) if i not in used)
