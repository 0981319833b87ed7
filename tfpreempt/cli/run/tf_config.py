"""Chooses free ports, and makes the variables that name the workers of one machine."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpreempt.errors import ConfigurationError

_HOST = "127.0.0.1"
_LOWEST_PORT = 10_000
_TRIES = 1_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def make_tf_config(ports: Sequence[int], index: int) -> str:
    """Returns the TF_CONFIG of a worker, for a cluster on this machine.

    Args:
        ports: ports of the workers.
        index: index of the worker.
    """
    addresses = [f"{_HOST}:{port}" for port in ports]
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


def make_jax_variables(ports: Sequence[int], index: int) -> dict[str, str]:
    """Returns the variables from which a program on JAX connects its processes.

    JAX itself reads JAX_COORDINATOR_ADDRESS. The program passes the values of
    JAX_NUM_PROCESSES and JAX_PROCESS_ID to `jax.distributed.initialize`.
    `keras.distribution.initialize` reads the variables of Keras.

    A single worker gets no variables: on a TPU slice and in Slurm, JAX finds the
    processes of all machines itself, and an address of this machine would be wrong.

    Args:
        ports: ports of the workers; process 0 hosts JAX's coordination service. Empty
            if no port was free: then no worker starts.
        index: index of the worker.
    """
    if len(ports) < 2:
        return {}
    address, count = f"{_HOST}:{ports[0]}", str(len(ports))
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": count,
        "JAX_PROCESS_ID": str(index),
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": address,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": count,
        "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
    }


@contextlib.contextmanager
def claimed_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Context manager: reserves free ports for the workers.

    TensorFlow's server binds a port some seconds later, and cannot share the port (no
    SO_REUSEPORT), so this process must not bind the port. The port is kept free in two
    ways. First, the port is below the range from which the kernel chooses ports for
    outgoing connections. (On loopback such a connection could even connect to itself.)
    Second, this process binds a Unix socket with an abstract name that contains the
    port, so that other supervisors on this machine choose another port.

    Args:
        count: number of ports.

    Raises:
        ConfigurationError: there are not enough free ports.
        OSError: there are no free file descriptors to test a port.
    """
    chance, top = random.SystemRandom(), _outgoing_ports_start()
    claims: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as ends:
        for _ in range(_TRIES):
            if len(claims) == count:
                break
            port = chance.randrange(_LOWEST_PORT, top)
            if (claim := _claim(port)) is not None:
                claims[port] = ends.enter_context(claim)
        if len(claims) < count:
            raise ConfigurationError(
                f"{len(claims)} free ports on {_HOST}, {count} needed. Use fewer "
                "workers, or stop the processes that use the ports."
            )
        yield tuple(claims)


def _claim(port: int) -> socket.socket | None:
    """Reserves a port against other supervisors of this machine.

    The name of a Unix socket is the reservation, so the TCP port itself stays free.

    Returns:
        The Unix socket: the port is reserved until the socket is closed. None if the
        port is in use or reserved.

    Raises:
        OSError: the port could not be tested.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0tfpreempt-port-{port}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def _outgoing_ports_start() -> int:
    """Returns the lowest port that the kernel uses for outgoing connections.

    Returns 65536 if this port is so low that too few ports remain below it.
    """
    try:
        low = int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 32_768  # Linux's default
    return low if low > _LOWEST_PORT + _TRIES else 65_536
