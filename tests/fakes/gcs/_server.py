"""The server itself: its faults, and its contents."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from tests.fakes.gcs._service import Service, error_reply
from tests.fakes.replies import BrokenReply
from tfpreempt.testing._server import FakeServer, Reply, Request

When = Literal["before", "after"]
_KEPT_BYTES = 64 << 10  # more of a request's body is not remembered

Serve = Callable[[Request], Reply | None]
"""Returns the reply to a request; None drops the connection."""


@dataclasses.dataclass(slots=True)
class Fault:
    """A fault of the next requests that it applies to.

    Attributes:
        kind: a request has at most one fault of each kind, in the order of the calls.
        left: number of requests with the fault.
        around: replaces or wraps the normal service of a request.
        applies: returns whether the fault applies to a request without its body, and to
            its number, counted from 0 in the order of arrival.
        reads: number of bytes of the body to read.
    """

    kind: str
    left: float
    around: Callable[[Serve, Request], Reply | None]
    applies: Callable[[Request, int], bool]
    reads: float = math.inf


class GcsServer(FakeServer):
    """A server of Google Cloud Storage's JSON API on the loopback interface.

    `environment()` directs any client of the real service to the server. Objects are in
    memory. Each connection has a thread. Faults can be requested from any thread; each
    fault applies to requests in the order of arrival.

    Args:
        buckets: names of the existing buckets.
        max_page: largest number of entries of a page; clients must accept any number.

    Attributes:
        request_count: number of requests so far, and the number of the next request.
    """

    _name = "fake-gcs"

    def __init__(
        self, buckets: Iterable[str] = ("bucket",), *, max_page: int = 1000
    ) -> None:
        self._service = Service(buckets, max_page)
        self._faults: list[Fault] = []
        self.request_count = 0
        super().__init__()

    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url}

    def answer(self, request: Request) -> Reply:
        return self._service.answer(request)

    def serve(self, head: Request, read: Callable[[int], bytes]) -> Reply | None:
        with self.changed:
            faults = self._due(head)
            self.request_count += 1
        wanted = min([head.length, *(fault.reads for fault in faults)])
        body = read(int(wanted))
        if len(body) < wanted:
            raise ConnectionAbortedError("the client went away")
        request = dataclasses.replace(head, body=body)
        self.record(request if len(body) <= _KEPT_BYTES else head)
        serve: Serve = self.respond
        for fault in faults:
            serve = functools.partial(fault.around, serve)
        return serve(request)

    def _due(self, head: Request) -> list[Fault]:
        """The faults that a request meets, the outermost last."""
        due: dict[str, Fault] = {}
        for fault in self._faults:
            if fault.kind not in due and fault.applies(head, self.request_count):
                due[fault.kind] = fault
                fault.left -= 1
        self._faults = [fault for fault in self._faults if fault.left > 0]
        return [*due.values()]

    def _order(self, fault: Fault) -> None:
        if fault.left:
            with self.changed:
                self._faults.append(fault)

    # --- faults ----------------------------------------------------------------------

    def failure(self, status: int) -> Reply:
        return error_reply(status, "Ordered by the test.")

    def drop_request(self, ahead: int = 0, *, when: When = "before") -> int:
        """Drops the connection of one request.

        Args:
            ahead: number of requests before the dropped request, from now on.
            when: "before" the service, or "after" it: then only the reply is lost.

        Returns:
            The number of the request.
        """
        number = self.request_count + ahead
        around, reads = (_unserved, 0) if when == "before" else (_unanswered, math.inf)
        self._order(Fault("drop", 1, around, lambda _, at: at == number, reads))
        return number

    def cut_upload(self, after: int) -> None:
        """Drops the next connection whose body is longer, after so many bytes of it."""
        self._order(
            Fault("cut upload", 1, _unanswered, lambda h, _: h.length > after, after)
        )

    def cut_download(self, after: int, *, stalls: bool = False) -> None:
        """Interrupts the next download after some bytes.

        Args:
            after: number of bytes.
            stalls: whether the connection stays open without data until `up()`.
        """

        before = self._releases

        def nothing() -> Iterator[bytes]:
            self.await_release(before)
            yield b""

        def cut(serve: Serve, request: Request) -> Reply | None:
            reply = serve(request)
            if reply is None:
                return None
            return BrokenReply(
                status=reply.status,
                headers={**reply.headers, "Content-Length": str(len(reply.body))},
                body=reply.body[:after],
                pieces=nothing() if stalls else (),
            )

        self._order(Fault("cut download", 1, cut, _is_media))

    def corrupt_downloads(self, count: int = 1) -> None:
        """Flips a bit in each of the next downloads."""

        def corrupted(serve: Serve, request: Request) -> Reply | None:
            reply = serve(request)
            return reply and dataclasses.replace(reply, body=_flipped(reply.body))

        self._order(Fault("corrupt download", count, corrupted, _is_media))

    def corrupt_uploads(self, count: int = 1) -> None:
        """Flips a bit in each of the next bodies of resumable uploads."""

        def corrupted(serve: Serve, request: Request) -> Reply | None:
            return serve(dataclasses.replace(request, body=_flipped(request.body)))

        def is_chunk(head: Request, number: int) -> bool:
            return "upload_id" in head.query and head.length > 0

        self._order(Fault("corrupt upload", count, corrupted, is_chunk))

    def ignore_ranges(self, count: int | None = None) -> None:
        """Answers downloads of a range with the whole object, as HTTP allows.

        Args:
            count: number of downloads, including those of whole objects; None: all.
        """

        def ignoring(serve: Serve, request: Request) -> Reply | None:
            headers = {k: v for k, v in request.headers.items() if k != "range"}
            return serve(dataclasses.replace(request, headers=headers))

        left = math.inf if count is None else count
        self._order(Fault("ignore range", left, ignoring, _is_media))

    def leave_out_zeros(self) -> None:
        """Omits the `size` of empty objects, as servers do that omit zeros."""
        self._service.leaves_out_zeros = True

    def damage(self, bucket: str, name: str, offset: int = 0) -> None:
        """Flips a bit of a stored object, and keeps the stored checksums."""
        with self._service.lock:
            held = self._service.objects.bucket(bucket)
            stored = held[name]
            data = _flipped(stored.read(0, stored.size), offset)
            held[name] = dataclasses.replace(stored, pieces=(data,))

    def clear_faults(self) -> None:
        """Forgets all orders and ends `stall()` and `down()`."""
        with self.changed:
            self._faults.clear()
        self.fail(0)
        self.up()

    # --- what there is ---------------------------------------------------------------

    @property
    def open_uploads(self) -> int:
        """Resumable uploads that were begun and neither finished nor given up."""
        with self._service.lock:
            return sum(each.done is None for each in self._service.sessions.values())

    def forget_uploads(self) -> None:
        """Forgets all resumable uploads, as the service does after a week."""
        with self._service.lock:
            self._service.sessions.clear()

    def names(self, bucket: str = "bucket") -> list[str]:
        """The objects in a bucket."""
        with self._service.lock:
            return sorted(self._service.objects.bucket(bucket))

    def create_bucket(self, name: str) -> None:
        """Makes a bucket."""
        with self._service.lock:
            self._service.objects.create_bucket(name)


def _unserved(serve: Serve, request: Request) -> None:
    """Drops the connection before the request is served."""


def _unanswered(serve: Serve, request: Request) -> None:
    """Serves the request, and drops the connection without a reply."""
    serve(request)


def _is_media(head: Request, number: int) -> bool:
    """Whether an object's bytes are asked for."""
    return head.method == "GET" and (
        head.query.get("alt") == "media" or not head.path.startswith("/storage/")
    )


def _flipped(data: bytes | memoryview, at: int | None = None) -> bytes:
    """The same with one bit flipped; by default in the middle."""
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2 if at is None else at] ^= 1
    return bytes(changed)
