"""ObjectStore for a folder of another store."""

from __future__ import annotations

from collections.abc import Iterator

from tfpreempt.storage.chunks import SeekableReader, SequentialWriter
from tfpreempt.storage.object_store import ObjectStat, ObjectStore, check_name


class PrefixedStore:
    """Store of the objects below a folder of another store.

    Args:
        store: the other store, which contains the objects.
        prefix: path of the folder in the other store, without "/" at both ends.

    Raises:
        ConfigurationError: the prefix is unsafe as a path.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = check_name(prefix) + "/"
        self.uri = f"{store.uri.rstrip('/')}/{prefix}"

    def put_if_absent(
        self, name: str, source: SeekableReader, *, timeout: float | None = None
    ) -> bool:
        return self._store.put_if_absent(self._full(name), source, timeout=timeout)

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        self._store.replace(self._full(name), data, timeout=timeout)

    def get(
        self,
        name: str,
        target: SequentialWriter,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        return self._store.get(
            self._full(name), target, offset=offset, length=length, timeout=timeout
        )

    def list(self, prefix: str = "") -> Iterator[str]:
        for name in self._store.list(self._prefix + prefix):
            yield name[len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        """See `ObjectStore`. Lists every object below the folder; ignores `timeout`."""
        folders = (n.partition("/")[0] for n in self.list() if "/" in n)
        yield from dict.fromkeys(folders)

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        return self._store.stat(self._full(name), timeout=timeout)

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        self._store.delete(self._full(name), timeout=timeout)

    def _full(self, name: str) -> str:
        return self._prefix + check_name(name)
