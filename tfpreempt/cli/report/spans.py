"""A life's phases: what a worker did in each moment of it."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Iterable, Sequence

from tfpreempt.cli.report.lives import TRAINS, Event, Life, Phase, Span

_end = operator.itemgetter(1)


def make_spans(life: Life, commits: Sequence[Event]) -> list[Span]:
    """The spans of a life, one after another, from its beginning to its end.

    Args:
        life: of any worker.
        commits: those of the chief, who alone records them: others wait as long.
    """
    ended = life.exit
    windows = []
    for commit in commits:
        window = _blocked(commit)
        is_own = commit.record["worker"] == life.worker
        if not is_own and ended is not None and _is_last(commit, ended):
            # Made by all at once: the end is known by this worker's own clock.
            took = window[1] - window[0]
            window = ended.at - took, ended.at
        windows.append(window)
    return _paint(_phases(life, commits), windows, Phase.SAVING, over=TRAINS)


def trained(spans: Iterable[Span], until: float | None = None) -> float:
    """Seconds of training in these spans, lost or not, up to a time."""
    return sum(
        max(0.0, (each.end if until is None else min(each.end, until)) - each.begin)
        for each in spans
        if each.phase in (*TRAINS, Phase.LOST)
    )


def lose(spans: Sequence[Span], begin: float) -> list[Span]:
    """The same, with all training from a time on lost."""
    end = max((each.end for each in spans), default=begin)
    return _paint(spans, [(begin, end)], Phase.LOST, over=TRAINS)


def _phases(life: Life, commits: Sequence[Event]) -> list[Span]:
    """Its phases without saves."""
    changes = [(life.begin, Phase.STARTING)]
    ended, decided = life.exit, None
    for event in life.events:
        record = event.record
        now = changes[-1][1]
        match record.event:
            case "restored":
                began = max(life.begin, event.at - (record["seconds"] or 0.0))
                begins = Phase.TRACING if _is_traced(life) else Phase.TRAINING
                changes += [(began, Phase.RESTORING), (event.at, begins)]
            case "firststep":
                changes.append((event.at, Phase.TRAINING))
            case "notice" if now is Phase.TRAINING:
                changes.append((event.at, Phase.NOTICED))
            case "decision":
                decided = event.at
            case "commit" if record["because"] == "preemption":
                # With a long grace training goes on after it.
                is_last = ended is not None and _is_last(event, ended)
                after = Phase.LEAVING if is_last else Phase.TRAINING
                changes.append((event.at, after))
            case "exit":
                is_told = record["outcome"] in ("committed", "lost")
                is_called = is_told and now is Phase.TRAINING
                if is_called and decided is not None:  # by another worker
                    changes.append((max(changes[-1][0], decided), Phase.NOTICED))
                if changes[-1][1] is not Phase.LEAVING:
                    changes.append((event.at, Phase.LEAVING))
    if ended is None and (left := _left_with(life, commits)) is not None:
        changes.append((max(changes[-1][0], left.at), Phase.LEAVING))
    ends = [at for at, _ in changes[1:]] + [life.end]
    return [
        Span(phase=phase, begin=begin, end=end)
        for (begin, phase), end in zip(changes, ends, strict=True)
        if end > begin
    ]


def _is_traced(life: Life) -> bool:
    """Whether its first step is told apart; it is not, where that was the only one."""
    base = 0 if life.restored is None else life.restored.record["step"]
    made = [each.record["step"] > base for each in life.of("commit", "exit", "metrics")]
    return bool(life.of("firststep")) or not any(made)


def _blocked(commit: Event) -> tuple[float, float]:
    """From when to when training stood still for a commit, on the chief."""
    took = commit.record["save_seconds"]
    blocked = commit.record["blocked_seconds"]
    began = commit.at - took
    return began, began + (took if blocked is None else blocked)


def _left_with(life: Life, commits: Sequence[Event]) -> Event | None:
    """The commit that a life of which the last line is missing has left with."""
    for commit in commits[-1:]:
        because = commit.record["because"]
        if because == "finished" or because == life.cause == "preemption":
            return commit
    return None


def _is_last(commit: Event, ended: Event) -> bool:
    """Whether a worker left with this commit."""
    record = commit.record
    return bool(
        record["because"] == "preemption"
        and ended.record["outcome"] == "committed"
        and ended.record["step"] == record["step"]
    )


def _paint(
    spans: Iterable[Span],
    windows: Iterable[tuple[float, float]],
    phase: Phase,
    *,
    over: Collection[Phase],
) -> list[Span]:
    """The spans, with one phase in place of others in some windows of time.

    One sweep over both: a run may have made as many commits as it has spans.

    Args:
        spans: one after another.
        windows: from when to when, in any order; they may overlap.
        phase: that is put there.
        over: in place of which.
    """
    apart = _apart(windows)
    painted: list[Span] = []
    first = 0
    for span in spans:
        first = bisect.bisect_right(apart, span.begin, first, key=_end)
        if span.phase not in over:
            painted.append(span)
            continue
        cut, at = [], span.begin
        for number in range(first, len(apart)):
            begin, end = apart[number]
            if begin >= span.end:
                break
            inside = max(begin, span.begin), min(end, span.end)
            cut += [(span.phase, at, inside[0]), (phase, *inside)]
            at = inside[1]
        cut.append((span.phase, at, span.end))
        painted += [Span(phase=p, begin=b, end=e) for p, b, e in cut if e > b]
    return painted


def _apart(windows: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as windows in their order, none of which touch."""
    apart: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if apart and begin <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        elif end > begin:
            apart.append((begin, end))
    return apart
