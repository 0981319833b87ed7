"""Ready-made States for the random generators of Python and NumPy."""

from __future__ import annotations

import json
import logging
import random
from typing import IO, Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    check_bit_generator,
    decode,
    encode,
    readable,
)
from tfpreempt.checkpoint.state.random_state import GeneratorState, num_spawned
from tfpreempt.checkpoint.state.state import REGISTRY, StateRegistry

_log = logging.getLogger(__name__)
_MOST_SPAWNED = 10_000_000  # a restore spawns them again, in about two minutes
_AT_ONCE = 1_000  # generators spawned in one call, for little memory
_SPAWNED = "spawned"
"""Key of the number of spawned generators in a saved state; absent for 0."""


class PythonRandomState(GeneratorState):
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

    def _reseed(self, seed: int) -> None:
        self._generator.seed(seed)


class NumpyRandomState(GeneratorState):
    """Saves the state of a NumPy generator.

    The state includes how many generators `Generator.spawn` has made, but not their
    states: make a State for every spawned generator that the program keeps.

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
        state = self._get()
        if state.get(_SPAWNED, 0) > _MOST_SPAWNED:
            raise errors.SaveError(
                f"{self!r} cannot be saved: its generator has spawned more than "
                f"{_MOST_SPAWNED:,} generators. Create the generators from seeds, such "
                "as numpy.random.default_rng((seed, step))."
            )
        fileobj.write(json.dumps(encode(state)).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            state = decode(json.loads(fileobj.read()))
            check_bit_generator(state)
            _check_spawned(state)
            saved, here = state["bit_generator"], self._get()["bit_generator"]
            if saved == here:
                self._set(state)
        if saved != here:
            raise errors.CheckpointMismatchError(
                f"{self!r} was saved with the bit generator {str(saved)[:40]!r}, and "
                f"the generator of this program has {here!r}. Create the generator "
                "with the saved bit generator."
            )

    def _reseed(self, seed: int) -> None:
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
        state = self._generator.bit_generator.state
        spawned = num_spawned(self._generator.bit_generator)
        return {**state, _SPAWNED: spawned} if spawned else state

    def _set(self, state: Any) -> None:
        if self._generator is None:
            np.random.set_state(state)
        elif isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(state)
        else:
            bit_generator: Any = self._generator.bit_generator
            bit_generator.state = {key: state[key] for key in state if key != _SPAWNED}
            saved, here = state.get(_SPAWNED, 0), num_spawned(bit_generator)
            for done in range(here, saved, _AT_ONCE):
                bit_generator.seed_seq.spawn(min(_AT_ONCE, saved - done))
            if 0 < saved < here:
                _log.warning(
                    "%r was saved after its generator had spawned %d generators, and "
                    "this process has already spawned %d. So the next spawned "
                    "generators differ from those of an uninterrupted run",
                    *(self, saved, here),
                )


def _check_spawned(state: Any) -> None:
    """Raises ValueError if the saved number of spawned generators is out of range."""
    spawned = state.get(_SPAWNED, 0)
    if type(spawned) is not int or not 0 <= spawned <= _MOST_SPAWNED:
        raise ValueError(
            f"{_SPAWNED} is {spawned!r}; expected an integer from 0 to {_MOST_SPAWNED}"
        )
