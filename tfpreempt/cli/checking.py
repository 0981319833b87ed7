"""What `inspect` and `verify` share: find checkpoints, check them, show progress."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import click

from tfpreempt.checkpoint import catalog, inspection
from tfpreempt.checkpoint.catalog import Condition, Entry, Kind
from tfpreempt.checkpoint.verification import THREADS
from tfpreempt.core.progress import ByteBar
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.opening import SCHEMES

INTERRUPTED = 130  # as a shell says it: 128 and the number of SIGINT


class CheckpointPlace(click.ParamType[str]):
    """A path or a URI, as text."""

    name = "place"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        text = str(value)
        if not text or "\0" in text:
            self.fail(f"{text!r} is no path and no URI.", param, ctx)
        scheme, is_uri, _ = text.partition("://")
        if is_uri and scheme not in SCHEMES:
            known = ", ".join(f"{each}://" for each in SCHEMES)
            self.fail(
                f"{text!r} cannot be opened; expected a path, or a URI of one of "
                f"{known}. Mount what lies elsewhere, or copy it to a disk.",
                param,
                ctx,
            )
        return text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A checkpoint here, in the mirror, or in both. At least one is not None."""

    local: Entry | None = None
    remote: Entry | None = None

    @property
    def shown(self) -> Entry:
        """The one that stands for both."""
        found = self.local or self.remote
        assert found is not None
        return found

    @property
    def where(self) -> str:
        """Here, in the mirror, or both; an upload without marker doesn't count."""
        if self.local is None:
            return "remote"
        unfinished = Condition.NOT_COMMITTED
        is_there = self.remote is not None and self.remote.condition is not unfinished
        return "both" if is_there else "local"

    @property
    def condition(self) -> Condition:
        """Damaged if either is."""
        both = [each for each in (self.local, self.remote) if each is not None]
        if any(each.condition is Condition.DAMAGED for each in both):
            return Condition.DAMAGED
        return self.shown.condition

    @property
    def problems(self) -> tuple[str, ...]:
        both = (self.local, self.remote)
        return tuple(text for each in both if each for text in each.problems)

    @property
    def remarks(self) -> tuple[str, ...]:
        if self.local is None or self.remote is None:
            return self.shown.remarks
        return (*self.local.remarks, *(f"remote: {r}" for r in self.remote.remarks))


class _Unreadable(click.ClickException):
    """The place cannot be listed or reached: not the same as damage."""

    exit_code = 2


def find_rows(place: str, mirror: str | None = None) -> list[Row]:
    """What lies at a place, and in its mirror, not checked yet.

    Raises:
        ClickException: there is nothing, or it cannot be read; exit status 2.
        SystemExit: interrupted.
    """
    with _translated("--remote: "):
        other = [] if mirror is None else inspection.at(mirror)
    with _translated():
        return _matched(inspection.at(place), other)


def check_rows(
    found: Sequence[Row], *, every_byte: bool, threads: int = THREADS
) -> list[Row]:
    """The same, checked.

    Raises:
        ClickException: a store cannot be reached any more; exit status 2.
        SystemExit: interrupted.
    """
    todo = [each for row in found for each in (row.local, row.remote) if each]
    total = sum(
        each.size or 0 for each in todo if each.condition is Condition.COMMITTED
    )
    with _translated(), ByteBar("verifying", total if every_byte else 0) as bar:
        before = 0

        def checked(each: Entry | None) -> Entry | None:
            nonlocal before
            if each is None:
                return None
            done = before
            before += (each.size or 0) if each.is_committed else 0
            return inspection.check(
                each,
                every_byte=every_byte,
                threads=threads,
                watch=lambda count: bar.show(done + count),
            )

        return [
            Row(local=checked(row.local), remote=checked(row.remote)) for row in found
        ]


def _matched(local: Sequence[Entry], mirror: Sequence[Entry]) -> list[Row]:
    """What is here and what is in the mirror, matched by token, newest first."""
    found: dict[int, Row] = {}  # by the one that is shown
    twins = {each.token: each for each in mirror if each.token}
    for each in local:
        if each.kind is Kind.REMOTE or not isinstance(each.store, LocalStore):
            found[id(each)] = Row(remote=each)
        else:
            found[id(each)] = Row(local=each, remote=twins.pop(each.token, None))
    alone = [each for each in mirror if not each.token or each.token in twins]
    found |= {id(each): Row(remote=each) for each in alone}
    order = catalog.in_order(row.shown for row in found.values())
    return [found[id(each)] for each in order]


@contextlib.contextmanager
def _translated(where: str = "") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        # Threads that are in the middle of a request are not waited for.
        raise SystemExit(INTERRUPTED) from None
    except ConfigurationError as error:
        raise click.UsageError(f"{where}{error}") from error
    except TfpreemptError as error:
        raise _Unreadable(f"{where}{error}") from error
