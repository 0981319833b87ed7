"""What TensorFlow does in a save.

On every worker the save reads what needs all workers (`collective`); the chief
goes on to write it, in one of three forms: a directory of our own, the user's own
CheckpointManager, or whatever a save_fn does.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_context as _checkpoint_context

from tfpreempt import errors
from tfpreempt.checkpoint import layout, reader
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.collective import gathering, needs_peers
from tfpreempt.checkpoint.iterator_state import (
    IteratorState,
    check_position,
    iterators,
)
from tfpreempt.checkpoint.loader import CheckpointLoader
from tfpreempt.checkpoint.payload import Contents, Payload, Save, Written
from tfpreempt.checkpoint.per_replica import PerReplicaState
from tfpreempt.checkpoint.random_state import RandomState, warn_of_kernels
from tfpreempt.checkpoint.saver import CheckpointSaver, Copies
from tfpreempt.checkpoint.state import REGISTRY, State, StateRegistry
from tfpreempt.checkpoint.untracked import attach
from tfpreempt.checkpoint.variables import plain_message
from tfpreempt.core.clock import Clock
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.storage import failure
from tfpreempt.storage.files import Files


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
    registry: StateRegistry = REGISTRY,
    files: Files | None = None,
    clock: Clock | None = None,
) -> CheckpointSaver:
    """Builds the saver for what the user gave.

    Args:
        checkpoint_or_manager: a tf.train.Checkpoint, a tf.train.CheckpointManager, or
            None for named States alone.
        checkpoint_dir: where a Checkpoint is saved; a manager has its own.
        cluster: who the workers are; the chief writes the payload and commits.
        max_to_keep: own commits to keep, None for all; a manager keeps its own number.
        save_fn: called on every worker in place of the save.
        chief_directory: the chief's directory, where a non-chief manager has another.
        io_device: where TensorFlow's files are written and read; None: where the
            variables are, which may be another machine.
        copies: the copy of the directory in an object store; None without one.
        registry: the named States that go along.
        files: the file operations.
        clock: for measured times.

    Raises:
        ConfigurationError: an argument cannot work; says what to do.
    """
    given = checkpoint_or_manager
    is_managed = isinstance(given, tf.train.CheckpointManager)
    if not (given is None or is_managed or isinstance(given, tf.train.Checkpoint)):
        raise errors.ConfigurationError(
            "Expected a tf.train.Checkpoint, a tf.train.CheckpointManager or None; got "
            f"{type(given).__name__}: {given!r}."
        )
    checkpoint = given.checkpoint if is_managed else given
    files_begin = os.path.basename(given._prefix) if is_managed else layout.PAYLOAD
    directory = failure.check_directory(
        chief_directory or (given.directory if is_managed else checkpoint_dir),
        is_flat=save_fn is not None or is_managed,
        name=None if checkpoint is None else files_begin,
    )
    is_chief = cluster.is_chief
    if checkpoint is not None and (save_fn is None or not is_chief):
        for path, iterator in iterators(checkpoint):
            check_position(iterator, f"The iterator {path!r} of the Checkpoint")
    payload = Payload()
    if save_fn is not None:
        payload = _FunctionPayload(save_fn, checkpoint, is_chief, io_device)
    elif is_managed:
        payload = _ManagedPayload(given, is_chief, io_device)
    elif given is not None:
        payload = _OwnPayload(given, is_chief, io_device)
    contents = Contents(
        cluster=cluster,
        payload=payload,
        random_state=RandomState(),
        registry=registry,
    )
    loader = CheckpointLoader(
        contents,
        directory,
        max_to_keep=max_to_keep,
        needs_prefix=checkpoint is not None and save_fn is None,
        files=files,
    )
    return CheckpointSaver(loader, copies=copies, clock=clock)


class _Tracked(Payload):
    """The part of a payload that has to do with one tf.train.Checkpoint."""

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint | None,
        is_chief: bool,
        io_device: str | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._is_chief = is_chief
        options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._options = None if io_device is None else options
        self.states: list[State] = []
        if checkpoint is not None:
            if not tf.executing_eagerly():
                raise errors.UsageError(
                    "tfpreempt needs eager execution (TensorFlow 2)."
                )
            self.states.append(PerReplicaState(checkpoint))
            warn_of_kernels(checkpoint)
            if not is_chief:
                self.states.append(IteratorState(checkpoint))

    def needs_peers(self) -> bool:
        attach(self._checkpoint)
        return needs_peers(self._checkpoint)

    def check(self, prefix: str) -> None:
        if self._checkpoint is not None:
            reader.check(prefix)

    def restore(self, prefix: str, *, with_data: bool = True) -> None:
        if self._checkpoint is not None:
            reader.restore(self._checkpoint, prefix, self._options, with_data)


# --- the three kinds of payload ------------------------------------------------------


@contextlib.contextmanager
def _writing(what: str) -> Iterator[None]:
    """As TensorFlow's own handler saves; its errors become SaveError."""
    try:
        with _checkpoint_context.preemption_save_context():
            yield
    except tf.errors.OpError as error:
        said = plain_message(error)
        advice = failure.advice_on(said)
        raise errors.SaveError(
            f"Could not write {what}: {type(error).__name__}: {said}"
            + (f"; {advice}" if advice else "")
            + ". No older checkpoint was touched."
        ) from error


def _save_arguments(save: Save) -> dict[str, Any]:
    """The arguments of `tf.train.CheckpointManager.save` by name, as far as given.

    Raises:
        ConfigurationError: it has no such arguments.
    """
    manager_save = inspect.signature(tf.train.CheckpointManager.save)
    try:
        given = manager_save.bind(None, *save.args, **save.kwargs).arguments
    except TypeError as error:
        raise errors.ConfigurationError(
            "Arguments for the save are those of tf.train.CheckpointManager.save "
            f"{manager_save}; got {save.args!r}, {save.kwargs!r}: {error}"
        ) from error
    return {name: value for name, value in given.items() if value is not None}


def _whole_number(value: Any) -> int:
    """A number, or the value of a variable or tensor."""
    return int(value.numpy() if hasattr(value, "numpy") else value)


class _OwnPayload(_Tracked):
    """A tf.train.Checkpoint in a directory of our own per commit."""

    def write(self, save: Save) -> Written:
        checkpoint = self._checkpoint
        assert checkpoint is not None
        attach(checkpoint)
        with _writing(f"step {save.step}"), gathering(checkpoint):
            arguments = _save_arguments(save)
            checkpoint.sync()
            checkpoint.save_counter.assign_add(1)
            save.prepare()
            if self._is_chief:
                checkpoint.write(
                    os.path.join(save.directory, layout.PAYLOAD),
                    options=arguments.get("options") or self._options,
                )
        number = arguments.get("checkpoint_number", save.step)
        return Written(number=_whole_number(number))


class _ManagedPayload(_Tracked):
    """The user's own CheckpointManager: files stay flat, under its own names."""

    def __init__(
        self,
        manager: tf.train.CheckpointManager,
        is_chief: bool,
        io_device: str | None,
    ) -> None:
        super().__init__(manager.checkpoint, is_chief, io_device)
        self._manager = manager

    def write(self, save: Save) -> Written:
        attach(self._manager.checkpoint)
        with _writing(f"step {save.step}"), gathering(self._manager.checkpoint):
            save.prepare()
            return self._save(save)

    def _save(self, save: Save) -> Written:
        manager, checkpoint = self._manager, self._manager.checkpoint
        arguments = _save_arguments(save)
        if self._options is not None:
            arguments.setdefault("options", self._options)
        if "check_interval" not in arguments:
            # A preemption must not be lost to the manager's interval, nor to a save of
            # the user's own at this step, which nobody synced.
            arguments["check_interval"] = False
            if manager.checkpoint_interval is not None:
                manager._last_checkpoint_step = None
        manager.sync()
        following = int(checkpoint.save_counter.numpy()) + 1
        number = _whole_number(arguments.get("checkpoint_number", following))
        prefix = os.path.abspath(f"{manager._prefix}-{number}")
        is_saved = True
        if self._is_chief:
            save.declare(prefix)
            with _keeping_all(manager):
                is_saved = manager.save(**arguments) is not None
                manager.sync()
        else:
            self._follow()
        return Written(number=save.step, prefix=prefix, is_empty=not is_saved)

    def committed(self) -> None:
        if self._manager.checkpoints:
            self._manager._sweep()
            self._manager._record_state()

    def _follow(self) -> None:
        """What `manager.save` counts, on a worker that writes nothing."""
        self._count_step()
        self._manager.checkpoint.save_counter.assign_add(1)

    def _count_step(self) -> None:
        manager = self._manager
        if manager.checkpoint_interval is not None:
            manager._last_checkpoint_step = _whole_number(manager._step_counter)

    def restored(self, candidate: Entry) -> None:
        """As `manager.restore_or_initialize` does, also for an older checkpoint."""
        self._count_step()
        manager = self._manager
        if not self._is_chief or candidate.prefix is None:
            return
        folder, name = os.path.split(candidate.prefix)
        if folder != os.path.abspath(manager.directory):
            return
        prefix = os.path.join(manager.directory, name)  # as the manager writes it
        manager._latest_checkpoint = prefix
        if prefix not in manager._maybe_delete:
            manager._maybe_delete[prefix] = os.path.getmtime(prefix + ".index")


@contextlib.contextmanager
def _keeping_all(manager: tf.train.CheckpointManager) -> Iterator[None]:
    """Puts off the manager's deletions: until our marker the old one is needed."""
    kept = manager._max_to_keep
    manager._max_to_keep = None
    try:
        yield
    finally:
        manager._max_to_keep = kept


class _FunctionPayload(_Tracked):
    """A save_fn, called on every worker; the path it returns gets a manifest."""

    def __init__(
        self,
        save_fn: Callable[..., Any],
        checkpoint: tf.train.Checkpoint | None,
        is_chief: bool,
        io_device: str | None,
    ) -> None:
        super().__init__(checkpoint, is_chief, io_device)
        self._save_fn = save_fn

    def write(self, save: Save) -> Written:
        if self._checkpoint is not None:
            attach(self._checkpoint)
        with _checkpoint_context.preemption_save_context():
            path = self._save_fn(*save.args, **save.kwargs)
            if self._checkpoint is not None:
                self._checkpoint.sync()
        save.prepare()  # last: save_fn may need all workers
        if path is None:
            return Written(number=save.step, is_empty=True)
        try:
            prefix = os.path.abspath(os.fsdecode(os.fspath(path)))
        except TypeError:
            raise errors.SaveError(
                f"save_fn returned {path!r}; expected the path that it wrote, or None."
            ) from None
        return Written(number=save.step, prefix=prefix)

    def needs_peers(self) -> bool:
        return True  # nobody knows what it does
