"""The dataset that `fit` makes its iterators of, in place of its own.

So the iterators can be counted, and told from those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tfpreempt.data.iterators import make_iterator
from tfpreempt.keras.interface import Fit

_MARK = "_tfpreempt_made"


class CountedDataset:
    """See above.

    Args:
        fit: takes this in place of its dataset.

    Attributes:
        dataset: what it stands for.
        made: iterators that the fit has made.
        instead: a number of an iterator, and the dataset that it is made of: what is
            left of its data.
        before_next: called before the fit makes an iterator.
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
        """The number, from 1, of an iterator of this; 0 for one from elsewhere."""
        owner, number = getattr(iterator, _MARK, (None, 0))
        return number if owner is self else 0

    def spare(self) -> Any:
        """An iterator that the fit does not know of."""
        return make_iterator(self.dataset)
