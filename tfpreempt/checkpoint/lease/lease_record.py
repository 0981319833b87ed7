"""The record of a lease's holder, used to decide whether the holder still runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import sys
import time

MAX_BYTES = 4096
_MAX_PID = (1 << 31) - 1
_BOOT = "/proc/sys/kernel/random/boot_id"
_NAMESPACE = "/proc/self/ns/pid"
_TIME_NAMESPACE = "/proc/self/ns/time"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """The process that holds a lease, as described by the record of the lease.

    Attributes:
        token: random token, made for this record. The lease of a directory has the same
            token; the lease of an object store has a number as its token.
        pid: process id, in the pid namespace of the process.
        started: start time of the process in clock ticks since the boot, as shown by
            /proc in the process's time namespace. Pid and start time identify a process
            within one boot. 0 if /proc is missing or belongs to another pid namespace.
        host: name of the machine or container, shown to users.
        boot: id of the machine's boot, equal in every container of the machine.
        namespace: id of the pid namespace; "" if /proc does not show the namespace.
        grace_seconds: grace period of the process in seconds: the time for an exit
            after a notice.
        since: time when the record was made, in seconds since the epoch, shown to
            users.
        program: name of the program, shown to users; without arguments, which may
            contain secrets.
        time_namespace: id of the time namespace of `started`; "" on a kernel without
            time namespaces.
    """

    token: str
    pid: int
    started: int
    host: str
    boot: str
    namespace: str
    grace_seconds: float
    since: float
    program: str
    time_namespace: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host} ({self.program}), since {since}"

    def is_dead(self, here: LeaseOwner) -> bool:
        """Returns whether the process has certainly exited. Returns False if the state
        of the process is unknown, because the process belongs to another boot or pid
        namespace.

        A different boot id does not prove that the machine was restarted: a copy of a
        machine or a container has the same name and machine id as the original. So the
        process may be running on the original, and `here` on the copy.

        Args:
            here: record of the calling process.
        """
        where = (self.boot, self.namespace)
        if "" in where or where != (here.boot, here.namespace):
            return False
        if self.pid == here.pid:
            # The calling process has the holder's pid. So the holder has exited, or the
            # holder was the calling process before an exec.
            return True
        return not self._is_running(here)

    def is_running_beside(self, here: LeaseOwner) -> bool:
        """Returns whether the process certainly runs on the machine of `here`, and is
        not the process `here`.

        Returns False if the state of the process is unknown: the process belongs to
        another boot or pid namespace; or the start times cannot be compared, so a new
        process may have the same pid.

        Args:
            here: record of the calling process.
        """
        where = (self.boot, self.namespace)
        is_here = "" not in where and where == (here.boot, here.namespace)
        has_times = 0 not in (self.started, here.started)
        is_known = is_here and has_times and self.time_namespace == here.time_namespace
        return is_known and not self.is_dead(here)

    def _is_running(self, here: LeaseOwner) -> bool:
        """Returns whether the process still runs: its pid exists, and does not belong
        to a new process. Returns True if the state of the process is unknown."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        try:
            started = _started(self.pid) if here.started else 0
        except OSError:
            return True  # /proc hides the process from this user
        if started is None:
            return False
        # Start times in two time namespaces differ by the offset of the namespaces.
        is_known = 0 not in (started, self.started)
        is_comparable = is_known and self.time_namespace == here.time_namespace
        return started == self.started or not is_comparable

    def to_json(self) -> bytes:
        """Returns the record as JSON, for the lease's file or object."""
        return json.dumps(dataclasses.asdict(self)).encode()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLease:
    """A lease of another process, as found by a poll.

    Attributes:
        token: token of the lease.
        holder: holder of the lease; None while a process is deleting the lease.
        renewals: number of renewals by the holder, in ASCII; empty before the first
            renewal.
    """

    token: str
    holder: LeaseOwner | None
    renewals: bytes


def is_token(name: str) -> bool:
    """Returns whether a name has the form of a lease token: 32 hexadecimal digits."""
    return re.fullmatch(r"[0-9a-f]{32}", name) is not None


def this_process(grace_seconds: float) -> LeaseOwner:
    """Returns a record of this process with a new token, for taking a lease.

    Args:
        grace_seconds: grace period of this process, in seconds.
    """
    pid, started, boot = os.getpid(), 0, ""
    if _link("/proc/self") == str(pid):  # otherwise /proc shows another pid namespace
        with contextlib.suppress(OSError):
            started = _started(pid) or 0
    with contextlib.suppress(OSError), open(_BOOT, encoding="ascii") as file:
        boot = file.readline().strip()
    return LeaseOwner(
        token=secrets.token_hex(16),
        pid=pid,
        started=started,
        host=os.uname().nodename,
        boot=boot,
        namespace=_link(_NAMESPACE),
        grace_seconds=grace_seconds,
        since=time.time(),
        program=os.path.basename(sys.argv[0] if sys.argv else "")[:200] or "python",
        time_namespace=_link(_TIME_NAMESPACE),
    )


def from_json(data: bytes, token: str) -> LeaseOwner:
    """Returns the holder described by a record that `to_json` has made.

    Args:
        data: content of the record, which any process may have written.
        token: token of the returned holder, if the content is not a valid record.

    Returns:
        The holder. If the content is not a valid record, a holder with only the token;
        for this holder, `is_dead` always returns False.
    """
    try:
        found = json.loads(data[:MAX_BYTES])
        holder = LeaseOwner(**found)
        kinds = {"int": int, "float": (int, float), "str": str}
        for field in dataclasses.fields(LeaseOwner):
            value = getattr(holder, field.name)
            if isinstance(value, bool) or not isinstance(
                value,
                kinds[str(field.type)],  # type: ignore[arg-type]
            ):
                raise TypeError(field.name)
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(field.name)  # messages contain the text
        str(holder)  # raises an error if `since` is not a valid time
        if 0 < holder.pid <= _MAX_PID:
            return holder
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        pass
    return LeaseOwner(
        token=token,
        pid=0,
        started=0,
        host="an unknown host",
        boot="",
        namespace="",
        grace_seconds=0.0,
        since=0.0,
        program="its record cannot be read",
    )


def _started(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since the boot; None if the
    process has ended (is a zombie).

    Raises:
        OSError: there is no such process, or /proc hides the process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may have spaces
    except ProcessLookupError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
