"""Reads all records of a run's journals, as they were written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tfpreempt.core.journal import LineReader, open_file, parse_record


def read_journal(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of every worker and supervisor, by wall time.

    Args:
        directory: directory of the journals; a missing one holds no records.
    """
    records: list[dict[str, Any]] = []
    for path in sorted(Path(directory).glob("*.jsonl")):
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            lines = LineReader().read_on(file.fileno())
            records += [each for line in lines if (each := parse_record(line))]
    return sorted(records, key=lambda record: float(record["wall"]))
