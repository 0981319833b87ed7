"""What goes wrong on the way to and from the fake, as the test ordered it."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

_T = TypeVar("_T")
When = Literal["before", "after"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What happens to one request.

    Attributes:
        status: an error that is answered; None for none.
        drop: the connection is dropped before the request is looked at, or after it
            was served but before the reply; None for neither.
        cut_upload: bytes of the body after which the connection is dropped.
        cut_download: bytes of the reply's body after which it is dropped.
        corrupts: a bit of the reply's body is flipped.
        corrupts_upload: a bit of the request's body is.
        stalls: no reply comes before `up()`.
        stalls_inside: where the reply's body is cut, the connection stays.
        ignores_range: the whole object is sent, whatever part was asked for.
    """

    status: int | None = None
    drop: When | None = None
    cut_upload: int | None = None
    cut_download: int | None = None
    corrupts: bool = False
    corrupts_upload: bool = False
    stalls: bool = False
    stalls_inside: bool = False
    ignores_range: bool = False


class Faults:
    """Counts requests and hands out orders. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.failures: list[int] = []
        self.drops: dict[int, When] = {}
        self.cut_uploads: list[int] = []
        self.cut_downloads: list[tuple[int, bool]] = []
        self.corruptions = 0
        self.upload_corruptions = 0
        self.ignored_ranges = 0.0
        self.stalls = 0

    def arrive(
        self, *, length: int, is_media: bool, is_chunk: bool
    ) -> tuple[int, Orders]:
        """The number of a request that has just come, and its orders."""
        with self._lock:
            number, self.count = self.count, self.count + 1
            stalls, self.stalls = self.stalls > 0, max(self.stalls - 1, 0)
            corrupts = is_media and self.corruptions > 0
            self.corruptions -= corrupts
            ignores = is_media and self.ignored_ranges > 0
            self.ignored_ranges -= ignores
            changes = is_chunk and length > 0 and self.upload_corruptions > 0
            self.upload_corruptions -= changes
            cut = _next(self.cut_downloads) if is_media else None
            return number, Orders(
                status=self.failures.pop() if self.failures else None,
                drop=self.drops.pop(number, None),
                cut_upload=self._cut_upload(length),
                cut_download=cut[0] if cut else None,
                stalls_inside=cut[1] if cut else False,
                corrupts=corrupts,
                corrupts_upload=changes,
                ignores_range=ignores,
                stalls=stalls,
            )

    def _cut_upload(self, length: int) -> int | None:
        """Where the body is cut; a shorter one is not what was meant."""
        if self.cut_uploads and length > self.cut_uploads[0]:
            return self.cut_uploads.pop(0)
        return None

    def order_failures(self, count: int, status: int) -> None:
        with self._lock:
            self.failures = [status] * count

    def order_drop(self, ahead: int, when: When) -> int:
        """Orders a drop so many requests from now; returns the request's number."""
        with self._lock:
            number = self.count + ahead
            self.drops[number] = when
            return number

    def order_stalls(self, count: int) -> None:
        with self._lock:
            self.stalls = count

    def order_corruptions(self, count: int, *, of_uploads: bool = False) -> None:
        with self._lock:
            if of_uploads:
                self.upload_corruptions = count
            else:
                self.corruptions = count

    def order_whole(self, count: int | None) -> None:
        with self._lock:
            self.ignored_ranges = math.inf if count is None else count

    def order_cut(self, after: int, *, of_upload: bool, stalls: bool = False) -> None:
        with self._lock:
            if of_upload:
                self.cut_uploads.append(after)
            else:
                self.cut_downloads.append((after, stalls))

    def clear(self) -> None:
        """Forgets all orders; the count goes on."""
        with self._lock:
            self.failures, self.drops = [], {}
            self.cut_uploads, self.cut_downloads = [], []
            self.corruptions = self.upload_corruptions = self.stalls = 0
            self.ignored_ranges = 0


def corrupted(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same with one bit flipped, in the middle of the first piece."""
    is_done = False
    for piece in pieces:
        if piece and not is_done:
            changed = bytearray(piece)
            changed[len(changed) // 2] ^= 1
            yield bytes(changed)
            is_done = True
        else:
            yield piece


def _next(orders: list[_T]) -> _T | None:
    return orders.pop(0) if orders else None
