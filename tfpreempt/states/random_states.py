"""Ready-made States for the random generators of Python and NumPy."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    check_bit_generator,
    decode,
    encode,
    readable,
)
from tfpreempt.checkpoint.state.random_state import load_own_or_first
from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry


class PythonRandomState(State):
    """Saves the state of a generator of Python's `random` module.

    Args:
        name: name of the State, unique among the existing States.
        generator: a `random.Random`; None: the generator behind `random.random()`.
        per_worker: whether each worker saves its own state; False: the chief's state is
            restored on every worker.
        registry: registry of States; None does not register the State.
    """

    def __init__(
        self,
        name: str = "python_random",
        generator: random.Random | None = None,
        *,
        per_worker: bool = True,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        super().__init__(name, per_worker, registry=registry)
        self._generator: Any = random if generator is None else generator

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(encode(self._generator.getstate())).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            self._generator.setstate(decode(json.loads(fileobj.read())))

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores this worker's generator after the number of workers has changed.

        A worker with a saved file loads the file. A new worker gets a generator whose
        seed is derived from the chief's file and the worker's index.
        """
        if (seed := load_own_or_first(self, files, worker)) is not None:
            self._generator.seed(seed)


class NumpyRandomState(State):
    """Saves the state of a NumPy generator.

    Generators made by `Generator.spawn` are not included: make a State for every
    spawned generator.

    Args:
        name: name of the State, unique among the existing States.
        generator: a `numpy.random.Generator` or `numpy.random.RandomState`; None: the
            generator behind `numpy.random.random()`.
        per_worker: whether each worker saves its own state; False: the chief's state is
            restored on every worker.
        registry: registry of States; None does not register the State.
    """

    def __init__(
        self,
        name: str = "numpy_random",
        generator: np.random.Generator | np.random.RandomState | None = None,
        *,
        per_worker: bool = True,
        registry: StateRegistry | None = REGISTRY,
    ) -> None:
        super().__init__(name, per_worker, registry=registry)
        self._generator = generator

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(encode(self._get())).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            state = decode(json.loads(fileobj.read()))
            check_bit_generator(state)
            saved, here = state["bit_generator"], self._get()["bit_generator"]
            if saved == here:
                self._set(state)
        if saved != here:
            raise errors.CheckpointMismatchError(
                f"{self!r} was saved with the bit generator {str(saved)[:40]!r}, and "
                f"the generator of this program has {here!r}. Create the generator "
                "with the saved bit generator."
            )

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores this worker's generator after the number of workers has changed.

        A worker with a saved file loads the file. A new worker gets a generator whose
        seed is derived from the chief's file and the worker's index.
        """
        if (seed := load_own_or_first(self, files, worker)) is not None:
            if isinstance(self._generator, np.random.Generator):
                self._set(type(self._generator.bit_generator)(seed).state)
            else:
                legacy = self._generator or np.random
                legacy.seed(list(seed.to_bytes(16, "little")))

    def _get(self) -> Any:
        if self._generator is None:
            return np.random.get_state(legacy=False)
        if isinstance(self._generator, np.random.RandomState):
            return self._generator.get_state(legacy=False)
        return self._generator.bit_generator.state

    def _set(self, state: Any) -> None:
        if self._generator is None:
            np.random.set_state(state)
        elif isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(state)
        else:
            self._generator.bit_generator.state = state
