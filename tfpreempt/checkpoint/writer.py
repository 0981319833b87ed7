"""What TensorFlow does in a save.

On every worker the save reads what needs all workers (`collective_read`); the chief
then writes, in one of three forms: a directory of our own, the user's own
CheckpointManager, or whatever a save_fn does. Into a directory of our own the others
write a share each of what all hold, where that is large (`worker_parts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint import (
    bundle_writer,
    fence,
    large_tensors,
    layout,
    pointer,
    reader,
    structure,
)
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.collective_read import Read, reading
from tfpreempt.checkpoint.data_order import OrderState
from tfpreempt.checkpoint.fence import FencedFiles
from tfpreempt.checkpoint.iterator_state import (
    IteratorState,
    check_position,
    iterators,
    keep_all_seeds,
    shared_iterators,
)
from tfpreempt.checkpoint.large_tensors import LargeTensors
from tfpreempt.checkpoint.lease import Lease
from tfpreempt.checkpoint.loader import CheckpointLoader
from tfpreempt.checkpoint.payload import Payload, Staged
from tfpreempt.checkpoint.per_replica import PerReplicaState
from tfpreempt.checkpoint.random_state import RandomState
from tfpreempt.checkpoint.saver import CheckpointSaver, Copies
from tfpreempt.checkpoint.shares import DenseTensor
from tfpreempt.checkpoint.state import REGISTRY, StateRegistry
from tfpreempt.checkpoint.tensorflow_generators import warn_of_kernels
from tfpreempt.checkpoint.untracked import attach
from tfpreempt.checkpoint.variables import (
    distributed,
    held_bytes,
    is_on_read,
    is_replicated,
    plain_message,
    walk,
)
from tfpreempt.checkpoint.worker_parts import WorkerParts
from tfpreempt.core import seams
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.storage import failure, paths
from tfpreempt.storage.files import Files, files_for

_log = logging.getLogger(__name__)


def make_saver(
    checkpoint_or_manager: Any,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    *,
    cluster: Cluster = LOCAL,
    max_to_keep: int | None = 2,
    save_fn: Callable[..., Any] | None = None,
    chief_directory: str | None = None,
    io_device: str | None = None,
    copies: Copies | None = None,
    is_shared: bool = True,
    registry: StateRegistry = REGISTRY,
    files: Files | None = None,
    lease: Lease | None = None,
    clock: Clock | None = None,
    is_second: bool = False,
) -> CheckpointSaver:
    """Builds the saver for what the user gave.

    Args:
        checkpoint_or_manager: a tf.train.Checkpoint, a tf.train.CheckpointManager, or
            None for named States alone.
        checkpoint_dir: where a Checkpoint is saved; a manager has its own.
        cluster: who the workers are; the chief writes the payload, but for the shares
            of others, and commits.
        max_to_keep: own commits to keep, None for all; a manager keeps its own number.
        save_fn: called on every worker in place of the save.
        chief_directory: the chief's directory, where a non-chief manager has another.
        io_device: where TensorFlow's files are written and read; None: where the
            variables are, which may be another machine.
        copies: the copy of the directory in an object store; None without one.
        is_shared: whether all workers see the directory, so that each can write a
            share of what all hold.
        registry: the named States that go along.
        files: the file operations.
        lease: of the directory, under which the chief commits; None without one.
        clock: for measured times.
        is_second: whether another saver has this Checkpoint: its saves alone are
            counted by `save_counter`, and its checks are not repeated. The second one
            keeps the memory of its asynchronous saves.

    Raises:
        ConfigurationError: an argument cannot work; says what to do.
        UnsupportedVersionError: this TensorFlow lacks a name that a manager rests on.
    """
    given = checkpoint_or_manager
    is_managed = isinstance(given, tf.train.CheckpointManager)
    if not (given is None or is_managed or isinstance(given, tf.train.Checkpoint)):
        raise errors.ConfigurationError(
            "Expected a tf.train.Checkpoint, a tf.train.CheckpointManager or None; got "
            f"{type(given).__name__}: {given!r}."
        )
    if is_managed:
        seams.require("manager")
    checkpoint = given.checkpoint if is_managed else given
    files_begin = os.path.basename(given._prefix) if is_managed else layout.PAYLOAD
    directory = failure.check_directory(
        chief_directory or (given.directory if is_managed else checkpoint_dir),
        is_flat=save_fn is not None or is_managed,
        name=None if checkpoint is None else files_begin,
    )
    if checkpoint is not None and not is_second:
        if save_fn is None or not cluster.is_chief:
            for path, iterator in iterators(checkpoint):
                check_position(iterator, f"The iterator {path!r} of the Checkpoint")
        if tf.executing_eagerly():
            warn_of_kernels(checkpoint)
    files = files or files_for(directory)
    if lease is not None:
        files = FencedFiles(files, lease)
    payload = Payload()
    if save_fn is not None:
        payload = _FunctionPayload(checkpoint, save_fn, cluster, io_device)
    elif is_managed:
        payload = _ManagedPayload(checkpoint, given, cluster, io_device, files)
    elif given is not None:
        parts = None
        if is_shared and cluster.world > 1 and not cluster.saves_all:
            parts = WorkerParts(worker=cluster.worker, world=cluster.world, files=files)
        payload = _OwnPayload(
            checkpoint,
            None,
            cluster,
            io_device,
            files,
            worker_parts=parts,
            counts_saves=not is_second,
            keeps_copies=is_second,
        )
    loader = CheckpointLoader(
        directory=directory,
        cluster=cluster,
        files=files,
        payload=payload,
        random_state=RandomState(),
        registry=registry,
        max_to_keep=max_to_keep,
        needs_prefix=checkpoint is not None and save_fn is None,
    )
    return CheckpointSaver(loader, copies, clock or SystemClock(), lease)


@dataclasses.dataclass(eq=False)
class _Tracked(Payload):
    """The part of a payload that has to do with one tf.train.Checkpoint.

    Args:
        checkpoint: None where a save_fn saves something else.
        by: the CheckpointManager or save_fn that saves it; None: it saves itself.
        cluster: who the workers are; the chief writes.
        io_device: see `make_saver`.
    """

    checkpoint: Any
    by: Any
    cluster: Cluster
    io_device: str | None

    def __post_init__(self) -> None:
        options = tf.train.CheckpointOptions(experimental_io_device=self.io_device)
        self._options = None if self.io_device is None else options
        # What was restored, and who tells what nothing has of it yet; until it is said.
        self._restored: tuple[str, Callable[[], Sequence[str]]] | None = None
        if self.checkpoint is None:
            return
        if not tf.executing_eagerly():
            raise errors.UsageError("tfpreempt needs eager execution (TensorFlow 2).")
        self.states = [OrderState(self.checkpoint), PerReplicaState(self.checkpoint)]
        if not self.cluster.is_chief:
            self.states.append(IteratorState(self.checkpoint))

    def write(
        self, save: Staged, prepare: Callable[..., None], *args: Any, **kwargs: Any
    ) -> Staged:
        attach(self.checkpoint)
        keep_all_seeds(self.checkpoint)
        with _writing(f"step {save.step}"), self._reading() as read:
            return self._write(save, prepare, _save_arguments(args, kwargs), read)

    def _write(
        self,
        save: Staged,
        prepare: Callable[..., None],
        arguments: dict[str, Any],
        read: Read,
    ) -> Staged:
        raise NotImplementedError

    def needs_peers(self) -> bool:
        attach(self.checkpoint)
        return any(
            is_on_read(obj)
            and distributed(obj).aggregation  # type: ignore[union-attr]
            != tf.VariableAggregation.ONLY_FIRST_REPLICA
            for _, obj in walk(self.checkpoint)
        )

    def take_part(self) -> None:
        if self.checkpoint is not None:
            attach(self.checkpoint)
            with self._reading():
                pass

    def _reading(self) -> contextlib.AbstractContextManager[Read]:
        return reading(self.checkpoint, are_others=self.cluster.world > 1)

    def held_bytes(self) -> int:
        return 0 if self.checkpoint is None else held_bytes(self.checkpoint)

    def check(self, prefix: str) -> None:
        if self.checkpoint is not None:
            reader.check(prefix)

    def check_shares(self) -> None:
        if self.checkpoint is not None:
            attach(self.checkpoint)
            for iterator in shared_iterators(self.checkpoint):
                iterator.check_shares()

    def restore(self, prefix: str, *, with_data: bool = True) -> None:
        if self.checkpoint is not None:
            keep_all_seeds(self.checkpoint)
            left = reader.restore(self.checkpoint, prefix, self._options, with_data)
            self._restored = prefix, left

    def left(self) -> Sequence[str]:
        return () if self._restored is None else self._restored[1]()

    def warn_of_left(self) -> None:
        left, restored, self._restored = self.left(), self._restored, None
        if restored is not None and left:
            _log.warning(
                "%s has variables that nothing here has, so they were not restored "
                "(%d): %s. If nothing that is made later takes them, the program has "
                "changed since, and its saves are without them.",
                restored[0],
                len(left),
                structure.listed(left),
            )


# --- the three kinds of payload ------------------------------------------------------


@contextlib.contextmanager
def _writing(what: str) -> Iterator[None]:
    """As TensorFlow's own handler saves; its errors become SaveError."""
    try:
        with seams.checkpoint_context.preemption_save_context(), _logging_kept():
            yield
    except tf.errors.OpError as error:
        said = plain_message(error)
        advice = failure.advice_on(said)
        raise errors.SaveError(
            f"Could not write {what}: {type(error).__name__}: {said}"
            + (f"; {advice}" if advice else "")
            + ". No older checkpoint was touched."
        ) from error


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """TensorFlow's save calls `logging.info()`, which sets up a program's logging.

    A root logger without handlers gets one there, and all lines that follow another
    form than those before. Here it has the one that Python uses where there is none.
    """
    last = logging.lastResort
    if last is None or logging.root.handlers:
        yield
        return
    logging.root.addHandler(last)
    try:
        yield
    finally:
        logging.root.removeHandler(last)


def _save_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `tf.train.CheckpointManager.save` by name, as far as given.

    Raises:
        ConfigurationError: it has no such arguments.
    """
    manager_save = inspect.signature(tf.train.CheckpointManager.save)
    try:
        given = manager_save.bind(None, *args, **kwargs).arguments
    except TypeError as error:
        raise errors.ConfigurationError(
            "Arguments for the save are those of tf.train.CheckpointManager.save "
            f"{manager_save}; got {args!r}, {kwargs!r}: {error}"
        ) from error
    return {name: value for name, value in given.items() if value is not None}


def _whole_number(value: Any) -> int:
    """A number, or the value of a variable or tensor."""
    return int(value.numpy() if hasattr(value, "numpy") else value)


@dataclasses.dataclass(eq=False)
class _OwnPayload(_Tracked):
    """A tf.train.Checkpoint in a directory of our own per commit.

    Args:
        files: the file operations, for what TensorFlow does not write.
        worker_parts: how the workers write a share each; None where the chief writes
            all.
        counts_saves: whether the checkpoint's `save_counter` counts its saves.
        keeps_copies: whether the memory of asynchronous saves is kept for the next one,
            which begins when that save is over.
    """

    files: Files
    worker_parts: WorkerParts | None
    counts_saves: bool
    keeps_copies: bool
    _spare: Mapping[str, large_tensors.Bytes] = dataclasses.field(
        default_factory=dict, init=False
    )

    def _write(
        self,
        save: Staged,
        prepare: Callable[..., None],
        arguments: dict[str, Any],
        read: Read,
    ) -> Staged:
        checkpoint = self.checkpoint
        checkpoint.sync()
        if self.counts_saves:
            checkpoint.save_counter.assign_add(1)
        prepare()
        prefix = os.path.join(save.directory, layout.PAYLOAD)
        options = arguments.get("options") or self._options
        is_tensorflows = options is not None or paths.is_url(prefix)
        if self.cluster.is_chief and is_tensorflows:
            checkpoint.write(prefix, options=options)
        elif self.cluster.is_chief:
            save = self._write_small(save, prefix, read)
        elif not (is_tensorflows or save.is_async or self.worker_parts is None):
            save = self._read_replicated(save, self.worker_parts)
        if "checkpoint_number" not in arguments:
            return save
        number = _whole_number(arguments["checkpoint_number"])
        return dataclasses.replace(save, number=number)

    def _write_small(self, save: Staged, prefix: str, read: Read) -> Staged:
        """Lets TensorFlow write all but the large tensors, see `write_tensors`."""
        # While training goes on nobody has a copy of all tensors but the chief.
        parts = None if save.is_async else self.worker_parts
        large = LargeTensors(
            small_bytes=bundle_writer.SMALL_BYTES,
            worth_bytes=bundle_writer.WORTH_BYTES,
            replication=None if parts is None else self._replication,
        )
        read.extract = large.extract
        self.checkpoint.write(prefix)
        tensors: Sequence[DenseTensor] = large.found
        if save.is_async:
            spare, self._spare = self._spare, {}
            tensors = large_tensors.copied(tensors, bundle_writer.THREADS, spare)
            if (
                self.keeps_copies
            ):  # and not what came from a GPU, which is new each time
                self._spare = {
                    copy.name: copy.data
                    for copy, each in zip(tensors, large.found, strict=True)
                    if each.is_shared
                }
        is_dealt = bool(parts is not None and tensors and parts.is_worth_it(tensors))
        return dataclasses.replace(save, tensors=tensors, is_dealt=is_dealt)

    def _read_replicated(self, save: Staged, parts: WorkerParts) -> Staged:
        """The same tensors that the chief deals out, on another worker."""
        with _left_to_the_chief(save.step):
            tensors = large_tensors.replicated(
                self.checkpoint,
                small_bytes=bundle_writer.SMALL_BYTES,
                worth_bytes=parts.worth_bytes,
                is_replicated=self._replication(),
                wanted=parts.names_of_own,
            )
            if parts.is_worth_it(tensors):
                return dataclasses.replace(save, tensors=tensors, is_dealt=True)
        return save

    def _replication(self) -> large_tensors.IsReplicated:
        """What says whether all workers hold the same of a variable, and know it."""
        world = self.worker_parts.world if self.worker_parts is not None else 1
        [per_replica] = [s for s in self.states if isinstance(s, PerReplicaState)]
        own = {id(distributed(variable)) for _, variable in per_replica.variables()}
        return lambda each: (
            is_replicated(each, world) and id(distributed(each)) not in own
        )

    def free_copies(self) -> None:
        self._spare = {}

    def write_tensors(self, save: Staged) -> Staged:
        if save.is_dealt:
            assert self.worker_parts is not None
            if self.cluster.is_chief:
                parts = self.worker_parts.write_own(save)
                return dataclasses.replace(save, parts=parts)
            parts = []
            with _left_to_the_chief(save.step):
                parts = self.worker_parts.write_own(save)
            return dataclasses.replace(save, tensors=(), parts=parts)
        if not save.tensors:
            return save
        prefix = os.path.join(save.directory, layout.PAYLOAD)
        threads = bundle_writer.THREADS
        if save.is_async:  # the others are for training
            threads = max(1, threads // 2)
        sums = bundle_writer.add(
            self.files,
            prefix,
            save.tensors,
            threads,
            check=save.permit.check if save.permit else None,
        )
        return dataclasses.replace(save, tensors=(), sums=sums)

    def complete(self, save: Staged, workers: Collection[int]) -> Staged:
        assert self.worker_parts is not None
        parts = [*save.parts, *self.worker_parts.others(save, workers)]
        prefix = os.path.join(save.directory, layout.PAYLOAD)
        sums = bundle_writer.merge(self.files, prefix, parts)
        return dataclasses.replace(
            save, tensors=(), is_dealt=False, parts=(), sums=sums
        )


@contextlib.contextmanager
def _left_to_the_chief(step: int) -> Iterator[None]:
    """A worker's share that cannot be had costs nothing else of its part.

    The chief finds no description of it, and writes it.
    """
    try:
        yield
    except errors.LeaseLostError:
        raise
    except Exception as error:  # noqa: BLE001 - of TensorFlow, or no thread, say
        _log.warning(
            "tfpreempt: this worker's share of step %d cannot be written, so worker 0 "
            "writes it; nothing is lost: %s: %s",
            step,
            type(error).__name__,
            error,
        )


def _not_yet() -> None:
    """Takes the place of a method of a CheckpointManager while it saves."""


@dataclasses.dataclass(eq=False)
class _ManagedPayload(_Tracked):
    """The user's own CheckpointManager: files stay flat, under its own names.

    Args:
        files: the file operations.
    """

    files: Files

    can_be_async = False  # it is the user's, and deletes on the main thread

    def _write(
        self,
        save: Staged,
        prepare: Callable[..., None],
        arguments: dict[str, Any],
        read: Read,
    ) -> Staged:
        manager, checkpoint = self.by, self.checkpoint
        manager.sync()
        following = int(checkpoint.save_counter.numpy()) + 1
        number = _whole_number(arguments.get("checkpoint_number", following))
        prefix = os.path.abspath(f"{manager._prefix}-{number}")
        prepare(prefix if self.cluster.is_chief else None)
        if self._options is not None:
            arguments.setdefault("options", self._options)
        if "check_interval" not in arguments:
            # A preemption must not be lost to the manager's interval, nor to a save of
            # the user's own at this step, which nobody synced.
            arguments["check_interval"] = False
            if manager.checkpoint_interval is not None:
                manager._last_checkpoint_step = None
        is_saved = True
        if self.cluster.is_chief:
            # It deletes nothing yet: until our marker the old one is needed.
            kept, manager._max_to_keep = manager._max_to_keep, None
            manager._record_state = _not_yet
            try:
                is_saved = manager.save(**arguments) is not None
                manager.sync()
            finally:
                manager._max_to_keep = kept
                del manager._record_state
        else:  # what `manager.save` counts
            self._count_step()
            checkpoint.save_counter.assign_add(1)
        return dataclasses.replace(save, prefix=prefix, is_empty=not is_saved)

    def committed(self) -> None:
        if self.by.checkpoints:
            self._forget_others()
            self._record_state()
            kept = len(self.by.checkpoints)
            self.by._sweep()
            if len(self.by.checkpoints) < kept:
                self._record_state()

    def _forget_others(self) -> None:
        """Takes what lies elsewhere out of what the manager would delete.

        The manager believes TensorFlow's `checkpoint` file, which other users may be
        able to write, and the file can name checkpoints of any directory.
        """
        own = os.path.dirname(os.path.abspath(self.by._prefix))
        for prefix in list(self.by._maybe_delete):
            if os.path.dirname(os.path.abspath(prefix)) != own:
                del self.by._maybe_delete[prefix]
                _log.warning(
                    "tfpreempt: the file %r in %s names the checkpoint %r; expected "
                    "only checkpoints in %s. That checkpoint is kept, and the name is "
                    "removed from the file. Find out who wrote the name.",
                    layout.POINTER,
                    self.by.directory,
                    prefix,
                    own,
                )

    def _record_state(self) -> None:
        """What the manager does, who syncs nothing: after a loss of power its state may
        be empty, and then no manager can be made in this directory any more.
        """
        manager = self.by

        def relative(path: str) -> str:
            return os.path.relpath(path, manager.directory)

        state = pointer.Pointer(
            latest=relative(manager.latest_checkpoint),
            paths=tuple(map(relative, manager._maybe_delete)),
            timestamps=tuple(manager._maybe_delete.values()),
            last_preserved=manager._last_preserved_timestamp,
        )
        path = os.path.join(os.path.abspath(manager.directory), layout.POINTER)
        fence.publish(self.files, path, pointer.to_bytes(state))

    def _count_step(self) -> None:
        manager = self.by
        if manager.checkpoint_interval is not None:
            manager._last_checkpoint_step = _whole_number(manager._step_counter)

    def restored(self, candidate: Entry) -> None:
        """As `manager.restore_or_initialize` does, also for an older checkpoint."""
        self._count_step()
        manager = self.by
        if not self.cluster.is_chief or candidate.prefix is None:
            return
        folder, name = os.path.split(candidate.prefix)
        if folder != os.path.abspath(manager.directory):
            return
        prefix = os.path.join(manager.directory, name)  # as the manager writes it
        manager._latest_checkpoint = prefix
        if prefix not in manager._maybe_delete:
            manager._maybe_delete[prefix] = os.path.getmtime(prefix + ".index")


class _FunctionPayload(_Tracked):
    """A save_fn, called on every worker; the path it returns gets a manifest."""

    can_be_async = False  # nobody knows what it does

    def write(
        self, save: Staged, prepare: Callable[..., None], *args: Any, **kwargs: Any
    ) -> Staged:
        if self.checkpoint is not None:
            attach(self.checkpoint)
        with seams.checkpoint_context.preemption_save_context():
            path = self.by(*args, **kwargs)
            if self.checkpoint is not None:
                self.checkpoint.sync()
        prepare()  # last: save_fn may need all workers
        if path is None:
            return dataclasses.replace(save, is_empty=True)
        try:
            prefix = os.path.abspath(os.fsdecode(os.fspath(path)))
        except TypeError:
            raise errors.SaveError(
                f"save_fn returned {path!r}; expected the path that it wrote, or None."
            ) from None
        return dataclasses.replace(save, prefix=prefix)

    def needs_peers(self) -> bool:
        return True  # nobody knows what it does
