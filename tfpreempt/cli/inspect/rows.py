"""Reads and checks the checkpoints of a directory or URI, and of its mirror."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import click

from tfpreempt.checkpoint.directory import catalog, retention
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.restore import inspection
from tfpreempt.checkpoint.restore.verification import THREADS
from tfpreempt.core.progress_bar import ByteBar
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.storage.local import LocalStore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A checkpoint in the inspected directory, in the mirror, or in both.

    Attributes:
        entry: the checkpoint, with the problems and remarks of both copies.
        where: storage with a copy: "local", "mirror" or "both". An incomplete upload
            (without a marker) does not count as a copy.
        path: path of the local copy; None if there is none.
        uri: URI of the copy in the mirror; None if there is none.
        kept: reasons why retention keeps the commit, see `retention.explain`; ""
            without a commit.
    """

    entry: Entry
    where: str
    path: str | None
    uri: str | None
    kept: str = ""


class _Unreadable(click.ClickException):
    """Error: the directory or URI cannot be read, so nothing is known about it."""

    exit_code = 2


def look(
    location: str,
    mirror: str | None = None,
    *,
    every_byte: bool,
    threads: int = THREADS,
) -> list[Row]:
    """Checks the checkpoints of a run and its mirror; returns them newest first.

    Args:
        location: path or URI of the run, or of a checkpoint.
        mirror: path or URI of the mirror; None: no mirror.
        every_byte: whether to verify checksums by reading every byte; if False, only
            sizes are checked.
        threads: number of threads that read.

    Raises:
        ClickException: the path or URI is missing or cannot be read; exit status 2.
        SystemExit: the user interrupted the check.
    """
    with _translated("--mirror: "):
        copies = [] if mirror is None else inspection.at(mirror)
    check = functools.partial(inspection.check, every_byte=every_byte, threads=threads)
    with _translated():
        here = inspection.at(location)
        found, checked, done = (*here, *copies), [], 0
        sizes = [(each.size or 0) if each.is_committed else 0 for each in found]
        with ByteBar("verifying", sum(sizes) if every_byte else 0) as bar:
            for each, size in zip(found, sizes, strict=True):

                def show(count: int, before: int = done) -> None:
                    bar.show(before + count)

                checked.append(check(each, watch=show))
                done += size
    local, remote = checked[: len(here)], checked[len(here) :]
    kept = retention.explain(catalog.in_order(remote))
    kept |= retention.explain(catalog.in_order(local))
    return [
        dataclasses.replace(row, kept=kept.get(row.entry.token, ""))
        for row in _matched(local, remote)
    ]


def _matched(here: list[Entry], mirror: list[Entry]) -> list[Row]:
    """Returns a row for every checkpoint, newest first.

    A local checkpoint and a checkpoint in the mirror are two copies of one checkpoint
    if their tokens are equal.
    """
    twins = {each.token: each for each in mirror if each.token}
    rows = [
        _row(None, each)
        if each.kind is Kind.MIRROR or not isinstance(each.store, LocalStore)
        else _row(each, twins.pop(each.token, None))
        for each in here
    ]
    rows += [_row(None, e) for e in mirror if not e.token or e.token in twins]
    by_entry = {id(row.entry): row for row in rows}
    order = catalog.in_order(row.entry for row in rows)
    return [by_entry[id(entry)] for entry in order]


def _row(local: Entry | None, mirror: Entry | None) -> Row:
    """Returns the row of a checkpoint with one or two copies.

    The checkpoint counts as corrupt if a copy is corrupt.
    """
    both = [each for each in (local, mirror) if each is not None]
    shown, *other = both
    is_there = mirror is not None and mirror.condition is not CommitStatus.NOT_COMMITTED
    is_corrupt = any(each.condition is CommitStatus.CORRUPT for each in both)
    entry = dataclasses.replace(
        shown,
        condition=CommitStatus.CORRUPT if is_corrupt else shown.condition,
        problems=tuple(text for each in both for text in each.problems),
        remarks=(*shown.remarks, *(f"mirror: {r}" for e in other for r in e.remarks)),
    )
    return Row(
        entry=entry,
        where="mirror" if local is None else "both" if is_there else "local",
        path=None if local is None else local.path,
        uri=None if mirror is None else mirror.path,
    )


@contextlib.contextmanager
def _translated(where: str = "") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        # Exit at once with status 128 + SIGINT, as in a shell: threads with a pending
        # request are not waited for.
        raise SystemExit(130) from None
    except ConfigurationError as error:
        raise click.UsageError(f"{where}{error}") from error
    except TfpreemptError as error:
        raise _Unreadable(f"{where}{error}") from error
