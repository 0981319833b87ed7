"""Threads that share tasks: all are done, or the first failure is the owner's."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from tfpreempt.checkpoint.remote.bar import Bar
from tfpreempt.storage.crew import CancelledError, Crew


def quiet():
    pass


@pytest.mark.parametrize("threads", [1, 4])
def test_tasks_of_tasks_are_done_too(threads):
    crew, done = Crew("test", threads), []

    def split(depth):
        done.append(depth)
        if depth:
            crew.add([lambda: split(depth - 1)] * 2, first=depth % 2 == 0)

    crew.add([lambda: split(4)])
    crew.run(quiet)
    assert len(done) == 31


def test_without_tasks_it_is_over_at_once():
    Crew("test", 3).run(quiet)


def test_the_first_failure_ends_the_others():
    crew, is_long = Crew("test", 2), threading.Event()
    ended = threading.Event()

    def long():
        is_long.set()
        try:
            while True:
                crew.check()
        except CancelledError:
            ended.set()
            raise

    def failing():
        is_long.wait(60)
        raise OSError("first")

    never = []
    crew.add([long, failing, lambda: never.append(1)])
    with pytest.raises(OSError, match="first"):
        crew.run(quiet)
    assert ended.is_set()
    assert never == []


def test_the_owner_may_give_up():
    crew, begun = Crew("test", 1), threading.Event()

    def endless():
        begun.set()
        while True:
            crew.check()

    def watch():
        begun.wait(60)
        raise TimeoutError("enough")

    crew.add([endless])
    with pytest.raises(TimeoutError, match="enough"):
        crew.run(watch)


class Terminal(io.StringIO):
    """Standard error of somebody who looks at it."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("kind", "is_shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_is_for_terminals(monkeypatch, kind, is_shown):
    monkeypatch.setattr(sys, "stderr", kind())
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar("gs://bucket/[run]", 100)
    bar.show(10)
    bar.show(50)
    bar.close()
    assert ("[run]" in sys.stderr.getvalue()) == is_shown
