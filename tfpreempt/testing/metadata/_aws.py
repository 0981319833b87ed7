"""A fake of the instance metadata service of Amazon EC2, version 2."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable

from tfpreempt.testing._server import FakeServer, Reply, Request

ROOT = "/latest/meta-data/"
TTL_HEADER = "x-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "x-aws-ec2-metadata-token"
LONGEST_TTL_SECONDS = 21_600


class FakeAws(FakeServer):
    """Fake of EC2's metadata service: serves tokens and `/latest/meta-data/`.

    Like the real service, the fake answers

    - 401 to requests without a token or with an expired token;
    - 400 to token requests without a lifetime;
    - 403 to token requests that a proxy has forwarded;
    - 404 for missing entries. The entries that announce a termination are missing until
      the test sets them.

    Args:
        longest_ttl: longest lifetime of a token in seconds, even if a client requests
            more.
        monotonic: time source for the expiry of tokens.
    """

    headers = {"Content-Type": "text/plain", "Server": "EC2ws"}

    def __init__(
        self,
        *,
        longest_ttl: int = LONGEST_TTL_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._longest_ttl = longest_ttl
        self._monotonic = monotonic
        self._tokens: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._entries: dict[str, object] = _new_entries()
        super().__init__()

    def environment(self) -> dict[str, str]:
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url,
            "AWS_EC2_METADATA_DISABLED": "false",
        }

    def interrupt(
        self, action: str = "terminate", at: datetime.datetime | None = None
    ) -> None:
        """Announces a Spot interruption.

        Args:
            action: "terminate", "stop" or "hibernate".
            at: time of the interruption; by default in two minutes.
        """
        text = _text_of(at, datetime.timedelta(minutes=2))
        self.set("spot/instance-action", {"action": action, "time": text})
        if action == "terminate":
            self.set("spot/termination-time", text)

    def recommend_rebalance(self, at: datetime.datetime | None = None) -> None:
        """Publishes a rebalance recommendation.

        Args:
            at: time of the recommendation; by default now.
        """
        notice = {"noticeTime": _text_of(at, datetime.timedelta(0))}
        self.set("events/recommendations/rebalance", notice)

    def set_lifecycle(self, state: str) -> None:
        """Sets the state into which the Auto Scaling group moves the instance.

        Args:
            state: target lifecycle state, such as "Terminated".
        """
        self.set("autoscaling/target-lifecycle-state", state)

    def set(self, path: str, value: object) -> None:
        """Sets an entry.

        Args:
            path: path of the entry, relative to `/latest/meta-data/`.
            value: text, or a value to be sent as JSON.
        """
        with self.changed:
            self._entries[path.strip("/")] = value

    def remove(self, path: str) -> None:
        """Removes an entry, if present; the server then answers 404 for the entry.

        Args:
            path: path of the entry, relative to `/latest/meta-data/`.
        """
        with self.changed:
            self._entries.pop(path.strip("/"), None)

    def expire_tokens(self) -> None:
        """Revokes every token issued so far."""
        with self.changed:
            self._tokens.clear()

    def answer(self, request: Request) -> Reply:
        with self.changed:
            if request.path == "/latest/api/token":
                return self._answer_token(request)
            if request.method != "GET":
                return self.reply(405, "Method Not Allowed")
            expires = self._tokens.get(request.headers.get(TOKEN_HEADER, ""), 0.0)
            if expires <= self._monotonic():
                return self.reply(401, "Unauthorized")
            path = request.path.removeprefix(ROOT).strip("/")
            if not request.path.startswith(ROOT) or path not in self._entries:
                return self.reply(404, "Not Found")
            return self.reply(200, self._entries[path])

    def _answer_token(self, request: Request) -> Reply:
        asked = request.headers.get(TTL_HEADER, "")
        if request.method != "PUT":
            return self.reply(405, "Method Not Allowed")
        if "x-forwarded-for" in request.headers:
            return self.reply(403, "Forbidden")
        if not asked.isdecimal() or not 1 <= int(asked) <= LONGEST_TTL_SECONDS:
            return self.reply(400, "Bad Request")
        seconds = min(int(asked), self._longest_ttl)
        token = f"AQAEAToken{next(self._numbers)}=="
        self._tokens[token] = self._monotonic() + seconds
        headers = {"Content-Type": "text/plain", TTL_HEADER: str(seconds)}
        return Reply(headers=headers, body=token.encode())


def _text_of(at: datetime.datetime | None, ahead: datetime.timedelta) -> str:
    """Formats a time as EC2 does.

    Args:
        at: the time; None: the current time plus `ahead`.
        ahead: duration to add to the current time.
    """
    when = datetime.datetime.now(datetime.timezone.utc) + ahead if at is None else at
    return when.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _new_entries() -> dict[str, object]:
    return {
        "instance-id": "i-0123456789abcdef0",
        "instance-life-cycle": "spot",
        "instance-type": "p4d.24xlarge",
        "placement/availability-zone": "eu-central-1a",
        "placement/region": "eu-central-1",
        "iam/security-credentials": "trainer",
        "iam/security-credentials/trainer": {
            "Code": "Success",
            "LastUpdated": "2026-11-21T18:00:00Z",
            "Type": "AWS-HMAC",
            "AccessKeyId": "EXAMPLE",
            "SecretAccessKey": "an-example-is-no-secret",
            "Token": "example",
            "Expiration": "2099-01-01T00:00:00Z",
        },
    }
