"""Notices from Google Compute Engine's metadata server.

One thread serves all topics. It hangs in one GET, on the smallest part of the server's
tree that holds them all, and the answer comes when anything there changes. What that
part does not carry is asked for singly in between. docs/decisions/0009 has the reasons.

Protocol: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Unpack
from urllib.parse import quote

from tfpreempt import errors
from tfpreempt.core.clock import Clock
from tfpreempt.notice.metadata import (
    BODY_BYTES,
    Answer,
    MetadataSession,
    SessionClosedError,
    checked_base_url,
    epoch_seconds,
    printable,
    url_from,
)
from tfpreempt.notice.topics import Poller, Report, Told, TopicWatch, WatchOptions

HOST_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
NO_CHECK_VARIABLE = "NO_GCE_CHECK"

ROOT = "/computeMetadata/v1/"
DIRECTORY = "instance/"

HANG_SECONDS = 60
HANG_BETWEEN_SINGLES_SECONDS = 5
# The server ends a hanging GET itself; this is for one that has stopped to.
HANG_EXTRA_SECONDS = 10
PLAIN_SECONDS = 3
# The directory has the instance's attributes too, by the API's limits up to 512 KB.
DIRECTORY_BYTES = 2 * 1024 * 1024
PAUSE_SECONDS = 0.1
HIDDEN = frozenset({403, 404})  # how a proxy conceals an entry
# Where the server does not hold the answer back, or has nothing to wait for.
POLL_SECONDS = 1.0


ABSENT = object()
"""What `pick()` returns for an entry that is not there."""

Read = Callable[[object, float], Told | None]
"""Takes the entry's value and the wall time; returns the notice if any."""

_NO_MAINTENANCE = {"COMPLETED", "CANCELED", "CANCELLED", "NONE", "UNKNOWN", ""}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One entry.

    Attributes:
        path: below the root, with a "/" at its end if it is a directory.
        read: what its value means.
        quiet: statuses by which it says nothing; every machine has an entry without.
    """

    path: str
    read: Read
    quiet: frozenset[int] = frozenset()


def read_preempted(value: object, now: float) -> Told | None:
    """instance/preempted: FALSE, then TRUE for good."""
    return _read_word("preempted", value, up={"TRUE"}, quiet={"FALSE", "NONE", ""})


def read_maintenance_event(value: object, now: float) -> Told | None:
    """instance/maintenance-event: a migration is no end."""
    return _read_word(
        "maintenance-event",
        value,
        up={"TERMINATE_ON_HOST_MAINTENANCE"},
        quiet={"NONE", "MIGRATE_ON_HOST_MAINTENANCE", ""},
    )


def read_stop_state(value: object, now: float) -> Told | None:
    """instance/shutdown-details/stop-state: a graceful shutdown."""
    return _read_word(
        "stop-state",
        value,
        up={"PENDING_STOP", "STOPPING"},
        quiet={"UNSPECIFIED", "STOP_STATE_UNSPECIFIED", "NONE", ""},
    )


def read_upcoming_maintenance(value: object, now: float) -> Told | None:
    """instance/upcoming-maintenance/: an object, in one of two spellings.

    Nothing is said by {}, "NONE", an object with an error, or empty fields; nor by a
    maintenance that is over, by its status or by the end of its window. Without a
    status the window decides alone.

    Raises:
        NoticeError: the status is none that is known.
    """
    if not isinstance(value, dict):
        _read_word("upcoming-maintenance", value, up=set(), quiet={"NONE", ""})
        return None
    fields = {_squash(str(name)): each for name, each in value.items()}
    status = str(fields.get("maintenancestatus") or "").strip().upper()
    start, end = (fields.get(f"window{side}time") for side in ("start", "end"))
    told = _read_word(
        "upcoming-maintenance", status, up={"PENDING", "ONGOING"}, quiet=_NO_MAINTENANCE
    )
    begins, ends = epoch_seconds(start), epoch_seconds(end)
    if told is None:
        if status not in {"UNKNOWN", ""} or not start:
            return None
        ends = begins if ends is None else ends
    if ends is not None and ends <= now:
        return None
    kind = fields.get("maintenancetype") or fields.get("type") or "UNKNOWN"
    detail = (
        f"upcoming-maintenance is {status or 'PENDING'}, type {kind}, "
        f"window {start or '?'} to {end or '?'}"
    )
    return Told(printable(detail), now if status == "ONGOING" else begins)


TOPICS: Mapping[str, Topic] = {
    "preempted": Topic(path="instance/preempted", read=read_preempted),
    "maintenance-event": Topic(
        path="instance/maintenance-event", read=read_maintenance_event
    ),
    "upcoming-maintenance": Topic(
        path="instance/upcoming-maintenance/",
        read=read_upcoming_maintenance,
        quiet=frozenset({404, 503}),
    ),
    "stop-state": Topic(
        path="instance/shutdown-details/stop-state",
        read=read_stop_state,
        quiet=frozenset({404}),
    ),
}


def pick(tree: Mapping[str, object], path: str) -> object:
    """An entry of a recursive answer, whose names may be in camelCase.

    Args:
        tree: the answer.
        path: the entry's path below it.

    Returns:
        Its value, or `ABSENT`.
    """
    at: object = tree
    for name in path.strip("/").split("/"):
        if not isinstance(at, Mapping):
            return ABSENT
        spelled = {_squash(str(key)): key for key in at}
        if _squash(name) not in spelled:
            return ABSENT
        at = at[spelled[_squash(name)]]
    return at


def _squash(name: str) -> str:
    """One form of camelCase, snake_case and dashed names."""
    return name.replace("-", "").replace("_", "").lower()


def _read_word(
    topic: str, value: object, *, up: set[str], quiet: set[str]
) -> Told | None:
    """A notice if the word is among `up`.

    Raises:
        NoticeError: it is no word that is known.
    """
    word = "" if value is None else str(value).strip().upper()
    if word in up:
        return Told(f"{topic} is {word}")
    if word not in quiet:
        said = repr(printable(str(value)))
        raise errors.NoticeError(
            f"the metadata server says {said} for {topic}, expected one of "
            f"{sorted(up | quiet - {''})}; it is taken for no notice",
            said=said,
        )
    return None


def is_excluded(environment: Mapping[str, str] | None = None) -> bool:
    """Whether NO_GCE_CHECK says that this is not a machine of Google's.

    For detection; whoever makes a `GceWatch` means it.
    """
    variables = os.environ if environment is None else environment
    return variables.get(NO_CHECK_VARIABLE, "").strip().lower() in {"true", "1", "yes"}


def metadata_url(environment: Mapping[str, str] | None = None) -> str:
    """The metadata server's address as the environment names it, or the usual one.

    GCE_METADATA_HOST comes first, then GCE_METADATA_ROOT, then GCE_METADATA_IP.

    Raises:
        ConfigurationError: a variable holds no host.
    """
    return url_from(HOST_VARIABLES, environment)


class GceWatch(TopicWatch):
    """Watches the machine's own entries on the metadata server.

    | topic | is a notice | source |
    |---|---|---|
    | `preempted` | when it is TRUE | `gce:preempted` |
    | `maintenance-event` | when it is TERMINATE_ON_HOST_MAINTENANCE; not when the machine migrates | `gce:maintenance-event` |
    | `upcoming-maintenance` | when a maintenance is planned or runs | `gce:upcoming-maintenance` |
    | `stop-state` | when a graceful shutdown is pending | `gce:stop-state` |

    Args:
        topics: which of them to watch.
        url: host, host:port or http://host:port of the server; by default from the
            environment, see `metadata_url()`.
        maintenance_lead_seconds: an upcoming maintenance is a notice only once its
            window begins within so many seconds. It is announced up to seven days
            ahead. None: as soon as it is announced.
        **options: clock, wait, jitter and close_limit, see `WatchOptions`.

    Raises:
        ConfigurationError: a topic is unknown, or the address is none.
    """  # noqa: E501 - a table's row is one line

    def __init__(
        self,
        topics: Iterable[str] = tuple(TOPICS),
        *,
        url: str | None = None,
        maintenance_lead_seconds: float | None = None,
        **options: Unpack[WatchOptions],
    ) -> None:
        super().__init__("gce", topics, TOPICS, **options)
        self._url = metadata_url() if url is None else checked_base_url(url, "url")
        self._lead_seconds = maintenance_lead_seconds

    def poller(self) -> Poller:
        topics = {name: TOPICS[name] for name in self.topics}
        session = MetadataSession(self._url)
        return GcePoller(session, topics, self.clock, self._lead_seconds)


class GcePoller(Poller):
    """One hanging GET after the other.

    Args:
        session: its own, closed with it.
        topics: what to look for.
        clock: where times come from.
        lead_seconds: as `maintenance_lead_seconds` of the watch.
    """

    def __init__(
        self,
        session: MetadataSession,
        topics: Mapping[str, Topic],
        clock: Clock,
        lead_seconds: float | None,
    ) -> None:
        super().__init__(session, "gce", topics, HANG_BETWEEN_SINGLES_SECONDS)
        self._topics = topics
        self._clock = clock
        self._lead_seconds = lead_seconds
        only = next(iter(topics.values())).path
        self._preferred = only if len(topics) == 1 else DIRECTORY
        self._target = self._preferred
        self._etag: str | None = None
        self._hang_seconds = HANG_SECONDS
        self._due: dict[str, float] = {}  # when what is announced becomes a notice

    def poll(self, report: Report) -> float:
        """Waits for a change, at most `HANG_SECONDS`, and reports all topics."""
        try:
            return self._poll(report)
        except errors.NoticeError:
            # A wait for the next change would miss those that came meanwhile, and a
            # server that was refusing things as it started may refuse them no more.
            self._etag, self._target = None, self._preferred
            raise

    def _poll(self, report: Report) -> float:
        began, before = self._clock.monotonic(), self._etag
        answer = self._get(self._target, self._hang_query())
        if self._target == DIRECTORY and answer.status in {400, *HIDDEN}:
            # A proxy that hides the directory (GKE): hang on the first topic alone.
            self._target = next(iter(self._topics.values())).path
            before = None
            answer = self._get(self._target, "")
        missing = self._report_target(answer, report)
        for name in missing:
            self._report_single(name, report)
        self._etag = answer.headers.get("etag") if answer.status == 200 else None
        self._hang_seconds = self._next_hang(missing)
        is_early = self._clock.monotonic() - began < POLL_SECONDS
        if self._etag is None or (self._etag == before and is_early):
            return POLL_SECONDS
        return PAUSE_SECONDS

    def _hang_query(self) -> str:
        if self._etag is None:
            return ""
        return (
            f"&wait_for_change=true&timeout_sec={self._hang_seconds}"
            f"&last_etag={quote(self._etag, safe='')}"
        )

    def _report_target(self, answer: Answer, report: Report) -> list[str]:
        """Reports what the answer carries; returns the topics that it does not."""
        if self._target != DIRECTORY:
            paths = {topic.path: name for name, topic in self._topics.items()}
            name = paths[self._target]
            self._report_value(name, self._single_value(name, answer), report)
            return [other for other in self._topics if other != name]
        self._check_status(DIRECTORY, answer)
        tree = answer.json(self._url(DIRECTORY))
        if not isinstance(tree, dict):
            said = repr(printable(answer.text()))
            raise errors.NoticeError(
                f"{self._url(DIRECTORY)} answered {said}, expected a JSON object with "
                "the instance's entries",
                said=said,
            )
        values = {
            name: pick(tree, topic.path.removeprefix(DIRECTORY))
            for name, topic in self._topics.items()
        }
        for name, value in values.items():
            self._report_value(name, value, report)
        return [name for name, value in values.items() if value is ABSENT]

    def _report_single(self, name: str, report: Report) -> None:
        """Asks for one entry. Its failures are its own: the others are still seen."""
        try:
            answer = self._get(self._topics[name].path, "")
            self._report_value(name, self._single_value(name, answer), report)
        except SessionClosedError:
            raise
        except errors.NoticeError as error:
            self._failures[name].note_failure(error)

    def _single_value(self, name: str, answer: Answer) -> object:
        """An entry's value; None where there is none, `ABSENT` if nothing is known."""
        topic = self._topics[name]
        if answer.status in topic.quiet:
            return None if answer.status == 404 else ABSENT
        if answer.status in HIDDEN:
            hidden = errors.NoticeError(
                f"{self._url(topic.path)} answered with status {answer.status}, "
                "expected 200: every machine of Google's has this entry, so a proxy "
                f"hides it; let it through, or set {HOST_VARIABLES[0]} to a server "
                "that is not hidden"
            )
            # Not raised: the other topics are asked for all the same.
            self._failures[name].note_failure(hidden)
            return ABSENT
        self._check_status(topic.path, answer)
        try:
            return answer.json(self._url(topic.path))
        except errors.NoticeError:
            # A word alone is what the server sends where it knows no alt=json; what
            # it means, if anything, is for the topic to say.
            return answer.text()

    def _report_value(self, name: str, value: object, report: Report) -> None:
        if value is ABSENT:
            return
        topic, now = self._topics[name], self._clock.wall()
        try:
            told = topic.read(value, now)
        except errors.NoticeError as error:
            # A word that we do not know must not cost us the others' hanging GET.
            self._failures[name].note_failure(error)
        else:
            self._failures[name].note_success()
            report(name, self._within_lead(name, told, now))

    def _within_lead(self, name: str, told: Told | None, now: float) -> Told | None:
        """The notice, if it is one already; else it is kept in mind when it will be."""
        self._due.pop(name, None)
        lead = self._lead_seconds
        if told is None or told.goes_at is None or lead is None:
            return told
        if told.goes_at - lead <= now:
            return told
        self._due[name] = told.goes_at - lead
        return None

    def _next_hang(self, missing: list[str]) -> int:
        """How long the next GET may hang: not past the time of an announced notice."""
        if any(not self._topics[name].quiet for name in missing):
            longest = POLL_SECONDS  # behind a proxy, and no time to lose
        else:
            longest = HANG_BETWEEN_SINGLES_SECONDS if missing else HANG_SECONDS
        until_due = min(self._due.values(), default=math.inf) - self._clock.wall()
        return max(1, math.ceil(min(longest, until_due)))

    def _get(self, path: str, query: str) -> Answer:
        is_directory = path.endswith("/")
        recursive = "recursive=true&" if is_directory else ""
        hang = self._hang_seconds + HANG_EXTRA_SECONDS
        answer = self._session.request(
            f"{ROOT}{path}?{recursive}alt=json{query}",
            headers={"Metadata-Flavor": "Google"},
            seconds=hang if query else PLAIN_SECONDS,
            body_bytes=DIRECTORY_BYTES if path == DIRECTORY else BODY_BYTES,
        )
        if answer.headers.get("metadata-flavor") != "Google":
            raise errors.NoticeError(
                f"{self._url(path)} answered without the header "
                f"'Metadata-Flavor: Google' (status {answer.status}), so it is not the "
                "metadata server and is not listened to; on a machine of Google's look "
                f"for a proxy, elsewhere leave the GCE sources out or set "
                f"{HOST_VARIABLES[0]}"
            )
        return answer

    def _check_status(self, path: str, answer: Answer) -> None:
        if answer.status != 200:
            raise errors.NoticeError(
                f"{self._url(path)} answered with status {answer.status}, expected 200"
            )

    def _url(self, path: str) -> str:
        return f"{self._session.base_url}{ROOT}{path}"
