"""Positions in tf.data pipelines: States of dataset iterators, and their cache files.

TensorFlow does not check the files of `Dataset.cache(path)` before it restores an
iterator: with files missing, an iterator that was reading its cache ends the process by
SIGSEGV, and an iterator that was writing its cache fails at each start with
AlreadyExistsError because of the lock file that an interrupted epoch left. So the files
are checked before the state is restored.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import read_parts, write_parts
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.state.unfinished_caches import (
    delete_shards,
    expect_caches,
    is_complete,
    keep,
)
from tfpreempt.checkpoint.tensors.shuffle_seeds import (
    SEEDS,
    Element,
    ShuffleSeeds,
    parts,
    seeds_of,
)
from tfpreempt.checkpoint.tensors.variables import Attached, plain_message
from tfpreempt.core import seams

Objects = Sequence[tuple[str, Any]]

_MODE, _SHARD, _WRITES = b"Mode", b"shard_id", 1


def cache_paths(*datasets: Any) -> list[str]:
    """The paths of the file caches that datasets are built of."""
    found = [
        os.fsdecode(node._filename.numpy())
        for node in parts(*datasets)
        if type(node).__name__ == "CacheDataset"
    ]
    return [path for path in dict.fromkeys(found) if path and "://" not in path]


def check_cache_files(state: Any, paths: Sequence[str]) -> None:
    """Refuses a state whose cache files are missing; see `prepare_cache_files`.

    Args:
        state: the state of an iterator: a variant tensor of shape (elements,).
        paths: file caches of the iterator's dataset.

    Raises:
        CheckpointMismatchError: names the missing files.
    """
    if missing := prepare_cache_files(state, paths):
        raise errors.CheckpointMismatchError(
            "The position in the data was saved with an iterator that reads a cache, "
            f"and files of the cache are missing: {', '.join(missing)}. Put the files "
            "back; or keep the iterator out of the tf.train.Checkpoint and derive the "
            "batch from the step: iter(dataset.skip(handler.total_run_calls)). A cache "
            "must lie on storage that outlives the machine."
        )


def prepare_cache_files(state: Any, paths: Sequence[str]) -> list[str]:
    """Brings the files of an unfinished cache to the moment of a state.

    A state that was saved while the iterator wrote a cache shows that the files of the
    unfinished cache are this run's own: files that are newer than the state are
    deleted, because TensorFlow writes them again and refuses to while they are there.

    Returns:
        Missing files; empty if the state can be restored. If files are missing, all
        files of the unfinished cache are deleted.
    """
    if not paths:
        return []
    modes, shards = [], []
    for element in map(Element, tf.unstack(state)):
        modes += element.numbers(_MODE, b"FileCache")
        shards += element.numbers(_SHARD, b"FileCacheImpl")
    missing: list[str] = []
    incomplete = [path for path in paths if not is_complete(path)]
    is_writing = len(modes) == 1 and modes[0] == _WRITES and len(paths) == 1
    if is_writing and incomplete:
        [path], shard = paths, shards[0] if shards else 0
        missing = [
            f"{path}_{number}.index"
            for number in range(shard)
            if not is_complete(f"{path}_{number}")
        ]
        if shard:  # else the run had written nothing: the files may be another's
            delete_shards(path, since=0 if missing else shard)
            keep(path)
    elif len(modes) - modes.count(_WRITES) > len(paths) - len(incomplete):
        missing = [f"{path}.index or .data" for path in incomplete]
    return missing


_POLICIES = tf.data.experimental.ExternalStatePolicy


def pack(state: Any) -> list[bytes]:
    """The bytes of an iterator's serialized state.

    Args:
        state: a variant tensor of shape (elements,), as `serialize_iterator` gives it.

    Returns:
        One part per element, as tf.data itself does it: a proto ends at 2 GB.
    """
    return [bytes(tf.io.serialize_tensor(e).numpy()) for e in tf.unstack(state)]


def unpack(parts: Sequence[bytes]) -> Any:
    """What `pack` was given."""
    return tf.stack([tf.io.parse_tensor(part, tf.variant) for part in parts])


def shared_iterators(objects: Objects) -> list[Any]:
    """The iterators of `tfpreempt.data.distribute` whose position is equal on all
    workers.

    Args:
        objects: path and object, from `walk`.
    """
    # TensorFlow's own are not trackable, so those in a checkpoint are ours.
    return [
        obj
        for _, obj in objects
        if isinstance(obj, tf.distribute.DistributedIterator) and obj.is_shared
    ]


def other_places(objects: Objects, graph: Any, nodes: Mapping[int, int]) -> list[str]:
    """The iterators whose position in a checkpoint is of another kind than theirs.

    Args:
        objects: path and object, from `walk`.
        graph: the TrackableObjectGraph of the saved one.
        nodes: the node that an object is restored from, by its id().

    Returns:
        Their paths.
    """
    found = []
    for path, obj in objects:
        node = nodes.get(id(obj))
        if node is not None and isinstance(obj, tf.distribute.DistributedIterator):
            saved = {child.local_name for child in graph.nodes[node].children}
            if saved and not saved.issuperset(obj._trackable_children()):
                found.append(path)
    return found


# --- states that are complete ----------------------------------------------------


def keep_seeds(iterator: Any, *datasets: Any) -> None:
    """Lets the state of an iterator hold the seeds of its shuffles.

    The files of its caches are checked before a state is restored. Reads nothing and
    changes no seed. A second call does nothing, nor does a call for an iterator that
    adds the seeds itself. Must not run while another thread makes iterators of the same
    datasets.

    Args:
        iterator: a tf.data iterator (`OwnedIterator`).
        *datasets: datasets that the iterator is made of; by default its own.
    """
    if not datasets and iterator._dataset is not None:
        datasets = (iterator._dataset,)
    if hasattr(iterator, SEEDS) or not datasets:
        return
    seeds, caches = seeds_of(*datasets), cache_paths(*datasets)
    setattr(iterator, SEEDS, seeds)
    if not seeds.probes and not caches:
        return
    # The iterator must not refer to itself: its threads would live until the next
    # garbage collection.
    own, kind = weakref.ref(iterator), type(iterator)

    def serialize() -> dict[str, Any]:
        state = lambda: kind._serialize_to_tensors(own())["_STATE"]  # noqa: E731
        return {"_STATE": seeds.add_to(state)}

    def restore(restored: dict[str, Any]) -> Any:
        state = restored["_STATE"]
        _with_values(state, lambda values: check_cache_files(values, caches))
        done = kind._restore_from_tensors(own(), restored)
        _with_values(state, seeds.restore)
        return done

    iterator._serialize_to_tensors = serialize
    iterator._restore_from_tensors = restore


def _with_values(state: Any, call: Callable[[Any], None]) -> None:
    """Calls a function with a state; TensorFlow restores remote tasks in a graph."""
    if tf.executing_eagerly():
        call(state)
        return
    text = tf.io.serialize_tensor(state)  # a py_function takes no variants
    tf.py_function(lambda text: call(tf.io.parse_tensor(text, tf.variant)), [text], [])


def add_seeds(iterator: Any, serialize: Callable[[], Any]) -> Any:
    """Returns the state of an iterator, with seeds if `keep_seeds` was called for it.

    Args:
        iterator: a tf.data iterator.
        serialize: returns the iterator's state, a variant tensor of shape (elements,).
    """
    seeds: ShuffleSeeds | None = getattr(iterator, SEEDS, None)
    if seeds is None or not seeds.probes:
        return serialize()
    return seeds.add_to(serialize)


# --- who has no position -------------------------------------------------------------


def check_position(iterator: Any, where: str) -> None:
    """Refuses a dataset iterator whose position cannot be saved.

    The iterator is not read. Its state holds the seeds of its shuffles from now on.

    Args:
        iterator: `iter(dataset)`.
        where: what it is, for the error.

    Raises:
        ConfigurationError: says why, and what to write instead.
    """
    seams.require("iterators")
    dataset = iterator._dataset
    found = [] if dataset is None else [dataset]
    if reads_data_service(*found):
        raise errors.ConfigurationError(
            f"{where} reads from the tf.data service, which decides itself which batch "
            "comes next, so the iterator has no position that can be saved. "
            f"{KEEP_SERVICE_OUT}."
        )
    if reads_generator(*found):
        why, instead = "it reads a Python generator", ""
    else:
        try:
            iterator._serialize_to_tensors()
        except tf.errors.OpError as error:
            said: str | None = plain_message(error)
        else:
            said = hidden_state(*found)
        if said is None:
            keep_seeds(iterator)
            expect_caches(cache_paths(*found))
            return
        why = f"an op in it may keep a state of its own: {said.rstrip('.')}"
        instead = (
            " If what the op gives depends on nothing but its arguments, say so: "
            "options = tf.data.Options(); options.experimental_external_state_policy "
            "= tf.data.experimental.ExternalStatePolicy.IGNORE; dataset = "
            "dataset.with_options(options)."
        )
    raise errors.ConfigurationError(
        f"{where} has no position that can be saved: {why}. Every save would fail, and "
        "each restart begin anew. Keep it out of what is saved, and derive the batch "
        "from the step, or begin behind what was read: "
        "iter(dataset.skip(handler.total_run_calls)). tfpreempt.data makes "
        f"datasets whose position is saved.{instead}"
    )


KEEP_SERVICE_OUT = (
    "Keep the iterator out of what is saved. A restarted run takes the batches that "
    "the service gives then, so samples of the interrupted epoch may come twice or not "
    "at all. With a job_name, a dispatcher that outlives the run continues the same "
    "epoch. For exact resume read the data in the workers themselves, for instance "
    "with tfpreempt.data"
)
"""Advice for a loop over the tf.data service."""


def reads_data_service(*datasets: Any) -> bool:
    """Whether a pipeline takes its elements from the tf.data service."""
    return any(
        type(node).__name__.startswith("_DataServiceDataset")
        for node in parts(*datasets)
    )


def reads_generator(*datasets: Any) -> bool:
    """Whether a Python generator feeds a pipeline: it can't be put back.

    TensorFlow says so only once the pipeline was read.
    """
    return any(
        op.type == "GeneratorDataset"
        for wrapper in _functions(*datasets)
        for op in wrapper.function.graph.get_operations()
    )


def hidden_state(*datasets: Any) -> str | None:
    """What in a pipeline keeps a state that is not in its iterators' state.

    Python functions, random ops and variables do, unless an option of the pipeline says
    that they don't matter. An iterator that was not read yet knows nothing of what lies
    behind a shuffle, so each function is asked alone, in a pipeline that is never read.
    """
    for options in (dataset.options() for dataset in datasets):
        policy = options.experimental_external_state_policy
        is_lenient = policy not in (None, _POLICIES.FAIL)
        if is_lenient or options.experimental_symbolic_checkpoint:
            return None
    nothing = tf.data.Dataset.range(0)
    for wrapper in _functions(*datasets):
        function = wrapper.function
        held = [  # as light as can be: the values count for nothing
            each
            if each.dtype in (tf.resource, tf.variant)
            else tf.zeros([], each.dtype)
            for each in function.captured_inputs
        ]
        alone = seams.gen_dataset_ops.map_dataset(
            nothing._variant_tensor,
            held,
            f=function,
            output_types=[tf.int64],
            output_shapes=[[]],
        )
        try:
            seams.gen_dataset_ops.dataset_to_graph_v2(
                alone, external_state_policy=_POLICIES.FAIL.value
            )
        except tf.errors.FailedPreconditionError as error:
            return plain_message(error).rpartition("graph: ")[2]
    return None


def _functions(*datasets: Any) -> Iterator[Any]:
    return (each for part in parts(*datasets) for each in part._functions())


# --- saved apart ---------------------------------------------------------------------


class IteratorState(State):
    """The positions of a non-chief worker's dataset iterators.

    The chief's are in TensorFlow's own files; without this the other workers would go
    on from the chief's position in their own data.
    """

    _is_reserved = True

    def __init__(self, attached: Attached) -> None:
        super().__init__("tfpreempt.iterators", per_worker=True, registry=None)
        self._attached = attached

    def is_wanted(self) -> bool:
        return bool(self._attached.iterators)

    def save(self, fileobj: IO[bytes]) -> None:
        header, parts = [], []
        for path, iterator in self._attached.iterators.items():
            elements = pack(iterator._serialize_to_tensors()["_STATE"])
            parts += elements
            header.append({"path": path, "elements": len(elements)})
        write_parts(fileobj, header, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        left = iter(parts)
        saved = {
            entry["path"]: [next(left) for _ in range(entry["elements"])]
            for entry in header
        }
        for path, iterator in self._attached.iterators.items():
            if path in saved:
                iterator._restore_from_tensors({"_STATE": unpack(saved[path])})

    def fold(self, files: Sequence[IO[bytes] | None], worker: int, world: int) -> None:
        """Leaves them: at the chief's place where all share one, else at the beginning,
        because each worker's part of the data is another one now."""


@contextlib.contextmanager
def positions_kept(objects: Objects) -> Iterator[None]:
    """Leaves dataset iterators where they are while a checkpoint is restored.

    Iterators whose position is equal on all workers are restored.

    Args:
        objects: path and object, from `walk`.
    """
    name = "_restore_from_tensors"
    shared = {
        id(owned) for each in shared_iterators(objects) for owned in each.host_iterators
    }
    kept = [
        obj
        for _, obj in objects
        if isinstance(obj, seams.iterator_ops.OwnedIterator) and id(obj) not in shared
    ]
    own = [vars(iterator).get(name) for iterator in kept]
    for iterator in kept:
        iterator._restore_from_tensors = lambda restored: []
    try:
        yield
    finally:
        for iterator, restore in zip(kept, own, strict=True):
            del iterator._restore_from_tensors  # uncovers the class's own
            if restore is not None:  # of `keep_seeds`
                iterator._restore_from_tensors = restore
