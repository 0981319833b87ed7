"""Fingerprints of the order of training data, stored with the positions in the data.

A position gives how much of the data was read, but not the order of the data. A resumed
run with a different order would train on some samples twice and on other samples never,
without an error. So a commit stores fingerprints (crc32c), and a restore compares the
fingerprints with the resumed run. The kinds of fingerprints:

- "permutation": checksum of the sample indices in order, for data with known indices:
  arrays, a PyDataset, the pipelines of `tfpreempt.data`. A difference is an error.
- "seeds": checksum of the seeds of a tf.data pipeline's shuffles. A difference causes a
  warning: the interrupted epoch continues from the iterator's state, but the seeds
  decide the order of later epochs.
- "element": checksum of the last trained batch, for data that are read again up to the
  position after a restart. A difference causes a warning.

A kind of fingerprint is compared only if both the commit and the resumed run have this
kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.storage import checksum

log = logging.getLogger(__name__)

Order = Mapping[str, int]
"""Fingerprints of the order of some data, by kind."""

_FEW = 1024  # a fingerprint covers so many indices of an epoch, or numbers of an array
_WARNINGS = {
    "seeds": (
        "the shuffles of the training data have other seeds or buffer sizes than in "
        "the interrupted run. This epoch continues in its order, but later epochs have "
        "another order than in an uninterrupted run. Use the seeds and buffer sizes of "
        "the interrupted run"
    ),
    "element": (
        "the training data were read again up to the position of the checkpoint, but "
        "the last batch differs from the batch of the interrupted run at this "
        "position. The data have another order than in the interrupted run, so some "
        "samples are trained twice and other samples not at all. Set a seed for every "
        "random operation in the data; or use a keras.utils.PyDataset or "
        "tfpreempt.data, whose data are not read again"
    ),
}


def of_indices(indices: Any) -> int:
    """Returns the fingerprint of a sequence of indices, which depends on the order of
    the indices."""
    return checksum.extended(0, np.ascontiguousarray(indices, dtype="<i8"))


def of_batch(batch: Any) -> int:
    """Returns the fingerprint of a batch: the checksum of the first 1,024 numbers of
    every NumPy array in the batch."""
    crc = 0
    for part in _arrays(batch):
        if part.dtype.kind in "biuf":
            crc = checksum.extended(crc, np.ascontiguousarray(part.flat[:_FEW]))
    return crc


def _arrays(batch: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the NumPy arrays in nested containers. The arrays of a dict are yielded in
    the sorted order of the keys."""
    if isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch):
            yield from _arrays(batch[key])
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _arrays(part)


def first_positions(size: int) -> range:
    """Returns the positions in an epoch of the samples whose indices are part of the
    "permutation" fingerprint: the first 1,024 positions.

    Args:
        size: number of samples in the epoch.
    """
    return range(min(size, _FEW))


def check(saved: Order, here: Order, where: str) -> None:
    """Compares the order of the interrupted run with the order of this run.

    A different permutation is an error. Different seeds, or a different last batch,
    cause a warning only.

    Args:
        saved: fingerprints in the commit.
        here: fingerprints of this run.
        where: beginning of the error message, which names the data.

    Raises:
        CheckpointMismatchError: the order of the data differs.
    """
    differing = [kind for kind in here if saved.get(kind, here[kind]) != here[kind]]
    if "permutation" in differing:
        raise errors.CheckpointMismatchError(
            f"{where} have another order than in the interrupted run: the indices have "
            f"the fingerprint {here['permutation']:08x} here, and "
            f"{saved['permutation']:08x} in the checkpoint. A resumed run would train "
            "on some samples twice and on other samples not at all. Use the seed, the "
            "number of samples, the batch size and the versions of Keras and "
            "TensorFlow of the interrupted run, or another checkpoint directory."
        )
    for kind in differing:
        log.warning("%s.", _WARNINGS[kind])


def parse(saved: Any) -> Order:
    """Returns the fingerprints that a commit contains, after a check of the types.

    Args:
        saved: the decoded JSON value from the commit.

    Raises:
        ValueError: `saved` is not a mapping of fingerprints.
    """
    is_order = isinstance(saved, Mapping) and all(
        isinstance(kind, str) and type(crc) is int for kind, crc in saved.items()
    )
    if not is_order:
        raise ValueError(f"expected fingerprints of data, got {str(saved)[:200]}")
    return dict(saved)
