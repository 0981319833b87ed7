"""The dataset from which `fit` makes iterators, instead of the original dataset.

So the iterators of the fit are counted, and distinguished from foreign iterators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tfpreempt.data.iterators import make_iterator
from tfpreempt.keras.fit_protocol import Fit

_MARK = "_tfpreempt_made"


class CountedDataset:
    """Replaces the dataset of a fit, and counts the iterators made from the dataset.

    Args:
        fit: the fit, whose dataset is replaced.

    Attributes:
        dataset: the original dataset.
        made: number of iterators that the fit has made.
        instead: number of an iterator, and the dataset for that iterator: the rest of
            the fit's data.
        before_next: function called before the fit makes an iterator.
    """

    def __init__(self, fit: Fit) -> None:
        self.made = 0
        self.dataset = getattr(fit.loop, fit.dataset_name)
        setattr(fit.loop, fit.dataset_name, self)
        self.instead: tuple[int, Any] = (0, None)
        self.before_next: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        self.before_next()
        self.made += 1
        number, rest = self.instead
        iterator: Any = make_iterator(rest if number == self.made else self.dataset)
        setattr(iterator, _MARK, (self, self.made))
        return iterator  # type: ignore[no-any-return]  # TensorFlow is untyped

    def number(self, iterator: Any) -> int:
        """Returns the number, from 1, of an iterator made here; 0 for a foreign one."""
        owner, number = getattr(iterator, _MARK, (None, 0))
        return number if owner is self else 0

    def spare(self) -> Any:
        """Returns an iterator without counting the iterator."""
        return make_iterator(self.dataset)
