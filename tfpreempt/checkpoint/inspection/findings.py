"""What a look at checkpoints finds: one value for each, whoever wrote it, wherever."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.manifest import Manifest
from tfpreempt.checkpoint.remote import commits
from tfpreempt.storage.interface import ObjectStore
from tfpreempt.storage.local import LocalStore

_LATEST_TIME = 253_402_300_000.0  # dates end with the year 9999
_WORKER = layout.worker_name(0).rstrip("0")


class Form(enum.Enum):
    """How it is laid out."""

    OWN = "own"  # a directory of our own
    FLAT = "flat"  # TensorFlow's flat files with our sidecar directory
    FOREIGN = "foreign"  # written without tfpreempt
    REMOTE = "remote"  # a folder of a mirror
    STAGING = "staging"  # a save that is under way, or died


class Condition(enum.Enum):
    """What it is worth."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"  # never restored; under way, or left by a dead save
    DAMAGED = "damaged"
    FOREIGN = "not ours"  # no manifest, so nothing says what its bytes should be


class Checked(enum.Enum):
    """How it was checked."""

    NOTHING = "nothing"
    SIZES = "sizes"
    EVERY_BYTE = "every byte"
    LENGTHS = "index and lengths"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """A named State in a commit.

    Attributes:
        name: of the State.
        worker: whose it is; None for the one that is equal on all workers.
        bytes: size of its file.
    """

    name: str
    worker: int | None
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint, or what could have become one.

    Attributes:
        name: as its directory lists it; hostile until it is escaped.
        form: how it is laid out.
        condition: what it is worth.
        store: what reads it.
        location: path, prefix or URI.
        holder: where in the store its marker and manifest are.
        base: where in the store the manifest's names begin.
        manifest: None if it has none, or none that can be read.
        token: equal for all who see this very commit; None if unknown.
        time: wall time of the save, seconds since the epoch; None if unknown.
        size: bytes; None if unknown.
        checked: how it was checked.
        problems: why it is damaged.
        remarks: what else there is to say.
    """

    name: str
    form: Form
    condition: Condition
    store: ObjectStore
    location: str
    holder: str = ""
    base: str = ""
    manifest: Manifest | None = None
    token: str | None = None
    time: float | None = None
    size: int | None = None
    checked: Checked = Checked.NOTHING
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether it is a copy in a mirror, or on no disk of this machine."""
        return self.form is Form.REMOTE or not isinstance(self.store, LocalStore)

    @property
    def step(self) -> int | None:
        """The step that it carries; None if nothing says."""
        if self.manifest is not None:
            return self.manifest.step
        folder = commits.parse(self.name)
        return None if folder is None else folder.step

    @property
    def sequence(self) -> int | None:
        """Its rank among the commits of its directory; None if nothing says."""
        if self.manifest is not None:
            return self.manifest.sequence
        folder = commits.parse(self.name)
        return None if folder is None else folder.sequence

    @property
    def states(self) -> tuple[StateFile, ...]:
        """The named States in it, those of all workers first."""
        if self.manifest is None:
            return ()
        inside = f"{self.holder}/" if self.form is Form.FLAT else ""
        found = [
            state
            for entry in self.manifest.files
            if entry.name.startswith(inside)
            and (state := _state(entry.name[len(inside) :], entry.size)) is not None
        ]
        found.sort(key=lambda each: -1 if each.worker is None else each.worker)
        return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A checkpoint here, in the mirror, or in both. At least one is not None."""

    local: Found | None = None
    remote: Found | None = None

    @property
    def shown(self) -> Found:
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
        return tuple(
            problem
            for each in (self.local, self.remote)
            if each is not None
            for problem in each.problems
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        if self.local is None or self.remote is None:
            return self.shown.remarks
        return (*self.local.remarks, *(f"remote: {r}" for r in self.remote.remarks))


def rows(local: Iterable[Found], mirror: Iterable[Found] = ()) -> list[Row]:
    """What is here and what is in the mirror, matched by token, newest first."""
    waiting: dict[str, Found] = {}
    found = []
    for each in mirror:
        if each.token is None:
            found.append(Row(remote=each))
        else:
            waiting[each.token] = each
    for each in local:
        if each.is_remote:
            found.append(Row(remote=each))
        else:
            twin = waiting.pop(each.token, None) if each.token is not None else None
            found.append(Row(local=each, remote=twin))
    found += [Row(remote=each) for each in waiting.values()]
    return _in_order(found)


def saved_at(manifest: Manifest) -> float | None:
    """The wall time that a manifest gives, if it can be one."""
    value = manifest.metadata.get("saved_at")
    if not isinstance(value, int | float) or not 0 <= value < _LATEST_TIME:
        return None
    return float(value)


def _in_order(found: list[Row]) -> list[Row]:
    """Ours by sequence, as a restart ranks them; the others put in by time."""
    ranked = [row for row in found if row.shown.sequence is not None]
    ranked.sort(
        key=lambda row: (row.shown.sequence or 0, row.shown.time or 0.0), reverse=True
    )
    dated = [row for row in found if row.shown.sequence is None]
    dated.sort(key=lambda row: row.shown.time or 0.0, reverse=True)
    merged: list[Row] = []
    for row in ranked:
        while dated and (dated[0].shown.time or 0.0) > (row.shown.time or 0.0):
            merged.append(dated.pop(0))
        merged.append(row)
    return merged + dated


def _state(name: str, size: int) -> StateFile | None:
    folder, _, file = name.partition("/")
    suffix = layout.state_file("")
    if not file.endswith(suffix) or "/" in file:
        return None
    worker = None
    if folder != layout.STATES:
        number = folder.removeprefix(_WORKER)
        if number == folder or not number.isdecimal() or len(number) > 9:
            return None
        worker = int(number)
    return StateFile(name=file.removesuffix(suffix), worker=worker, bytes=size)
