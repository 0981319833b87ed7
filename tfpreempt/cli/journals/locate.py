"""Finds the journal of a run: on this machine, or in a mirror."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.mirror.journal_mirror import fetch
from tfpreempt.core.journal import journal_directory
from tfpreempt.core.log_output import plain
from tfpreempt.storage.open_store import SCHEMES, local_path, open_store

_SHOWN = 5  # number of other runs to suggest


def find_journal(location: str) -> Path:
    """Returns the directory of the journal for a path or URI given by the user.

    Args:
        location: checkpoint directory of a run, its URI, or the directory of a journal.

    Raises:
        ConfigurationError: the text is neither a path nor a URI.
    """
    path = local_path(location)
    if path is None:
        return journal_directory(location)
    return Path(path) if has_journal(Path(path)) else journal_directory(path)


def has_journal(directory: Path) -> bool:
    """Returns whether a directory contains journal files."""
    return any(directory.glob("*.jsonl"))


def commits_in(directory: str | Path) -> list[Entry]:
    """Returns the commits in a checkpoint directory, newest first.

    Useful if a run has no journal: a program that saves States without a handler makes
    commits, but writes no journal.
    """
    with contextlib.suppress(OSError):
        return [each for each in catalog.scan(str(directory)) if each.is_committed]
    return []


def count_commits(directory: str | Path, found: Sequence[Entry]) -> str:
    """Returns a text with the number of commits and the newest step.

    Returns "" if there are no commits.

    Args:
        directory: the checkpoint directory.
        found: the commits in the directory, from `commits_in`.
    """
    if not found:
        return ""
    return f"{len(found)} commit(s) in {directory}, newest step {found[0].step}"


def hint(location: str) -> str:
    """Returns advice for a message that says that `location` has no journal.

    Args:
        location: path or URI given by the user.

    Returns:
        A sentence with a leading space; "" if there is no advice.
    """
    path = local_path(location)
    if path is None:
        return ""
    if not os.path.isdir(path):
        return f" The directory {path!r} does not exist."
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
    return f" Name one of the runs in it: {', '.join(sorted(runs)[:_SHOWN])}{more}."


@contextlib.contextmanager
def fetched_journal(location: str, local: Path | None = None) -> Iterator[Path]:
    """Context manager: downloads the journals in a mirror to a temporary directory.

    Args:
        location: path or URI of the mirror. If the scheme of the URI is unknown, the
            directory is empty.
        local: directory of this machine's journal, whose records are added to the copy;
            None: no records are added.

    Yields:
        The temporary directory, which is removed at the end of the `with` block.

    Raises:
        TfpreemptError: the path or URI is invalid, or the storage does not answer.
        OSError: the disk has no space for the copy.
    """
    with tempfile.TemporaryDirectory(prefix="tfpreempt-journal-") as directory:
        if local_path(location) is not None or location.partition("://")[0] in SCHEMES:
            fetch(open_store(location), Path(directory), local)
        yield Path(directory)
