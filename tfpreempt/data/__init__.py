"""Data whose place a commit can hold: for `model.fit` and for custom loops alike.

distribution   distribute(): what a strategy makes of a dataset, as such an iterator
host_iterator  a distributed iterator whose place can be saved
iterators      iterators of any data, and the ordinary ones below them
pipelines      from_arrays(), from_index(): pipelines whose place is a few numbers
read_ahead     global batches that are copied to the devices ahead of the step
slices         the slices of a global batch that this process's replicas train on

Imported by keras, tfpreempt.
"""

from __future__ import annotations

from tfpreempt.data.distribution import distribute
from tfpreempt.data.pipelines import from_arrays, from_index

__all__ = ["distribute", "from_arrays", "from_index"]
