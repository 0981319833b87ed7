"""A client of S3, and a way to wait for it that ends when time is up.

obstore's time-outs belong to a store, not to a call. Its coroutines can be cancelled,
so calls run in one event loop of our own: the caller's thread may have a loop already,
as every notebook's has.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import IO, TypeVar

from obstore.exceptions import BaseError
from obstore.store import S3Store

from tfpreempt import errors
from tfpreempt.core.threads import OwnedThread
from tfpreempt.storage import pieces
from tfpreempt.storage.limits import REQUEST_SECONDS, RETRY_SECONDS, Limit

_T = TypeVar("_T")
_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has no threads


def connect(bucket: str) -> S3Store:
    """A client with endpoint, region and credentials from the environment.

    Raises:
        ConfigurationError: one of the settings cannot work.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL"
    )
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        return S3Store(
            bucket,
            config={"endpoint": endpoint} if endpoint else None,
            region=region or "us-east-1",
            client_options={
                "allow_http": (endpoint or "").startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={"retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except (BaseError, ValueError) as error:
        raise errors.ConfigurationError(
            f"s3://{bucket} cannot be opened: {error}. Check the variables that begin "
            "with AWS_."
        ) from error


def wait(start: Callable[[], Awaitable[_T]], limit: Limit) -> _T:
    """Runs a coroutine in the loop, cancelled when the call's time is up.

    Raises:
        TimeoutError: it was.
    """

    async def run() -> _T:
        return await asyncio.wait_for(start(), limit.call())

    future = asyncio.run_coroutine_threadsafe(run(), _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # an interrupt; nothing if it has ended
        raise


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            OwnedThread("tfpreempt-s3", loop.run_forever).start()
            _loops.clear()
            _loops[os.getpid()] = loop
        return _loops[os.getpid()]


class Feed:
    """A file as the iterator that obstore reads from, in a thread of its own.

    Attributes:
        failure: what reading raised; obstore would wrap it.
    """

    def __init__(self, source: IO[bytes], size: int) -> None:
        self._pieces: Iterator[bytes] = pieces.of(source, size)
        self.failure: BaseException | None = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
