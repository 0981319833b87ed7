"""Notices from Google Compute Engine's metadata server.

A topic is an entry of the server that can announce a termination. One thread watches
all topics. The thread sends a hanging GET for the directory `instance/`: a request that
the server answers only when an entry of the directory changes. If the answer lacks an
entry, the thread requests that entry separately before the next hanging GET.
docs/decisions/0009 has the reasons.

Protocol: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote

from typing_extensions import Unpack

from tfpreempt import errors
from tfpreempt.notice.metadata_session import (
    BODY_BYTES,
    Answer,
    SessionClosedError,
    epoch_seconds,
    readable,
    url_from,
)
from tfpreempt.notice.metadata_watch import (
    ActiveNotice,
    MetadataWatch,
    WatchOptions,
)

HOST_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
NO_CHECK_VARIABLE = "NO_GCE_CHECK"

ROOT = "/computeMetadata/v1/"
DIRECTORY = "instance/"

HANG_SECONDS = 60
# Timeout in seconds if some entries need separate requests.
HANG_BETWEEN_SINGLES_SECONDS = 5
# The thread waits this much longer than the server's timeout for a hanging GET.
HANG_EXTRA_SECONDS = 10
PLAIN_SECONDS = 3
# Largest answer for the directory; the instance's attributes alone may be 512 KB.
DIRECTORY_BYTES = 2 * 1024 * 1024
PAUSE_SECONDS = 0.1  # between two requests
HIDDEN = frozenset({403, 404})  # HTTP statuses of a proxy that hides an entry
# Seconds between two requests, if the server answers a hanging GET at once, or gives no
# ETag.
POLL_SECONDS = 1.0


ABSENT = object()
"""Return value of `pick()` for a missing entry."""

Read = Callable[[object, float], ActiveNotice | None]
"""Function that parses an entry: takes the value of the entry and the wall time, and
returns the notice, or None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """An entry of the metadata server that can announce a termination.

    Attributes:
        path: path relative to `ROOT`; it ends with "/" if the entry is a directory.
        read: function that parses the entry.
        quiet: HTTP statuses that are no errors for this entry, because not every
            machine has the entry; empty if every machine has it.
    """

    path: str
    read: Read
    quiet: frozenset[int] = frozenset()


def read_word(
    topic: str, up: set[str], quiet: set[str], value: object, now: float
) -> ActiveNotice | None:
    """Parses an entry whose value is a word.

    Args:
        topic: name of the entry, for messages.
        up: words that are a notice.
        quiet: words that are no notice, in addition to "NONE" and "".
        value: the value of the entry.
        now: the wall time; not used.

    Raises:
        NoticeError: the word is unknown.
    """
    word = "" if value is None else str(value).strip().upper()
    if word in up:
        return ActiveNotice(f"{topic} is {word}")
    if word not in quiet | {"NONE", ""}:
        raise errors.NoticeError(
            f"the metadata server's value of {topic} is unknown, expected one of "
            f"{sorted(up | quiet | {'NONE'})}; the value counts as no notice. The "
            "value is not shown, because metadata can hold secrets"
        )
    return None


def read_upcoming_maintenance(value: object, now: float) -> ActiveNotice | None:
    """Parses the entry instance/upcoming-maintenance/, an object with a time window.

    Field names may be in camelCase or snake_case. Returns None for {}, for "NONE", for
    an object with an error or with empty fields, and for a maintenance that is over,
    according to its status or the end of its window. If the status is missing or
    UNKNOWN, only the window decides.

    Args:
        value: the value of the entry.
        now: the wall time, in seconds since the Unix epoch.

    Raises:
        NoticeError: the status is unknown.
    """
    topic = "upcoming-maintenance"
    if not isinstance(value, dict):
        return read_word(topic, set(), set(), value, now)
    fields = {_squash(str(name)): each for name, each in value.items()}
    status = str(fields.get("maintenancestatus") or "").strip().upper()
    start, end = (fields.get(f"window{side}time") for side in ("start", "end"))
    over = {"COMPLETED", "CANCELED", "CANCELLED", "UNKNOWN"}
    notice = read_word(topic, {"PENDING", "ONGOING"}, over, status, now)
    begins, ends = epoch_seconds(start), epoch_seconds(end)
    if notice is None:
        if status not in {"UNKNOWN", ""} or not start:
            return None
        ends = begins if ends is None else ends
    if ends is not None and ends <= now:
        return None
    kind = str(fields.get("maintenancetype") or fields.get("type"))
    shown = kind if re.fullmatch("[A-Z_]{1,40}", kind) else "UNKNOWN"
    window = f"{readable(begins)} to {readable(ends)}"
    detail = f"{topic} is {status or 'PENDING'}, type {shown}, window {window}"
    return ActiveNotice(detail, now if status == "ONGOING" else begins)


def _words(topic: str, up: set[str], quiet: set[str]) -> Read:
    return functools.partial(read_word, topic, up, quiet)


TOPICS: Mapping[str, Topic] = {
    "preempted": Topic(
        path="instance/preempted", read=_words("preempted", {"TRUE"}, {"FALSE"})
    ),
    "maintenance-event": Topic(
        path="instance/maintenance-event",
        read=_words(
            "maintenance-event",
            up={"TERMINATE_ON_HOST_MAINTENANCE"},
            # In a live migration the machine keeps running.
            quiet={"MIGRATE_ON_HOST_MAINTENANCE"},
        ),
    ),
    "upcoming-maintenance": Topic(
        path="instance/upcoming-maintenance/",
        read=read_upcoming_maintenance,
        quiet=frozenset({404, 503}),
    ),
    "stop-state": Topic(
        path="instance/shutdown-details/stop-state",
        read=_words(
            "stop-state",
            up={"PENDING_STOP", "STOPPING"},
            quiet={"UNSPECIFIED", "STOP_STATE_UNSPECIFIED"},
        ),
        quiet=frozenset({404}),
    ),
}


def pick(tree: object, path: str) -> object:
    """Finds an entry in the server's answer for a directory.

    The names in the answer may be in camelCase, the names in the path have dashes.

    Args:
        tree: the answer: nested dicts, one for every directory.
        path: path of the entry, relative to the requested directory.

    Returns:
        The value of the entry, or `ABSENT`.
    """
    at = tree
    for name in path.strip("/").split("/"):
        entries = at.items() if isinstance(at, Mapping) else ()
        squashed = {_squash(str(key)): value for key, value in entries}
        at = squashed.get(_squash(name), ABSENT)
    return at


def _squash(name: str) -> str:
    """Normalizes a name, so that camelCase, snake_case and dashes become equal."""
    return name.replace("-", "").replace("_", "").lower()


def is_excluded(environment: Mapping[str, str]) -> bool:
    """Returns whether NO_GCE_CHECK forbids requests.

    The detection of the platform respects the variable. A `GceWatch` ignores the
    variable, because the program has asked for the watch.
    """
    value = environment.get(NO_CHECK_VARIABLE, "").strip().lower()
    return value in {"true", "1", "yes"}


def metadata_url(environment: Mapping[str, str]) -> str:
    """Returns the metadata server's address from the environment, or the default.

    The first variable that is set counts: GCE_METADATA_HOST, then GCE_METADATA_ROOT,
    then GCE_METADATA_IP.

    Raises:
        ConfigurationError: the value of the variable is not a host.
    """
    return url_from(HOST_VARIABLES, environment)


class GceWatch(MetadataWatch):
    """Watches the entries of the metadata server that announce this machine's end.

    Polls by hanging GETs: requests that the server answers when an entry changes.

    | topic | is a notice | source |
    |---|---|---|
    | `preempted` | when the entry is TRUE | `gce:preempted` |
    | `maintenance-event` | when the entry is TERMINATE_ON_HOST_MAINTENANCE; not when the machine migrates | `gce:maintenance-event` |
    | `upcoming-maintenance` | when a maintenance is planned or runs | `gce:upcoming-maintenance` |
    | `stop-state` | when a graceful shutdown is pending | `gce:stop-state` |

    Args:
        topics: the topics to watch, see the table.
        maintenance_lead_seconds: seconds from the notice of an upcoming maintenance to
            the start of its window. None: the notice is given when the maintenance is
            announced, up to seven days before the window.
        **options: url, clock and wait, see `WatchOptions`.

    Raises:
        ConfigurationError: a topic is unknown, or the address is invalid.
    """  # noqa: E501 - a table's row is one line

    name = "gce"
    _known = TOPICS
    _find_url = staticmethod(metadata_url)

    def __init__(
        self,
        topics: Iterable[str] = tuple(TOPICS),
        *,
        maintenance_lead_seconds: float | None = None,
        **options: Unpack[WatchOptions],
    ) -> None:
        super().__init__(topics, HANG_BETWEEN_SINGLES_SECONDS, **options)
        self._lead_seconds = maintenance_lead_seconds
        self._hangs_on_all = len(self.topics) > 1
        self._etag: str | None = None
        self._hang_seconds = HANG_SECONDS
        # Times at which announced maintenances become notices.
        self._due: dict[str, float] = {}

    def poll(self) -> float:
        """Waits up to `HANG_SECONDS` for a change of an entry; reports all topics."""
        try:
            return self._poll()
        except errors.NoticeError:
            # Begin without an ETag: waiting for the next change could miss changes made
            # since the failed request. Try the directory again, too: a server that is
            # starting up may refuse the directory at first.
            self._etag, self._hangs_on_all = None, len(self.topics) > 1
            raise

    def _poll(self) -> float:
        began, before = self.clock.monotonic(), self._etag
        first = TOPICS[self.topics[0]].path
        target = DIRECTORY if self._hangs_on_all else first
        answer = self._get(target, hangs=True)
        if target == DIRECTORY and answer.status in {400, *HIDDEN}:
            # A proxy hides the directory (GKE). Wait for a change of the first topic
            # only.
            self._hangs_on_all, before = False, None
            answer = self._get(first)
        if self._hangs_on_all:
            values = self._carried(answer)
        else:
            values = {self.topics[0]: self._single_value(self.topics[0], answer)}
        for name, value in values.items():
            if value is not ABSENT:
                self._report_topic(name, value)
        missing = [name for name in self.topics if name not in values]
        for name in missing:
            self._report_topic(name)
        self._etag = answer.headers.get("etag") if answer.status == 200 else None
        self._hang_seconds = self._next_hang(missing)
        is_early = self.clock.monotonic() - began < POLL_SECONDS
        if self._etag is None or (self._etag == before and is_early):
            return POLL_SECONDS
        return PAUSE_SECONDS

    def _carried(self, answer: Answer) -> dict[str, object]:
        """Returns the values of those topics that an answer for the directory has."""
        if answer.status != 200:
            raise answer.refused("200")
        tree = answer.fields("a JSON object with the instance's entries")
        found = {
            name: pick(tree, TOPICS[name].path.removeprefix(DIRECTORY))
            for name in self.topics
        }
        return {name: value for name, value in found.items() if value is not ABSENT}

    def _report_topic(self, name: str, value: object = ABSENT) -> None:
        """Reports the state of a topic; logs an error, so the next topic is reported.

        Args:
            name: the topic.
            value: value of the entry; `ABSENT`: the method requests the entry.
        """
        topic, now = TOPICS[name], self.clock.wall()
        try:
            if value is ABSENT:
                value = self._single_value(name, self._get(topic.path))
            notice = None if value is ABSENT else topic.read(value, now)
        except SessionClosedError:
            raise
        except errors.NoticeError as error:
            self._failures[name].note_failure(error, self.interval)
        else:
            if value is not ABSENT:
                self._failures[name].note_success()
                self.report(name, self._within_lead(name, notice, now))

    def _single_value(self, name: str, answer: Answer) -> object:
        """Returns the value of an entry.

        Args:
            name: the topic.
            answer: the server's answer to a request for the entry.

        Returns:
            The value; None if the machine has no such entry; `ABSENT` if the value is
            unknown.
        """
        topic = TOPICS[name]
        if answer.status in topic.quiet:
            return None if answer.status == 404 else ABSENT
        if answer.status in HIDDEN:
            hidden = answer.refused(
                "200: every machine of Compute Engine has this entry, so a proxy hides "
                "the entry. Allow the entry in the proxy, or set "
                f"{HOST_VARIABLES[0]} to a server with the entry"
            )
            # Log the error, and raise nothing, because further topics must be
            # requested.
            self._failures[name].note_failure(hidden, self.interval)
            return ABSENT
        if answer.status != 200:
            raise answer.refused("200")
        try:
            return answer.json()
        except errors.NoticeError:
            # A server that does not know alt=json sends a plain word.
            return answer.text()

    def _within_lead(
        self, name: str, notice: ActiveNotice | None, now: float
    ) -> ActiveNotice | None:
        """Returns the notice if it is due; else stores its due time and returns None.

        A notice with a time is due `maintenance_lead_seconds` before the time; any
        other notice is due at once.

        Args:
            name: the topic.
            notice: the notice in the entry of the topic.
            now: the wall time.
        """
        self._due.pop(name, None)
        lead = self._lead_seconds
        if notice is None or notice.shutdown_at is None or lead is None:
            return notice
        if notice.shutdown_at - lead <= now:
            return notice
        self._due[name] = notice.shutdown_at - lead
        return None

    def _next_hang(self, missing: list[str]) -> int:
        """Returns the timeout in seconds of the next hanging GET.

        The timeout is shorter if a notice becomes due, or if entries must be requested
        separately.

        Args:
            missing: topics that the last answer for the directory did not contain.
        """
        if any(not TOPICS[name].quiet for name in missing):
            # behind a proxy: poll often, because a preemption leaves little time
            longest = POLL_SECONDS
        else:
            longest = HANG_BETWEEN_SINGLES_SECONDS if missing else HANG_SECONDS
        until_due = min(self._due.values(), default=math.inf) - self.clock.wall()
        return max(1, math.ceil(min(longest, until_due)))

    def _get(self, path: str, *, hangs: bool = False) -> Answer:
        """Requests an entry or a directory.

        Args:
            path: path relative to `ROOT`.
            hangs: whether the server answers only when the ETag differs from the last
                one, or after a timeout.
        """
        query, seconds = "alt=json", PLAIN_SECONDS
        if path.endswith("/"):
            query += "&recursive=true"
        if hangs and self._etag is not None:
            seconds = self._hang_seconds + HANG_EXTRA_SECONDS
            query += f"&wait_for_change=true&timeout_sec={self._hang_seconds}"
            query += f"&last_etag={quote(self._etag, safe='')}"
        answer = self._session.request(
            f"{ROOT}{path}?{query}",
            headers={"Metadata-Flavor": "Google"},
            seconds=seconds,
            body_bytes=DIRECTORY_BYTES if path == DIRECTORY else BODY_BYTES,
        )
        if answer.headers.get("metadata-flavor") != "Google":
            raise answer.refused(
                "the header 'Metadata-Flavor: Google', so it is not the metadata "
                "server and is not listened to; on a machine of Google's look for a "
                f"proxy, elsewhere leave the GCE sources out or set {HOST_VARIABLES[0]}"
            )
        return answer
