"""A fake of the metadata server of Google Compute Engine."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tfpreempt.testing._server import FakeServer, Reply, Request

ROOT = "/computeMetadata/v1/"
_CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class FakeGce(FakeServer):
    """Fake of GCE's metadata server: serves `/computeMetadata/v1/`, with hanging GETs.

    Like the real server, the fake

    - refuses requests without `Metadata-Flavor: Google`, and requests that a proxy has
      forwarded;
    - redirects a request for a directory without a trailing "/";
    - uses hashes of the content as ETags;
    - answers 404 for missing entries;
    - answers 400 if a client waits for a change of a directory without
      `recursive=true`.

    Args:
        longest_hang: maximum seconds of a hanging GET, even if the client requests more
            by `timeout_sec`.
        is_camel_case: whether names in recursive replies are in camelCase. If False,
            they have dashes, as in paths.
        hides_directory: whether the server answers requests for the directory
            `instance/` with 403, as a proxy for metadata concealment does.

    Attributes:
        hanging: number of hanging GETs that wait now, also for disconnected clients.
    """

    headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}

    def __init__(
        self,
        *,
        longest_hang: float = 60.0,
        is_camel_case: bool = True,
        hides_directory: bool = False,
    ) -> None:
        self._longest_hang = longest_hang
        self._is_camel_case = is_camel_case
        self._hides_directory = hides_directory
        self._tree: dict[str, Any] = _new_tree()
        self.hanging = 0
        super().__init__()

    def environment(self) -> dict[str, str]:
        return {
            "GCE_METADATA_HOST": self.host,
            "GCE_METADATA_ROOT": self.host,
            "GCE_METADATA_IP": self.host,
        }

    def preempt(self) -> None:
        """Sets `instance/preempted` to TRUE."""
        self.set("instance/preempted", "TRUE")

    def set(self, path: str, value: object) -> None:
        """Sets an entry, and answers the hanging GETs that wait for a change.

        Args:
            path: path of the entry, such as "instance/maintenance-event".
            value: text, a number, or a dict, which becomes a directory.
        """
        *folders, name = path.strip("/").split("/")
        with self.changed:
            at = self._tree
            for folder in folders:
                at = at.setdefault(folder, {})
            at[name] = value
            self.changed.notify_all()

    def remove(self, path: str) -> None:
        """Removes an entry, if present; the server then answers 404 for the entry.

        Args:
            path: path of the entry, such as "instance/maintenance-event".
        """
        folder, _, name = path.strip("/").rpartition("/")
        with self.changed:
            (self._find(folder) or {}).pop(name, None)
            self.changed.notify_all()

    def answer(self, request: Request) -> Reply:
        if request.headers.get("metadata-flavor") != "Google":
            return self.reply(403, "Missing required header: Metadata-Flavor\n")
        if "x-forwarded-for" in request.headers:
            return self.reply(403, "Forwarded requests are refused\n")
        if request.path == "/":
            return self.reply(200, "computeMetadata/\n")
        if request.method != "GET" or not f"{request.path}/".startswith(ROOT):
            return self.reply(404, "not found\n")
        path = request.path.removeprefix(ROOT)
        if self._hides_directory and path == "instance/":
            return self.reply(403, "concealed\n")
        with self.changed:
            return self._answer_entry(path, request)

    def _answer_entry(self, path: str, request: Request) -> Reply:
        value = self._find(path)
        if value is None:
            return self.reply(404, "not found\n")
        is_directory = isinstance(value, dict)
        is_recursive = request.query.get("recursive", "false").lower() == "true"
        if is_directory and not request.path.endswith("/"):
            location = {"Location": f"{self.url}{request.path}/"}
            return Reply(status=301, headers={**self.headers, **location})
        if request.query.get("wait_for_change", "false").lower() == "true":
            if is_directory and not is_recursive:
                return self.reply(400, "wait_for_change needs recursive=true here\n")
            self._hang(path, request)
            value = self._find(path)
            if value is None:
                return self.reply(404, "not found\n")
        is_json = request.query.get("alt", "json" if is_recursive else "text") == "json"
        spelt = _camel(value) if self._is_camel_case else value
        body = json.dumps(spelt) if is_json else _listing(value)
        kind = "application/json" if is_json else "application/text"
        headers = {**self.headers, "ETag": _etag(value), "Content-Type": kind}
        return Reply(headers=headers, body=body.encode())

    def _hang(self, path: str, request: Request) -> None:
        """Waits until the ETag of the entry differs from the client's `last_etag`.

        Without a `last_etag`, waits until the entry changes.
        """
        known = request.query.get("last_etag", _etag(self._find(path)))
        asked = request.query.get("timeout_sec", "")
        seconds = float(asked) if asked.isdigit() else self._longest_hang
        self.hanging += 1
        self.changed.notify_all()
        try:
            self.wait(
                lambda: _etag(self._find(path)) != known,
                min(seconds, self._longest_hang),
            )
        finally:
            self.hanging -= 1

    def _find(self, path: str) -> Any:
        at: Any = self._tree
        for name in filter(None, path.split("/")):
            at = at.get(name) if isinstance(at, dict) else None
        return at


def _listing(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"{each}\n" for each in value)
    if not isinstance(value, dict):
        return str(value)
    return "".join(
        f"{name}/\n" if isinstance(value[name], dict) else f"{name}\n"
        for name in sorted(value)
    )


def _etag(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _camel(value: Any, is_attributes: bool = False) -> Any:
    """Converts names to camelCase, as in recursive replies.

    Names of attributes are not converted, because users choose them.
    """
    if not isinstance(value, dict):
        return value
    return {
        name
        if is_attributes
        else re.sub("-(.)", lambda found: found[1].upper(), name): _camel(
            each, name == "attributes"
        )
        for name, each in value.items()
    }


def _new_tree() -> dict[str, Any]:
    account = {
        "aliases": ["default"],
        "email": "trainer@example-project.iam.gserviceaccount.com",
        "scopes": [_CLOUD_SCOPE],
    }
    return {
        "instance": {
            "attributes": {"startup-script": "#! /bin/sh\n"},
            "hostname": "trainer-0.example-project.internal",
            "id": 1234567890123456789,
            "machine-type": "projects/1/machineTypes/a2-highgpu-1g",
            "maintenance-event": "NONE",
            "name": "trainer-0",
            "preempted": "FALSE",
            "scheduling": {
                "automatic-restart": "FALSE",
                "on-host-maintenance": "TERMINATE",
                "preemptible": "TRUE",
            },
            "service-accounts": {"default": account, account["email"]: account},
            "zone": "projects/1/zones/europe-west4-a",
        },
        "project": {"numeric-project-id": 1, "project-id": "example-project"},
        "universe": {"universe-domain": "googleapis.com"},
    }
