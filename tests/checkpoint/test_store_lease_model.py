"""The lease of an object store, in every order of requests.

As in `lease_world`, a process is the list of the results of its requests. Any process
may take another process for crashed, or never continue.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
from typing import Any, NamedTuple

import pytest

from tests.checkpoint.lease_world import Stopped
from tests.checkpoint.test_store_lease import MANIFEST, folder_of
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.lease.lease import try_acquire
from tfpreempt.checkpoint.lease.lease_record import this_process
from tfpreempt.checkpoint.lease.object_store_lease import ObjectStoreLease
from tfpreempt.storage.object_store import ObjectNotFoundError, ObjectStat

HERE = this_process(30.0)


class Process(NamedTuple):
    said: tuple[Any, ...] = ()
    word: str | None = None
    has_started: bool = False


class World(NamedTuple):
    objects: frozenset[tuple[str, bytes]]
    processes: tuple[Process, ...]
    wrong: str = ""


class Store:
    """Repeats recorded results; stops the process at the next request."""

    uri = "model://"

    def __init__(self, said):
        self._said = list(said)

    def ask(self, *request):
        if not self._said:
            raise Stopped(request)
        return self._said.pop(0)

    def put_if_absent(self, name, source, *, timeout=None):
        return self.ask("put", name, source.read())

    def replace(self, name, data, *, timeout=None):
        self.ask("replace", name, data)

    def get(self, name, target, *, offset=0, length=None, timeout=None):
        data = self.ask("get", name)
        if data is None:
            raise ObjectNotFoundError(name)
        return target.write(data)

    def list(self, prefix=""):
        return self.ask("list", prefix)

    def stat(self, name, *, timeout=None):
        return ObjectStat(size=0) if self.ask("get", name) is not None else None

    def delete(self, name, *, timeout=None):
        self.ask("delete", name)


@functools.cache
def manifest_of(name):
    return MANIFEST.replace(b'"save"', b'"%s"' % name.encode())


def program(kind, name, store):
    """Returns a start with two polls, and the upload of one commit."""
    place = kind(store)
    here = dataclasses.replace(HERE, token=name)

    def why_over(found):
        is_over = found.holder is None or store.ask("choose")
        return "over" if is_over else None

    tries = (try_acquire(place, here, why_over) for _ in range(2))
    token = next((token for token in tries if token is not None), None)
    if token is None:
        return "refused"
    store.ask("started")
    manifest = manifest_of(name)
    folder = folder_of(manifest)
    store.put_if_absent(f"{folder}/{layout.MANIFEST}", io.BytesIO(manifest))
    place.record_pending_marker(token, folder)
    if not place.has(token):
        return "lost"
    store.put_if_absent(f"{folder}/{layout.MARKER}", io.BytesIO(b""))
    place.end(token)
    return "done"


@functools.cache
def next_request(kind, name, said):
    try:
        return program(kind, name, Store(said))
    except Stopped as stopped:
        return stopped.args[0]


def answers(world, i, kind, *more):
    """Returns the result of a request, and the objects afterwards."""
    objects = dict(world.objects)
    name = more[0] if more else ""
    match kind:
        case "choose":
            return [(False, objects), (True, objects)]
        case "put" if name in objects:
            return [(False, objects)]
        case "put":
            return [(True, objects | {name: more[1]})]
        case "replace":
            return [(None, objects | {name: more[1]})]
        case "get":
            return [(objects.get(name), objects)]
        case "list":
            return [(tuple(sorted(n for n in objects if n.startswith(name))), objects)]
        case "delete":
            objects.pop(name, None)
    return [(None, objects)]


def moves(kind, world, names):
    found = []
    for i, process in enumerate(world.processes):
        if process.word is not None:
            continue
        request = next_request(kind, names[i], process.said)
        if isinstance(request, str):
            ended = Process(word=request, has_started=process.has_started)
            return [changed(world, i, ended)]
        after = []
        for said, objects in answers(world, i, *request):
            now = process._replace(said=(*process.said, said))
            new = world._replace(objects=frozenset(objects.items()))
            if request[0] == "started":
                now = now._replace(has_started=True)
            folder = folder_of(manifest_of(names[i]))
            is_marker = request[:2] == ("put", f"{folder}/{layout.MARKER}")
            if is_marker and said and not is_newest(world, names[i]):
                new = new._replace(wrong=f"{names[i]} marks after another started")
            after.append(changed(new, i, now))
        if request[0] == "choose":
            return after
        found += after
    return found


def is_newest(world, name):
    """Returns whether the newest record belongs to this process."""
    records = {
        n: d for n, d in world.objects if n.startswith("lease/") and d[:1] == b"{"
    }
    holder = records[max(records)]
    started = {i for i, p in enumerate(world.processes) if p.has_started}
    newest = next(
        i for i, n in enumerate("abc") if f'"token": "{n}"'.encode() in holder
    )
    return "abc"[newest] == name or newest not in started


def changed(world, i, process):
    before = world.processes
    return world._replace(processes=(*before[:i], process, *before[i + 1 :]))


def explore(names, kind=ObjectStoreLease):
    first = World(frozenset(), (Process(),) * len(names))
    todo, seen, ends, wrong = [first], {first}, set(), set()
    while todo:
        world = todo.pop()
        if world.wrong:
            wrong.add(world.wrong)
            continue
        after = moves(kind, world, names)
        if not after:
            ends.add(tuple(p.word for p in world.processes))
        for each in after:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return ends, wrong


@pytest.fixture(autouse=True, scope="module")
def silence():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_order_of_requests():
    ends, wrong = explore("ab")
    assert not wrong
    assert {"done", "lost", "refused"} <= {word for end in ends for word in end}


class Forgetful(ObjectStoreLease):
    """A start that checks first and acts later, and completes no pending marker."""

    def record_pending_marker(self, token, folder):
        pass


def test_a_look_before_the_marker_is_no_fence():
    assert explore("ab", kind=Forgetful)[1]
