"""Contacts the metadata servers of all clouds in parallel, with one deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Iterable, Mapping

from tfpreempt.core.threads import ManagedThread
from tfpreempt.notice import aws, azure, gce
from tfpreempt.notice.gce import ABSENT, pick
from tfpreempt.notice.metadata_session import MetadataSession, printable
from tfpreempt.storage.paths import without_secrets

LIMIT_SECONDS = 0.25
_GPU_MACHINES = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DetectedMachine:
    """Facts about the machine, from a metadata server or from files.

    Attributes:
        cloud: "gce", "aws" or "azure"; None if unknown.
        evidence: facts that show the cloud and the kinds, as texts for messages.
        kinds: properties of the machine: any of "tpu", "spot" and "gpu".
        is_identified: whether the files name the maker of the machine, a cloud or
            a manufacturer. If so, the machine is in no other cloud.
    """

    cloud: str | None = None
    evidence: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    is_identified: bool = False


Probe = Callable[[Mapping[str, str], float], DetectedMachine | None]
"""Function that contacts the metadata server of one cloud. It takes the environment
variables and a timeout in seconds, and returns None if the server is no metadata server
of that cloud."""


def probe_gce(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
    """Contacts GCE's metadata server: requests the entries of the instance."""
    base = gce.metadata_url(environment)
    answer = MetadataSession(base).request(
        f"{gce.ROOT}{gce.DIRECTORY}?recursive=true&alt=json",
        headers={"Metadata-Flavor": "Google"},
        seconds=limit,
        body_bytes=gce.DIRECTORY_BYTES,
    )
    if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
        return None
    instance = answer.json()
    if pick(instance, "id") is ABSENT:
        return None
    kinds: dict[str, str] = {}
    for name in ("accelerator-type", "agent-worker-number"):
        if pick(instance, f"attributes/{name}") is not ABSENT:
            kinds["tpu"] = f"the instance has the attribute {name}"
    if str(pick(instance, "scheduling/preemptible")).upper() == "TRUE":
        kinds["spot"] = "the instance's scheduling is preemptible"
    machine = str(pick(instance, "machine-type")).rpartition("/")[2]
    if family := next(filter(machine.startswith, _GPU_MACHINES), ""):
        kinds["gpu"] = f"machine types {family}* have GPUs"
    evidence = (f"{base} answers as GCE's metadata server", *kinds.values())
    return DetectedMachine(cloud="gce", evidence=evidence, kinds=frozenset(kinds))


def probe_aws(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
    """Contacts EC2's metadata service: requests a token."""
    base = aws.metadata_url(environment)
    answer = MetadataSession(base).request(
        aws.TOKEN_TARGET, method="PUT", headers={aws.TTL_HEADER: "60"}, seconds=limit
    )
    if answer.status != 200 or aws.TTL_HEADER.lower() not in answer.headers:
        return None
    return DetectedMachine(cloud="aws", evidence=(f"{base} gives tokens of EC2",))


def probe_azure(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
    """Contacts Azure's metadata service: requests the name of the machine."""
    base = azure.metadata_url(environment)
    answer = MetadataSession(base).request(
        azure.NAME_TARGET, headers=azure.HEADERS, seconds=limit
    )
    name = answer.text()
    if answer.status != 200 or not azure.is_vm_name(name):
        return None
    return DetectedMachine(cloud="azure", evidence=(f"{base} calls this VM {name!r}",))


def is_excluded(cloud: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a variable forbids requests to a cloud's metadata server."""
    checks = {"gce": gce.is_excluded, "aws": aws.is_excluded}
    return cloud in checks and checks[cloud](environment)


ADDRESS_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "gce": gce.HOST_VARIABLES,
    "aws": (aws.ENDPOINT_VARIABLE,),
    "azure": (azure.HOST_VARIABLE,),
}
"""For every cloud: environment variables with the address of its metadata server."""


def named_addresses(
    clouds: Iterable[str], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns the variables that contain the address of a server, as "NAME='value'".

    Args:
        clouds: clouds whose servers are meant.
        environment: environment variables.
    """
    return tuple(
        f"{name}={printable(without_secrets(environment[name]))!r}"
        for cloud in clouds
        for name in ADDRESS_VARIABLES[cloud]
        if environment.get(name)
    )


PROBES: Mapping[str, Probe] = {
    "gce": probe_gce,
    "aws": probe_aws,
    "azure": probe_azure,
}


def probe_all(
    probes: Mapping[str, Probe],
    environment: Mapping[str, str],
    limit_seconds: float = LIMIT_SECONDS,
) -> DetectedMachine | None:
    """Contacts metadata servers in parallel; returns the first result with a cloud.

    Returns None if no server identifies a cloud in time. A function that has not
    returned within the timeout continues in a daemon thread, and its result is ignored.

    Args:
        probes: for every cloud, the function that contacts its metadata server.
        environment: environment variables, which may contain addresses of servers, or
            forbid requests to a server.
        limit_seconds: timeout for all servers together.
    """
    deadline = time.monotonic() + limit_seconds
    answers: queue.SimpleQueue[DetectedMachine | None] = queue.SimpleQueue()

    def ask(probe: Probe) -> None:
        finding = None
        # An error means: no server, or a server that is no metadata server.
        with contextlib.suppress(Exception):
            finding = probe(environment, limit_seconds)
        answers.put(finding)

    asked = {
        name: probe
        for name, probe in probes.items()
        if not is_excluded(name, environment)
    }
    for name, probe in asked.items():
        ManagedThread(f"tfpreempt-probe-{name}", functools.partial(ask, probe)).start()
    for _ in asked:
        try:
            finding = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if finding is not None:
            return finding
    return None
