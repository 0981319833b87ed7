"""Fingerprints of the order of training data, stored with the positions in the data.

A position gives how much of the data was read, but not in which order. If a resumed run
has a different order, it trains on some samples twice and on others never, and nothing
shows the error. So a commit stores fingerprints (crc32c), and a restore compares them:

- "permutation": of the sample indices in their order, if the order is known: for
  arrays, a PyDataset and the pipelines of `tfpreempt.data`. A difference is an error.
- "seeds": of the shuffles of a tf.data pipeline. The interrupted epoch is continued
  from the iterator's state, but the seeds decide the order of later epochs.
- "element": of the last trained batch, if the data before the position are read again
  after a restart.

A kind of fingerprint is compared only if both the commit and the run have that kind.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.tensors.shuffle_seeds import parts
from tfpreempt.checkpoint.tensors.variables import Attached
from tfpreempt.core import private_api
from tfpreempt.storage import checksum

log = logging.getLogger(__name__)

Order = Mapping[str, int]

_PERMUTATION = "_tfpreempt_permutation"
_FEW = 1024  # only the first indices of an order, or numbers of an array, are compared
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
    """Returns the fingerprint of some indices in their order."""
    return checksum.extended(0, np.ascontiguousarray(indices, dtype="<i8"))


def of_batch(batch: Any) -> int:
    """Returns the fingerprint of a batch: of the first numbers of every NumPy array in
    the batch."""
    crc = 0
    for part in tf.nest.flatten(batch):
        if isinstance(part, np.ndarray) and part.dtype.kind in "biuf":
            crc = checksum.extended(crc, np.ascontiguousarray(part.flat[:_FEW]))
    return crc


def with_permutation(dataset: tf.data.Dataset, indices: Any) -> tf.data.Dataset:
    """Marks a dataset with the fingerprint of its order; returns the dataset.

    Args:
        dataset: the pipeline. From the mark, `of_pipeline` knows the order without
            reading the pipeline.
        indices: the first sample indices of the first epoch.
    """
    setattr(dataset, _PERMUTATION, of_indices(indices))
    return dataset


def first_positions(size: int) -> range:
    """Returns the positions in an epoch whose sample indices are part of the
    fingerprint.

    Args:
        size: number of samples in the epoch.
    """
    return range(min(size, _FEW))


def of_pipeline(*datasets: Any, has_seeds: bool) -> dict[str, int]:
    """Returns the fingerprints of tf.data pipelines by kind, without reading any
    element.

    Args:
        datasets: the pipelines.
        has_seeds: whether the result includes "seeds".
    """
    found: dict[str, int] = {}
    nodes = list(parts(*datasets))
    marks = [mark for node in nodes if (mark := vars(node).get(_PERMUTATION))]
    if marks:
        found["permutation"] = of_indices(marks)
    seeds = [
        int(number)
        for node in nodes
        if has_seeds and isinstance(node, private_api.shuffle_op._ShuffleDataset)
        for number in (node._seed, node._seed2, node._buffer_size)
    ]
    if seeds:
        found["seeds"] = of_indices(seeds)
    return found


def check(saved: Order, here: Order, where: str) -> None:
    """Compares the order of the interrupted run with the order of this run.

    A different permutation is an error. Different seeds, or a different last batch,
    cause a warning only.

    Args:
        saved: fingerprints of the commit.
        here: fingerprints of this run.
        where: name of the data, for the error.

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
    """Returns the fingerprints from a record in a commit.

    Raises:
        ValueError: `saved` is not a mapping of fingerprints.
    """
    is_order = isinstance(saved, Mapping) and all(
        isinstance(kind, str) and type(crc) is int for kind, crc in saved.items()
    )
    if not is_order:
        raise ValueError(f"expected fingerprints of data, got {str(saved)[:200]}")
    return dict(saved)


class OrderState(State):
    """Saves the fingerprints of a worker's `tfpreempt.data` iterators in a Checkpoint.

    Other pipelines are left out: a training loop may create a dataset for each epoch,
    with different seeds, and restore the state of an earlier dataset into a later
    dataset.
    """

    _is_reserved = True

    def __init__(self, attached: Attached) -> None:
        super().__init__("tfpreempt.data_order", per_worker=True, registry=None)
        self._attached = attached

    def should_save(self) -> bool:
        return bool(self._orders())

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(self._orders()).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            saved = {
                path: parse(order) for path, order in json.loads(fileobj.read()).items()
            }
        for path, order in self._orders().items():
            check(saved.get(path, {}), order, f"The data of the iterator {path!r}")

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Compares the order with the chief's: with a different number of workers,
        every worker takes over the chief's position."""
        if files[0] is not None:
            self.load(files[0])

    def _orders(self) -> dict[str, Order]:
        return {
            path: order
            for path, iterator in self._attached.iterators.items()
            if (order := of_iterator(iterator))
        }


def of_iterator(iterator: Any) -> Order:
    """Returns the fingerprints of the `tfpreempt.data` pipeline of an iterator."""
    dataset: Iterable[Any] | None = iterator._dataset
    return {} if dataset is None else of_pipeline(dataset, has_seeds=False)
