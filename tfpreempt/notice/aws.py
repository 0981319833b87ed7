"""Notices from the instance metadata service of Amazon EC2, version 2.

A topic is an entry of the service that can announce a termination. Every request needs
a token, which the service issues for a limited time. The service cannot report changes,
so one thread polls all topics every five seconds, as Amazon recommends.

Protocol:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping

from typing_extensions import Unpack

from tfpreempt import errors
from tfpreempt.notice.metadata_session import (
    DEFAULT_URL,
    Answer,
    epoch_seconds,
    readable,
    url_from,
)
from tfpreempt.notice.metadata_watch import (
    ActiveNotice,
    MetadataWatch,
    WatchOptions,
)

_logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
MODE_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
IPV6_URL = "http://[fd00:ec2::254]"

TOKEN_TARGET = "/latest/api/token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_SECONDS = 21_600  # the longest lifetime that the service grants
ROOT = "/latest/meta-data/"
INTERVAL_SECONDS = 5.0
REQUEST_SECONDS = 3.0

# Lifecycle states in which the instance ends; an instance in a warm pool may also stop.
AWAY = {"Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated"}

Read = Callable[[Answer], ActiveNotice | None]


def read_interruption(answer: Answer) -> ActiveNotice | None:
    """Parses the entry spot/instance-action: JSON with an action and its time."""
    expected = "an action such as 'terminate' and its time"
    fields = answer.fields(expected)
    action = fields.get("action")
    if not isinstance(action, str) or not re.fullmatch("[a-z][a-z-]{2,31}", action):
        raise answer.refused(expected)
    goes_at = epoch_seconds(fields.get("time"))
    return ActiveNotice(
        f"spot/instance-action is {action} at {readable(goes_at)}", goes_at
    )


def read_rebalance(answer: Answer) -> ActiveNotice | None:
    """Parses the entry events/recommendations/rebalance: JSON with a time.

    The time is the time of the recommendation. The entry exists until the instance
    ends.
    """
    expected = "an object with noticeTime"
    when = answer.fields(expected).get("noticeTime")
    if not isinstance(when, str) or not when:
        raise answer.refused(expected)
    since = epoch_seconds(when)
    return ActiveNotice(
        f"rebalance is recommended since {readable(since)}", since=since
    )


def read_lifecycle(answer: Answer) -> ActiveNotice | None:
    """Parses the entry autoscaling/target-lifecycle-state.

    The entry is the state into which the Auto Scaling group is moving the instance.
    """
    state = answer.text()
    if state in AWAY:
        return ActiveNotice(f"target-lifecycle-state is {state}")
    if not re.fullmatch("[A-Za-z:]{1,64}", state):
        raise answer.refused("a state such as 'InService'")
    return None


TOPICS: Mapping[str, tuple[str, Read]] = {
    "spot-interruption": ("spot/instance-action", read_interruption),
    "rebalance": ("events/recommendations/rebalance", read_rebalance),
    "lifecycle": ("autoscaling/target-lifecycle-state", read_lifecycle),
}
"""For every topic: path of the entry relative to `ROOT`, and function that parses the
entry. If the server answers 404, there is no notice."""


def is_excluded(environment: Mapping[str, str]) -> bool:
    """Returns whether AWS_EC2_METADATA_DISABLED forbids requests.

    The detection of the platform respects the variable, as Amazon's clients do. An
    `AwsWatch` ignores the variable, because the program has asked for the watch.
    """
    return environment.get(DISABLED_VARIABLE, "").strip().lower() == "true"


def metadata_url(environment: Mapping[str, str]) -> str:
    """Returns the service's address from the environment, or the default address.

    AWS_EC2_METADATA_SERVICE_ENDPOINT contains an address. If it is not set,
    AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE chooses the default address: IPv4 or IPv6.

    Raises:
        ConfigurationError: a variable has an invalid value.
    """
    mode = environment.get(MODE_VARIABLE, "").strip()
    usual = {"": DEFAULT_URL, "ipv4": DEFAULT_URL, "ipv6": IPV6_URL}
    url = url_from((ENDPOINT_VARIABLE,), environment, usual.get(mode.lower(), ""))
    if not url:
        raise errors.ConfigurationError(
            f"{MODE_VARIABLE}={mode!r}: expected 'IPv4' or 'IPv6'; unset the variable "
            "for IPv4"
        )
    return url


class AwsWatch(MetadataWatch):
    """Watches the entries of the metadata service that announce the instance's end.

    A poll requests every topic; the token is renewed before it expires. A rebalance
    recommendation from before the creation of the watch is ignored: the previous
    process has already exited because of the recommendation. Otherwise every process
    that is restarted on the instance would exit again.

    | topic | is a notice | source |
    |---|---|---|
    | `spot-interruption` | two minutes before the interruption of a Spot instance | `aws:spot-interruption` |
    | `rebalance` | when the risk of an interruption is high: early, and not always followed by an interruption | `aws:rebalance` |
    | `lifecycle` | when the Auto Scaling group terminates the instance | `aws:lifecycle` |

    Args:
        topics: the topics to watch, see the table.
        interval: seconds between two polls.
        **options: url, clock and wait, see `WatchOptions`.

    Raises:
        ConfigurationError: a topic is unknown, the address is invalid, or the interval
            is not positive.
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
        # Round down, because the service's times are whole seconds.
        self._began = math.floor(self.clock.wall())
        self._has_passed_over = False
        self._token = ""
        self._renew_at = 0.0

    def poll(self) -> float:
        """Requests every topic once; raises the first error if all topics fail."""
        failures: dict[str, errors.NoticeError] = {}
        for name, log in self._failures.items():
            path, read = TOPICS[name]
            answer = self._get(path)
            try:
                notice = self._read(answer, read)
            except errors.NoticeError as error:
                failures[name] = error
            else:
                log.note_success()
                self.report(name, notice)
        if len(failures) == len(self._failures):
            raise next(iter(failures.values()))
        for name, failure in failures.items():
            self._failures[name].note_failure(failure, self.interval)
        return self.interval

    def _read(self, answer: Answer, read: Read) -> ActiveNotice | None:
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise answer.refused("200 or 404")
        notice = read(answer)
        if notice is None or notice.since is None or notice.since >= self._began:
            return notice
        if not self._has_passed_over:
            self._has_passed_over = True
            _logger.info(
                "%s, from before this process started to watch: not a notice",
                notice.detail,
            )
        return None

    def _get(self, path: str) -> Answer:
        """Requests an entry; renews the token if the service rejects the token."""
        for is_second in (False, True):
            if not self._token or self.clock.monotonic() >= self._renew_at:
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
                "a token for a PUT; the metadata service of the instance is disabled, "
                "or another server listens at this address. If this machine is not an "
                f"EC2 instance, remove the source or set {ENDPOINT_VARIABLE}"
            )
        granted = answer.headers.get(TTL_HEADER.lower(), "")
        # Ignore a number with 10 digits or more: no token lives for 30 years.
        is_lifetime = granted.isdecimal() and len(granted) < 10
        seconds = int(granted) if is_lifetime else TTL_SECONDS
        self._token = token
        # Renew the token early, but wait at least a second: with a lifetime of 0 there
        # would be requests without end.
        self._renew_at = self.clock.monotonic() + max(0.9 * seconds, 1.0)
