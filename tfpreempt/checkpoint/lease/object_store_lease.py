"""The lease of a place in an object store, by names that are created only once.

    lease/<n>           the n-th holder's record, put if absent; the highest n holds it
    lease/<n>.beat      its counter; written by that holder alone, as the next one
    lease/<n>.marking   the folder that it is about to mark as a commit
    lease/<n>.over      it has ended; this others may write too

**Taking it** is to create the next number: of many who try, one does. Numbers are not
used again, because the highest one stays when its holder leaves. A rule of the bucket
may delete the record of a long run as an old object: the beat, which is young, stands
for it then, and somebody else only for what is said by another number.

**The fence.** An object store has no operation that would fail for who is no holder. So
a holder says which folder it marks, looks whether it still holds the lease, and puts
the marker. Who takes over creates its number, reads what the ones before were marking,
and puts that marker itself before it looks for commits. Either the old holder sees the
new number and stops; or it had said what it marks before that number was created, and
its marker is there already when it wakes. What it says later is not put by a third, if
the second has renewed its lease or said what it marks: nothing comes to be a commit
behind the back of who is at work.

This rests on `put_if_absent`: a precondition on the generation in gs://, on the ETag
in s3://, a link(2) in a directory. A store without it can give it to two at once.
"""

from __future__ import annotations

import io
import logging
import re

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.manifest import from_json as read_manifest
from tfpreempt.checkpoint.lease.lease_record import Found, Holder, from_json
from tfpreempt.checkpoint.lease.lease_timeouts import Renewal
from tfpreempt.core.threads import OutOfTimeError, call_within
from tfpreempt.storage import paths
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore

_log = logging.getLogger(__name__)

PACE = Renewal(renewal=15.0, expiry=60.0, poll=1.0)  # each request is paid for
_FOLDER = "lease"
_NAME = re.compile(rf"{_FOLDER}/(\d{{10}})(\.[a-z]+)?")
_BEAT, _MARKING, _OVER = ".beat", ".marking", ".over"
_MAX_BYTES = 16 << 20
_PUT_SECONDS = 5.0  # that a start waits for the store to take its record
_SECONDS = 1.0  # that the end of a process may take for saying so


class StorePlace:
    """The lease of one place; any thread. All methods raise CheckpointError.

    Args:
        store: where.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.where = store.uri
        self.pace = PACE
        self._store = store
        self._seen = 0  # the highest number at the last look

    def look(self) -> Found | None:
        """Who has it; None if nobody."""
        names = self._names()
        self._seen = number = _highest(names)
        if number == 0 or _name(number, _OVER) in names:
            return None
        record = self._get(_name(number)) or b""
        return Found(
            token=str(number),
            holder=from_json(record, str(number)),
            beat=self._get(_name(number, _BEAT)) or b"",
        )

    def take(self, holder: Holder) -> str | None:
        """Takes it as it was at the last look, unless somebody did so since.

        Returns:
            Its token; None if somebody was quicker.
        """
        number = self._seen + 1
        record = io.BytesIO(holder.to_json())
        try:
            is_mine = call_within(  # a mounted directory may hang, and has no timeout
                _PUT_SECONDS,
                lambda: self._store.put_if_absent(
                    _name(number), record, timeout=_PUT_SECONDS
                ),
            )
        except OutOfTimeError as error:
            raise errors.SaveError(
                f"{self.where} did not take an object within {_PUT_SECONDS:g} s. "
                "Check the network, and the service."
            ) from error
        if not is_mine:
            return None
        older = [n for n in sorted(self._names()) if 0 < _number(n) < number]
        # Who renewed its lease, or said what it marks, had settled what was before it:
        # what an older one has said since then came too late.
        at_work = max(
            (_number(n) for n in older if n.endswith((_BEAT, _MARKING))), default=0
        )
        if _name(at_work, _MARKING) in older:
            self._settle(self._get(_name(at_work, _MARKING)) or b"")
        try:
            for name in older:
                self._store.delete(name)
        except errors.CheckpointError as error:
            _log.warning(
                "tfpreempt: older leases stay in %s, which does no harm: %s",
                self.where,
                error,
            )
        return str(number)

    def end(self, token: str) -> None:
        """It counts for nothing from now on."""
        self._store.replace(_name(int(token), _OVER), b"", timeout=_SECONDS)

    def has(self, token: str) -> bool:
        """Whether nothing says that it is over, or that another one was taken.

        Where all is gone, only a rule of the bucket can have deleted it.
        """
        names, number = self._names(), int(token)
        return _highest(names) in (0, number) and _name(number, _OVER) not in names

    def beat(self, token: str, count: int) -> None:
        """Renews it.

        Raises:
            FileNotFoundError: it is over.
        """
        if not self.has(token):
            raise FileNotFoundError(f"the lease of {self.where} is over")
        self._store.replace(_name(int(token), _BEAT), b"%d" % count)

    def sweep(self) -> None:
        """Nothing: what others left goes when it is taken."""

    def announce(self, token: str, folder: str) -> None:
        """Says which folder is about to be marked; who takes over finishes that."""
        self._store.replace(_name(int(token), _MARKING), folder.encode())

    def _settle(self, data: bytes) -> None:
        """Marks what an older holder was about to mark, so that it cannot later."""
        folder = data.decode("utf-8", "replace")
        if paths.why_unsafe(folder):
            return
        marker = f"{folder}/{layout.MARKER}"
        manifest = self._get(f"{folder}/{layout.MANIFEST}")
        if manifest is None or self._store.stat(marker) is not None:
            return
        try:
            sequence = read_manifest(manifest, folder).sequence
        except errors.CheckpointDamagedError:
            return  # nobody takes that for a commit
        content = catalog.marker_bytes(manifest, sequence)
        named = catalog.unread(self._store, folder).token
        if named not in ("", catalog.token_of(content, sequence)):
            return  # the manifest is not the one that belongs here: likewise
        self._store.put_if_absent(marker, io.BytesIO(content))

    def _names(self) -> set[str]:
        return set(self._store.list(f"{_FOLDER}/"))

    def _get(self, name: str) -> bytes | None:
        target = io.BytesIO()
        try:
            self._store.get(name, target, length=_MAX_BYTES)
        except ObjectMissingError:
            return None
        return target.getvalue()


def _name(number: int, suffix: str = "") -> str:
    return f"{_FOLDER}/{number:010d}{suffix}"


def _number(name: str) -> int:
    """That an object belongs to; 0 of what is none of ours."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _highest(names: set[str]) -> int:
    """The newest number; 0 without any."""
    return max(map(_number, names), default=0)
