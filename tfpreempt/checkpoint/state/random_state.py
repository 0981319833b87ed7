"""Saves the random generators of a process; every worker saves its own generators.

Files hold JSON and raw bytes only, no pickles, and are restored bit for bit.
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
_FRAMEWORKS = {
    "tensorflow": frozenset({"tf_seed", "tf_rng", "tf_generator", "keras_seed"}),
}
"""The keys of a record that hold generators of a framework. Its adapter ("generators"
in `core/frameworks.py`) has `record()`, which returns a JSON-able value or None for
each key, `load(record)` and `reseed(seed)`."""


class GlobalRngState(State):
    """The generators of Python, NumPy (legacy, global), TensorFlow and Keras 3.

    TensorFlow: the global `tf.random.Generator` if the program made one (a save never
    creates the generator), and the seed from which eager ops draw their seeds. Ops with
    an explicit seed, and random ops inside a tf.function, keep state in kernels, where
    the state cannot be read. Keras 3: the generator used by `keras.random` without a
    seed. A program that has not imported TensorFlow has no TensorFlow or Keras
    generators.
    """

    _is_reserved = True

    def __init__(self) -> None:
        super().__init__("tfpreempt.random", per_worker=True, registry=None)

    def save(self, fileobj: IO[bytes]) -> None:
        record = dict.fromkeys(key for keys in _FRAMEWORKS.values() for key in keys)
        record["python"] = encode(random.getstate())
        record["numpy"] = encode(np.random.get_state(legacy=False))
        for each in frameworks.adapters("generators"):
            record |= each.record()
        fileobj.write(json.dumps(record, sort_keys=True).encode())

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores the generators of another number of workers.

        If a generator was equal on every worker, a new worker gets the same generator:
        values drawn from the generator, such as the order of a PyDataset, must be equal
        on every worker. A generator that differed is seeded from the chief's generator.
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
        for framework, keys in _FRAMEWORKS.items():
            if differing & keys and (generators := _generators(framework)):
                generators.reseed(seed)

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            record = json.load(fileobj)
            generator = decode(record["numpy"])
            check_bit_generator(generator)
            # The program may import the framework later. The import comes first,
            # because the import draws from the generators of Python.
            others = [
                _generators(framework)
                for framework, keys in _FRAMEWORKS.items()
                if any(record.get(key) is not None for key in keys)
            ]
            random.setstate(decode(record["python"]))
            np.random.set_state(generator)
            for each in others:
                if each is not None:
                    each.load(record)


def _generators(framework: str) -> Any | None:
    """Returns the adapter of the generators; None if the framework is missing."""
    try:
        return frameworks.adapter(framework, "generators")
    except errors.TensorFlowMissingError:
        _log.warning(
            "the commit has the state of the random generators of %s, which "
            "is not installed here, so that state is not restored. If the program "
            "draws from these generators, install %s and start again",
            framework,
            framework,
        )
        return None


def own_or_first(
    files: Sequence[IO[bytes] | None], worker: int
) -> tuple[IO[bytes], bool]:
    """Chooses the saved file from which a random generator of a worker resumes.

    Returns:
        The worker's own file, or else the first existing file; and whether the file
        belongs to another worker.
    """
    if worker < len(files) and (own := files[worker]) is not None:
        return own, False
    return next(file for file in files if file is not None), True


def load_own_or_first(
    state: State, files: Sequence[IO[bytes] | None], worker: int
) -> int | None:
    """Loads a State of a random generator from the worker's own or the first file.

    Returns:
        The seed for the generator of a new worker; None for a worker with a file.
    """
    file, is_another = own_or_first(files, worker)
    saved = file.read()
    state.load(io.BytesIO(saved))
    return derived_seed(saved, worker) if is_another else None


def derived_seed(saved: bytes, worker: int) -> int:
    """Returns a 128-bit seed for the random generator of a new worker.

    Args:
        saved: saved state of the chief's generator.
        worker: index of the new worker.
    """
    digest = hashlib.sha256(saved + b"\0" + str(worker).encode())
    return int.from_bytes(digest.digest()[:_SEED_BYTES], "little")
