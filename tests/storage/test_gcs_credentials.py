"""Credentials for Google Cloud Storage whose server fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from tests.fakes.gcs import GcsServer
from tfpreempt import errors
from tfpreempt.storage import gcs_client
from tfpreempt.storage.open_store import open_store
from tfpreempt.testing._server import FakeServer, Reply, Request

pytestmark = pytest.mark.slow

TOKEN = Reply(body=b'{"access_token": "fresh", "expires_in": 3600}')
FAILURES = {
    "no answer": None,
    "503": Reply(status=503),
    "429": Reply(status=429),
    "an error of OAuth's": Reply(status=400, body=b'{"error": "server_error"}'),
}


class TokenServer(FakeServer):
    """Sends the given replies (None: drops the connection), and then issues tokens."""

    def __init__(self, *answers: Reply | None) -> None:
        self._answers = list(answers)
        super().__init__()

    def answer(self, request: Request) -> Any:
        return self._answers.pop(0) if self._answers else TOKEN


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A bucket that is found without STORAGE_EMULATOR_HOST, so with credentials."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(gcs_client, "FIRST_PAUSE", 0.01)
    with GcsServer() as server:
        monkeypatch.setattr(gcs_client, "_ADDRESS", server.url)
        yield server


def use(monkeypatch: pytest.MonkeyPatch, tokens: TokenServer) -> None:
    """Makes a user's credentials those of the environment."""
    credentials = Credentials(  # type: ignore[no-untyped-call]
        None,
        refresh_token="r",
        token_uri=f"{tokens.url}/token",
        client_id="c",
        client_secret="s",
    )
    monkeypatch.setattr(gcs_client, "find_credentials", lambda: credentials)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_failed_request_for_a_token_is_retried_without_a_global_draw(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch, failure: Reply | None
) -> None:
    """google-auth would draw the pause before its retry from Python's generator."""
    before = random.getstate()
    with TokenServer(failure, failure) as tokens:
        use(monkeypatch, tokens)
        assert open_store("gs://bucket/run").stat("x") is None
        assert len(tokens.requests) == 3
    assert random.getstate() == before
    assert server.requests[-1].headers["authorization"] == "Bearer fresh"


def test_revoked_credentials_are_reported_at_once(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked = Reply(status=400, body=b'{"error": "invalid_grant"}')
    with TokenServer(revoked) as tokens:
        use(monkeypatch, tokens)
        with pytest.raises(errors.CheckpointError, match="Renew the credentials"):
            open_store("gs://bucket/run").stat("x")
        assert len(tokens.requests) == 1


@pytest.mark.parametrize(
    ("is_on_google", "advice"),
    [(True, "Renew the credentials"), (False, "no credentials were found")],
)
def test_a_silent_metadata_server_means_no_credentials_elsewhere_than_at_google(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    is_on_google: bool,
    advice: str,
) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CLOUDSDK_CONFIG", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    monkeypatch.setattr(gcs_client, "detect_gce_residency_linux", lambda: is_on_google)
    before = random.getstate()
    with pytest.raises(errors.CheckpointError, match=advice) as caught:
        open_store("gs://bucket/run").stat("x", timeout=1.0)
    assert caught.value.is_permanent is not is_on_google
    assert random.getstate() == before
