"""The model of these programs on JAX; see toy_model.py.

The workers are the processes of `jax.distributed`. All that a step changes is in a
`PyTreeState`, but for the position in the data, and the generators of Python and NumPy,
which each process has of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from toy_model import INDEX, say

from tfpreempt.states import LoaderState, PyTreeState

HEARTBEATS = 10
"""Seconds without a heartbeat after which JAX aborts the processes, with the word
"heartbeats" of the strategy. The default of JAX is 100."""


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """How the processes share the state.

    Attributes:
        is_whole: whether every process holds the sums of all; otherwise each process
            alone holds its own.
        is_asynchronous: whether a step ends before it is computed, as JAX does it if
            the program reads no result.
        cluster_resolver: None: a handler on JAX gets none.
    """

    is_whole: bool
    is_asynchronous: bool
    cluster_resolver: None = None


def make_strategy(name: str) -> Strategy:
    """Connects the processes, if the name is "mwms". Words may follow, after commas.

    whole           every process holds the sums of all, and not only its own
    asynchronous    a step ends before it is computed, as no result is read
    no service      JAX's preemption service is off
    heartbeats      see HEARTBEATS
    """
    kind, *words = name.split(",")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    has_service = "no service" not in words
    jax.config.update("jax_enable_preemption_service", has_service)
    is_soon = "heartbeats" in words
    if kind == "mwms":
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=INDEX,
            **({"heartbeat_timeout_seconds": HEARTBEATS} if is_soon else {}),
        )
    return Strategy("whole" in words, "asynchronous" in words)


class Rows:
    """The rows of one worker, in a separate random order."""

    def __init__(self) -> None:
        self._order = np.random.default_rng(INDEX).permutation(1000)
        self._position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        row = self._order[self._position % len(self._order)]
        self._position += 1
        return int(row)

    def get_state(self) -> dict[str, int]:
        return {"position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class Model:
    """Weights, momentum, a sum of each worker, a random key, rows and two generators.

    Args:
        strategy: value of `make_strategy`.
        mebibytes: size of additional weights, which change in each step.
    """

    checkpoint = None  # a handler on JAX saves named States

    def __init__(self, strategy: Strategy, mebibytes: int = 0) -> None:
        self.strategy = strategy
        mesh = Mesh(np.array(jax.devices()), ("workers",))
        self._by_worker = NamedSharding(mesh, P("workers"))
        everywhere = NamedSharding(mesh, P())
        summed = everywhere if strategy.is_whole else self._by_worker
        shardings = {
            "weights": everywhere,
            "momentum": everywhere,
            "total": summed,
            "key": everywhere,
            "more": everywhere,
        }
        zeros = functools.partial(np.zeros, dtype=np.float32)
        arrays = {
            "weights": np.linspace(-1.0, 1.0, 7, dtype=np.float32),
            "momentum": zeros(7),
            "total": zeros(jax.process_count()),
            "more": zeros(mebibytes << 18),
        }
        placed: dict[str, Any] = {
            name: jax.make_array_from_callback(
                array.shape, shardings[name], array.__getitem__
            )
            for name, array in arrays.items()
        }
        placed["key"] = jax.random.key(400)
        self._state = PyTreeState("model", {"arrays": placed, "trained": 0})
        self._rows = LoaderState("rows", Rows())
        self._update = jax.jit(self._change, donate_argnums=0, out_shardings=shardings)
        np.random.seed(100 + INDEX)
        random.seed(200 + INDEX)

    @property
    def _arrays(self) -> dict[str, Any]:
        found: dict[str, Any] = self._state.value["arrays"]
        return found

    @property
    def steps(self) -> int:
        """How many steps it has trained."""
        return int(self._state.value["trained"])

    def weights_text(self) -> str:
        """The bytes of the weights, as text."""
        return np.asarray(self._arrays["weights"]).tobytes().hex()

    def draw(self) -> Any:
        """Returns this worker's batch, from the worker's own data and generators."""
        row = next(self._rows.loader) / 1000.0
        return np.float32(np.random.rand(7) + random.random() + row)

    def step(self) -> None:
        """Trains one step, written like the step of a user."""
        mine = np.float32(self.draw())[None]
        batch = jax.make_array_from_process_local_data(self._by_worker, mine)
        arrays, steps = self._arrays, self.steps
        arrays = self._update(arrays, batch)
        if not self.strategy.is_asynchronous:
            jax.block_until_ready(arrays)
        self._state.value = {"arrays": arrays, "trained": steps + 1}

    def traced(self) -> None:
        """Called while the step is traced, and not in later steps."""

    def _change(self, arrays: dict[str, Any], batch: Any) -> dict[str, Any]:
        self.traced()
        key, noise, dropped = jax.random.split(arrays["key"], 3)
        x = batch + jax.random.normal(noise, batch.shape)
        x *= jax.random.bernoulli(dropped, 0.8, batch.shape)
        gradient = jnp.mean(jnp.tanh(arrays["weights"]) * x, axis=0)
        momentum = 0.9 * arrays["momentum"] + gradient
        return {
            "weights": arrays["weights"] - 0.05 * momentum,
            "momentum": momentum,
            "total": arrays["total"] + jnp.sum(x * x, axis=1) / 3.0,
            "key": key,
            "more": arrays["more"] + momentum[0],
        }

    def digest(self) -> str:
        """Returns a digest of all values that a step changes."""
        held = b"".join(
            numbers for name in self._arrays for numbers in self._held(name)
        )
        return hashlib.sha256(held).hexdigest()[:16]

    def _held(self, name: str) -> list[bytes]:
        """Returns this process's shards of an array."""
        array = self._arrays[name]
        raw = jax.random.key_data(array) if name == "key" else array
        return [np.asarray(each.data).tobytes() for each in raw.addressable_shards]

    def report(self, **more: object) -> None:
        """Prints everything that an exact resume must have kept."""
        state = {name: [p.hex() for p in self._held(name)] for name in self._arrays}
        state["total_parts"] = state.pop("total")
        drawn = self.draw().tobytes().hex()
        said = {"trained": self.steps, "next_draw": drawn} | more
        say("result", json.dumps(state | said))
