"""Draws the state diagrams of the docs from the tables of the code.

    python -m tests.docs.diagrams       writes docs/img/*.svg, and docs/agreement.md

For the agreement, one worker of two makes all transitions that the table allows, for
every reply of the store and of the other worker. (`tests/cluster` explores the replies
of real clusters; here every reply is possible.) An arrow is a change of a role's state,
with its events. An event that leads to one state from four or more states is a line of
text below the diagram instead. The diagram of a fit shows the table of its phases.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

from tests.docs import chart
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination import state_machine
from tfpreempt.coordination.protocol_types import (
    Action,
    Key,
    MainThreadState,
    WatcherState,
    WorkerState,
)
from tfpreempt.keras.fit import phases

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "agreement.md"
ROLES: dict[str, type[WatcherState] | type[MainThreadState]] = {
    "watch": WatcherState,
    "main": MainThreadState,
}
MANY = 4

SETTINGS = (
    ev.ProtocolConfig(worker=0, num_workers=2, saves_alone=True),
    ev.ProtocolConfig(worker=0, num_workers=2, saves_alone=False),
    ev.ProtocolConfig(worker=1, num_workers=2),
)
# The values of keys that matter to the table. The main thread is at boundary 1.
COUNTS = (ev.StepCount(1, final=True), ev.Tombstone())
DECISIONS = tuple(ev.DecidedStep(boundary) for boundary in (1, 2, None))


@dataclasses.dataclass(frozen=True, slots=True)
class Arrow:
    """A change of one role's state."""

    role: str
    source: str
    target: str
    event: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A state of the worker, and its open requests."""

    state: WorkerState
    asked: frozenset[Action]
    is_flagged: bool = False


@functools.cache
def arrows() -> frozenset[Arrow]:
    """Returns all transitions of both roles."""
    found: set[Arrow] = set()
    for settings in SETTINGS:
        state, actions = state_machine.INITIAL
        first = Stage(state, frozenset(actions))
        seen, left = {first}, [first]
        while left:
            stage = left.pop()
            for event, asked in events(stage):
                after, actions = state_machine.apply(settings, stage.state, event)
                found |= changes(stage.state, event, after)
                if after.round > 1 or after.main is MainThreadState.DETACHED:
                    continue
                is_heard = (
                    after.watch is not WatcherState.GONE
                    and after.main is not MainThreadState.ENDED
                )
                following = Stage(
                    after,
                    asked.union(actions) if is_heard else frozenset(),
                    stage.is_flagged or ev.RaiseFlag() in actions,
                )
                if following not in seen:
                    seen.add(following)
                    left.append(following)
    return frozenset(found)


def changes(
    before: WorkerState, event: ev.ProtocolEvent, after: WorkerState
) -> set[Arrow]:
    """The arrows of one event."""
    word = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(event).__name__).lower()
    pairs = {"watch": (before.watch, after.watch), "main": (before.main, after.main)}
    return {
        Arrow(role, source.name, target.name, word)
        for role, (source, target) in pairs.items()
        if source is not target
    }


def events(stage: Stage) -> Iterator[tuple[ev.ProtocolEvent, frozenset[Action]]]:
    """Returns the possible next events, with the open requests after each event."""
    for action in stage.asked:
        for event in answers(action):
            yield event, stage.asked - {action}
    for event in happenings(stage):
        yield event, stage.asked


def answers(action: Action) -> Iterator[ev.ProtocolEvent]:
    """Returns the possible replies of the store to a request."""
    match action:
        case ev.ReadCounter():
            yield ev.CounterRead(1, 1)
        case ev.Get(Key.NOTICE, round):
            yield from (ev.NoticeRead(round, kind) for kind in ev.NoticeKind)
        case ev.Get(Key.DECISION, round):
            yield from (ev.DecisionRead(round, each) for each in DECISIONS)
        case ev.Get(Key.COMMIT, round):
            yield from (ev.CommitRead(round, kind) for kind in ev.CommitKind)
        case ev.Gather(Key.COUNT, round):
            yield from (ev.AllCountsReceived(round, (count,)) for count in COUNTS)
        case ev.Gather(Key.DONE, round, (other,)):
            yield from (
                ev.AllStagedReceived(round, staged) for staged in ((other,), ())
            )
        case ev.Gather(Key.BYE, round):
            yield ev.AllGoodbyesReceived(round)
        case ev.Insert(Key.COUNT, round, ev.StepCount(_, final)):
            kind = ev.FinalCount if final else ev.OwnCount
            yield from (kind(round, each) for each in (action.value, ev.Tombstone()))
        case ev.Insert(Key.BYE):
            yield ev.GoodbyeSent()


def happenings(stage: Stage) -> Iterator[ev.ProtocolEvent]:
    """Returns the possible events without a request."""
    state = stage.state
    if state.main is MainThreadState.ENDED:
        yield ev.NextRound()
        return
    if state.watch is not WatcherState.GONE:
        yield ev.StoreGone()
    match state.main:
        case MainThreadState.TRAINING:
            yield ev.Boundary(1, last=True)
            if stage.is_flagged:
                yield ev.Boundary(1)
            yield ev.StepFailed()
        case MainThreadState.SAVING:
            yield from (ev.Saved(ok) for ok in (True, False))
        case MainThreadState.COMMITTING:
            yield from (ev.Committed(kind) for kind in ev.CommitKind)
    if state.main in state_machine.WAITS:
        yield ev.DeadlinePassed()
    yield ev.Detached()


def said(role: str, found: Set[Arrow]) -> dict[str, tuple[list[str], str]]:
    """Returns the events that lead to one state from many states, with this state."""
    by_event = defaultdict(list)
    for arrow in found:
        if arrow.role == role:
            by_event[arrow.event].append(arrow)
    return {
        event: (sorted({a.source for a in each}), each[0].target)
        for event, each in by_event.items()
        if len(each) >= MANY and len({a.target for a in each}) == 1
    }


def draw(role: str, found: Set[Arrow]) -> str:
    """Draws the diagram of a role."""
    states = [state.name for state in ROLES[role]]
    in_text = said(role, found)
    drawn = [
        (arrow.source, arrow.target, arrow.event)
        for arrow in found
        if arrow.role == role and arrow.event not in in_text
    ]
    return chart.svg(f"The states of {role}", states, drawn)


def tell(role: str, found: Set[Arrow]) -> str:
    """Returns the text below a role's diagram."""
    states = {state.name for state in ROLES[role]}
    lines = [f"![The states of {role}](img/agreement-{role}.svg)", ""]
    for event, (sources, target) in sorted(said(role, found).items()):
        others = states - {target}
        where = "any other state" if others <= {*sources, "ENDED"} else _listed(sources)
        lines.append(f"- *{event}* leads from {where} to `{target}`.")
    return "\n".join(lines)


def draw_fit() -> str:
    """The phases of a fit."""
    drawn = [
        (phase.name, following.name, event.value)
        for phase, row in phases.TABLE.items()
        for event, following in row.items()
    ]
    return chart.svg(
        "The phases of a fit", [each.name for each in phases.FitPhase], drawn
    )


def drawings() -> dict[str, str]:
    """Returns all diagrams, by path under docs/."""
    found = arrows()
    of_roles = {f"img/agreement-{role}.svg": draw(role, found) for role in ROLES}
    return {**of_roles, "img/fit-phases.svg": draw_fit()}


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`"


def section(role: str) -> re.Pattern[str]:
    """Returns the part of the page with a role's diagram and its text."""
    begin = f"<!-- {role}: drawn by tests/docs/diagrams.py -->\n"
    return re.compile(f"(?<={begin}).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    text, found = PAGE.read_text(encoding="utf-8"), arrows()
    for role in ROLES:
        text = section(role).sub(f"{tell(role, found)}\n", text, count=1)
    PAGE.write_text(text, encoding="utf-8")
    for path, drawing in drawings().items():
        (DOCS / path).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
