"""Checks every notice source of a config once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tfpreempt.core.compat import StrEnum
from tfpreempt.core.threads import CallTimeoutError, call_within
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.metadata_watch import ActiveNotice, MetadataWatch
from tfpreempt.notice.watcher import NoticeSourceConfig

ANSWER_SECONDS = 8.0


class SourceHealth(StrEnum):
    """The result of the check of a source."""

    WORKING = "working"
    NOTICE = "notice"  # works, and announces a preemption of this machine now
    FAILED = "failed"
    NO_ANSWER = "no answer"  # possibly no error: the source may work later


@dataclasses.dataclass(frozen=True, slots=True)
class SourceState:
    """The result of the check of a notice source, with the name of the source.

    Attributes:
        name: name of the source.
        grace_seconds: grace period of the source's notices; None if unknown.
        state: whether the source works on this machine.
        detail: explanation for the user.
    """

    name: str
    grace_seconds: float | None
    state: SourceHealth
    detail: str = ""


WatchMaker = Callable[[list[str]], MetadataWatch]
Verdict = tuple[SourceHealth, str]

WATCHES: Mapping[str, WatchMaker] = {
    "gce": GceWatch,
    "aws": AwsWatch,
    "azure": AzureWatch,
}


def probe_sources(
    sources: Iterable[NoticeSourceConfig],
    watches: Mapping[str, WatchMaker] = WATCHES,
    limit_seconds: float = ANSWER_SECONDS,
) -> tuple[SourceState, ...]:
    """Checks every source once, without starting the source.

    Args:
        sources: sources of a config.
        watches: for each cloud, a function that takes topics (kinds of notices, such as
            "preempted"), and returns the object that polls the metadata server.
        limit_seconds: timeout for the metadata server of every cloud.
    """
    watched = [(each.source.name, each.grace_seconds) for each in sources]
    verdicts: dict[str, Verdict] = {}
    topics: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in watched):
        kind, _, rest = name.partition(":")
        if kind in watches:
            topics.setdefault(kind, []).append(rest)
        elif kind == "signal":
            verdicts[name] = _signal(rest)
        elif kind == "file":
            verdicts[name] = _file(Path(rest))
        else:
            verdicts[name] = (
                SourceHealth.WORKING,
                "not checked: a function of the program",
            )
    for kind, names in topics.items():
        verdicts |= _cloud(kind, names, watches[kind], limit_seconds)
    return tuple(SourceState(name, grace, *verdicts[name]) for name, grace in watched)


def _signal(name: str) -> Verdict:
    """Checks whether this process blocks a signal. If so, a job that is started in the
    same shell blocks the signal, too."""
    if signal.Signals[name] in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        why = f"{name} is blocked in this shell; a thread of the job receives it"
        return SourceHealth.WORKING, why
    return SourceHealth.WORKING, "not blocked"


def _file(path: Path) -> Verdict:
    if os.path.lexists(path):
        return SourceHealth.NOTICE, f"{path} exists; remove the file"
    if os.path.isdir(path.parent):
        return SourceHealth.WORKING, "file does not exist: no notice now"
    return (
        SourceHealth.NO_ANSWER,
        f"no notice possible before the directory {path.parent} exists",
    )


def _cloud(
    kind: str, topics: list[str], make: WatchMaker, limit: float
) -> dict[str, Verdict]:
    """Polls a metadata server once; returns the results by name of the source.

    Args:
        kind: name of the cloud.
        topics: topics to check.
        make: function that takes the topics, and returns the object that polls.
        limit: timeout in seconds.
    """
    levels: dict[str, ActiveNotice | None] = {}
    state, why = SourceHealth.FAILED, ""  # result for topics without an answer
    try:
        with contextlib.closing(make(topics)) as watch:
            levels = watch.levels
            call_within(limit, watch.poll)
    except CallTimeoutError:
        state, why = SourceHealth.NO_ANSWER, f"no answer within {limit:g} s"
    except Exception as error:  # noqa: BLE001 - the error is the result of the check
        why = str(error)

    def verdict(topic: str) -> Verdict:
        if topic not in levels:
            text = why or watch.failure(topic) or "answer cannot be read"
            return state, text
        if (notice := levels[topic]) is not None:
            return SourceHealth.NOTICE, notice.detail
        return SourceHealth.WORKING, "answers: no notice now"

    return {f"{kind}:{topic}": verdict(topic) for topic in topics}
