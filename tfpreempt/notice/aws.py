"""Notices from the instance metadata service of Amazon EC2, by its version 2.

Every request carries a token, which is fetched with a lifetime. There is no way to
wait for a change, so one thread asks for all topics every five seconds, as Amazon
recommends.

Protocol: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping

from typing_extensions import Unpack

from tfpreempt import errors
from tfpreempt.notice.metadata import (
    DEFAULT_URL,
    Answer,
    epoch_seconds,
    readable,
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

Read = Callable[[Answer], Told | None]


def read_interruption(answer: Answer) -> Told | None:
    """spot/instance-action: an object with the action and its time."""
    expected = "an action such as 'terminate' and its time"
    fields = answer.fields(expected)
    action = fields.get("action")
    if not isinstance(action, str) or not re.fullmatch("[a-z][a-z-]{2,31}", action):
        raise answer.refused(expected)
    goes_at = epoch_seconds(fields.get("time"))
    return Told(f"spot/instance-action is {action} at {readable(goes_at)}", goes_at)


def read_rebalance(answer: Answer) -> Told | None:
    """events/recommendations/rebalance: the time of an early warning.

    It stays there as long as the instance lives.
    """
    expected = "an object with noticeTime"
    when = answer.fields(expected).get("noticeTime")
    if not isinstance(when, str) or not when:
        raise answer.refused(expected)
    since = epoch_seconds(when)
    return Told(f"rebalance is recommended since {readable(since)}", since=since)


def read_lifecycle(answer: Answer) -> Told | None:
    """autoscaling/target-lifecycle-state: where the group takes the instance to."""
    state = answer.text()
    if state in AWAY:
        return Told(f"target-lifecycle-state is {state}")
    if not re.fullmatch("[A-Za-z:]{1,64}", state):
        raise answer.refused("a state such as 'InService'")
    return None


TOPICS: Mapping[str, tuple[str, Read]] = {
    "spot-interruption": ("spot/instance-action", read_interruption),
    "rebalance": ("events/recommendations/rebalance", read_rebalance),
    "lifecycle": ("autoscaling/target-lifecycle-state", read_lifecycle),
}
"""Path below `ROOT`, and what its answer means; a status of 404 means nothing."""


def is_excluded(environment: Mapping[str, str]) -> bool:
    """Whether AWS_EC2_METADATA_DISABLED forbids to ask, as Amazon's clients take it.

    For detection; whoever makes an `AwsWatch` means it.
    """
    return environment.get(DISABLED_VARIABLE, "").strip().lower() == "true"


def metadata_url(environment: Mapping[str, str]) -> str:
    """The service's address as the environment names it, or the usual one.

    AWS_EC2_METADATA_SERVICE_ENDPOINT is an address;
    AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE chooses between IPv4 and IPv6.

    Raises:
        ConfigurationError: a variable holds something else.
    """
    mode = environment.get(MODE_VARIABLE, "").strip()
    usual = {"": DEFAULT_URL, "ipv4": DEFAULT_URL, "ipv6": IPV6_URL}
    url = url_from((ENDPOINT_VARIABLE,), environment, usual.get(mode.lower(), ""))
    if not url:
        raise errors.ConfigurationError(
            f"{MODE_VARIABLE}={mode!r}: expected 'IPv4' or 'IPv6'; unset it for IPv4"
        )
    return url


class AwsWatch(TopicWatch):
    """Watches what the metadata service says of this instance's end.

    | topic | is a notice | source |
    |---|---|---|
    | `spot-interruption` | two minutes ahead of the end of a Spot instance | `aws:spot-interruption` |
    | `rebalance` | when the risk of that is high: early, and not always followed by it | `aws:rebalance` |
    | `lifecycle` | when the Auto Scaling group takes the instance down | `aws:lifecycle` |

    Args:
        topics: which of them to watch.
        interval: seconds between two looks.
        **options: url, clock and wait, see `WatchOptions`.

    Raises:
        ConfigurationError: a topic is unknown, the address is none, or the interval is
            not positive.
    """  # noqa: E501 - a table's row is one line

    name = "aws"
    _known = TOPICS
    _find_url = staticmethod(metadata_url)

    def __init__(
        self,
        topics: Iterable[str] = ("spot-interruption", "lifecycle"),
        *,
        interval: float = INTERVAL_SECONDS,
        **options: Unpack[WatchOptions],
    ) -> None:
        super().__init__(topics, interval, **options)

    def poller(self) -> Poller:
        return AwsPoller(self)


class AwsPoller(Poller):
    """Asks for each topic once, with a token that is renewed in time.

    What the service has said since before this was made is no notice: the process
    before this one has left by it, and every restart would do so again.
    """

    def __init__(self, watch: TopicWatch) -> None:
        super().__init__(watch)
        self._began = math.floor(self._clock.wall())  # the service's are whole seconds
        self._has_passed_over = False
        self._token = ""
        self._renew_at = 0.0

    def poll(self, report: Report) -> float:
        """Asks for all topics. What all fail at is the service's fault, and raised."""
        failures: dict[str, errors.NoticeError] = {}
        for name, log in self._failures.items():
            path, read = TOPICS[name]
            answer = self._get(path)
            try:
                told = self._read(answer, read)
            except errors.NoticeError as error:
                failures[name] = error
            else:
                log.note_success()
                report(name, told)
        if len(failures) == len(self._failures):
            raise next(iter(failures.values()))
        for name, failure in failures.items():
            self._failures[name].note_failure(failure, self._interval)
        return self._interval

    def _read(self, answer: Answer, read: Read) -> Told | None:
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise answer.refused("200 or 404")
        told = read(answer)
        if told is None or told.since is None or told.since >= self._began:
            return told
        if not self._has_passed_over:
            self._has_passed_over = True
            _logger.info("%s, from before this watch: no notice", told.detail)
        return None

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
        if answer.status != 200 or not re.fullmatch("[!-~]{1,4096}", token):
            raise answer.refused(
                "a token for a PUT; the instance's metadata service may be turned off, "
                f"or something else listens there. Elsewhere than on EC2 set "
                f"{ENDPOINT_VARIABLE}"
            )
        granted = answer.headers.get(TTL_HEADER.lower(), "")
        # More digits than that are no lifetime; a longer one is not granted.
        is_lifetime = granted.isdecimal() and len(granted) < 10
        seconds = int(granted) if is_lifetime else TTL_SECONDS
        self._token = token
        # In good time, but never at once: a lifetime of 0 would fetch without end.
        self._renew_at = self._clock.monotonic() + max(0.9 * seconds, 1.0)
