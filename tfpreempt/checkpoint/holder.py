"""Who holds a lease: written down for other processes, which ask whether it lives."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
import time

_MAX_BYTES = 4096
_BOOT = "/proc/sys/kernel/random/boot_id"
_MACHINE = "/etc/machine-id"
_NAMESPACE = "/proc/self/ns/pid"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process, as its lease names it.

    Attributes:
        token: of this lease alone: the fencing token.
        pid: in its own namespace.
        started: when the process began, in clock ticks of its machine; with the pid it
            names one process of a boot.
        host: the name of its machine or container.
        machine: the machine's id; empty where it has none.
        boot: the id of the machine's boot, equal in all of its containers.
        namespace: in which the pid counts.
        grace_seconds: that it may need to leave, once it was told to.
        since: seconds since the epoch, for people.
        program: what runs, for people.
    """

    token: str
    pid: int
    started: int
    host: str
    machine: str
    boot: str
    namespace: str
    grace_seconds: float
    since: float
    program: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host} ({self.program}), since {since}"

    def is_dead(self, here: Holder) -> bool:
        """Whether it provably is: asked on its machine, about its boot and namespace.

        Args:
            here: the process that asks.
        """
        is_known = bool(self.boot and here.boot)
        if is_known and self.boot != here.boot:
            is_here = (self.host, self.machine) == (here.host, here.machine)
            return is_here and bool(self.machine)  # it was started anew since
        if not is_known or self.namespace != here.namespace:
            return False
        if self.pid == here.pid:
            return True  # of a number that is ours now, or of what we were before exec
        return not _is_running(self.pid, self.started)

    def to_json(self) -> bytes:
        """What the lease's file holds."""
        return json.dumps(dataclasses.asdict(self)).encode()


def this_process(grace_seconds: float) -> Holder:
    """A holder's record of this process, with a token of its own.

    Args:
        grace_seconds: that it may need to leave.
    """
    pid = os.getpid()
    return Holder(
        token=secrets.token_hex(16),
        pid=pid,
        started=_started(pid) or 0,
        host=os.uname().nodename,
        machine=_first_line(_MACHINE),
        boot=_first_line(_BOOT),
        namespace=_link(_NAMESPACE),
        grace_seconds=grace_seconds,
        since=time.time(),
        program=" ".join(sys.argv)[:200] or "python",
    )


def from_json(data: bytes, token: str) -> Holder:
    """Reads what `to_json` wrote.

    Args:
        data: from a file that anybody may have written.
        token: of the lease, as its directory names it.

    Returns:
        The holder; one of which nothing is known, and that never counts as dead, where
        the file is something else.
    """
    try:
        found = json.loads(data[:_MAX_BYTES])
        holder = Holder(**{**found, "token": token})
        kinds = {"int": int, "float": (int, float), "str": str}
        for field in dataclasses.fields(Holder):
            value = getattr(holder, field.name)
            if isinstance(value, bool) or not isinstance(
                value,
                kinds[str(field.type)],  # type: ignore[arg-type]
            ):
                raise TypeError(field.name)
        str(holder)  # its time is one
        if holder.pid > 0:
            return holder
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        pass
    return Holder(
        token=token,
        pid=0,
        started=0,
        host="an unknown host",
        machine="",
        boot="",
        namespace="",
        grace_seconds=0.0,
        since=0.0,
        program="its record cannot be read",
    )


def _is_running(pid: int, started: int) -> bool:
    try:
        return _started(pid) == started
    except FileNotFoundError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True  # hidden from this user


def _started(pid: int) -> int | None:
    """When a process began; None of one that has ended and was not waited for.

    Raises:
        FileNotFoundError: there is none, or it is hidden.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may have spaces
    except ProcessLookupError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except (OSError, ValueError):
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
