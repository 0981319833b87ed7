"""The lease of a mirror in an object store, by names created only once.

    lease/<n>           record of the n-th holder, put if absent; the highest n holds it
    lease/<n>.renewals  number of renewals; the holder alone rewrites this object
    lease/<n>.marking   the folder about to be marked as a commit by the holder
    lease/<n>.over      the holder has ended; any process may write this name

**Taking the lease** is the creation of the next number: of many attempts, one succeeds.
Numbers are not used again, because the highest number stays when its holder exits. A
lifecycle rule of the bucket may delete the record of a long run as an old object. The
young `.renewals` then replaces the record, and only a higher number or an `.over` ends
the lease.

**The fence.** An object store cannot make an operation fail for a process without the
lease. So a holder writes the name of the folder to mark, checks that the lease is still
held, and puts the marker. A process that takes over creates the next number, reads the
name written by the earlier holder, puts that marker itself, and only then looks for
commits. There are two cases. The old holder sees the new number, and stops. Or the old
holder had written the name before the new number was created, and finds the marker in
place when it wakes. A name written later by the old holder is ignored by a third
holder, provided that the second holder has renewed the lease or written a name. No
commit therefore appears without the knowledge of the current holder.

The protocol rests on `put_if_absent`: a precondition on the generation in gs://, on the
ETag in s3://, a link(2) in a directory. A store without such a precondition can give
the lease to two processes at once.
"""

from __future__ import annotations

import io
import logging
import re

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.manifest import from_json as read_manifest
from tfpreempt.checkpoint.lease.lease_record import LeaseOwner, ObservedLease, from_json
from tfpreempt.checkpoint.lease.lease_timeouts import RenewalIntervals
from tfpreempt.core.threads import CallTimeoutError, call_within
from tfpreempt.storage import paths
from tfpreempt.storage.object_store import ObjectNotFoundError, ObjectStore

_log = logging.getLogger(__name__)

# slower than a disk: requests cost money
PACE = RenewalIntervals(renewal=15.0, expiry=60.0, poll=1.0)
_FOLDER = "lease"
_NAME = re.compile(rf"{_FOLDER}/(\d{{10}})(\.[a-z]+)?")
_RENEWALS, _MARKING, _OVER = ".renewals", ".marking", ".over"
_MAX_BYTES = 16 << 20
_PUT_SECONDS = 5.0  # timeout of a start for its record
_SECONDS = 1.0  # timeout of an exiting process for `.over`


class ObjectStoreLease:
    """The lease of one mirror; any thread. Every method raises CheckpointError.

    Args:
        store: object store of the mirror.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.where = store.uri
        self.pace = PACE
        self._store = store
        self._seen = 0  # the highest number at the last poll

    def read_owner(self) -> ObservedLease | None:
        """Returns the lease held here by some process; None if the lease is free."""
        names = self._names()
        self._seen = number = _highest(names)
        if number == 0 or _name(number, _OVER) in names:
            return None
        record = self._get(_name(number)) or b""
        return ObservedLease(
            token=str(number),
            holder=from_json(record, str(number)),
            renewals=self._get(_name(number, _RENEWALS)) or b"",
        )

    def take(self, holder: LeaseOwner) -> str | None:
        """Takes the lease unless another process has taken the lease since the last
        `look`.

        Returns:
            The token of the lease; None if another process was faster.

        Raises:
            SaveError: the store did not accept the record within the timeout.
        """
        number = self._seen + 1
        record = io.BytesIO(holder.to_json())
        try:
            is_mine = call_within(  # a mounted directory may hang, without a timeout
                _PUT_SECONDS,
                lambda: self._store.put_if_absent(
                    _name(number), record, timeout=_PUT_SECONDS
                ),
            )
        except CallTimeoutError as error:
            raise errors.SaveError(
                f"{self.where} did not accept an object within {_PUT_SECONDS:g} s. "
                "Check the network and the service."
            ) from error
        if not is_mine:
            return None
        older = [n for n in sorted(self._names()) if 0 < _number(n) < number]
        # A holder that has renewed the lease, or written a name to mark, had settled
        # the earlier names before. A name written later by an earlier holder is too
        # late.
        at_work = max(
            (_number(n) for n in older if n.endswith((_RENEWALS, _MARKING))), default=0
        )
        if _name(at_work, _MARKING) in older:
            self._settle(self._get(_name(at_work, _MARKING)) or b"")
        try:
            for name in older:
                self._store.delete(name)
        except errors.CheckpointError as error:
            _log.warning(
                "could not delete older leases in %s, which do no harm: %s",
                self.where,
                error,
            )
        return str(number)

    def end(self, token: str) -> None:
        """Ends a lease: the lease counts as free from now on."""
        self._store.replace(_name(int(token), _OVER), b"", timeout=_SECONDS)

    def has(self, token: str) -> bool:
        """Returns whether a lease still counts: without an `.over`, and with the
        highest number.

        If no object is left, the lease still counts: only a lifecycle rule can have
        deleted the objects.
        """
        names, number = self._names(), int(token)
        return _highest(names) in (0, number) and _name(number, _OVER) not in names

    def renew(self, token: str, count: int) -> None:
        """Renews a lease.

        Args:
            token: token of the lease.
            count: number of renewals of the lease, including this renewal.

        Raises:
            FileNotFoundError: the lease is over.
        """
        if not self.has(token):
            raise FileNotFoundError(f"the lease of {self.where} is over")
        self._store.replace(_name(int(token), _RENEWALS), b"%d" % count)

    def sweep(self) -> None:
        """Does nothing: `take` removes the objects of earlier holders."""

    def record_pending_marker(self, token: str, folder: str) -> None:
        """Writes the name of the folder about to be marked; a later holder completes
        the mark."""
        self._store.replace(_name(int(token), _MARKING), folder.encode())

    def _settle(self, data: bytes) -> None:
        """Marks the folder named by an earlier holder, so that the earlier holder
        cannot do so later."""
        folder = data.decode("utf-8", "replace")
        if paths.why_unsafe(folder):
            return
        marker = f"{folder}/{layout.MARKER}"
        manifest = self._get(f"{folder}/{layout.MANIFEST}")
        if manifest is None or self._store.stat(marker) is not None:
            return
        try:
            sequence = read_manifest(manifest, folder).sequence
        except errors.CheckpointCorruptedError:
            return  # a corrupt manifest is never taken for a commit
        content = catalog.marker_bytes(manifest, sequence)
        named = catalog.unread_entry(self._store, folder).token
        if named not in ("", catalog.token_of(content, sequence)):
            return  # the manifest of another folder: no commit, either
        self._store.put_if_absent(marker, io.BytesIO(content))

    def _names(self) -> set[str]:
        return set(self._store.list(f"{_FOLDER}/"))

    def _get(self, name: str) -> bytes | None:
        target = io.BytesIO()
        try:
            self._store.get(name, target, length=_MAX_BYTES)
        except ObjectNotFoundError:
            return None
        return target.getvalue()


def _name(number: int, suffix: str = "") -> str:
    return f"{_FOLDER}/{number:010d}{suffix}"


def _number(name: str) -> int:
    """Returns the number in an object's name; 0 for an object outside of any lease."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _highest(names: set[str]) -> int:
    """Returns the highest number among some names; 0 without any."""
    return max(map(_number, names), default=0)
