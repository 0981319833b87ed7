"""Finds the journal of a run that somebody names."""

from __future__ import annotations

from pathlib import Path

from tfpreempt.core.journal import journal_directory
from tfpreempt.storage.opening import local_path


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
    is_journal = any(Path(path).glob("*.jsonl"))
    return Path(path) if is_journal else journal_directory(path)
