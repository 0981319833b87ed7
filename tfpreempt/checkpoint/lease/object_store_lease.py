"""The lease of a mirror, as objects in its object store; every lease has a new number.

    lease/<n>           record of the n-th holder, created only if absent; the process
                        with the highest n holds the lease
    lease/<n>.renewals  number of renewals; only the holder rewrites this object
    lease/<n>.marking   folder of a commit that the holder is about to complete
    lease/<n>.over      shows that the lease has ended; any process may create this
                        object

**Taking the lease** is the creation of the record with the next number; only one of
several processes succeeds. Numbers are not used again, because the objects of the
highest number stay when the holder exits. A lifecycle rule of the bucket may delete the
record of a long run, because the object is old. The holder is then known by its
younger `.renewals`. Only a higher number or an `.over` ends the lease.

**The fence.** A process that lost the lease must not commit unnoticed, but an object
store cannot refuse the process's requests. A commit is complete once its folder has a
marker. So a holder first writes the name of the folder to `.marking`, then checks the
lease, and then creates the marker. A process that takes over creates the next number,
reads the `.marking` of the earlier holder, and creates the marker in the named folder.
Then the process searches for commits. There are two cases:

- The earlier holder reads the new number in its check of the lease, and stops.
- The earlier holder had written `.marking` before the new number was created. Then the
  new holder has created the marker before its search for commits.

If the earlier holder writes a `.marking` still later, a third holder ignores that
`.marking`, provided that the second holder has renewed the lease or written a
`.marking`. So no commit appears without the knowledge of the current holder.

The protocol needs an atomic `put_if_absent`: a precondition on the generation in gs://,
on the ETag in s3:// and az://, a link(2) in a directory. In a store without such a
precondition, two processes may hold the lease at once.
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
from tfpreempt.storage.object_store import ObjectStore, read_object

_log = logging.getLogger(__name__)

# Longer intervals than for a disk, because requests cost money.
PACE = RenewalIntervals(renewal=15.0, expiry=60.0, poll=1.0)
_FOLDER = "lease"
# Exactly the names that `_name` makes, so that each number has one name.
_NAME = re.compile(rf"{_FOLDER}/(\d{{10}}|[1-9]\d{{10,18}})(\.[a-z]+)?", re.ASCII)
_RENEWALS, _MARKING, _OVER = ".renewals", ".marking", ".over"
_MAX_BYTES = 16 << 20
_PUT_SECONDS = 5.0  # timeout for creating the record of a lease
_SECONDS = 1.0  # timeout for writing `.over`; short, because the process is exiting


class ObjectStoreLease:
    """The lease of one mirror. Any thread may call the methods. Methods may raise
    CheckpointError.

    Args:
        store: object store of the mirror.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.where = store.uri
        self.pace = PACE
        self._store = store
        self._seen = 0  # highest number found by the last `read_owner`

    def read_owner(self) -> ObservedLease | None:
        """Returns the lease that some process holds; None if the lease is free."""
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
        """Takes the lease, unless another process has taken the lease since the last
        `read_owner`.

        Args:
            holder: record of the calling process.

        Returns:
            The token of the new lease; None if another process was faster.

        Raises:
            SaveError: the object store did not confirm the record within the timeout.
            CheckpointError: an object has the highest number that a lease can have.
        """
        number = self._seen + 1
        if _number(_name(number)) != number:
            error = errors.CheckpointError(
                f"{self.where} has the object {_name(self._seen)!r}, which has the "
                "highest number of a lease, so no process can take the lease. Delete "
                "all objects whose names begin with this name."
            )
            error.is_permanent = True
            raise error
        record = io.BytesIO(holder.to_json())
        try:
            # Limit the whole call: a store in a mounted directory may hang, and ignores
            # `timeout`.
            is_mine = call_within(
                _PUT_SECONDS,
                lambda: self._store.put_if_absent(
                    _name(number), record, timeout=_PUT_SECONDS
                ),
            )
        except CallTimeoutError as error:
            raise errors.SaveError(
                f"{self.where} did not confirm the write of an object within "
                f"{_PUT_SECONDS:g} s. Check the network and the storage service."
            ) from error
        if not is_mine:
            return None
        older = [n for n in sorted(self._names()) if 0 < _number(n) < number]
        # A new holder first creates the marker for the `.marking` of the holder before.
        # Only then does the new holder write a `.renewals` or a `.marking`. So the
        # highest number with such an object counts: a `.marking` with a lower number is
        # done, or was written too late, and is ignored.
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
                "could not delete records of older leases in %s, which only take up "
                "space: %s",
                self.where,
                error,
            )
        return str(number)

    def end(self, token: str) -> None:
        """Ends the lease with this token: another process can then take the lease."""
        self._store.replace(_name(int(token), _OVER), b"", timeout=_SECONDS)

    def has(self, token: str) -> bool:
        """Returns whether the lease with this token is still valid: the lease has the
        highest number, and no `.over`.

        If the store has no object of any lease, the lease counts as valid, because only
        a lifecycle rule can have deleted all objects.
        """
        names, number = self._names(), int(token)
        return _highest(names) in (0, number) and _name(number, _OVER) not in names

    def renew(self, token: str, count: int) -> None:
        """Renews a lease: writes the number of renewals.

        Args:
            token: token of the lease.
            count: number of renewals of the lease, including this renewal.

        Raises:
            FileNotFoundError: the lease was ended.
        """
        if not self.has(token):
            raise FileNotFoundError(f"the lease of {self.where} was ended")
        self._store.replace(_name(int(token), _RENEWALS), b"%d" % count)

    def sweep(self) -> None:
        """Does nothing, because `take` removes the objects of earlier holders."""

    def record_pending_marker(self, token: str, folder: str) -> None:
        """Writes the name of a folder, before the marker in the folder is created. If
        the process is interrupted after the write, the next holder creates the marker.

        Args:
            token: token of the lease.
            folder: folder of the commit.
        """
        self._store.replace(_name(int(token), _MARKING), folder.encode())

    def _settle(self, data: bytes) -> None:
        """Commits the folder that an earlier holder named in its `.marking`: creates
        the marker of the folder. Otherwise the earlier holder could create the marker
        later, unnoticed.

        Args:
            data: content of the `.marking`: the name of the folder.
        """
        folder = data.decode("utf-8", "replace")
        if catalog.kind_of(folder) is not catalog.Kind.MIRROR:
            return  # corrupt: no folder of a commit has this name
        marker = f"{folder}/{layout.MARKER}"
        manifest = self._get(f"{folder}/{layout.MANIFEST}")
        if manifest is None or self._store.stat(marker) is not None:
            return
        try:
            sequence = read_manifest(manifest, folder).sequence
        except errors.CheckpointCorruptedError:
            return  # a folder with a corrupt manifest must not become a commit
        content = catalog.marker_bytes(manifest, sequence)
        named = catalog.unread_entry(self._store, folder).token
        if named != catalog.token_of(content, sequence):
            return  # the manifest belongs to another folder: create no marker
        self._store.put_if_absent(marker, io.BytesIO(content))

    def _names(self) -> set[str]:
        return set(self._store.list(f"{_FOLDER}/"))

    def _get(self, name: str) -> bytes | None:
        return read_object(self._store, name, _MAX_BYTES)


def _name(number: int, suffix: str = "") -> str:
    return f"{_FOLDER}/{number:010d}{suffix}"


def _number(name: str) -> int:
    """Returns the lease number in the name of an object; 0 if the object belongs to no
    lease."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _highest(names: set[str]) -> int:
    """Returns the highest lease number in a set of object names; 0 if no object belongs
    to a lease."""
    return max(map(_number, names), default=0)
