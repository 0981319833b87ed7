"""Finds the journal of a run that somebody names: here, or copied to a store."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.mirror.journal_mirror import fetch
from tfpreempt.cli.terminal import plain
from tfpreempt.core.journal import journal_directory
from tfpreempt.storage.opening import SCHEMES, local_path, open_store

_SHOWN = 5  # of other runs


def find_journal(place: str) -> Path:
    """Where the journal lies that somebody names, by itself or by its run.

    Args:
        place: the checkpoint directory of a run, its URI, or a journal's own directory.

    Raises:
        ConfigurationError: it can be neither a path nor a URI.
    """
    path = local_path(place)
    if path is None:
        return journal_directory(place)
    return Path(path) if has_journal(Path(path)) else journal_directory(path)


def has_journal(directory: Path) -> bool:
    """Whether it is a journal's directory."""
    return any(directory.glob("*.jsonl"))


def commits_in(directory: str | Path) -> list[Entry]:
    """Returns the commits in a checkpoint directory, newest first.

    A program with States alone commits, and keeps no journal.
    """
    with contextlib.suppress(OSError):
        return [each for each in catalog.scan(str(directory)) if each.is_committed]
    return []


def count_commits(directory: str | Path, found: Sequence[Entry]) -> str:
    """Returns the number of commits and the newest step; empty without a commit.

    Args:
        directory: the checkpoint directory.
        found: the commits in the directory, from `commits_in`.
    """
    if not found:
        return ""
    return f"{len(found)} commit(s) in {directory}, newest step {found[0].step}"


def hint(place: str) -> str:
    """Returns advice for a user who has named a directory without a journal.

    Returns:
        A sentence with a space before it; empty if nothing better is known.
    """
    path = local_path(place)
    if path is None:
        return ""
    if not os.path.isdir(path):
        return f" There is no directory {path!r}."
    if commits := count_commits(path, commits_in(path)):
        return f" `tfpreempt inspect` shows {plain(commits)}."
    runs = [
        plain(str(each.parent))
        for each in Path(path).glob("*/journal")
        if has_journal(each)
    ]
    if not runs:
        return ""
    more = " and others" if len(runs) > _SHOWN else ""
    return f" There are runs in {', '.join(sorted(runs)[:_SHOWN])}{more}: name one."


@contextlib.contextmanager
def fetched_journal(place: str, local: Path | None = None) -> Iterator[Path]:
    """A context with a copy of the journals that a mirror has; it may be empty.

    Args:
        place: of the mirror, a path or a URI; with others the copy is empty.
        local: a journal of this machine, to be put together with the copy.

    Raises:
        TfpreemptError: the place cannot be one, or does not answer.
        OSError: there is no room for the copy.
    """
    with tempfile.TemporaryDirectory(prefix="tfpreempt-journal-") as directory:
        if local_path(place) is not None or place.partition("://")[0] in SCHEMES:
            fetch(open_store(place), Path(directory), local)
        yield Path(directory)
