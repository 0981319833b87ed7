"""Notices from the instance metadata service of Amazon EC2, by its version 2.

Every request carries a token, which is fetched with a lifetime. There is no way to
wait for a change, so one thread asks for all topics every five seconds, as Amazon
recommends.

Protocol: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Unpack

from tfpreempt import errors
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.clock import Clock
from tfpreempt.notice.metadata import (
    DEFAULT_URL,
    Answer,
    MetadataSession,
    checked_base_url,
    epoch_seconds,
    printable,
    url_from,
)
from tfpreempt.notice.topics import Poller, Report, Told, TopicWatch, WatchOptions

_logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
MODE_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
IPV6_URL = "http://[fd00:ec2::254]"

TOKEN_TARGET = "/latest/api/token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_SECONDS = 21_600  # the longest that is granted
ROOT = "/latest/meta-data/"
INTERVAL_SECONDS = 5.0
REQUEST_SECONDS = 3.0

# In a warm pool an instance that is stopped or hibernates is taken away as well.
AWAY = {"Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated"}

Read = Callable[[Answer, str], Told | None]


def read_interruption(answer: Answer, url: str) -> Told | None:
    """spot/instance-action: an object with the action and its time."""
    fields = _object(answer, url)
    action = fields.get("action")
    if not isinstance(action, str) or not re.fullmatch("[a-z][a-z-]{2,31}", action):
        raise _unexpected(answer, url, "an action such as 'terminate' and its time")
    told = printable(f"spot/instance-action is {action} at {fields.get('time')}")
    return Told(told, epoch_seconds(fields.get("time")))


def read_rebalance(answer: Answer, url: str) -> Told | None:
    """events/recommendations/rebalance: the time of an early warning.

    It stays there as long as the instance lives.
    """
    when = _object(answer, url).get("noticeTime")
    if not isinstance(when, str) or not when:
        raise _unexpected(answer, url, "an object with noticeTime")
    detail = printable(f"rebalance is recommended since {when}")
    return Told(detail, since=epoch_seconds(when))


def read_lifecycle(answer: Answer, url: str) -> Told | None:
    """autoscaling/target-lifecycle-state: where the group takes the instance to."""
    state = answer.text()
    if state in AWAY:
        return Told(f"target-lifecycle-state is {state}")
    if not re.fullmatch("[A-Za-z:]{1,64}", state):
        raise _unexpected(answer, url, "a state such as 'InService'")
    return None


TOPICS: Mapping[str, tuple[str, Read]] = {
    "spot-interruption": ("spot/instance-action", read_interruption),
    "rebalance": ("events/recommendations/rebalance", read_rebalance),
    "lifecycle": ("autoscaling/target-lifecycle-state", read_lifecycle),
}
"""Path below `ROOT`, and what its answer means; a status of 404 means nothing."""


def is_excluded(environment: Mapping[str, str] | None = None) -> bool:
    """Whether AWS_EC2_METADATA_DISABLED forbids to ask, as Amazon's clients take it.

    For detection; whoever makes an `AwsWatch` means it.
    """
    variables = os.environ if environment is None else environment
    return variables.get(DISABLED_VARIABLE, "").strip().lower() == "true"


def metadata_url(environment: Mapping[str, str] | None = None) -> str:
    """The service's address as the environment names it, or the usual one.

    AWS_EC2_METADATA_SERVICE_ENDPOINT is an address;
    AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE chooses between IPv4 and IPv6.

    Raises:
        ConfigurationError: a variable holds something else.
    """
    variables = os.environ if environment is None else environment
    mode = variables.get(MODE_VARIABLE, "").strip()
    default = IPV6_URL if mode.lower() == "ipv6" else DEFAULT_URL
    url = url_from((ENDPOINT_VARIABLE,), variables, "")
    if not url and mode.lower() not in {"", "ipv4", "ipv6"}:
        raise errors.ConfigurationError(
            f"{MODE_VARIABLE}={mode!r}: expected 'IPv4' or 'IPv6'; unset it for IPv4"
        )
    return url or default


class AwsWatch(TopicWatch):
    """Watches what the metadata service says of this instance's end.

    | topic | is a notice | source |
    |---|---|---|
    | `spot-interruption` | two minutes ahead of the end of a Spot instance | `aws:spot-interruption` |
    | `rebalance` | when the risk of that is high: early, and not always followed by it | `aws:rebalance` |
    | `lifecycle` | when the Auto Scaling group takes the instance down | `aws:lifecycle` |

    Args:
        topics: which of them to watch.
        url: host, host:port or http://host:port of the service; by default from the
            environment, see `metadata_url()`.
        interval: seconds between two looks.
        **options: clock, wait, jitter and close_limit, see `WatchOptions`.

    Raises:
        ConfigurationError: a topic is unknown, the address is none, or the interval is
            not positive.
    """  # noqa: E501 - a table's row is one line

    def __init__(
        self,
        topics: Iterable[str] = ("spot-interruption", "lifecycle"),
        *,
        url: str | None = None,
        interval: float = INTERVAL_SECONDS,
        **options: Unpack[WatchOptions],
    ) -> None:
        super().__init__("aws", topics, TOPICS, **options)
        self._url = metadata_url() if url is None else checked_base_url(url, "url")
        self._interval = check_seconds("the interval of AwsWatch", interval)

    def poller(self) -> Poller:
        session = MetadataSession(self._url)
        return AwsPoller(session, self.topics, self.clock, self._interval)


class AwsPoller(Poller):
    """Asks for each topic once, with a token that is renewed in time.

    What the service has said since before this was made is no notice: the process
    before this one has left by it, and every restart would do so again.

    Args:
        session: its own, closed with it.
        topics: what to ask for.
        clock: where times come from.
        interval: seconds between two looks.
    """

    def __init__(
        self,
        session: MetadataSession,
        topics: Iterable[str],
        clock: Clock,
        interval: float,
    ) -> None:
        super().__init__(session, "aws", topics, interval)
        self._clock = clock
        self._began = math.floor(clock.wall())  # the service's times are whole seconds
        self._has_passed_over = False
        self._token = ""
        self._renew_at = 0.0

    def poll(self, report: Report) -> float:
        """Asks for all topics. What all fail at is the service's fault, and raised."""
        failures: dict[str, errors.NoticeError] = {}
        for name in self._failures:
            path, read = TOPICS[name]
            answer = self._get(path)
            try:
                told = self._read(path, read, answer)
            except errors.NoticeError as error:
                failures[name] = error
            else:
                self._failures[name].note_success()
                report(name, self._if_new(told))
        if len(failures) == len(self._failures):
            raise next(iter(failures.values()))
        for name, failure in failures.items():
            self._failures[name].note_failure(failure)
        return self._interval

    def _if_new(self, told: Told | None) -> Told | None:
        if told is None or told.since is None or told.since >= self._began:
            return told
        if not self._has_passed_over:
            self._has_passed_over = True
            _logger.info("%s, from before this watch: no notice", told.detail)
        return None

    def _read(self, path: str, read: Read, answer: Answer) -> Told | None:
        if answer.status == 404:
            return None
        url = f"{self._session.base_url}{ROOT}{path}"
        if answer.status != 200:
            raise errors.NoticeError(
                f"{url} answered with status {answer.status}, expected 200 or 404"
            )
        return read(answer, url)

    def _get(self, path: str) -> Answer:
        """The answer, with a new token if the old one is not accepted."""
        for is_second in (False, True):
            if not self._token or self._clock.monotonic() >= self._renew_at:
                self._fetch_token()
            headers = {TOKEN_HEADER: self._token}
            answer = self._session.request(
                ROOT + path, headers=headers, seconds=REQUEST_SECONDS
            )
            if answer.status != 401 or is_second:
                break
            self._token = ""
        return answer

    def _fetch_token(self) -> None:
        self._token = ""
        answer = self._session.request(
            TOKEN_TARGET,
            method="PUT",
            headers={TTL_HEADER: str(TTL_SECONDS)},
            seconds=REQUEST_SECONDS,
        )
        token = answer.text()
        is_token = 0 < len(token) <= 4096 and token.isascii() and token.isprintable()
        if answer.status != 200 or not is_token or " " in token:
            said = repr(printable(token, 60))
            raise errors.NoticeError(
                f"PUT {self._session.base_url}{TOKEN_TARGET} answered with status "
                f"{answer.status} and {said}, expected a token; the instance's "
                "metadata service may be turned off, or something else listens there. "
                f"Elsewhere than on EC2 set {ENDPOINT_VARIABLE}",
                said=said,
            )
        granted = answer.headers.get(TTL_HEADER.lower(), "")
        seconds = int(granted) if granted.isdecimal() else TTL_SECONDS
        self._token = token
        # In good time, but never at once: a lifetime of 0 would fetch without end.
        self._renew_at = self._clock.monotonic() + max(0.9 * seconds, 1.0)


def _object(answer: Answer, url: str) -> dict[str, object]:
    value = answer.json(url)
    if not isinstance(value, dict):
        raise _unexpected(answer, url, "a JSON object")
    return value


def _unexpected(answer: Answer, url: str, expected: str) -> errors.NoticeError:
    said = repr(printable(answer.text()))
    return errors.NoticeError(
        f"{url} answered {said}, expected {expected}; it is taken for no notice",
        said=said,
    )
