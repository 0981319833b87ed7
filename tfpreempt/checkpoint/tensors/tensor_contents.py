"""Saves and restores a tf.train.Checkpoint: TensorFlow's part in a commit.

In a save, every worker reads the values whose read needs all workers (`gather.py`).
Then the files are written, in one of three forms: the chief (worker 0) writes a new
directory of tfpreempt, or calls the user's CheckpointManager, or every worker calls the
user's save_fn. In the first form, every worker may write a share of the replicated
large tensors (`replica_parallel.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle_writer, tensor_copies
from tfpreempt.checkpoint.directory import checkpoint_state, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.state.contents import Contents, StagedSave, write_tensors
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.tensors import bundle_reader, gather, reader
from tfpreempt.checkpoint.tensors.data_order import OrderState
from tfpreempt.checkpoint.tensors.gather import (
    LargeTensors,
    Read,
    reading,
)
from tfpreempt.checkpoint.tensors.iterator_state import (
    IteratorState,
    check_position,
    keep_seeds,
    shared_iterators,
)
from tfpreempt.checkpoint.tensors.per_replica import (
    PerReplicaState,
    WorkerVariablesState,
)
from tfpreempt.checkpoint.tensors.program_values import warn_of_kernels
from tfpreempt.checkpoint.tensors.replica_parallel import ReplicaParallelWriter
from tfpreempt.checkpoint.tensors.variables import (
    Attached,
    attach,
    attached,
    distributed,
    held_bytes,
    is_on_read,
    is_replicated,
    out_of_scope,
    plain_message,
)
from tfpreempt.core import private_api
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.log_output import FallbackHandler
from tfpreempt.storage import os_errors
from tfpreempt.storage.files import Files

_log = logging.getLogger(__name__)


COUNTER = "checkpointed_runs"
"""The name under which TensorFlow's own handler saves the number of runs."""


class DirectoryRequiredError(
    errors.ConfigurationError,
    tf.errors.InvalidArgumentError,  # type: ignore[misc]  # TensorFlow is untyped
):
    """Raised for a tf.train.Checkpoint that was passed without a directory."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def is_checkpoint(given: Any) -> bool:
    """Returns whether an object is a Checkpoint or CheckpointManager of TensorFlow."""
    return isinstance(given, tf.train.Checkpoint | tf.train.CheckpointManager)


def check_directory(given: Any, checkpoint_dir: str | os.PathLike[str] | None) -> None:
    """Checks that the user gave a directory for a Checkpoint. A CheckpointManager knows
    its directory.

    Args:
        given: a tf.train.Checkpoint or a tf.train.CheckpointManager.
        checkpoint_dir: the directory, if given.

    Raises:
        DirectoryRequiredError: a Checkpoint has no directory.
    """
    if isinstance(given, tf.train.Checkpoint) and not checkpoint_dir:
        raise DirectoryRequiredError(
            "checkpoint_or_checkpoint_manager is a tf.train.Checkpoint, and "
            f"checkpoint_dir is {checkpoint_dir!r}; expected a directory for its "
            "saves. Pass checkpoint_dir=, or a tf.train.CheckpointManager"
        )


def attach_counter(given: Any) -> Any:
    """Adds tfpreempt's counter of runs, and TensorFlow's `save_counter`, to the user's
    checkpoint.

    Args:
        given: a tf.train.Checkpoint or a tf.train.CheckpointManager.

    Returns:
        The variable that counts runs, int64.
    """
    checkpoint = getattr(given, "checkpoint", given)

    def make() -> Any:
        # TensorFlow creates the counter at the first access.
        _ = checkpoint.save_counter
        if hasattr(checkpoint, COUNTER):
            return None
        return tf.Variable(0, dtype=tf.int64, trainable=False, name=COUNTER)

    if (counter := out_of_scope(make)) is not None:
        setattr(checkpoint, COUNTER, counter)
    return getattr(checkpoint, COUNTER)


def file_location(given: Any) -> tuple[str | None, str]:
    """Returns where TensorFlow's files are written: the directory of a
    CheckpointManager, and the prefix of the file names.

    The directory is None for a tf.train.Checkpoint.

    Raises:
        UnsupportedVersionError: this version of TensorFlow lacks a private name needed
            for managers.
    """
    if not isinstance(given, tf.train.CheckpointManager):
        return None, layout.PAYLOAD
    private_api.check_available("manager")
    return given.directory, os.path.basename(given._prefix)


def make_contents(
    given: Any,
    *,
    save_fn: Callable[..., Any] | None,
    cluster: Cluster,
    io_device: str | None,
    files: Files,
    is_shared: bool,
    is_second: bool,
) -> Contents:
    """Returns the `Contents` of a Checkpoint: the object that saves and restores the
    Checkpoint, in the form given by the arguments.

    Args:
        given: the Checkpoint or CheckpointManager.
        save_fn: the user's save function; see `open_directory`.
        cluster: the workers; see `open_directory`.
        io_device: device for TensorFlow's files; see `open_directory`.
        files: the file operations, fenced by the lease if there is a lease.
        is_shared: whether every worker sees the directory.
        is_second: whether this is the second of two directories in which the
            Checkpoint is saved; see `open_directory`.

    Raises:
        ConfigurationError: the position of an iterator cannot be saved.
        UsageError: eager execution is off.
    """
    is_managed = isinstance(given, tf.train.CheckpointManager)
    checkpoint = given.checkpoint if is_managed else given
    if not tf.executing_eagerly():
        raise errors.UsageError(
            "tfpreempt needs eager execution, and eager execution is disabled. Call "
            "tf.compat.v1.enable_eager_execution() at the start, or remove the call "
            "that disables eager execution."
        )
    found = attach(checkpoint)
    if not is_second:
        if save_fn is None or not cluster.is_chief:
            for path, iterator in found.iterators.items():
                check_position(iterator, f"The iterator {path!r} of the Checkpoint")
        warn_of_kernels(found.tracked()[0])
    states: list[State] = [OrderState(found), PerReplicaState(found)]
    if not cluster.is_chief:
        states += [IteratorState(found), WorkerVariablesState(found)]
    options = None
    if io_device is not None:
        options = tf.train.CheckpointOptions(experimental_io_device=io_device)
    common = (checkpoint, cluster, options, states)
    if save_fn is not None:
        return _SaveFnContents(*common, save_fn)
    if is_managed:
        return _ManagerContents(*common, given, files)
    parts = None
    if is_shared and cluster.num_workers > 1 and not cluster.saves_all:
        parts = ReplicaParallelWriter(
            worker=cluster.worker, num_workers=cluster.num_workers, files=files
        )
    return _OwnContents(
        *common,
        files,
        worker_parts=parts,
        is_second=is_second,
    )


def saving() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which TensorFlow's own preemption handler saves."""
    context: contextlib.AbstractContextManager[None]
    context = private_api.checkpoint_context.preemption_save_context()
    return context


@dataclasses.dataclass(eq=False)
class _Tracked(Contents):
    """Base class for the three ways to save a tf.train.Checkpoint: by tfpreempt, by the
    user's CheckpointManager, or by the user's save_fn. All of them read the values and
    restore the Checkpoint in the same way.

    Args:
        checkpoint: the user's checkpoint.
        cluster: the workers; the chief writes.
        options: tf.train.CheckpointOptions for TensorFlow's files, or None.
        states: tfpreempt's States for values of the checkpoint's objects that differ
            between workers; every worker saves its values.
    """

    checkpoint: Any
    cluster: Cluster
    options: Any
    states: Sequence[State] = dataclasses.field()
    # (restored prefix, function that returns the names of the variables not restored
    # yet; see `reader.restore`). None before a restore and after `warn_of_unrestored`.
    _restored: tuple[str, Callable[..., Sequence[str]]] | None = dataclasses.field(
        default=None, init=False
    )

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        self.free_read_ahead()
        with _without_collection():
            found = attach(self.checkpoint)
            for iterator in found.iterators.values():
                keep_seeds(iterator)
            with _writing(f"step {save.step}"), self._reading(found) as read:
                arguments = _save_arguments(args, kwargs) if args or kwargs else {}
                self._capture(save, arguments, read)

    def _capture(self, save: StagedSave, arguments: dict[str, Any], read: Read) -> None:
        raise NotImplementedError

    def needs_peers(self) -> bool:
        if self.cluster.num_workers == 1:
            return False
        return any(
            is_on_read(variable)
            and variable.aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA
            for _, variable in attach(self.checkpoint).differing
        )

    def take_part(self) -> None:
        self.free_read_ahead()
        with self._reading(attach(self.checkpoint)):
            pass

    def prepare(self) -> None:
        try:
            with _without_collection(), saving():
                gather.prepare(self.checkpoint, attach(self.checkpoint))
        except Exception as error:  # noqa: BLE001 - any error of its objects
            _log.warning(
                "TensorFlow cannot list the objects of the Checkpoint: %s: %s. Until "
                "this is fixed, every save fails, at a preemption too. Correct the "
                "objects that the error names.",
                type(error).__name__,
                error,
            )

    def _reading(self, found: Attached) -> contextlib.AbstractContextManager[Read]:
        return reading(
            self.checkpoint,
            are_others=self.cluster.num_workers > 1,
            graph=found.graph,
        )

    def held_bytes(self) -> int:
        return held_bytes(self.checkpoint)

    def read_ahead(self, prefix: str) -> Mapping[str, tuple[int, int]]:
        # Free the old tensors before memory for new tensors is allocated.
        self._ahead = None
        if self.options is None:
            with _without_collection():
                self._ahead = bundle_reader.read_ahead(prefix)
        return {} if self._ahead is None else self._ahead.sums

    def check(self, prefix: str) -> None:
        reader.check(prefix)

    def check_shares(self) -> None:
        objects, _ = attach(self.checkpoint).tracked()
        for iterator in shared_iterators(objects):
            iterator.check_shares()

    def restore(
        self, prefix: str, *, with_data: bool = True, is_partial: bool = False
    ) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.prefix != prefix:
            ahead = None
        with _without_collection():
            left = reader.restore(
                self.checkpoint, prefix, self.options, with_data, ahead, is_partial
            )
        self._restored = prefix, left

    def created_later(self) -> Sequence[str]:
        return () if self._restored is None else self._restored[1](later=True)

    def warn_of_unrestored(self) -> None:
        restored, self._restored = self._restored, None
        if restored is not None and (left := restored[1]()):
            _log.warning(
                "%s has variables that this program does not have, so they were not "
                "restored (%d): %s. Commits lack these variables until an object that "
                "is created later uses them, and a restart from such a commit starts "
                "with their initial values. If a later step creates them, create them "
                "before the handler, for example by optimizer.build(variables).",
                restored[0],
                len(left),
                reader.listed(left),
            )


# --- the three forms -----------------------------------------------------------------


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Returns a context without Python's garbage collection.

    A save or restore creates objects for every tensor. So many new objects would
    trigger a collection over all objects of the program, while training waits: 0.2
    seconds in a program that has imported TensorFlow.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def _writing(what: str) -> Iterator[None]:
    """Returns a context for a save, the same as in TensorFlow's own preemption handler;
    turns TensorFlow's errors into SaveError.

    TensorFlow's save calls `logging.info()`. The call adds a handler to a root logger
    without handlers, so later log lines of the program would look different from
    earlier lines. To prevent the change, the context adds a temporary handler that acts
    like Python's default handler.

    Args:
        what: words that name the save in the error, such as "step 5".
    """
    fallback = None if logging.root.handlers else FallbackHandler()
    if fallback is not None:
        logging.root.addHandler(fallback)
    try:
        with private_api.checkpoint_context.preemption_save_context():
            yield
    except tf.errors.OpError as error:
        message = plain_message(error)
        advice = os_errors.advice_on(message)
        raise errors.SaveError(
            f"Could not write {what}: {type(error).__name__}: {message}"
            + (f"; {advice}" if advice else "")
            + ". Older checkpoints are unchanged."
        ) from error
    finally:
        if fallback is not None:
            logging.root.removeHandler(fallback)


def _save_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's arguments for `tf.train.CheckpointManager.save`, by name.

    Raises:
        ConfigurationError: `save` has no such arguments.
    """
    manager_save = inspect.signature(tf.train.CheckpointManager.save)
    try:
        given = manager_save.bind(None, *args, **kwargs).arguments
    except TypeError as error:
        raise errors.ConfigurationError(
            f"Got the arguments {args!r}, {kwargs!r} for a save; expected the "
            f"arguments of tf.train.CheckpointManager.save {manager_save}: {error}"
        ) from error
    return {name: value for name, value in given.items() if value is not None}


def _whole_number(value: Any) -> int:
    """Returns a number as an int; accepts variables and tensors too."""
    return int(value.numpy() if hasattr(value, "numpy") else value)


@dataclasses.dataclass(eq=False)
class _OwnContents(_Tracked):
    """Saves a tf.train.Checkpoint without a CheckpointManager or save_fn: tfpreempt
    writes a new directory for every commit.

    Args:
        files: the file operations for the files not written by TensorFlow.
        worker_parts: lets every worker write a share of the tensors; None if the chief
            writes every tensor.
        is_second: whether the Checkpoint is also saved in a first directory. If True,
            saves do not increment the checkpoint's `save_counter`, and the next
            asynchronous save uses the same memory for its copies of the tensors as the
            previous asynchronous save. So the caller must begin a save only after the
            previous save has ended.
    """

    files: Files
    worker_parts: ReplicaParallelWriter | None
    is_second: bool

    needs_prefix = True

    def __post_init__(self) -> None:
        self._copies = tensor_copies.CopyMemory(is_kept=self.is_second)
        if not self.is_second:
            # Create the counter before `attach` searches for variables.
            _ = self.checkpoint.save_counter

    def _capture(self, save: StagedSave, arguments: dict[str, Any], read: Read) -> None:
        checkpoint = self.checkpoint
        checkpoint.sync()
        if not self.is_second:
            checkpoint.save_counter.assign_add(1)
        save.create_staging()
        prefix = os.path.join(save.staging, layout.PAYLOAD)
        options = arguments.get("options") or self.options
        is_tensorflows = options is not None
        if self.cluster.is_chief and is_tensorflows:
            checkpoint.write(prefix, options=options)
        elif self.cluster.is_chief:
            self._capture_large(save, prefix, read)
        elif not (is_tensorflows or save.is_async or self.worker_parts is None):
            with _left_to_the_chief(save.step):
                tensors = gather.replicated(
                    checkpoint,
                    small_bytes=bundle_writer.SMALL_BYTES,
                    worth_bytes=self.worker_parts.worth_bytes,
                    is_replicated=self._replication(),
                    wanted=self.worker_parts.names_of_own,
                )
                if self.worker_parts.is_worth_it(tensors):
                    save.tensors, save.is_dealt = tensors, True
        if "checkpoint_number" in arguments:
            save.number = _whole_number(arguments["checkpoint_number"])

    def _capture_large(self, save: StagedSave, prefix: str, read: Read) -> None:
        """Lets TensorFlow write the chief's small tensors at a path prefix, and keeps
        the large tensors in `save` for the method `write`."""
        # In an asynchronous save, only the chief copies the tensors, so only the chief
        # can write.
        parts = None if save.is_async else self.worker_parts
        large = LargeTensors(
            small_bytes=bundle_writer.SMALL_BYTES,
            worth_bytes=bundle_writer.WORTH_BYTES,
            is_replicated=None if parts is None else self._replication(),
        )
        read.extract = large.extract
        self.checkpoint.write(prefix)
        save.tensors = large.found
        if save.is_async:
            save.tensors = self._copies.copied(large.found, bundle_writer.THREADS)
        save.is_dealt = bool(
            parts is not None and save.tensors and parts.is_worth_it(save.tensors)
        )

    def _replication(self) -> gather.IsReplicated:
        """Returns a predicate of a variable: whether all workers must have the same
        value of the variable."""
        num_workers = (
            self.worker_parts.num_workers if self.worker_parts is not None else 1
        )
        found = attached(self.checkpoint)
        differing = found.differing + found.own
        own = {id(distributed(variable)) for _, variable in differing}
        return lambda each: (
            is_replicated(each, num_workers) and id(distributed(each)) not in own
        )

    def free_copies(self) -> None:
        self._copies.free()

    def write(self, save: StagedSave) -> None:
        with contextlib.nullcontext() if save.is_async else _without_collection():
            if not save.is_dealt:
                if save.tensors:
                    write_tensors(self.files, save)
                return
            assert self.worker_parts is not None
            if self.cluster.is_chief:
                save.parts = self.worker_parts.write_own(save)
                return
            with _left_to_the_chief(save.step):
                save.parts = self.worker_parts.write_own(save)
            save.tensors = ()

    def complete(self, save: StagedSave, workers: Collection[int]) -> None:
        assert self.worker_parts is not None
        with _without_collection():
            parts = [*save.parts, *self.worker_parts.others(save, workers)]
            prefix = os.path.join(save.staging, layout.PAYLOAD)
            save.sums = bundle_writer.merge(self.files, prefix, parts)
        save.tensors, save.parts, save.is_dealt = (), (), False


@contextlib.contextmanager
def _left_to_the_chief(step: int) -> Iterator[None]:
    """Returns a context for the write of this worker's share of the tensors, in which
    an error is logged and not raised.

    After an error the worker still saves its States. The chief finds no description of
    the share, and writes the share.

    Raises:
        LeaseLostError: the lease is lost.
    """
    try:
        yield
    except errors.LeaseLostError:
        raise
    except Exception as error:  # noqa: BLE001 - any error
        _log.warning(
            "cannot write this worker's share (a part of the tensors) of step %d, so "
            "worker 0 writes this share; nothing is lost: %s: %s",
            step,
            type(error).__name__,
            error,
        )


def _not_yet() -> None:
    """Does nothing. Replaces the manager's `_record_state` during a save, so that the
    manager's `checkpoint` file names a checkpoint only after the commit."""


@dataclasses.dataclass(eq=False)
class _ManagerContents(_Tracked):
    """Saves a tf.train.Checkpoint with the user's CheckpointManager. The files have the
    names that the manager gives.

    Args:
        manager: the CheckpointManager.
        files: the file operations.
    """

    manager: Any
    files: Files

    can_be_async = False  # the manager deletes old checkpoints on the main thread
    needs_prefix = True

    def _capture(self, save: StagedSave, arguments: dict[str, Any], read: Read) -> None:
        manager, checkpoint = self.manager, self.checkpoint
        manager.sync()
        following = int(checkpoint.save_counter.numpy()) + 1
        number = _whole_number(arguments.get("checkpoint_number", following))
        prefix = os.path.abspath(f"{manager._prefix}-{number}")
        save.create_staging(prefix if self.cluster.is_chief else None)
        if self.options is not None:
            arguments.setdefault("options", self.options)
        if "check_interval" not in arguments:
            # The manager must not skip the save at a preemption: neither because of its
            # interval, nor because the user saved at this step already, without a sync
            # to the disk.
            arguments["check_interval"] = False
            if manager.checkpoint_interval is not None:
                manager._last_checkpoint_step = None
        is_saved = True
        if self.cluster.is_chief:
            # The manager must not delete checkpoints yet: the old checkpoint is needed
            # until the new checkpoint has a marker.
            kept, manager._max_to_keep = manager._max_to_keep, None
            manager._record_state = _not_yet
            try:
                is_saved = manager.save(**arguments) is not None
                manager.sync()
            finally:
                manager._max_to_keep = kept
                del manager._record_state
        else:  # increment the counters, as `manager.save` does on the chief
            self._count_step()
            checkpoint.save_counter.assign_add(1)
        save.prefix, save.is_empty = prefix, not is_saved

    def committed(self) -> None:
        if self.manager.checkpoints:
            self._forget_others()
            self._record_state()
            kept = len(self.manager.checkpoints)
            self.manager._sweep()
            if len(self.manager.checkpoints) < kept:
                self._record_state()

    def _forget_others(self) -> None:
        """Removes checkpoints in other directories from the manager's list of old
        checkpoints, which the manager deletes one after the other.

        The manager reads the list from TensorFlow's `checkpoint` file. Other users may
        be able to write the file, and the file can name checkpoints in any directory.
        """
        own = os.path.dirname(os.path.abspath(self.manager._prefix))
        for prefix in list(self.manager._maybe_delete):
            if os.path.dirname(os.path.abspath(prefix)) != own:
                del self.manager._maybe_delete[prefix]
                _log.warning(
                    "the file %r in %s names the checkpoint %r; expected only "
                    "checkpoints in %s. That checkpoint is kept, and its name is "
                    "removed from the file. Find the program that wrote the name into "
                    "the file.",
                    layout.POINTER,
                    self.manager.directory,
                    prefix,
                    own,
                )

    def _record_state(self) -> None:
        """Writes the manager's `checkpoint` file, synced to the disk.

        The manager itself does not sync. After a power loss the file may then be empty,
        and no manager can be created in the directory any more.
        """
        manager = self.manager

        def relative(path: str) -> str:
            return os.path.relpath(path, manager.directory)

        state = checkpoint_state.CheckpointStateFile(
            latest=relative(manager.latest_checkpoint),
            paths=tuple(map(relative, manager._maybe_delete)),
            timestamps=tuple(manager._maybe_delete.values()),
            last_preserved=manager._last_preserved_timestamp,
        )
        path = os.path.join(os.path.abspath(manager.directory), layout.POINTER)
        self.files.publish(path, checkpoint_state.to_bytes(state))

    def _count_step(self) -> None:
        manager = self.manager
        if manager.checkpoint_interval is not None:
            manager._last_checkpoint_step = _whole_number(manager._step_counter)

    def restored(self, candidate: Entry) -> None:
        """Updates the manager after a restore, as `manager.restore_or_initialize` does,
        even if the restored checkpoint is not the newest."""
        self._count_step()
        manager = self.manager
        if not self.cluster.is_chief or candidate.prefix is None:
            return
        folder, name = os.path.split(candidate.prefix)
        if folder != os.path.abspath(manager.directory):
            return
        # Join the path in the form in which the manager writes prefixes.
        prefix = os.path.join(manager.directory, name)
        manager._latest_checkpoint = prefix
        if prefix not in manager._maybe_delete:
            manager._maybe_delete[prefix] = os.path.getmtime(prefix + ".index")


@dataclasses.dataclass(eq=False)
class _SaveFnContents(_Tracked):
    """Saves by a call of the user's save_fn on every worker. For the path that save_fn
    returns, tfpreempt writes a manifest (a list of files with checksums).

    Args:
        save_fn: the user's save function.
    """

    save_fn: Callable[..., Any]

    can_be_async = False  # save_fn may do anything, so training waits for the call

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        self.free_read_ahead()
        attach(self.checkpoint)
        with saving():
            path = self.save_fn(*args, **kwargs)
            self.checkpoint.sync()
        # Create the directory after the call of save_fn, which may need all workers: no
        # error may prevent the call.
        save.create_staging()
        save.take_path(path)

    def prepare(self) -> None:
        """Does nothing, because save_fn may save any objects."""

    def needs_peers(self) -> bool:
        return self.cluster.num_workers > 1  # save_fn may use collectives
