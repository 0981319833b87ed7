"""Output and holds of the test programs, and the model of their framework.

TOY_FRAMEWORK names the framework, whose module has two names that can be imported here:

Model           a model with every kind of state: weights, momentum, a sum of each
                worker, the position in the data of each worker, generators
make_strategy   creates the argument of `Model`, by name; "mwms" is for several workers
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FRAMEWORK = os.environ.get("TOY_FRAMEWORK", "tensorflow")
if FRAMEWORK == "jax":
    IS_ALONE = "JAX_PROCESS_ID" not in os.environ
    INDEX = int(os.environ.get("JAX_PROCESS_ID", "0"))
else:
    IS_ALONE = "TF_CONFIG" not in os.environ
    INDEX = (
        json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    )
HOLD_LIMIT = 60.0


def __getattr__(name: str) -> Any:
    if name in ("Model", "make_strategy"):
        return getattr(importlib.import_module(f"{FRAMEWORK}_model"), name)
    raise AttributeError(name)


def say(word: str, *values: object) -> None:
    """Prints a line for the test in one write, because threads log to the same file."""
    print(" ".join(map(str, (word, *values))) + "\n", end="", flush=True)


def log_to_stdout() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format=f"log [{INDEX}] %(relativeCreated)d %(levelname)s %(name)s %(message)s",
    )


def hold_file(name: str) -> Path:
    """Returns the file that `Place.hold` of the test creates."""
    return Path(os.environ["HOLD_DIRECTORY"]) / f"hold-{name}"


def hold(name: str = "step") -> None:
    """Blocks, like a long step, while the file of the test exists; prints when the end
    of the step would see a notice."""
    file, is_noticed = hold_file(name), False
    if file.exists():
        say("holding", name)
    end = time.monotonic() + HOLD_LIMIT
    while file.exists():
        if time.monotonic() > end:
            raise TimeoutError("nobody released this worker")
        if not is_noticed and sees_notice():
            is_noticed = True
            say("noticed")
        time.sleep(0.002)


def sees_notice() -> bool:
    """Returns whether the end of the current step would see a notice."""
    sessions = sys.modules.get("tfpreempt.handler.current_session")
    session = sessions and sessions.current()
    return session is not None and session.step_flag.flag


def say_when(word: str, *step: object) -> None:
    """Prints a line with the time of a clock that all processes of a machine share."""
    say(word, *step, time.monotonic())


def slow_down() -> None:
    """Sleeps in a step, if the test has called `Place.slow_down`."""
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float(Path(os.environ["HOLD_DIRECTORY"], "slow").read_text()))


def before_asynchronous_writes(call: Callable[[], None]) -> None:
    """Makes a call before an asynchronous save writes a tensor, in its thread."""
    from tfpreempt.checkpoint.bundles import bundle_writer

    bundle_writer.SMALL_BYTES = bundle_writer.WORTH_BYTES = 0
    add = bundle_writer.add

    def held(*args: Any, check: Any, **more: Any) -> Any:
        if check is not None:
            call()
        return add(*args, check=check, **more)

    bundle_writer.add = held
