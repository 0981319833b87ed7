"""The lease, in every order of the file operations of processes that contend for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging

import pytest

from tests.checkpoint import lease_world
from tests.checkpoint.lease_world import Disk, Process, World
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.lease.directory_lease import (
    DirectoryLease,
    FencedFiles,
    ObservedLease,
)
from tfpreempt.checkpoint.lease.lease import try_acquire
from tfpreempt.checkpoint.lease.lease_record import this_process

HERE = this_process(30.0)
NAMES = tuple(digit * 32 for digit in "abcd")


@pytest.fixture(autouse=True, scope="module")
def silence():
    """Hides thousands of warnings about takeovers."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclasses.dataclass
class Way:
    """The lease as its file operations show it."""

    place: DirectoryLease
    token: str

    def check(self):
        pass

    @contextlib.contextmanager
    def moving(self):
        yield self.place.fenced_path(self.token)


def program(
    disk: Disk,
    name: str,
    does: str,
    kind: type[DirectoryLease] = DirectoryLease,
    fenced: type[FencedFiles] = FencedFiles,
) -> str:
    """Returns a process that executes the given actions in order.

    S: starts, with two polls; s: starts, with one poll; n: starts, with two polls, and
    takes no running process for crashed. c: commits; all processes use the same name.
    e: releases the lease.
    """
    place = kind("/", disk)
    files = fenced(disk, Way(place, name))
    for each in does:
        if each in "sSn" and not start(disk, place, name, each):
            return "refused"
        if each == "c":
            try:
                data = lease_world.marker_of(NAMES.index(name))
                files.publish(f"/run/{layout.MARKER}", data)
            except FileNotFoundError:
                return "lost"
        if each == "e":
            place.end(name)
    return "done"


def start(disk: Disk, place: DirectoryLease, name: str, how: str) -> bool:
    def why_over(found: ObservedLease) -> str | None:
        is_over = found.holder is None or (how != "n" and disk.choose())
        return "over" if is_over else None

    here = dataclasses.replace(HERE, token=name)
    return any(
        try_acquire(place, here, why_over) for _ in range(1 if how == "s" else 2)
    )


def explore(*does: str, **rules: type) -> Result:
    """Explores all worlds of such processes, of which one has the lease at first."""
    programs = [
        functools.partial(program, name=name, does=each, **rules)
        for name, each in zip(NAMES, does, strict=False)
    ]
    first = World(frozenset(nodes(does)), (Process(),) * len(does), holder(does))
    result, todo, seen = Result(), [first], {first}
    while todo:
        world = todo.pop()
        if world.wrong:
            result.wrong.add(world.wrong)
            continue
        after = lease_world.moves(programs, world)
        if not after:
            result.ends.add(tuple(each.word or "" for each in world.processes))
        for each in after:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    result.worlds = seen
    return result


def nodes(does):
    """Returns the initial disk: a directory for commits, and the owner of the lease."""
    yield (0, "run", 1, None)
    if (has := holder(does)) is not None:
        here = dataclasses.replace(HERE, token=NAMES[has])
        yield (0, layout.LEASE, 10, None)
        yield (10, NAMES[has], 11, None)
        yield (11, "holder", 12, here.to_json())


def holder(does):
    return next(
        (i for i, each in enumerate(does) if each[:1] not in tuple("sSn")), None
    )


@dataclasses.dataclass
class Result:
    worlds: set[World] = dataclasses.field(default_factory=set)
    ends: set[tuple[str, ...]] = dataclasses.field(default_factory=set)
    wrong: set[str] = dataclasses.field(default_factory=set)


# Scenarios, and ends that at least one path must reach: a search that never gets
# there proves nothing.
SMALL = {
    "a frozen holder": (("cce", "Sc"), {("lost", "done"), ("done", "done")}),
    "a holder that leaves": (("e", "Sc"), {("done", "done")}),
    "a holder that nobody takes for dead": (
        ("ce", "nc"),
        {("done", "refused"), ("done", "done")},
    ),
}
LARGE = {
    "a dead holder, two starts": (
        ("", "sc", "sc"),
        {("done", "lost", "done"), ("done", "refused", "done")},
    ),
    "two starts": (("Sc", "Sc"), {("done", "refused"), ("done", "lost")}),
    "two lives": (("Sce", "Sce"), {("done", "done"), ("lost", "done")}),
    "two lives, nobody dead": (("nce", "nce"), {("done", "done"), ("refused", "done")}),
    "a frozen holder, two starts": (
        ("c", "sc", "sc"),
        {("lost", "lost", "done"), ("done", "done", "lost")},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_operations(name):
    check(*SMALL[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_operations_of_more(name):
    check(*LARGE[name])


def check(does, wanted):
    result = explore(*does)
    assert not result.wrong
    assert wanted <= result.ends
    if not {*"sS"} & {*"".join(does)}:
        assert "lost" not in {word for ends in result.ends for word in ends}
    for disk in {world.nodes for world in result.worlds}:
        assert is_free_for_who_takes_all_for_dead(disk), sorted(disk)


def is_free_for_who_takes_all_for_dead(nodes) -> bool:
    """Returns whether a crash at any time locks out no process for ever."""
    late = [functools.partial(program, name=NAMES[-1], does="Sc")]
    world = World(nodes, (Process(),))
    while world.processes[0].word is None:
        world = lease_world.moves(late, world)[-1]
    return world.processes[0].word == "done"


class Renamed(DirectoryLease):
    """A release by a rename: the old process can still write in its directory."""

    def end(self, token):
        self._disk.rename(f"/{layout.LEASE}/{token}", f"/over-{token}")


class LookedAt(DirectoryLease):
    """A check before the act, instead of a fenced path."""

    def fenced_path(self, token):
        if not self.has(token):
            raise FileNotFoundError(token)
        return f"/moved-{token}"


class MadeThere(DirectoryLease):
    """An acquisition without a single rename: two leases can exist side by side."""

    def take(self, holder):
        new, root = f"/{layout.LEASE}.{holder.token}", f"/{layout.LEASE}"
        self._disk.make_dirs(f"{new}/{holder.token}")
        self._disk.write(f"{new}/{holder.token}/holder", [holder.to_json()])
        self._disk.make_dirs(root)
        with contextlib.suppress(FileNotFoundError):
            self._disk.rename(f"{new}/{holder.token}", f"{root}/{holder.token}")
        return self.has(holder.token)


class Beside(FencedFiles):
    """A temporary file beside its target, with the same name in all processes."""

    def publish(self, path, data):
        self.write(path + ".tmp", [data])
        with self._lease.moving() as way:
            self._files.rename(path + ".tmp", way)
            self._files.rename(way, path)


@pytest.mark.slow  # a search for each rule
@pytest.mark.parametrize(
    ("rules", "does", "wrong"),
    [
        ({"kind": Renamed}, ("c", "Sc"), "0 commits after 1 took over"),
        ({"kind": LookedAt}, ("c", "Sc"), "0 commits after 1 took over"),
        ({"kind": MadeThere}, ("Sc", "Sc"), "0 commits after 1 took over"),
        ({"fenced": Beside}, ("c", "Sc"), "1 commits what another one wrote"),
    ],
    ids=["Renamed", "LookedAt", "MadeThere", "Beside"],
)
def test_simpler_rules_fail(rules, does, wrong):
    assert wrong in explore(*does, **rules).wrong
