"""Who holds a lease: written down for other processes, which ask whether it lives."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time

MAX_BYTES = 4096
_MAX_PID = (1 << 31) - 1
_BOOT = "/proc/sys/kernel/random/boot_id"
_NAMESPACE = "/proc/self/ns/pid"
_TIME_NAMESPACE = "/proc/self/ns/time"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process, as its lease names it.

    Attributes:
        token: of this lease alone. In a directory it is the fencing token; in an object
            store that is the number of the record.
        pid: in its own namespace.
        started: clock ticks from the boot to the start of the process, as /proc shows
            them in its time namespace; with the pid they name one process of a boot. 0
            where /proc is missing, or that of another pid namespace.
        host: the name of its machine or container, for people.
        boot: the id of the machine's boot, equal in all of its containers.
        namespace: the pid namespace; "" where /proc does not show it.
        grace_seconds: that it may need to leave, once it was told to.
        since: seconds since the epoch, for people.
        program: the name of what runs, for people; arguments may hold secrets.
        time_namespace: in which `started` counts; "" on a kernel without such.
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

    def is_dead(self, here: Holder) -> bool:
        """Whether the process provably ended: of the same boot and pid namespace only.

        Another boot proves nothing: machines and containers that were copied have the
        same name and machine id, and both live.

        Args:
            here: the process that asks.
        """
        where = (self.boot, self.namespace)
        if "" in where or where != (here.boot, here.namespace):
            return False
        if self.pid == here.pid:
            return True  # of a number that is ours now, or of what we were before exec
        return not self._is_running(here)

    def _is_running(self, here: Holder) -> bool:
        """Whether the process still runs; another process may have its pid by now."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        try:
            started = _started(self.pid) if here.started else 0
        except OSError:
            return True  # hidden from this user
        if started is None:
            return False
        # Start times of two time namespaces differ by the offset of these.
        is_known = 0 not in (started, self.started)
        is_comparable = is_known and self.time_namespace == here.time_namespace
        return started == self.started or not is_comparable

    def to_json(self) -> bytes:
        """What the lease's file holds."""
        return json.dumps(dataclasses.asdict(self)).encode()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A lease that somebody has.

    Attributes:
        token: which.
        holder: who has it; None where it is being ended.
        beat: what its holder wrote last.
    """

    token: str
    holder: Holder | None
    beat: bytes


def this_process(grace_seconds: float) -> Holder:
    """A holder's record of this process, with a token of its own.

    Args:
        grace_seconds: that it may need to leave.
    """
    pid, started, boot = os.getpid(), 0, ""
    if _link("/proc/self") == str(pid):  # else /proc is of another pid namespace
        with contextlib.suppress(OSError):
            started = _started(pid) or 0
    with contextlib.suppress(OSError), open(_BOOT, encoding="ascii") as file:
        boot = file.readline().strip()
    return Holder(
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


def from_json(data: bytes, token: str) -> Holder:
    """Reads what `to_json` wrote.

    Args:
        data: from a file that anybody may have written.
        token: for a holder of which nothing is known.

    Returns:
        The holder; one of which nothing is known, and that never counts as dead, where
        the file is something else.
    """
    try:
        found = json.loads(data[:MAX_BYTES])
        holder = Holder(**found)
        kinds = {"int": int, "float": (int, float), "str": str}
        for field in dataclasses.fields(Holder):
            value = getattr(holder, field.name)
            if isinstance(value, bool) or not isinstance(
                value,
                kinds[str(field.type)],  # type: ignore[arg-type]
            ):
                raise TypeError(field.name)
        str(holder)  # its time is one
        if 0 < holder.pid <= _MAX_PID:
            return holder
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        pass
    return Holder(
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
    """When a process began; None of one that has ended and was not waited for.

    Raises:
        OSError: there is none, or it is hidden.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may have spaces
    except ProcessLookupError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
