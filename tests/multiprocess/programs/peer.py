"""Runs train.py with one worker that blocks in a phase, in any of its threads.

Usage: peer.py CHECKPOINT_DIR OPTION...

PEER_AT is a JSON object with the `worker` and the `phase`. In this phase the worker
prints `holding peer`, and blocks until the test releases it. With PEER_NETWORK each
worker has a separate network, and prints `holding network` until the test has connected
the networks.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import IO, Any

PLAN = json.loads(os.environ["PEER_AT"])
NEW_NETWORK, NEW_NAME = 0x40000000, 0x04000000
HELD_AT = 4
"""Number of finished steps when the step with the notice begins."""


def enter_network(prefix: str) -> None:
    """Enters a new network; the worker's address is the prefix and its number."""
    assert not ctypes.CDLL(None).unshare(NEW_NETWORK | NEW_NAME)  # before threads
    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        count = len(config["cluster"]["worker"])
        addresses = [f"{prefix}{index}:2222" for index in range(count)]
        os.environ["TF_CONFIG"] = json.dumps(
            config | {"cluster": {"worker": addresses}}
        )
    else:
        os.environ["JAX_COORDINATOR_ADDRESS"] = f"{prefix}0:2222"


if address := os.environ.get("PEER_NETWORK"):
    enter_network(address)

import file_events  # noqa: E402 - the network comes first
from toy_model import (  # noqa: E402 - the network comes first
    FRAMEWORK,
    INDEX,
    Model,
    hold,
    say,
)

from tfpreempt import State  # noqa: E402
from tfpreempt.checkpoint.bundles import bundle_writer  # noqa: E402
from tfpreempt.checkpoint.directory.layout import MARKER  # noqa: E402
from tfpreempt.core import frameworks  # noqa: E402

ROUND = re.compile(r"tfpreempt/[^/]+/\d+/(\w+)(?:/\d+)?")
START = re.compile(r"tfpreempt/[^/]+/start/\d+/(?:plan|hello/\d+)")
SAVE = re.compile(r"tfpreempt/[^/]+/save/(periodic|finished)-[^/]+/(\d+|commit)")
MARKERS = {4: "periodic marker", 12: "final marker"}
"""Phases of the markers of these steps, without a notice. Other steps have a notice."""

OF = {"periodic": "periodic", "finished": "final"}
"""Names of the phases of saves without a notice."""

once = threading.Lock()
has_begun = threading.Event()  # the step in which the notice comes


def at(phase: str) -> None:
    """Blocks the planned worker in this phase, once."""
    is_planned = {"worker": INDEX, "phase": phase} == PLAN
    if is_planned and once.acquire(blocking=False):
        hold("peer")
        say("went on")


def phase_of(key: str, value: str) -> str:
    """Returns the phase of a worker that inserts a key; "" for other keys."""
    if START.fullmatch(key):
        return "start"
    if found := SAVE.fullmatch(key):
        return f"{OF[found[1]]} {'commit' if found[2] == 'commit' else 'done'}"
    if not (found := ROUND.fullmatch(key)):
        return ""
    told = json.loads(value)
    if told.get("kind") == "finished":
        return "finished"
    return f"final {found[1]}" if found[1] == "count" and told["final"] else found[1]


def in_keys() -> None:
    """Adds phases before and after each key of a round, a start or a save.

    A tombstone does not count: it stands for the missing key of another worker.
    """
    coordination = frameworks.adapter(FRAMEWORK, "coordination")
    store_of = {"tensorflow": "TensorFlowStore", "jax": "JaxStore"}
    cls = getattr(coordination, store_of[FRAMEWORK])
    insert = cls.insert

    def held(store: Any, key: str, value: str) -> None:
        phase = "" if "tombstone" in value else phase_of(key, value)
        at(phase)
        insert(store, key, value)
        at(f"after {phase}")

    cls.insert = held


def in_saves() -> None:
    """In a share, and before a commit has its marker."""
    write = bundle_writer.write

    def held(*args: Any, **more: Any) -> Any:
        if has_begun.is_set():
            at("share")
        return write(*args, **more)

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith(f"/{MARKER}"):
            step = int(Path(arguments[1]).parent.name.split(".")[0])
            at(MARKERS.get(step, "marker"))

    bundle_writer.write = held
    file_events.watch(see)


def in_steps() -> None:
    """Adds phases before and after the step in which the notice comes."""
    step = Model.step

    def held(model: Model) -> None:
        if model.steps == HELD_AT:
            has_begun.set()
            hold("notice")
            at("step")
        step(model)

    Model.step = held  # type: ignore[method-assign]


def in_network() -> None:
    """Makes the collectives of JAX listen at the address of the new network.

    JAX resolves the name of the host. The name is changed only during the start,
    because the record of a lease has the name of the host.
    """
    begin = Model.__init__

    def renamed(model: Model, *args: Any) -> None:
        name = socket.gethostname()
        socket.sethostname(f"{address}{INDEX}")
        begin(model, *args)
        socket.sethostname(name)

    Model.__init__ = renamed  # type: ignore[method-assign]


class Told(State):
    """A State whose `save` and `load` are phases. It has a `sync`, so no trial save."""

    def sync(self) -> None:
        pass

    def save(self, fileobj: IO[bytes]) -> None:
        at("save" if has_begun.is_set() else "periodic save")

    def load(self, fileobj: IO[bytes]) -> None:
        at("restore")


if address:
    hold("network")
if address and FRAMEWORK == "jax":
    in_network()
in_keys()
in_saves()
in_steps()
told = Told("told", per_worker=True)
program = Path(sys.argv[0]).with_name("train.py")
sys.argv[0] = __file__ = str(program)
try:
    exec(compile(program.read_text(), program, "exec"))
except SystemExit:
    at("exit")
    raise
