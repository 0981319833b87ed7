"""The story of a run: what happened, when, and what it cost. No I/O, no clock."""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence

from tfpreempt.cli.report.goodput import Account, make_account
from tfpreempt.cli.report.lives import Event, Life, Phase, Span, make_lives
from tfpreempt.cli.report.records import Record
from tfpreempt.cli.report.spans import lose, make_spans, trained
from tfpreempt.core.fields import is_number
from tfpreempt.handler.now import TOLD_EVERY

_SKEW_SECONDS = 5.0
"""Workers leave with a commit within less than that of one another."""

_at, _begin = operator.attrgetter("at"), operator.attrgetter("begin")

_INSTANT = 1e-6
"""Seconds by which sums of times may differ."""

Point = tuple[float, float, float]
"""Of a curve: seconds since the epoch, step, value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker's time.

    Attributes:
        index: of the worker.
        spans: one after another; what lies between two of them is not of this run.
    """

    index: int
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit; times in seconds, `at` since the epoch."""

    at: float
    step: int
    because: str
    bytes: int
    save_seconds: float
    blocked_seconds: float
    notice_to_commit_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """A worker went on from a commit, or a snapshot.

    Attributes:
        at: seconds since the epoch at which it was done.
        worker: which one.
        step: that it goes on from.
        tier: "memory", "disk" or "bucket"; None where nobody said.
        seconds: it took, with agreeing on it; None where nobody said.
    """

    at: float
    worker: int
    step: int
    tier: str | None
    seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """Training ended before it was over; as its first worker saw it.

    Attributes:
        at: of the notice, or of the end where there was none; since the epoch.
        cause: "preemption", "failure", "hang", or what else a supervisor says;
            "killed" where nobody says anything.
        sources: of the notices, such as "signal:SIGTERM", with the workers that heard.
        step: that it came to; the least that is known where `is_estimated`; None where
            no worker has left a record.
        is_estimated: whether no record says how far it came.
        saved_step: of the commit that was made for it; None: there was none.
        notice_to_commit_seconds: of that commit.
        restored_step: that the next start went on from; None: there was none.
        tier: see `Restore`.
        steps_lost: that had to be made again; before the next start, those after the
            newest commit. None where the commits are not known.
        down_seconds: without a process; None where there was no next start.
        away_seconds: from `at` until it trained again; None if it did not.
    """

    at: float
    cause: str
    sources: Mapping[str, tuple[int, ...]]
    step: int | None
    is_estimated: bool
    saved_step: int | None
    notice_to_commit_seconds: float | None
    restored_step: int | None
    tier: str | None
    steps_lost: int | None
    down_seconds: float | None
    away_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run.

    Attributes:
        begin: of the first process; seconds since the epoch.
        end: of the last one, or of the newest record.
        outcome: "finished", "interrupted", or "running" where no record says; "silent"
            where a worker has not ended, and nothing is heard of it any more.
        step: that it has come to; None where no worker has left a record.
        step_seconds: the mean of its steps; None where unknown.
        workers: in the order of their indices.
        interruptions: in their order.
        commits: likewise.
        restores: likewise.
        metrics: curves by name.
        own_metrics: names of those in the journal, which count the run's steps.
        faults: what went wrong and was survived, by "where: error", and how often.
        account: where the time went.
        warnings: why some of this may be wrong, or is missing.
    """

    begin: float
    end: float
    outcome: str
    step: int | None
    step_seconds: float | None
    workers: tuple[Worker, ...]
    interruptions: tuple[Interruption, ...]
    commits: tuple[Commit, ...]
    restores: tuple[Restore, ...]
    metrics: Mapping[str, tuple[Point, ...]]
    own_metrics: frozenset[str]
    faults: Mapping[str, int]
    account: Account
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """From the first process to the end of the last one."""
        return self.end - self.begin

    @property
    def durations(self) -> dict[str, list[float]]:
        """Seconds of what is measured each time, by what it is."""
        to_commit = [each.notice_to_commit_seconds for each in self.commits]
        away = [each.away_seconds for each in self.interruptions]
        restores = [each.seconds for each in self.restores]
        return {
            "notice to commit": [each for each in to_commit if each is not None],
            "save": [each.save_seconds for each in self.commits],
            "training stood still": [each.blocked_seconds for each in self.commits],
            "restore": [each for each in restores if each is not None],
            "away": [each for each in away if each is not None],
        }

    @property
    def goodput(self) -> float | None:
        """The share of good time; None where no worker has left a record."""
        return None if self.step is None else self.account.goodput

    @property
    def steps_lost(self) -> int:
        """In all interruptions."""
        return sum(each.steps_lost or 0 for each in self.interruptions)

    @property
    def bytes_written(self) -> int:
        """Of all commits."""
        return sum(each.bytes for each in self.commits)


def make_story(records: Sequence[Record], warnings: Sequence[str] = ()) -> Story | None:
    """Tells the story of a run; None where no process has left a record.

    Args:
        records: those of each file in the order in which they were written.
        warnings: of whoever read them.
    """
    lives = make_lives(records)
    if not lives.of_worker:
        return None
    events = sorted(
        (e for mine in lives.of_worker.values() for life in mine for e in life.events),
        key=lambda event: event.at,
    )
    commits = [each for each in events if each.record.event == "commit"]
    of_worker = {
        index: _with_ends(_stretched(mine, events, commits), commits)
        for index, mine in lives.of_worker.items()
    }
    every = [life for mine in of_worker.values() for life in mine]
    first = min(of_worker, key=lambda index: (not _is_told(of_worker[index]), index))
    lead = of_worker[first]
    standing = _standing(lead, commits)
    workers = tuple(
        Worker(index=index, spans=tuple(_spans(mine, commits, standing)))
        for index, mine in of_worker.items()
    )
    spans = next(worker.spans for worker in workers if worker.index == first)
    restores = [
        Restore(
            at=each.at,
            worker=each.record["worker"],
            step=each.record["step"],
            tier=each.record["tier"],
            seconds=each.record["seconds"],
        )
        for each in events
        if each.record.event == "restored" and each.record["path"] is not None
    ]
    told = [
        *warnings,
        *lives.warnings,
        *_missing(of_worker, workers),
        *_skew(every, commits),
    ]
    return Story(
        begin=min(life.begin for life in every),
        end=max(life.end for life in every),
        outcome=_outcome(lead),
        step=_reached(lead[-1], commits)[0] if _is_told(lead) else None,
        step_seconds=_step_seconds(commits),
        workers=workers,
        interruptions=tuple(_interruptions(lead, spans, events, commits, standing)),
        commits=tuple(_commit(each) for each in commits),
        restores=tuple(restores),
        metrics=(metrics := _metrics(events)),
        own_metrics=frozenset(metrics),
        faults=_faults(events),
        account=make_account(span for each in workers for span in each.spans),
        warnings=tuple(told),
    )


# --- time ----------------------------------------------------------------------------


def _stretched(
    lives: Sequence[Life], events: Sequence[Event], commits: Sequence[Event]
) -> list[Life]:
    """Lives of which no record tells the end last as long as is known of.

    All workers have part in a commit, which the chief alone records; and they train as
    long as any does.
    """
    stretched = []
    for number, life in enumerate(lives):
        if not _has_end(life):
            is_last = number + 1 == len(lives)
            limit = math.inf if is_last else lives[number + 1].begin
            known = _between(events if is_last else commits, -math.inf, limit)[-1:]
            end = max([life.end, *(each.at for each in known)])
            life = dataclasses.replace(life, end=end)
        stretched.append(life)
    return stretched


def _with_ends(lives: Sequence[Life], commits: Sequence[Event]) -> list[Life]:
    """A life that does not tell its end has finished with the commit for that.

    The chief makes it for all.
    """
    return [
        dataclasses.replace(life, is_finished=True)
        if life.exit is None
        and any(e.record["because"] == "finished" for e in _during(commits, life)[-1:])
        else life
        for life in lives
    ]


def _is_told(lives: Sequence[Life]) -> bool:
    """Whether a worker has told of itself; a supervisor alone knows no steps."""
    return any(life.events for life in lives)


def _spans(
    lives: Sequence[Life], commits: Sequence[Event], standing: int | None
) -> list[Span]:
    """All spans of a worker, with those between its lives."""
    spans: list[Span] = []
    kept = _kept(lives, standing)
    for number, life in enumerate(lives):
        if _is_told(lives):
            mine = make_spans(life, _during(commits, life))
        else:
            mine = [Span(phase=Phase.UNKNOWN, begin=life.begin, end=life.end)]
        step = kept[number]
        if step is not None and (at := _reached_at(life, mine, step, commits)):
            mine = lose(mine, at)
        spans += mine
        if number + 1 < len(lives) and not life.is_finished:
            end, begin = life.end, lives[number + 1].begin
            phase = Phase.DOWN if _has_end(life) else Phase.UNKNOWN
            if begin > end:
                spans.append(Span(phase=phase, begin=end, end=begin))
    return spans


def _has_end(life: Life) -> bool:
    """Whether a record says when it ended."""
    return life.code is not None or life.exit is not None


def _during(commits: Sequence[Event], life: Life) -> list[Event]:
    """The commits that were made in a life: by it, or meanwhile by the chief.

    Where clocks differ, steps tell those of another life.
    """
    first = 0 if life.restored is None else life.restored.record["step"]
    last = math.inf if life.exit is None else life.exit.record["step"]
    return [
        each
        for each in _between(commits, life.begin, life.end + _INSTANT)
        if first <= each.record["step"] <= last
    ]


def _between(events: Sequence[Event], begin: float, end: float) -> Sequence[Event]:
    """The events of a time; all are in their order."""
    first = bisect.bisect_left(events, begin, key=_at)
    return events[first : bisect.bisect_right(events, end, key=_at)]


def _kept(lives: Sequence[Life], standing: int | None) -> list[int | None]:
    """For each life, the step up to which the run has kept it; None for all of it.

    That is what later lives went on from, and after the last one the newest commit.
    What was finished is kept, whatever was begun after it.
    """
    kept: list[int | None] = []
    limit = standing if lives[-1].is_over else None
    for life in reversed(lives):
        if life.is_finished:
            limit = None
        kept.append(limit)
        if life.restored is not None:
            step = life.restored.record["step"]
            limit = step if limit is None else min(limit, step)
    return kept[::-1]


def _standing(lead: Sequence[Life], commits: Sequence[Event]) -> int | None:
    """The step that the next start goes on from; None where nobody says.

    Worker 0, who leads if it has told anything, alone records commits; those of a
    save_fn nobody does.
    """
    last = lead[-1]
    for commit in _between(commits, -math.inf, last.end + _INSTANT)[-1:]:
        return int(commit.record["step"])
    ends = {each.exit.record["outcome"] for each in lead if each.exit is not None}
    is_known = last.worker == 0 and _is_told(lead)
    if not is_known or ends & {"committed", "finished"}:
        return None
    return 0 if last.restored is None else int(last.restored.record["step"])


def _milestones(life: Life, commits: Sequence[Event]) -> list[tuple[float, int]]:
    """When it is known to have been at which step, in the order of both."""
    found: list[tuple[float, int]] = []
    if life.restored is not None:
        found.append((life.restored.at, life.restored.record["step"]))
    found += [(e.at, e.record["step"]) for e in life.of("firststep", "metrics", "exit")]
    for each in _during(commits, life):
        found.append((each.at - each.record["save_seconds"], each.record["step"]))
    row: list[tuple[float, int]] = []
    for at, step in sorted(found):
        if not row or step >= row[-1][1]:
            row.append((at, step))
    return row


def _reached_at(
    life: Life, spans: Sequence[Span], step: int, commits: Sequence[Event]
) -> float | None:
    """When a life came to a step; None: it made none after it, as far as is known."""
    row = _milestones(life, commits)
    if not row:
        return None
    if step < row[0][1]:
        return life.begin  # it went further back than where this one began
    at, known = [each for each in row if each[1] <= step][-1]
    later = [each for each in row if each[1] > step]
    if later:
        until, more = later[0]
        share = (step - known) / (more - known)
        return _after(spans, at, share * (trained(spans, until) - trained(spans, at)))
    if life.exit is not None:
        return None
    if step == known:
        return at  # a kill: all that came after the newest commit
    seconds = _step_seconds(commits)
    return _after(spans, at, (step - known) * seconds) if seconds else None


def _after(spans: Sequence[Span], begin: float, seconds: float) -> float:
    """When so many seconds were trained since a time."""
    for span in spans:
        inside = trained([span]) - trained([span], begin)
        if inside and inside >= seconds:
            return max(begin, span.begin) + seconds
        seconds -= inside
    return math.inf


def _step_seconds(commits: Sequence[Event]) -> float | None:
    """The newest mean that is known."""
    known = (each.record["step_seconds"] for each in reversed(commits))
    return next((seconds for seconds in known if seconds), None)


def _reached(life: Life, commits: Sequence[Event]) -> tuple[int, bool]:
    """The step that a life came to, and whether that is estimated."""
    row = _milestones(life, commits)
    if row:
        step = row[-1][1]
    else:  # a start that has told of nothing yet will go on from the newest commit
        step = next(
            (e.record["step"] for e in _between(commits, -math.inf, life.end)[-1:]), 0
        )
    is_known = life.exit is not None or not life.is_over or not life.of("firststep")
    return step, not (is_known or life.is_finished)


# --- what happened -------------------------------------------------------------------


def _interruptions(
    lead: Sequence[Life],
    spans: Sequence[Span],
    events: Sequence[Event],
    commits: Sequence[Event],
    standing: int | None,
) -> list[Interruption]:
    """The ends of the first worker's lives that were not the end of training."""
    found = []
    heard = [each for each in events if each.record.event == "notice"]
    for number, life in enumerate(lead):
        if life.is_finished or not life.is_over:
            continue
        later = lead[number + 1 :]
        notices = _between(heard, life.begin, life.end)
        at = min((each.at for each in notices), default=life.end)
        saved = _served_by(life, commits)
        took = None if saved is None else saved.record["notice_to_commit_seconds"]
        if saved is not None and took is None and notices:
            took = max(0.0, saved.at - at)
        restored = next((each.restored for each in later if each.restored), None)
        end = bisect.bisect_left(spans, life.end, key=_begin)
        mine = spans[bisect.bisect_left(spans, life.begin, key=_begin) : end]
        step, is_estimated = _reached(life, commits)
        back, told = standing, None
        if restored is not None:
            back, told = int(restored.record["step"]), restored.record["reached"]
            step = max(step, back) if life.events else back
        if is_estimated:
            guess = step + _steps_after(life, mine, commits, step)
            step = guess if told is None else _near(guess, told, step, commits)
        lost = None if back is None else max(0, step - back)
        if life.restored is None and life.events:
            lost = 0  # a start that failed; those before it have lost what there was
        down = later[0].begin - life.end if later and _has_end(life) else None
        again = next((s.begin for s in spans[end:] if s.phase in _BACK), None)
        found.append(
            Interruption(
                at=at,
                cause=_cause(life),
                sources=_sources(notices),
                step=step if _is_told(lead) else None,
                is_estimated=is_estimated,
                saved_step=None if saved is None else saved.record["step"],
                notice_to_commit_seconds=took,
                restored_step=None if restored is None else restored.record["step"],
                tier=None if restored is None else restored.record["tier"],
                steps_lost=lost,
                down_seconds=down,
                away_seconds=None if again is None else again - at,
            )
        )
    return found


def _served_by(life: Life, commits: Sequence[Event]) -> Event | None:
    """The commit that a life left with: a notice may have found one under way."""
    step = None
    if life.exit is not None and life.exit.record["outcome"] == "committed":
        step = life.exit.record["step"]
    for commit in reversed(_during(commits, life)):
        if commit.record["because"] == "preemption" or commit.record["step"] == step:
            return commit
    return None


_BACK = (Phase.TRAINING, Phase.NOTICED, Phase.LOST)


def _steps_after(
    life: Life, spans: Sequence[Span], commits: Sequence[Event], step: int
) -> int:
    """How many steps a killed life made after the last that is known; a guess."""
    seconds, row = _step_seconds(commits), _milestones(life, commits)
    if not seconds or not row:
        return 0
    made = trained(spans, life.end) - trained(spans, row[-1][0])
    return max(0, round(made / seconds) - (step - row[-1][1]))


def _near(guess: int, told: int, step: int, commits: Sequence[Event]) -> int:
    """A guess that fits to what the process told last, shortly before its last step."""
    least, seconds = max(told, step), _step_seconds(commits)
    more = round(TOLD_EVERY / seconds) if seconds else 0
    return min(max(guess, least), least + more)


def _sources(notices: Sequence[Event]) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for each in notices:
        found.setdefault(each.record["source"], set()).add(each.record["worker"])
    return {source: tuple(sorted(workers)) for source, workers in found.items()}


def _cause(life: Life) -> str:
    if life.cause is not None and life.cause != "finished":
        return life.cause  # a program may leave with code 0 for a preemption too
    if life.exit is None:
        return "killed"
    return "failure" if life.exit.record["outcome"] == "failed" else "preemption"


def _outcome(lives: Sequence[Life]) -> str:
    # A start that was refused, or has told nothing, leaves it as it was.
    begun = [each for each in lives if each.restored or not each.is_over]
    last = begun[-1] if begun else lives[-1]
    if last.is_finished:
        return "finished"
    return "interrupted" if last.is_over else "running"


def _commit(event: Event) -> Commit:
    record = event.record
    blocked = record["blocked_seconds"]
    return Commit(
        at=event.at,
        step=record["step"],
        because=record["because"],
        bytes=record["bytes"],
        save_seconds=record["save_seconds"],
        blocked_seconds=record["save_seconds"] if blocked is None else blocked,
        notice_to_commit_seconds=record["notice_to_commit_seconds"],
    )


def _metrics(events: Sequence[Event]) -> dict[str, tuple[Point, ...]]:
    curves: dict[str, list[Point]] = {}
    for event in events:
        if event.record.event == "metrics":
            for name, value in event.record["values"].items():
                if is_number(value):
                    point = (event.at, float(event.record["step"]), float(value))
                    curves.setdefault(name, []).append(point)
    return {name: tuple(points) for name, points in curves.items()}


def _faults(events: Sequence[Event]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in events:
        if event.record.event == "fault":
            text = f"{event.record['where']}: {event.record['error']}"
            counts[text] = counts.get(text, 0) + 1
    return counts


# --- what may be wrong ---------------------------------------------------------------


_ELSEWHERE = (
    "Its file may be lost; or the program keeps its commits, and with them its "
    "journal, in another directory than --checkpoint-dir: then name that one"
)


def _missing(
    lives: Mapping[int, Sequence[Life]], workers: Sequence[Worker]
) -> list[str]:
    found = []
    silent = [index for index, mine in lives.items() if not _is_told(mine)]
    if len(silent) == len(lives):
        found.append(
            "there are the records of a supervisor only, and none of a worker: steps, "
            f"commits and where the time went are not known. {_ELSEWHERE}"
        )
    elif 0 in silent or 0 not in lives:
        found.append(
            "there are no records of worker 0, which records the commits: saves and "
            f"lost steps are not known. {_ELSEWHERE}"
        )
    for worker in workers:
        gaps = [s.seconds for s in worker.spans if s.phase is Phase.UNKNOWN]
        if worker.index in silent:
            if worker.index and len(silent) < len(lives):
                found.append(
                    f"worker {worker.index} has left no records: its time is counted "
                    "as OTHER"
                )
        elif gaps:
            found.append(
                f"worker {worker.index}: no record says when {len(gaps)} process(es) "
                f"ended; {sum(gaps):.1f} s are counted as OTHER"
            )
    return found


def _skew(lives: Sequence[Life], commits: Sequence[Event]) -> list[str]:
    """Workers that left with a commit at another time than the chief made it."""
    made: dict[int, list[float]] = {}
    for each in commits:
        if each.record["because"] == "preemption":
            made.setdefault(each.record["step"], []).append(each.at)
    largest: dict[int, float] = {}
    for life in lives:
        if life.exit is None or life.exit.record["outcome"] != "committed":
            continue
        exit_at, step = life.exit.at, life.exit.record["step"]
        apart = [exit_at - at for at in made.get(step, ())]
        if apart:
            least = min(apart, key=abs)
            if abs(least) > max(_SKEW_SECONDS, abs(largest.get(life.worker, 0.0))):
                largest[life.worker] = least
    return [
        f"worker {worker} left {seconds:+.1f} s from the commit that it left with: its "
        "clock differs from worker 0's, and so does its place on the time line"
        for worker, seconds in largest.items()
    ]
