"""A wrapper of the dataset of a fit, which counts the iterators made by the fit.

The wrapper marks an iterator of the fit, to distinguish the iterator from an iterator
made by other code, for example for `evaluate` in a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tfpreempt.keras.fit_protocol import Fit

_MARK = "_tfpreempt_made"


class CountedDataset:
    """Replaces the dataset of a fit, and counts the iterators that the fit makes.

    Args:
        fit: the fit, whose dataset is replaced.

    Attributes:
        dataset: the original dataset.
        made: number of iterators that the fit has made so far.
        instead: (number of an iterator, dataset): the fit makes this iterator from the
            given dataset, which has the data after the resumed position.
        before_next: function called before the fit makes an iterator.
    """

    def __init__(self, fit: Fit) -> None:
        self.made = 0
        self.dataset = fit.replace_dataset(self)
        self._make_iterator = fit.pipelines.make_iterator
        self.instead: tuple[int, Any] = (0, None)
        self.before_next: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        self.before_next()
        self.made += 1
        number, rest = self.instead
        iterator: Any = self._make_iterator(
            rest if number == self.made else self.dataset
        )
        setattr(iterator, _MARK, (self, self.made))
        return iterator  # type: ignore[no-any-return]  # of any framework

    def number(self, iterator: Any) -> int:
        """Returns the number, from 1, of an iterator of the fit; 0 for an iterator made
        by other code."""
        owner, number = getattr(iterator, _MARK, (None, 0))
        return number if owner is self else 0

    def spare(self) -> Any:
        """Returns an additional iterator over the original dataset, which is not
        counted."""
        return self._make_iterator(self.dataset)
