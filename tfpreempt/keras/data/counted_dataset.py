"""The dataset that `fit` makes its iterators of, in place of its own.

So the iterators can be counted, and told from those of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfpreempt.keras.data.host_iterator import host_iterator, is_supported
from tfpreempt.keras.interface import Fit

_MARK = "_tfpreempt_made"


class CountedDataset:
    """See above.

    Args:
        fit: takes this in place of its dataset.

    Attributes:
        dataset: what it stands for.
        made: iterators that the fit has made.
    """

    def __init__(self, fit: Fit) -> None:
        self.made = 0
        self.dataset = fit.replace_dataset(self)
        self._instead: tuple[int, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.made += 1
        dataset = self.dataset
        if self._instead is not None and self._instead[0] == self.made:
            dataset = self._instead[1]
        iterator: Any = _iterator(dataset)
        setattr(iterator, _MARK, (self, self.made))
        return iterator  # type: ignore[no-any-return]  # TensorFlow is untyped

    def number(self, iterator: Any) -> int | None:
        """The number, from 1, of an iterator of this; None for one from elsewhere."""
        owner, number = getattr(iterator, _MARK, (None, None))
        return number if owner is self else None

    def spare(self) -> Any:
        """An iterator that the fit does not know of."""
        return _iterator(self.dataset)

    def replace(self, number: int, dataset: Any) -> None:
        """Another dataset for one iterator: what is left of its data."""
        self._instead = (number, dataset)


def _iterator(dataset: Any) -> Any:
    return host_iterator(dataset) if is_supported(dataset) else iter(dataset)
