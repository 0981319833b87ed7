"""Saves and restores positions in tf.data pipelines, and checks the cache files.

TensorFlow does not check the files of `Dataset.cache(path)` before the restore of an
iterator. If files are missing, an iterator that was reading the cache crashes the
process with SIGSEGV. An iterator that was writing the cache fails at every start with
AlreadyExistsError, because of the lock file left by the interrupted epoch. So tfpreempt
checks the files, and deletes leftovers, before the state of the iterator is restored.
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
from tfpreempt.checkpoint.tensors.variables import AttachedState, plain_message
from tfpreempt.core import private_api

Objects = Sequence[tuple[str, Any]]

_MODE, _SHARD, _WRITES = b"Mode", b"shard_id", 1


def cache_paths(*datasets: Any) -> list[str]:
    """Returns the paths of the file caches (`Dataset.cache(path)`) in datasets. Leaves
    out URLs.

    Args:
        datasets: pipelines to search, with their input datasets.
    """
    found = [
        os.fsdecode(node._filename.numpy())
        for node in parts(*datasets)
        if type(node).__name__ == "CacheDataset"
    ]
    return [path for path in dict.fromkeys(found) if path and "://" not in path]


def check_cache_files(state: Any, paths: Sequence[str]) -> None:
    """Calls `prepare_cache_files`, and raises an error if files are missing.

    Args:
        state: the state of an iterator: a variant tensor of shape (elements,).
        paths: paths of the iterator's caches, from `cache_paths`.

    Raises:
        CheckpointMismatchError: files are missing; the message names the files.
    """
    if missing := prepare_cache_files(state, paths):
        raise errors.CheckpointMismatchError(
            "The position in the data was saved with an iterator that reads a cache, "
            f"and files of the cache are missing: {', '.join(missing)}. Put the files "
            "back; or leave the iterator out of the tf.train.Checkpoint and skip the "
            "batches already read: iter(dataset.skip(handler.total_run_calls)). Keep "
            "caches on storage that outlives the machine."
        )


def prepare_cache_files(state: Any, paths: Sequence[str]) -> list[str]:
    """Prepares the files of a `Dataset.cache(path)` for the restore of an iterator;
    returns missing files.

    If the state was saved while the iterator was writing the cache, the unfinished
    cache belongs to this run. In this case the function deletes the files that were
    written after the save, because TensorFlow will write these files again, and refuses
    to overwrite files.

    Args:
        state: the state of an iterator: a variant tensor of shape (elements,).
        paths: paths of the iterator's caches, from `cache_paths`.

    Returns:
        Missing files; empty if the state can be restored. If files of an unfinished
        cache are missing, the cache is deleted.
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
        # With shard 0, the run had written no file before the save, so the files may
        # belong to another program. Keep the files: `clear_interrupted` deletes the
        # files that this run has written.
        if shard:
            delete_shards(path, since=0 if missing else shard)
            keep(path)
    elif len(modes) - modes.count(_WRITES) > len(paths) - len(incomplete):
        missing = [f"{path}.index or .data" for path in incomplete]
    return missing


_POLICIES = tf.data.experimental.ExternalStatePolicy
_WITHOUT_STATE = (
    *("CheckNumerics", "StatefulPartitionedCall", "If", "While", "Case"),
    *("Assert", "Print", "LookupTableFind", "Timestamp", "Dummy"),
)
"""Beginnings of the names of ops without a state that TensorFlow calls stateful: ops
that check values or call functions, ops that TensorFlow accepts in a pipeline, and the
`DummySeedGenerator` of a shuffle, whose seeds are in the state of the shuffle."""


def pack(state: Any) -> list[bytes]:
    """Returns the bytes of an iterator's serialized state.

    Args:
        state: a variant tensor of shape (elements,), from `serialize_iterator`.

    Returns:
        The bytes of every element. Elements are stored separately, as tf.data does,
        because a proto is limited to 2 GB.
    """
    return [bytes(tf.io.serialize_tensor(e).numpy()) for e in tf.unstack(state)]


def unpack(parts: Sequence[bytes]) -> Any:
    """Returns the iterator state from the bytes returned by `pack`."""
    return tf.stack([tf.io.parse_tensor(part, tf.variant) for part in parts])


def shared_iterators(objects: Objects) -> list[Any]:
    """Returns the iterators of `tfpreempt.data.distribute` with the same position on
    all workers.

    Args:
        objects: path and object, from `walk`.
    """
    # Every distributed iterator in `objects` has the attribute `is_shared` of
    # tfpreempt's class: `walk` finds only trackable objects, and TensorFlow's class is
    # not trackable.
    return [
        obj
        for _, obj in objects
        if isinstance(obj, tf.distribute.DistributedIterator) and obj.is_shared
    ]


def other_positions(
    objects: Objects, graph: Any, nodes: Mapping[int, int]
) -> list[str]:
    """Returns the paths of distributed iterators whose saved position does not fit this
    run. For example, the saved run had a single position for all workers, and this run
    has a separate position for every worker.

    Args:
        objects: path and object, from `walk`.
        graph: the saved TrackableObjectGraph.
        nodes: number of the saved node from which an object is restored, by the
            object's id().
    """
    found = []
    for path, obj in objects:
        node = nodes.get(id(obj))
        if node is not None and isinstance(obj, tf.distribute.DistributedIterator):
            saved = {child.local_name for child in graph.nodes[node].children}
            if saved and not saved.issuperset(obj._trackable_children()):
                found.append(path)
    return found


# --- complete states -------------------------------------------------------------


def keep_seeds(iterator: Any, *datasets: Any) -> None:
    """Adds the number of seeds drawn by an iterator's shuffles to all later states of
    the iterator, and a check of the cache files to all later restores.

    The check is `check_cache_files`, before the restore of the position. The call of
    `keep_seeds` reads no element and changes no seed. A second call for an iterator
    does nothing; a call for an iterator whose class already adds the number does
    nothing. No other thread may create iterators of the same datasets during the call.

    Args:
        iterator: a tf.data iterator (`OwnedIterator`).
        *datasets: datasets that the iterator reads; by default the dataset from which
            TensorFlow made the iterator.
    """
    if not datasets and iterator._dataset is not None:
        datasets = (iterator._dataset,)
    if hasattr(iterator, SEEDS) or not datasets:
        return
    seeds, caches = seeds_of(*datasets), cache_paths(*datasets)
    setattr(iterator, SEEDS, seeds)
    if not seeds.probes and not caches:
        return
    # Use a weak reference: an iterator that refers to itself would keep its threads
    # until the next garbage collection.
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
    """Calls a function with an iterator's state, as soon as the state has a value. For
    remote tasks, TensorFlow restores iterators in a graph, where a state has a value
    only when the graph runs. In this case the graph calls the function."""
    if tf.executing_eagerly():
        call(state)
        return
    # Pass the state as a string, because a py_function does not accept variants.
    text = tf.io.serialize_tensor(state)
    tf.py_function(lambda text: call(tf.io.parse_tensor(text, tf.variant)), [text], [])


def add_seeds(iterator: Any, serialize: Callable[[], Any]) -> Any:
    """Returns the state of an iterator. After a call of `keep_seeds` for the iterator,
    the state includes the number of seeds drawn by the shuffles.

    Args:
        iterator: a tf.data iterator.
        serialize: function that returns the iterator's state, a variant tensor of shape
            (elements,).
    """
    seeds: ShuffleSeeds | None = getattr(iterator, SEEDS, None)
    if seeds is None or not seeds.probes:
        return serialize()
    return seeds.add_to(serialize)


# --- iterators without a position ----------------------------------------------------


def check_position(iterator: Any, where: str) -> None:
    """Checks that the position of a dataset iterator can be saved.

    Reads no element. If the position can be saved, calls `keep_seeds`, so that later
    states include the number of seeds drawn by the shuffles.

    Args:
        iterator: `iter(dataset)`.
        where: beginning of the error message, with the name of the iterator.

    Raises:
        ConfigurationError: no position can be saved; the message gives the reason and
            an alternative.
    """
    private_api.check_available("iterators")
    dataset = iterator._dataset
    found = [] if dataset is None else [dataset]
    if reads_data_service(*found):
        raise errors.ConfigurationError(
            f"{where} reads from the tf.data service. The service chooses the next "
            "batch, so the iterator has no position that can be saved. "
            f"{KEEP_SERVICE_OUT}."
        )
    if reads_generator(*found):
        why, instead = "the dataset reads a Python generator", ""
    elif may_miss_end(*found):
        why, instead = MISSED_END, f" Or {REPEAT_FIRST}."
    else:
        try:
            iterator._serialize_to_tensors()
        except tf.errors.OpError as error:
            reason: str | None = plain_message(error)
        else:
            reason = hidden_state(*found)
        if reason is None:
            keep_seeds(iterator)
            expect_caches(cache_paths(*found))
            return
        why = f"an operation in the dataset may have state: {reason.rstrip('.')}"
        instead = (
            " If the result of the operation depends only on its arguments, set an "
            "option: options = tf.data.Options(); "
            "options.experimental_external_state_policy = "
            "tf.data.experimental.ExternalStatePolicy.IGNORE; dataset = "
            "dataset.with_options(options)."
        )
    raise errors.ConfigurationError(
        f"{where} has no position that can be saved: {why}. Every save would fail, and "
        "each restart would start from the beginning. Leave the iterator out of the "
        "checkpoint, and skip the batches already read: "
        "iter(dataset.skip(handler.total_run_calls)). Or use tfpreempt.data, which "
        f"makes datasets whose position is saved.{instead}"
    )


KEEP_SERVICE_OUT = (
    "Leave the iterator out of the saved objects. A restarted run takes the batches "
    "that the service sends at that time, so samples of the interrupted epoch may "
    "come twice or not at all. With a job_name, a dispatcher that outlives the run "
    "continues the same epoch. For an exact resume read the data in the workers, for "
    "instance with tfpreempt.data"
)
"""Advice for a loop over the tf.data service."""


def reads_data_service(*datasets: Any) -> bool:
    """Returns whether a pipeline reads elements from the tf.data service."""
    return any(
        type(node).__name__.startswith("_DataServiceDataset")
        for node in parts(*datasets)
    )


def reads_generator(*datasets: Any) -> bool:
    """Returns whether a Python generator feeds a pipeline; the position of a generator
    cannot be restored.

    TensorFlow's own check finds a generator only after the pipeline was read.
    """
    return any(
        op.type == "GeneratorDataset"
        for wrapper in _functions(*datasets)
        for op in wrapper.function.graph.get_operations()
    )


def may_miss_end(*datasets: Any) -> bool:
    """Returns whether a restored iterator may search for ever for the end of its data.

    `sample_from_datasets` without `stop_on_empty_dataset` ends when the iterator has
    counted the end of each dataset. TensorFlow (2.21) does not save the count: an
    iterator that is saved after the end of one dataset and restored then draws from
    the ended datasets for ever.
    """
    for node in parts(*datasets):
        kind = private_api.directed_interleave_op._DirectedInterleaveDataset
        if isinstance(node, kind) and not node._stop_on_empty_dataset:
            chosen, *sizes = (int(each.cardinality()) for each in node._inputs())
            if chosen == tf.data.INFINITE_CARDINALITY and chosen not in sizes:
                return True
    return False


MISSED_END = (
    "sample_from_datasets draws from datasets that all end, and a restored iterator "
    "may wait for ever at their end"
)
REPEAT_FIRST = (
    "repeat each dataset before sample_from_datasets, or pass "
    "stop_on_empty_dataset=True"
)


def hidden_state(*datasets: Any, allows_checks: bool = False) -> str | None:
    """Returns the name of an operation whose state is not part of the iterator's state;
    None if there is no such operation.

    Python functions, random ops and variables have such state, unless an option of the
    pipeline declares the state unimportant. TensorFlow's check of the whole iterator
    would not suffice: before the first read, an iterator does not know the operations
    behind a shuffle. So this function puts every function of the pipeline into a new
    pipeline without elements, and lets TensorFlow check that pipeline.

    Args:
        *datasets: datasets to search, with their input datasets.
        allows_checks: whether to ignore ops without a state that TensorFlow does not
            save by default, such as `tf.debugging.check_numerics`.
    """
    for options in (dataset.options() for dataset in datasets):
        policy = options.experimental_external_state_policy
        is_lenient = policy not in (None, _POLICIES.FAIL)
        if is_lenient or options.experimental_symbolic_checkpoint:
            return None
    nothing = tf.data.Dataset.range(0)
    for wrapper in _functions(*datasets):
        function = wrapper.function
        held = [  # use small tensors, because their values do not matter
            each
            if each.dtype in (tf.resource, tf.variant)
            else tf.zeros([], each.dtype)
            for each in function.captured_inputs
        ]
        alone = private_api.gen_dataset_ops.map_dataset(
            nothing._variant_tensor,
            held,
            f=function,
            output_types=[tf.int64],
            output_shapes=[[]],
        )
        try:
            private_api.gen_dataset_ops.dataset_to_graph_v2(
                alone, external_state_policy=_POLICIES.FAIL.value
            )
        except tf.errors.FailedPreconditionError as error:
            problem = plain_message(error).rpartition("graph: ")[2]
            if not (allows_checks and problem.startswith(_WITHOUT_STATE)):
                return problem
            # TensorFlow names only the first op: look for further ops.
            for kind in sorted({node.op for node in nodes_of(function.graph)}):
                is_stateful = function.graph.op_def_for_type(kind).is_stateful
                is_saved = "Dataset" in kind or kind.startswith(_WITHOUT_STATE)
                if is_stateful and not is_saved:
                    return f"{kind} is stateful."
    return None


def nodes_of(graph: tf.Graph) -> list[Any]:
    """Returns the nodes of a graph and of the functions that the graph contains.

    Raises:
        ValueError: the constants of the graph have more than 2 GB.
    """
    parts = graph.as_graph_def()
    bodies = [parts.node, *(each.node_def for each in parts.library.function)]
    return [node for body in bodies for node in body]


def _functions(*datasets: Any) -> Iterator[Any]:
    return (each for part in parts(*datasets) for each in part._functions())


# --- saved separately ----------------------------------------------------------------


class IteratorState(AttachedState):
    """Saves the positions of dataset iterators on workers other than the chief.

    TensorFlow's own files have the chief's positions. Without this State, the other
    workers would resume at the chief's position in their own data.
    """

    _name = "tfpreempt.iterators"

    def should_save(self) -> bool:
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

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Restores no position: with a different number of workers, a worker reads a
        different part of the data. Positions shared by all workers were restored from
        the chief's files; other iterators start at the beginning."""


@contextlib.contextmanager
def replacing(
    iterators: Sequence[Any], name: str, method: Callable[..., Any]
) -> Iterator[None]:
    """Returns a context in which a function replaces a method of dataset iterators.

    Args:
        iterators: the iterators.
        name: name of the method.
        method: the function, which does not get the iterator.
    """
    before = [vars(each).get(name) for each in iterators]
    for each in iterators:
        setattr(each, name, method)
    try:
        yield
    finally:
        for each, own in zip(iterators, before, strict=True):
            delattr(each, name)  # makes the class's method visible again
            if own is not None:  # `keep_seeds` had replaced the method
                setattr(each, name, own)


def positions_kept(objects: Objects) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the restore of a checkpoint does not change the
    positions of dataset iterators.

    Iterators with the same position on every worker are restored nevertheless.

    Args:
        objects: path and object, from `walk`.
    """
    shared = {
        id(owned) for each in shared_iterators(objects) for owned in each.host_iterators
    }
    kept = [
        obj
        for _, obj in objects
        if isinstance(obj, private_api.iterator_ops.OwnedIterator)
        and id(obj) not in shared
    ]
    return replacing(kept, "_restore_from_tensors", lambda restored: [])
