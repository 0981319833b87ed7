"""Who the workers are: the local cluster's ports and TF_CONFIG, or the one given."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfpreempt.errors import ConfigurationError

_HOST = "127.0.0.1"
_LOWEST_PORT = 10_000
_TRIES = 1_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenTask:
    """The task that a TF_CONFIG gives to a process.

    Attributes:
        type: such as "worker".
        index: among the tasks of its type.
    """

    type: str
    index: int

    @property
    def label(self) -> str:
        """Names the task's files, which may lie beside those of other machines."""
        return f"{self.type}-{self.index}"


def read_given_task(environment: Mapping[str, str]) -> GivenTask | None:
    """The task that the environment's TF_CONFIG names; None where it is not set.

    Raises:
        ConfigurationError: TF_CONFIG is set to something that is no cluster task.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        task = json.loads(text)["task"]
        return GivenTask(type=str(task.get("type", "worker")), index=int(task["index"]))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigurationError(
            f"TF_CONFIG is set to {text!r}, from which no task can be read. Expected "
            'JSON such as {"cluster": {"worker": ["host:port"]}, "task": {"type": '
            '"worker", "index": 0}}. Correct it, or unset it to have `tfpreempt run` '
            "make a local cluster."
        ) from error


def make_tf_config(ports: Sequence[int], index: int) -> str:
    """The TF_CONFIG of one worker of a cluster on this machine."""
    addresses = [f"{_HOST}:{port}" for port in ports]
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


class Ports:
    """Free ports for one incarnation; `release` just before its workers start.

    TensorFlow's server shares its port with nobody (no SO_REUSEPORT), so between the
    release and the server's bind, some seconds later, a port can't be held. Two things
    keep it free: it lies below the range from which the kernel takes ports for outgoing
    connections (on loopback one could even connect to itself), and an abstract socket
    that carries its number tells other supervisors of this machine to choose another.
    """

    def __init__(self, count: int) -> None:
        self._claims = contextlib.ExitStack()
        self._holds = contextlib.ExitStack()
        found = list(self._find(count))
        if len(found) < count:
            self.close()
            raise ConfigurationError(
                f"Found {len(found)} free ports on {_HOST}, {count} were asked for. "
                "Use fewer workers, or end what takes the ports."
            )
        self.numbers: tuple[int, ...] = tuple(found)

    def release(self) -> None:
        """Lets the workers bind the ports; other supervisors still keep away."""
        self._holds.close()

    def close(self) -> None:
        """Gives the ports up; more than once does no harm."""
        self._holds.close()
        self._claims.close()

    def _find(self, count: int) -> Iterator[int]:
        chance = random.SystemRandom()
        top = _outgoing_ports_start()
        for _ in range(_TRIES):
            if count == 0:
                return
            port = chance.randrange(_LOWEST_PORT, top)
            if self._take(port):
                count -= 1
                yield port

    def _take(self, port: int) -> bool:
        with contextlib.ExitStack() as undo:
            claim = undo.enter_context(socket.socket(socket.AF_UNIX))
            hold = undo.enter_context(socket.socket())
            hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                claim.bind(f"\0tfpreempt-port-{port}")
                hold.bind((_HOST, port))
            except OSError:
                return False  # somebody has it
            undo.pop_all()
        self._claims.enter_context(claim)
        self._holds.enter_context(hold)
        return True


def _outgoing_ports_start() -> int:
    """The first port that the kernel gives to outgoing connections, or 65536."""
    try:
        low = int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 32_768  # Linux's default
    return low if low > _LOWEST_PORT + _TRIES else 65_536
