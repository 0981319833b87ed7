"""All stores of the contract tests of object stores, and their servers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import azurite
from tests.fakes.azure import AzureServer
from tests.fakes.gcs import GcsServer
from tests.fakes.storage import FaultyObjectStore
from tests.ports import free_ports
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectStore
from tfpreempt.storage.open_store import open_store

ENDPOINT = os.environ.get("TFPREEMPT_TEST_GCS_ENDPOINT", "")
PAGE = 3  # entries: every listing has pages

IGNORES_PRECONDITIONS = "gcp-storage-emulator ignores ifGenerationMatch"
BEST_EFFORT = "a file system of others promises no exclusive create"

_runs = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A row of the contract.

    Attributes:
        name: name of the row.
        opens: creates an empty store.
        has_server: whether the store has a server, and is slow.
        not_first: why a later put may replace an earlier put; "" if it may not.
        not_exclusive: why two concurrent puts may both succeed; "" if they may not.
        composes: whether the store can join objects.
        missing: names of missing packages or programs; "" if there are none.
        known: other unsupported features and reasons, by name of the test.
    """

    name: str
    opens: Callable[[Path, pytest.MonkeyPatch], ObjectStore]
    has_server: bool = False
    not_first: str = ""
    not_exclusive: str = ""
    composes: bool = False
    missing: str = ""
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _fresh(scheme: str = "gs") -> str:
    return f"{scheme}://bucket/run-{next(_runs)}"


def _with(environment: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    for name, text in environment.items():
        patch.setenv(name, text)


def _gcs(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    _with(servers.gcs().environment(), patch)
    return open_store(_fresh())


def _gcs_of_others(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    _with(servers.gcs_of_others().environment(), patch)
    return open_store(_fresh())


def _emulator(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    patch.setenv("STORAGE_EMULATOR_HOST", servers.emulator())
    return open_store(_fresh())


def _named(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    patch.setenv("STORAGE_EMULATOR_HOST", ENDPOINT)
    _create_bucket(ENDPOINT)
    return open_store(f"{_fresh()}-{os.urandom(8).hex()}")


def _s3(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    _with(servers.s3().environment(), patch)
    return open_store(_fresh("s3"))


def _azure(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    _with(servers.azure().environment(), patch)
    return open_store(_fresh("az"))


def _azurite(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    _with(servers.azurite(), patch)
    return open_store(_fresh("az"))


def _fsspec(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    import fsspec

    return open_store(f"run-{next(_runs)}", fsspec.filesystem("memory"))


def _fsspec_local(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    import fsspec

    return open_store(str(tmp_path / "root"), fsspec.filesystem("file"))


def _pyarrow(tmp_path: Path, patch: pytest.MonkeyPatch) -> ObjectStore:
    from pyarrow import fs

    return open_store(str(tmp_path / "root"), fs.LocalFileSystem())


PLACES = [
    Place(name="local", opens=lambda path, _: LocalStore(str(path / "root"))),
    Place(name="fake", opens=lambda path, _: FaultyObjectStore(), composes=True),
    Place(name="gcs", opens=_gcs, has_server=True, composes=True),
    Place(
        name="gcs without ranges",
        opens=_gcs_of_others,
        has_server=True,
        composes=True,
    ),
    Place(
        name="gcp-storage-emulator",
        opens=_emulator,
        has_server=True,
        not_first=IGNORES_PRECONDITIONS,
        not_exclusive=IGNORES_PRECONDITIONS,
        composes=True,
    ),
    Place(name="s3", opens=_s3, has_server=True),
    Place(name="azure", opens=_azure, has_server=True),
    Place(
        name="azurite",
        opens=_azurite,
        has_server=True,
        missing=azurite.MISSING,
    ),
    Place(name="fsspec memory", opens=_fsspec, not_exclusive=BEST_EFFORT),
    Place(name="fsspec local", opens=_fsspec_local, not_exclusive=BEST_EFFORT),
]
if ENDPOINT:
    PLACES.append(
        Place(name="named endpoint", opens=_named, has_server=True, composes=True)
    )
# Too large for a test dependency; tested if installed.
if importlib.util.find_spec("pyarrow"):
    PLACES.append(
        Place(name="pyarrow local", opens=_pyarrow, not_exclusive=BEST_EFFORT)
    )


def _create_bucket(url: str) -> None:
    import requests

    requests.post(f"{url}/storage/v1/b", json={"name": "bucket"}, timeout=10)


class MotoServer:
    """Moto's S3 in threads of this process; a test can make it fail."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *args: Any) -> None:
                pass

        self.failures: list[int] = []
        self.ignores_ranges = False
        # Entered while a part of a multipart upload is read.
        self.during_part: Callable[[], AbstractContextManager[object]] = nullcontext
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="moto", daemon=True
        )
        self._thread.start()
        import requests

        requests.put(f"{self.url}/bucket", timeout=10).raise_for_status()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)

    def _answer(self, environ: Any, start_response: Any) -> Any:
        if self.failures:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{self.failures.pop()} Ordered", [])
            return [b""]
        if self.ignores_ranges:
            environ.pop("HTTP_RANGE", None)
        is_part = "partNumber=" in environ["QUERY_STRING"]
        with (
            self.during_part() if is_part else nullcontext(),
            self._lock,  # between moto's look and its write another may come
        ):
            return self._app(environ, start_response)


class Servers:
    """The servers of a run of the tests, each started when it is first asked for."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._gcs: GcsServer | None = None
        self._gcs_of_others: GcsServer | None = None
        self._s3: MotoServer | None = None
        self._azure: AzureServer | None = None
        self._azurite: dict[str, str] = {}
        self._emulator = ""

    def gcs(self) -> GcsServer:
        if self._gcs is None:
            self._gcs = self._stack.enter_context(GcsServer(max_page=PAGE))
        return self._gcs

    def gcs_of_others(self) -> GcsServer:
        """Returns a server with the minimum of HTTP and JSON."""
        if self._gcs_of_others is None:
            server = self._stack.enter_context(GcsServer(max_page=PAGE))
            server.ignore_ranges()
            server.leave_out_zeros()
            self._gcs_of_others = server
        return self._gcs_of_others

    def s3(self) -> MotoServer:
        if self._s3 is None:
            os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE)
            self._stack.callback(os.environ.pop, "MOTO_S3_DEFAULT_MAX_KEYS", None)
            self._s3 = MotoServer()
            self._stack.callback(self._s3.close)
        return self._s3

    def azure(self) -> AzureServer:
        if self._azure is None:
            self._azure = self._stack.enter_context(AzureServer(max_page=PAGE))
        return self._azure

    def azurite(self) -> dict[str, str]:
        self._azurite = self._azurite or self._stack.enter_context(azurite.serving())
        return self._azurite

    def emulator(self) -> str:
        if not self._emulator:
            from gcp_storage_emulator.server import create_server

            (port,) = free_ports(1)
            server = create_server("127.0.0.1", port, in_memory=True)
            server.start()
            self._stack.callback(server.stop)
            self._emulator = f"http://127.0.0.1:{port}"
            _create_bucket(self._emulator)
        return self._emulator

    def close(self) -> None:
        self._stack.close()


servers = Servers()


def session_servers() -> Iterator[Servers]:
    """The body of a session fixture."""
    yield servers
    servers.close()
