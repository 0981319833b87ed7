"""Campaigns: many random trials of one promise; each trial can be repeated.

A module of this package defines a campaign as `CAMPAIGN`. Some modules also define the
same campaign for loops on JAX, as `JAX_CAMPAIGN`. A trial draws all its random numbers
from one generator, which is seeded with the campaign's name, a seed and the number of
the trial.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import random
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

Facts = dict[str, str | int]
"""Facts of a trial. A summary adds up the numbers, and counts the words."""

Trial = Callable[[random.Random], Facts]
"""Raises an error if a promise is broken. Two trials may run at a time, in threads."""

Line = dict[str, Any]
"""One trial: seed, trial, facts, fault (or None), seconds, code (the commit it ran)."""

SHOWN = 6000
"""Number of letters of a fault that are kept, from the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Campaign:
    """A promise, and the trials that test the promise.

    Attributes:
        name: name of the module; with the prefix "jax-" for loops on JAX.
        promise: the random faults and the expected result, in one or two sentences.
        trials: number of trials in the full form.
        short: number of trials in `make test-all`; 0: another test is the short form.
        mark: mark of pytest for the requirements of the short form.
        prepare: context manager for the resources that all trials share.
        fixed: for each fault that the campaign found, the behavior before the fix, and
            the tests that were added.
        labels: for the page, the meaning of a name in the facts of a trial, if the name
            alone is not clear. Numbers stand before the meaning: "840 crashes".
        again: seeds and numbers of trials that found a fault; run in `make test-all`.
    """

    name: str
    promise: str
    trials: int
    short: int
    mark: str
    prepare: Callable[[], AbstractContextManager[Trial]]
    fixed: Sequence[str] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    again: Sequence[tuple[int, int]] = ()

    def generator(self, seed: int, number: int) -> random.Random:
        """Returns the random generator of one trial."""
        return random.Random(f"{self.name}/{seed}/{number}")

    def run(self, of: Iterable[tuple[int, int]], jobs: int = 1) -> Iterator[Line]:
        """Runs trials, given by seed and number; yields a line after each trial.

        Args:
            of: seeds and numbers of the trials.
            jobs: number of trials that run at the same time.
        """
        with self.prepare() as trial, ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(lambda each: self._line(trial, *each), of)

    def _line(self, trial: Trial, seed: int, number: int) -> Line:
        facts, fault, began = {}, None, time.monotonic()
        try:
            facts = trial(self.generator(seed, number))
        except Exception:
            fault = traceback.format_exc()[-SHOWN:]
        seconds = round(time.monotonic() - began, 2)
        return {
            "seed": seed,
            "trial": number,
            "facts": facts,
            "fault": fault,
            "seconds": seconds,
            "code": code(),
        }

    def summary(self, lines: Sequence[Line]) -> dict[str, Any]:
        """Returns the summary of a record for the page."""
        sums: collections.Counter[str] = collections.Counter()
        counts: dict[str, collections.Counter[str]] = {}
        for name, value in (fact for line in lines for fact in line["facts"].items()):
            if isinstance(value, str):
                counts.setdefault(name, collections.Counter())[value] += 1
            else:
                sums[name] += value
        return {
            "campaign": self.name,
            "seed": lines[0]["seed"] if lines else None,
            "trials": len(lines),
            "faults": sum(line["fault"] is not None for line in lines),
            "code": dict(collections.Counter(line["code"] for line in lines)),
            **sums,
            **{name: dict(sorted(found.items())) for name, found in counts.items()},
            "seconds": round(sum(line["seconds"] for line in lines)),
        }


@functools.cache
def code() -> str:
    """Returns the short hash of the tested commit; "unknown" outside of a clone."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Context manager: hides the warnings, which are correct after injected faults."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class _Ear(logging.Handler):
    """Logging handler that collects the warnings of one thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.said.append(record.getMessage())


@contextlib.contextmanager
def warned_of() -> Iterator[list[str]]:
    """Context manager: collects the warnings of this thread, if in `unseen`.

    Yields:
        The warnings so far.
    """
    ear = _Ear()
    logging.getLogger().addHandler(ear)
    try:
        yield ear.said
    finally:
        logging.getLogger().removeHandler(ear)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Context manager: hides the warnings as `silent`, except from `warned_of`."""
    nowhere = logging.NullHandler()  # without a handler, logging prints them
    logging.getLogger().addHandler(nowhere)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(nowhere)


class Record:
    """The lines of a campaign in a directory, from which an interrupted run continues.

    Args:
        directory: directory of the record; created if missing.
        campaign: campaign of the record.
    """

    def __init__(self, directory: Path, campaign: Campaign) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._campaign = campaign
        self._lines = directory / f"{campaign.name}.jsonl"
        self._summary = directory / f"{campaign.name}.json"

    def lines(self, seed: int | None = None) -> list[Line]:
        """Returns the existing lines, or the lines of a seed."""
        if not self._lines.exists():
            return []
        found = map(json.loads, self._lines.read_text("utf-8").splitlines())
        return [line for line in found if seed in (None, line["seed"])]

    def add(self, line: Line) -> None:
        """Appends a line in one write, so that a kill leaves no incomplete line."""
        with self._lines.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def sum_up(self, seed: int) -> None:
        """Writes the summary of all lines of a seed."""
        summary = self._campaign.summary(self.lines(seed))
        self._summary.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
