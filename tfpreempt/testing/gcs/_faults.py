"""What goes wrong on the way to and from the fake, as the test ordered it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from tfpreempt.testing.gcs._service import Request

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


@dataclasses.dataclass(slots=True)
class _Pending:
    left: float
    applies: Callable[[Request], bool]
    what: dict[str, Any]


class Faults:
    """Counts requests and hands out orders. Any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []

    def order(
        self,
        count: float = 1,
        applies: Callable[[Request], bool] = lambda request: True,
        **what: Any,
    ) -> None:
        """Orders something for the next so many requests to which it applies.

        Args:
            count: how many; 0 takes back what was ordered of this kind.
            applies: whether it is meant for a request.
            **what: fields of `Orders`.
        """
        with self._lock:
            if count:
                self._pending.append(_Pending(count, applies, what))
            else:
                self._pending = [
                    p for p in self._pending if p.what.keys() != what.keys()
                ]

    def arrive(self, head: Request) -> tuple[Request, Orders]:
        """A request that has just come, numbered, and its orders; of a kind one."""
        with self._lock:
            request = dataclasses.replace(head, number=self.count)
            self.count += 1
            orders: dict[str, Any] = {}
            for each in self._pending:
                if each.applies(request) and not each.what.keys() & orders.keys():
                    orders |= each.what
                    each.left -= 1
            self._pending = [each for each in self._pending if each.left > 0]
            return request, Orders(**orders)

    def clear(self) -> None:
        """Forgets all orders; the count goes on."""
        with self._lock:
            self._pending.clear()


def is_media(request: Request) -> bool:
    """Whether an object's bytes are asked for."""
    return request.method == "GET" and (
        request.query.get("alt") == "media" or not request.path.startswith("/storage/")
    )


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
