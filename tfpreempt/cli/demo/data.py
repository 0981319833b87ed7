"""The demo's data: scikit-learn's handwritten digits, batched by step number."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import sklearn.datasets

_TRAIN_IMAGES = 1437  # of 1797; the rest is for the final accuracy
_SPLIT_SEED = 0

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images of shape (n, 8, 8, 1) with values from 0 to 1, and their labels."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels

    def batch(
        self, seed: int, step: int, worker: int, workers: int, size: int
    ) -> tuple[Images, Labels]:
        """One worker's share of the global batch of a step.

        The whole position in the data follows from the step, so nothing but the step
        number has to survive a restart.

        Args:
            seed: draws the order of the images, anew for every epoch.
            step: global step, from 0.
            worker: index of the worker.
            workers: number of workers.
            size: images per worker.
        """
        count = len(self.train_images)
        per_epoch = max(1, count // (size * workers))
        epoch, position = divmod(step, per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(count)
        start = (position * workers + worker) * size
        rows = order[np.arange(start, start + size) % count]
        return self.train_images[rows], self.train_labels[rows]


def load_digits() -> Digits:
    """Loads the digits and splits them, always in the same way."""
    raw = sklearn.datasets.load_digits()
    images = (raw.images[..., np.newaxis] / 16.0).astype(np.float32)
    labels = raw.target.astype(np.int32)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    train, test = order[:_TRAIN_IMAGES], order[_TRAIN_IMAGES:]
    return Digits(
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
    )
