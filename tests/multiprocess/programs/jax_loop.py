"""A training loop on JAX in one or several processes, with options as words.

python jax_loop.py DIRECTORY [WORD ...]

sharded        half of the momentum is in each process
hold=N         each stays in step N while the file hold-0 or hold-1 exists
fail=N         process 1 raises an error in its step N
late           jax.distributed.initialize comes after the handler
slow           waits between jax.distributed.initialize and the handler
grace=S        seconds of the grace period
early          notices are handled after the loop, too; process 1 then holds
cached         compiled functions are kept; `loaded` counts functions
steps=N        ends after N steps
bad=N          the loss of process 1 is NaN in step N, which is left out
spoiled=N      the same; the loss is finite, and the state becomes NaN
without=N      the data lack the batch N
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tfpreempt
from tfpreempt.handler import current_session
from tfpreempt.states import PyTreeState

DIRECTORY = sys.argv[1]
WORDS = dict(word.partition("=")[::2] for word in sys.argv[2:])
STEPS = int(WORDS.get("steps", "40"))
NUM_PROCESSES = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
PROCESS = int(os.environ.get("JAX_PROCESS_ID", "0"))


def say(*words: object) -> None:
    # In one piece: a thread of the handler may print, too.
    print(f"{' '.join(map(str, words))}\n", end="", flush=True)


def initialize() -> None:
    if "cached" in WORDS:
        jax.config.update("jax_compilation_cache_dir", None)  # that of the zygote
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if NUM_PROCESSES > 1:
        jax.distributed.initialize(num_processes=NUM_PROCESSES, process_id=PROCESS)


def hold() -> None:
    """Blocks while the file exists; prints when the end of a step sees a notice."""
    say("holds")
    is_told = False
    while (Path(DIRECTORY).parent / f"hold-{PROCESS}").exists():
        session = current_session.current()
        if not is_told and session is not None and session.step_flag.flag:
            is_told = True
            say("noticed")
        time.sleep(0.005)


@jax.jit
def update(state: Any, x: Any, y: Any) -> Any:
    key, mine = jax.random.split(state["key"])
    kept = x * jax.random.bernoulli(mine, 0.8, x.shape)
    weights = state["weights"]
    gradient = jax.grad(lambda w: jnp.mean((kept @ w - y) ** 2))(weights)
    momentum = 0.9 * state["momentum"] + gradient
    return {
        "weights": (weights - 0.05 * momentum).astype(weights.dtype),
        "momentum": momentum,
        "key": key,
        "step": state["step"] + 1,
    }


def main() -> None:
    config = tfpreempt.GenericTerminationConfig(
        grace_period=float(WORDS["grace"]) if "grace" in WORDS else None
    )
    if "early" in WORDS:
        tfpreempt.handle_early_notices(config)
    if "late" not in WORDS:
        initialize()
        mesh = Mesh(np.array(jax.devices()), ("data",))
        by_row, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

        def placed(array: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(
                array.shape, sharding, array.__getitem__
            )

        zeros = np.zeros((8, 4), "float32")
        is_sharded = "sharded" in WORDS
        value = {
            "weights": placed(zeros, everywhere),
            "momentum": placed(zeros, by_row if is_sharded else everywhere),
            "key": jax.random.key(7),
            "step": 0,
        }
        shardings = {
            "weights": everywhere,
            "momentum": by_row if is_sharded else everywhere,
            "key": everywhere,
            "step": everywhere,
        }
        train = jax.jit(update, donate_argnums=0, out_shardings=shardings)
        state = PyTreeState("training", value)
    if "slow" in WORDS:
        say("waits")
        threading.Event().wait(5.0)
    directory = f"{DIRECTORY}-{PROCESS}" if "late" in WORDS else DIRECTORY
    loaded: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: loaded.append(event) if "cache_hits" in event else None
    )
    with tfpreempt.PreemptionCheckpointHandler(
        None,
        None,
        directory,
        config,
        save_freq=None if "hold" in WORDS else 7,
        compile_cache="cached" in WORDS,
        on_bad_step=tfpreempt.BadSteps() if {"bad", "spoiled"} & WORDS.keys() else None,
    ) as handler:
        say("starts", handler.total_run_calls)
        if "late" in WORDS:
            initialize()

        def step(number: int) -> float:
            if "late" in WORDS:
                return 0.0
            number += number >= int(WORDS.get("without", number + 1))
            random = np.random.default_rng(number)
            x = random.normal(size=(24, 8)).astype("float32")
            if PROCESS == 1 and WORDS.get("spoiled") == str(number):
                x[12:] = np.nan  # the rows of this process
            batch = placed(x, by_row), placed(x[:, :4], by_row)
            state.value = jax.block_until_ready(train(state.value, *batch))
            if PROCESS == 1 and WORDS.get("fail") == str(number):
                raise RuntimeError("a bug of process 1")
            if WORDS.get("hold") == str(number):
                hold()
            time.sleep(0.01)
            is_bad = PROCESS == 1 and WORDS.get("bad") == str(number)
            return float("nan") if is_bad else 0.0

        while handler.total_run_calls < STEPS:
            handler.run(step, handler.total_run_calls)
            say("step", handler.total_run_calls)
    say("loaded", len(loaded))
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state.value):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        raw = jax.random.key_data(leaf) if is_key else leaf
        for shard in raw.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    say("final", found.hexdigest())
    for shard in state.value["momentum"].addressable_shards:
        for row, numbers in enumerate(
            np.asarray(shard.data), shard.index[0].start or 0
        ):
            say("row", row, numbers.tobytes().hex())
    say("TensorFlow", "tensorflow" in sys.modules)
    if "early" in WORDS and PROCESS == 1:
        hold()


main()
