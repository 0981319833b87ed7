"""The fake's sockets: bodies come and go in large pieces, and break off on demand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from urllib.parse import parse_qsl, urlsplit

from tfpreempt.testing._loopback import Handler, LoopbackServer
from tfpreempt.testing.gcs._faults import Faults, Orders, When, corrupted, is_media
from tfpreempt.testing.gcs._service import Reply, Request, Service, error_reply

_PIECE = 4 << 20
_REASON = "Ordered by the test."


class GcsServer(LoopbackServer):
    """A server of Google Cloud Storage's JSON API on the loopback interface.

    Any client of the real one can be led here by `environment()`. Objects live in
    memory. What clients send is answered by threads, as many as there are connections;
    faults are ordered from any thread, and each hits requests in order of arrival.

    Args:
        buckets: names of the buckets that exist.
        max_page: the most entries of a page of a listing; clients must take any.

    Attributes:
        requests: what was asked, the newest last; without bodies.
    """

    def __init__(
        self, buckets: Iterable[str] = ("bucket",), *, max_page: int = 1000
    ) -> None:
        self.requests: list[Request] = []
        self._faults = Faults()
        self._releases = 0
        super().__init__("fake-gcs", _Handler)
        self._service = Service(buckets, self.url, max_page)

    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url}

    # --- faults ----------------------------------------------------------------------

    def fail(self, count: int, status: int = 503) -> None:
        """Answers the next `count` requests with an error; 0 ends it."""
        self._faults.order(0, status=status)
        self._faults.order(count, status=status)

    def stall(self, count: int | None = None) -> None:
        """Accepts requests and answers none, until `up()`.

        Args:
            count: how many requests; None: all.
        """
        if count is None:
            super().stall()
        else:
            self._faults.order(count, stalls=True)

    def up(self) -> None:
        with self.changed:
            self._releases += 1
        super().up()

    def drop_request(self, ahead: int = 0, *, when: When = "before") -> int:
        """Drops the connection of one request.

        Args:
            ahead: how many requests come before it from now on.
            when: "before" it is served, or "after": then only the reply is lost.

        Returns:
            The request's number.
        """
        number = self._faults.count + ahead
        self._faults.order(1, lambda each: each.number == number, drop=when)
        return number

    def cut_upload(self, after: int) -> None:
        """Drops the next connection whose body is longer, after so many bytes of it."""
        self._faults.order(1, lambda each: each.length > after, cut_upload=after)

    def cut_download(self, after: int, *, stalls: bool = False) -> None:
        """Drops the next download after so many bytes of it.

        Args:
            after: the bytes.
            stalls: the connection stays, and nothing more comes before `up()`.
        """
        self._faults.order(1, is_media, cut_download=after, stalls_inside=stalls)

    def corrupt_downloads(self, count: int = 1) -> None:
        """Flips one bit in each of the next downloads."""
        self._faults.order(count, is_media, corrupts=True)

    def corrupt_uploads(self, count: int = 1) -> None:
        """Flips one bit in each of the next bodies of resumable uploads."""
        self._faults.order(
            count,
            lambda each: "upload_id" in each.query and each.length > 0,
            corrupts_upload=True,
        )

    def ignore_ranges(self, count: int | None = None) -> None:
        """Answers downloads of a range with the whole object, as HTTP allows.

        Args:
            count: how many downloads, those of whole objects among them; None: all.
        """
        self._faults.order(
            math.inf if count is None else count, is_media, ignores_range=True
        )

    def leave_out_zeros(self) -> None:
        """Says no `size` of an empty object, as servers do that write no zeros."""
        with self._service.lock:
            self._service.leaves_out_zeros = True

    def damage(self, bucket: str, name: str, offset: int = 0) -> None:
        """Flips one bit of a stored object, whose checksums stay as they were."""
        with self._service.lock:
            held = self._service.objects.bucket(bucket)
            whole = bytearray(b"".join(held[name].pieces))
            whole[offset] ^= 1
            held[name] = dataclasses.replace(held[name], pieces=(bytes(whole),))

    def clear_faults(self) -> None:
        """Forgets all orders and ends `stall()` and `down()`."""
        self._faults.clear()
        self.up()

    # --- what there is ---------------------------------------------------------------

    @property
    def request_count(self) -> int:
        """Requests that have come so far; the next one has this number."""
        return self._faults.count

    @property
    def open_uploads(self) -> int:
        """Resumable uploads that were begun and neither finished nor given up."""
        with self._service.lock:
            return self._service.uploads.open_count

    def forget_uploads(self) -> None:
        """Forgets all resumable uploads, as the service does after a week."""
        with self._service.lock:
            self._service.uploads.forget()

    def names(self, bucket: str = "bucket") -> list[str]:
        """The objects in a bucket."""
        with self._service.lock:
            return sorted(self._service.objects.bucket(bucket))

    def create_bucket(self, name: str) -> None:
        """Makes a bucket."""
        with self._service.lock:
            self._service.objects.create_bucket(name)

    # --- for the connections ---------------------------------------------------------

    def arrive(self, head: Request) -> tuple[Request, Orders]:
        """A request whose head has come, with its number, and its orders."""
        return self._faults.arrive(head)

    def reply_to(
        self, request: Request, body: tuple[bytes, ...], orders: Orders
    ) -> Reply | None:
        """The answer, or what was ordered; None to drop the connection."""
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
            self._await_release(orders)
            if self._is_closing or self._is_down or orders.drop == "before":
                return None
        if orders.status is not None:
            return error_reply(orders.status, _REASON)
        if orders.corrupts_upload:
            body = tuple(bytes(piece) for piece in corrupted(body))
        if orders.ignores_range:
            headers = {k: v for k, v in request.headers.items() if k != "range"}
            request = dataclasses.replace(request, headers=headers)
        reply = self._service.answer(
            request, body, is_cut=orders.cut_upload is not None
        )
        if orders.drop or orders.cut_upload is not None:
            return None
        return None if self._is_closing or self._is_down else reply

    def await_release(self) -> None:
        """Waits for `up()` or the end."""
        with self.changed:
            self._await_release(Orders(stalls=True))

    def _await_release(self, orders: Orders) -> None:
        """Waits, with `changed` held, while requests are to be stalled."""
        before = self._releases
        self.changed.wait_for(
            lambda: (
                self._is_closing
                or not (self._is_stalled or orders.stalls)
                or self._releases != before
            )
        )


class _Handler(Handler):
    disable_nagle_algorithm = True

    @property
    def _fake(self) -> GcsServer:
        assert isinstance(self.server, GcsServer)
        return self.server

    def do_DELETE(self) -> None:  # noqa: N802  (the name that http.server calls)
        self.serve()

    def serve(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        head = Request(
            number=-1,
            method=self.command,
            path=parts.path,
            query=query,
            headers={name.lower(): text for name, text in self.headers.items()},
            length=int(self.headers.get("Content-Length") or 0),
        )
        request, orders = self._fake.arrive(head)
        wanted = request.length if orders.cut_upload is None else orders.cut_upload
        body = () if orders.drop == "before" else tuple(self._body(wanted))
        reply = self._fake.reply_to(request, body, orders)
        if reply is None:
            self.close_connection = True
        else:
            self._send(reply, orders)

    def _body(self, length: int) -> Iterator[bytes]:
        while length > 0:
            piece = self.rfile.read(min(length, _PIECE))
            if not piece:
                raise ConnectionAbortedError("the client went away")
            length -= len(piece)
            yield piece

    def _send(self, reply: Reply, orders: Orders) -> None:
        self.send_response(reply.status)
        for name, text in reply.headers.items():
            self.send_header(name, text)
        if reply.status not in (204, 304):
            self.send_header("Content-Length", str(reply.length))
        self.end_headers()
        left = reply.length if orders.cut_download is None else orders.cut_download
        for piece in corrupted(reply.pieces) if orders.corrupts else reply.pieces:
            self.wfile.write(piece[:left])
            left -= len(piece[:left])
        if orders.cut_download is not None:
            self.close_connection = True
            if orders.stalls_inside:
                self.wfile.flush()
                self._fake.await_release()
