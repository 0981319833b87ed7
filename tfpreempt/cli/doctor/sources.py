"""Asks each source of a config once whether it works here."""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tfpreempt.core.threads import OwnedThread
from tfpreempt.errors import TfpreemptError
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.topics import Poller, Told
from tfpreempt.notice.watcher import WatchedSource

ANSWER_SECONDS = 8.0


class Liveness(enum.StrEnum):
    """What asking a source has shown."""

    LIVE = "live"
    NOTICE = "notice"  # it says now that this machine goes
    DEAD = "dead"
    SLOW = "slow"  # no answer yet; may be normal


@dataclasses.dataclass(frozen=True, slots=True)
class SourceState:
    """One source of notices.

    Attributes:
        name: the source's.
        grace_seconds: what its notice leaves; None where nobody knows.
        state: whether it works here.
        detail: why, for people.
    """

    name: str
    grace_seconds: float | None
    state: Liveness
    detail: str = ""


PollerMaker = Callable[[list[str]], Poller]
Verdict = tuple[Liveness, str]

POLLERS: Mapping[str, PollerMaker] = {
    "gce": lambda topics: GceWatch(topics).poller(),
    "aws": lambda topics: AwsWatch(topics).poller(),
    "azure": lambda topics: AzureWatch(topics).poller(),
}


def probe_sources(
    sources: Iterable[WatchedSource],
    pollers: Mapping[str, PollerMaker] = POLLERS,
    limit_seconds: float = ANSWER_SECONDS,
) -> tuple[SourceState, ...]:
    """The state of each source; none of them is started.

    Args:
        sources: as a config names them.
        pollers: for each cloud, how to ask its metadata server for topics.
        limit_seconds: for each cloud.
    """
    watched = [(each.source.name, each.grace_seconds) for each in sources]
    verdicts: dict[str, Verdict] = {}
    topics: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in watched):
        kind, _, rest = name.partition(":")
        if kind in pollers:
            topics.setdefault(kind, []).append(rest)
        elif kind == "signal":
            verdicts[name] = _signal(rest)
        elif kind == "file":
            verdicts[name] = _file(Path(rest))
        else:
            verdicts[name] = Liveness.LIVE, "not asked: it is a function of the program"
    for kind, names in topics.items():
        verdicts |= _cloud(kind, names, pollers[kind], limit_seconds)
    return tuple(SourceState(name, grace, *verdicts[name]) for name, grace in watched)


def _signal(name: str) -> Verdict:
    """A signal that is blocked here is blocked in what is started from here."""
    number = signal.Signals[name]
    if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        why = f"{name} is blocked in this shell, and in what is started from it"
        return Liveness.DEAD, why
    return Liveness.LIVE, "is not blocked here"


def _file(path: Path) -> Verdict:
    if os.path.lexists(path):
        return Liveness.NOTICE, f"{path} is there; remove it"
    if os.path.isdir(path.parent):
        return Liveness.LIVE, "is not there; no notice now"
    return Liveness.SLOW, f"{path.parent} is not there yet; something has to make it"


def _cloud(
    kind: str, topics: list[str], make: PollerMaker, limit: float
) -> dict[str, Verdict]:
    """Asks one metadata server for all its topics."""
    levels: dict[str, Told | None] = {}
    faults: list[str] = []
    try:
        poller = make(topics)
    except TfpreemptError as error:
        return {f"{kind}:{topic}": (Liveness.DEAD, str(error)) for topic in topics}

    def ask() -> None:
        try:
            poller.poll(levels.__setitem__)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
            faults.append(str(error))

    thread = OwnedThread(f"tfpreempt-doctor-{kind}", ask)
    thread.start()
    is_done = thread.join(limit)
    poller.close()

    def verdict(topic: str) -> Verdict:
        if (told := levels.get(topic)) is not None:
            return Liveness.NOTICE, told.detail
        if topic in levels:
            return Liveness.LIVE, "answers; no notice now"
        if not is_done:
            return Liveness.SLOW, f"no answer within {limit:g} s"
        why = faults[0] if faults else poller.failure(topic)
        return Liveness.DEAD, why or "its answer cannot be read"

    return {f"{kind}:{topic}": verdict(topic) for topic in topics}
