"""Input data with a position that can be saved, for `model.fit` and custom loops.

distribution   distribute(): an iterator over a distributed dataset, with a position
host_iterator  a distributed iterator whose position can be saved
iterators      makes iterators, and finds the tf.data iterators inside of an iterator
pipelines      from_arrays(), from_index(): pipelines whose position is a few numbers
read_ahead     copies global batches to the devices before a step needs the batches
slices         the slices of a global batch for the replicas of this process

Imported by keras, tfpreempt.
"""

from __future__ import annotations

from tfpreempt.data.distribution import distribute
from tfpreempt.data.pipelines import from_arrays, from_index

__all__ = ["distribute", "from_arrays", "from_index"]
