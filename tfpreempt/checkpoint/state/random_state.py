"""Saves the global random generators of the process, on every worker.

The file of the State contains only JSON, no pickles. The generators are restored bit
for bit.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
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
from tfpreempt.checkpoint.state.state import State
from tfpreempt.core import frameworks

_log = logging.getLogger(__name__)
_SEED_BYTES = 16
_OF_TENSORFLOW = ("tf_seed", "tf_rng", "tf_generator")
"""The keys of a record for the generators of TensorFlow. The adapter of a framework
("generators" in `core/frameworks.py`) has `record()`, which returns a JSON-able value
or None for each key, `load(record)` and `reseed(seed)`."""
_KERAS_SEED = "keras_seed"
"""The key for the generator of Keras 3, saved by the adapter of the framework below
Keras (TensorFlow or JAX)."""


def num_spawned(bit_generator: Any) -> int:
    """Returns how many generators `spawn()` has made from a bit generator of NumPy; 0
    before NumPy 1.25."""
    seeds = getattr(bit_generator, "seed_seq", None)
    return getattr(seeds, "n_children_spawned", 0)


class GeneratorState(State):
    """A State that saves one random generator."""

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores this worker's generator after the number of workers has changed.

        A worker with a saved file loads the file. A new worker gets a generator whose
        seed is derived from the chief's file and the worker's index, so that the worker
        draws other numbers than the chief.
        """
        file, is_another = own_or_first(files, worker)
        saved = file.read()
        self.load(io.BytesIO(saved))
        if is_another:
            self._reseed(derived_seed(saved, worker))

    def _reseed(self, seed: int) -> None:
        """Seeds the generator.

        Args:
            seed: seed of up to 128 bits.
        """
        raise NotImplementedError


class GlobalRngState(State):
    """Saves the global random generators of Python, NumPy, TensorFlow and Keras 3.

    - Python: the generator of the module `random`.
    - NumPy: the legacy generator of `numpy.random`.
    - TensorFlow: the global `tf.random.Generator` if the program has made the
      generator, and the seed from which eager ops draw their seeds. The state of ops
      with an explicit seed, and of random ops inside a tf.function, is not saved,
      because the kernels of the ops do not show the state.
    - Keras 3: the generator that `keras.random` uses without a seed.

    The generators of a framework are saved only if the program has imported the
    framework.

    Attributes:
        ignores_tensorflow: whether a load ignores the generators of TensorFlow.
            Otherwise a load imports TensorFlow if its generators are in the commit.
    """

    _is_reserved = True

    def __init__(self) -> None:
        self.ignores_tensorflow = False
        super().__init__("tfpreempt.random", per_worker=True, registry=None)

    def save(self, fileobj: IO[bytes]) -> None:
        record = dict.fromkeys((*_OF_TENSORFLOW, _KERAS_SEED))
        record["python"] = encode(random.getstate())
        record["numpy"] = encode(np.random.get_state(legacy=False))
        for each in frameworks.adapters("generators"):
            record |= each.record()
        fileobj.write(json.dumps(record, sort_keys=True).encode())

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores the generators after the number of workers has changed.

        A worker with a saved file loads the file. A new worker, which has no file,
        loads the file of the chief (worker 0). So a generator whose saved state is
        equal on all workers has this state on the new worker too: values drawn from the
        generator, such as the order of a PyDataset, must be equal on every worker. The
        new worker seeds a generator whose saved states differ: the seed is derived from
        the worker's index and the chief's file.
        """
        mine, is_another = own_or_first(files, worker)
        own = mine.read()
        self.load(io.BytesIO(own))
        if not is_another:
            return
        seed = derived_seed(own, worker)
        rest = [file for file in files if file is not None and file is not mine]
        with readable(self):
            first, *others = map(json.loads, [own, *(file.read() for file in rest)])
            differing = {
                name for each in others for name in each if each[name] != first[name]
            }
        if "python" in differing:
            random.seed(seed)
        if "numpy" in differing:
            np.random.seed(list(seed.to_bytes(16, "little")))
        if not differing.isdisjoint(_OF_TENSORFLOW):
            for each in _generators_of_tensorflow():
                each.reseed(seed)

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            record = json.load(fileobj)
            generator = decode(record["numpy"])
            check_bit_generator(generator)
            # Import TensorFlow before Python's generator is set, because the import
            # draws from that generator.
            others = []
            is_used = any(record.get(key) is not None for key in _OF_TENSORFLOW)
            if is_used and not self.ignores_tensorflow:
                others += _generators_of_tensorflow()
            if record.get(_KERAS_SEED) is not None:
                others += frameworks.adapters("generators")
            random.setstate(decode(record["python"]))
            np.random.set_state(generator)
            for each in dict.fromkeys(others):
                each.load(record)


def _generators_of_tensorflow() -> list[Any]:
    """Imports TensorFlow, and returns the adapter for its generators.

    Logs a warning and returns no adapter if TensorFlow is not installed.
    """
    try:
        return [frameworks.adapter("tensorflow", "generators")]
    except errors.TensorFlowMissingError:
        _log.warning(
            "the commit has the state of the random generators of tensorflow, which is "
            "not installed here, so their state is not restored. If the program draws "
            "from these generators, install tensorflow and start the program again"
        )
        return []


def own_or_first(
    files: Sequence[IO[bytes] | None], worker: int
) -> tuple[IO[bytes], bool]:
    """Chooses the saved file from which a worker restores its random generators.

    Args:
        files: file of every previous worker, in worker order; None for a missing file.
        worker: index of this worker.

    Returns:
        The file with the index of this worker; if the file is missing, the first
        existing file. Also returns whether the file belongs to a different worker.
    """
    if worker < len(files) and (own := files[worker]) is not None:
        return own, False
    return next(file for file in files if file is not None), True


def derived_seed(saved: bytes, worker: int) -> int:
    """Returns a 128-bit seed for the random generator of a new worker.

    Args:
        saved: the file of the chief's generator.
        worker: index of the new worker.
    """
    digest = hashlib.sha256(saved + b"\0" + str(worker).encode())
    return int.from_bytes(digest.digest()[:_SEED_BYTES], "little")
