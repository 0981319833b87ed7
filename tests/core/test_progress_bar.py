"""A progress bar for bytes: only on a terminal, and only for long operations."""

from __future__ import annotations

import io
import sys

import pytest

from tfpreempt.core import progress_bar


class Terminal(io.StringIO):
    """A standard error on a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("kind", "is_shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_comes_late_and_on_a_terminal_only(monkeypatch, kind, is_shown):
    now = [0.0]
    monkeypatch.setattr(sys, "stderr", kind())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    with progress_bar.ByteBar("gs://bucket/[run]", 1 << 30) as bar:
        now[0] = 1.9
        bar.show(1 << 20)
        assert sys.stderr.getvalue() == ""
        now[0] = 2.1
        bar.show(1 << 29)
        bar.show(1 << 30)
    assert ("[run]" in sys.stderr.getvalue()) == is_shown
    assert ("1.0/1.0 GiB" in sys.stderr.getvalue()) == is_shown


def test_without_bytes_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress_bar, "_QUIET_SECONDS", -1.0)
    with progress_bar.ByteBar("nothing", 0) as bar:
        bar.show(0)
    assert sys.stderr.getvalue() == ""
