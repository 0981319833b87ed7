"""PreemptionCallback, the callback that a program adds to `model.fit`.

The class has every hook that Keras 3 and tf_keras call, and inherits from neither. So
the class works with both, and importing the module imports no Keras.
`isinstance(callback, keras.callbacks.Callback)` is still True, because `isinstance`
also reads the `__class__` of an object.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from tfpreempt import errors
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.checkpoint.restore.handle import (
    Checkpoint,
    checkpoints_in,
    latest_prefix,
)
from tfpreempt.core.arguments import check_timeout, is_period
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.core.scratch import local_directory
from tfpreempt.handler.bad_steps import BadSteps
from tfpreempt.handler.registration import open_compile_cache
from tfpreempt.keras.callbacks import builtin_callbacks, callback_files
from tfpreempt.keras.callbacks.callback_state import capture_files
from tfpreempt.keras.fit.frame_lookup import (
    callbacks_of,
    is_of_tf_keras,
    is_running,
    is_validation,
    keras_backend,
)
from tfpreempt.keras.fit.training import FitOptions, Training
from tfpreempt.keras.fit_record import EncodedValue
from tfpreempt.platforms.detected import resolve_config
from tfpreempt.storage import paths

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    import tf_keras

    from tfpreempt.platforms.config import TerminationConfig
    from tfpreempt.storage.object_store import ObjectStore

_running: list[Training] = []
"""The fit served by a callback of this process; at most one entry."""


class PreemptionCallback:
    """Makes `model.fit` safe to preempt: a restarted program resumes the fit.

    On a termination notice, the workers commit the same step and exit with the code
    that makes the platform restart the program. The restarted fit resumes at the next
    batch, bit for bit as if uninterrupted. docs/fit/data.md describes for which data
    the restart is exact.

    The callback may be at any position in the list of callbacks, and may serve several
    fits in sequence.

    Args:
        checkpoint_dir: directory used by this run only, on storage shared by the
            workers; or a URL, "gs://bucket/run", "s3://bucket/run" or
            "az://container/run": then every machine writes to a local scratch
            directory, and the URL is the mirror (see `mirror_dir`).
        save_freq: when to commit without a notice: "epoch" (after every epoch), an int
            (a number of batches), a `datetime.timedelta`, or None (on notices only).
            The state at the end of `fit` is always committed.
        termination_config: sources of notices, grace period and exit code. None detects
            the platform: SIGTERM is watched at once, a cloud's metadata server is
            queried in the background, and a log line names the platform.
        restore: False trains from the beginning even if there is a checkpoint.
        peer_timeout: timeout in seconds for any wait for other workers after a notice
            without a grace period. A step, an evaluation or a hook that this worker is
            running has no timeout after such a notice; the platform may end the
            process first.
        max_to_keep: number of commits to keep; None keeps every commit.
        keep_every: a number of steps or a `datetime.timedelta`: the first commit of
            each such period stays for ever. None: no such commit.
        best_by: `("val_loss", "min", 3)` also keeps the three commits with the lowest
            ("max": highest) value of a metric of the epoch's logs. With
            `keep_every` or `best_by`, at least the two newest commits stay.
        mirror_dir: URL of the mirror (the copy of the commits in an object store),
            gs://bucket/run, s3://bucket/run or az://container/run. Commits are uploaded
            in the background.
            If the mirror has a newer commit than the directory at the start, the fit
            resumes from the mirror. None: the value of the environment variable
            TFPREEMPT_MIRROR_DIR, if set.
        async_save: whether the saves of `save_freq` are asynchronous: the state is
            copied in memory, and the copy is written while training continues. False:
            training waits for the write, and no memory is needed for a copy.
        compile_cache: True keeps JAX's compilation cache with the commits: a restarted
            program loads compiled functions instead of compiling the functions again.
            Functions that are compiled before the callback is created are not kept, so
            create the callback before the model. Every user who can write to the
            directory or to the mirror can then make this program run code. Only for
            Keras on JAX.
        on_bad_step: steps to leave out of training, such as steps whose loss is NaN;
            see `BadSteps`. None: no step is left out. Pass the same value on every
            worker.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    # In the class, because the `Callback` of Keras 3 has a read-only property `model`.
    model: Any = None

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        save_freq: Literal["epoch"] | int | datetime.timedelta | None = "epoch",
        termination_config: TerminationConfig
        | tf.distribute.experimental.TerminationConfig
        | None = None,
        restore: bool = True,
        peer_timeout: float = 30.0,
        max_to_keep: int | None = 2,
        keep_every: int | datetime.timedelta | None = None,
        best_by: tuple[str, Literal["min", "max"], int] | None = None,
        mirror_dir: str | os.PathLike[str] | ObjectStore | None = None,
        async_save: bool = True,
        compile_cache: bool = False,
        on_bad_step: BadSteps | None = None,
    ) -> None:
        if isinstance(checkpoint_dir, os.PathLike):
            checkpoint_dir = os.fspath(checkpoint_dir)
        if not isinstance(checkpoint_dir, str) or not checkpoint_dir:
            raise errors.ConfigurationError(
                f"checkpoint_dir is {checkpoint_dir!r}; expected the path of a "
                "separate directory for this run, on storage that all workers share"
            )
        if restore not in (True, False):
            raise errors.ConfigurationError(
                f"restore is {restore!r}; expected True or False. Only a handler can "
                'restore in part: PreemptionCheckpointHandler(restore="partial")'
            )
        if not (on_bad_step is None or (isinstance(on_bad_step, BadSteps) and restore)):
            raise errors.ConfigurationError(
                f"on_bad_step is {on_bad_step!r} with restore={restore}; expected "
                "None, or tfpreempt.keras.BadSteps(...) with restore=True, because the "
                "fit returns to the last commit after a bad step"
            )
        if not (is_period(save_freq) or save_freq == "epoch"):
            raise errors.ConfigurationError(
                f'save_freq is {save_freq!r}; expected "epoch", a positive number of '
                "batches (an int), a positive datetime.timedelta "
                "(timedelta(minutes=5)), or None to save only at a preemption notice"
            )
        self._options = FitOptions(
            checkpoint_dir=checkpoint_dir,
            save_freq=save_freq,
            termination_config=termination_config,
            restore=restore,
            peer_timeout=peer_timeout,
            policy=RetentionPolicy(
                max_to_keep=max_to_keep, keep_every=keep_every, best_by=best_by
            ),
            mirror_dir=mirror_dir,
            async_save=async_save,
            on_bad_step=on_bad_step,
        )
        show_log_lines()
        if compile_cache:
            on_jax = keras_backend() == "jax"
            open_compile_cache(checkpoint_dir, mirror_dir, on_jax)
        # Shield the child processes now: before the fit begins, Keras may start
        # processes that read the data.
        resolve_config(termination_config)._shield_children()
        self._training: Training | None = None
        self._files: EncodedValue | None = None
        self._names = contextlib.ExitStack()  # file names resolved for the newest fit
        self._directory: str | None = None  # checkpoint directory of the newest fit
        self._last: MirrorStatus | None = None  # status at the end of the newest fit

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Checks that Keras' `Callback` does not hide the hooks of this class.

        Raises:
            UsageError: the class inherits from `Callback` before this class.
        """
        super().__init_subclass__(**arguments)
        before = cls.__mro__[: cls.__mro__.index(PreemptionCallback)]
        if set(before) & {*_imported_callback_classes()}:
            raise errors.UsageError(
                f"the class {cls.__name__!r} inherits from keras.callbacks.Callback "
                "before PreemptionCallback, so Keras would call none of its hooks. Put "
                f"PreemptionCallback first, or alone: class {cls.__name__}"
                "(PreemptionCallback)"
            )

    @property  # type: ignore[misc]  # the class is never assigned
    def __class__(self) -> type[PreemptionCallback]:
        """The class for `isinstance`: a subclass of the real class, and of the
        `Callback` of every imported Keras (keras, tf_keras).

        `type()` returns the real class, which does not inherit from Keras.
        """
        own: Any = type(self)
        return _with_keras_bases(own, _imported_callback_classes())

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes pickle use the real class: pickle refuses an object if its `__class__`
        differs from its type."""
        # In Python 3.10 only a subclass may have this method, `object` has none.
        get_state = getattr(self, "__getstate__", None)
        state = vars(self) if get_state is None else get_state()
        return object.__new__, (type(self),), state

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest commit for `tf.train.Checkpoint.restore`, or None.

        The path has the form of `tf.train.CheckpointManager.latest_checkpoint`. Reads
        the directory, but does not verify the commit.
        """
        return latest_prefix(self._local_directory())

    def checkpoints(self) -> list[Checkpoint]:
        """Returns references to the commits in the directory, oldest first.

        Reads the directory, but does not verify the commits. The list includes
        checkpoints by other programs that a fit can restore.
        `Checkpoint.kept_because` says why retention keeps a commit.

        Raises:
            CheckpointError: the directory cannot be listed.
        """
        return checkpoints_in(self._local_directory())

    def _local_directory(self) -> str:
        """Returns the path of the checkpoint directory; if the user gave a URL, the
        path of the scratch directory on this machine."""
        directory = self._directory or self._options.checkpoint_dir
        return paths.absolute(local_directory(directory))

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """State of the mirror `mirror_dir`. May be read on any thread.

        None without a mirror, before the first fit, and on workers other than the
        chief (worker 0). The end of a fit waits for the upload of the last commit;
        afterwards the state contains the result of the upload.
        """
        training = self._training
        if training is None:
            return self._last
        return training.run.directory.mirror_status

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until every commit is in `mirror_dir`. May be called on any thread.

        Also waits for an asynchronous save that has begun. After a fit the method
        returns at once, with the result of the fit's uploads.

        Args:
            timeout: seconds to wait. None waits while the upload makes progress, and
                stops after five minutes without progress.

        Returns:
            True if the mirror has the newest commit; also True without a mirror, and on
            workers other than the chief.

        Raises:
            ConfigurationError: the timeout is not a number of seconds.
        """
        check_timeout(timeout)
        training = self._training
        if training is not None:
            return training.session.wait_for_mirror(training.run, timeout)
        return self._last is None or self._last.is_complete

    # --- what Keras calls ------------------------------------------------------------

    def set_model(self, model: keras.Model | tf_keras.Model) -> None:
        """Stores the model at the start of a fit.

        Raises:
            ConfigurationError: Keras 3 runs on another backend than TensorFlow and JAX.
        """
        backend = "tensorflow" if is_of_tf_keras(model) else keras_backend()
        if backend not in ("tensorflow", "jax"):
            raise errors.ConfigurationError(
                f"Keras runs on the backend {backend!r}; expected the backend "
                "'tensorflow' or 'jax'. Set KERAS_BACKEND=tensorflow or "
                "KERAS_BACKEND=jax before keras is imported."
            )
        self.model = model
        callbacks = callbacks_of(model)
        self._names.close()  # left open by a fit that an error ended
        loggers = [
            each
            for each in callbacks
            if builtin_callbacks.kind(each) == callback_files.KIND
        ]
        if loggers:
            root = paths.absolute(local_directory(self._options.checkpoint_dir))
            self._names.enter_context(callback_files.resolved(loggers, root))
        # Read the text now: a CSVLogger may truncate its file when training begins.
        self._files = capture_files(loggers) if loggers else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agrees with other workers on a checkpoint, and plans the fit.

        Raises:
            UsageError: another PreemptionCallback is in this fit or in an outer fit.
        """
        if any(is_running(other.fit) for other in _running):
            raise errors.UsageError(
                "Got two PreemptionCallbacks in a fit, or in a fit inside a fit; "
                "expected one, because a process handles one preemption. Remove one "
                "PreemptionCallback."
            )
        while _running:
            _running.pop().abandon()
        self._directory = paths.absolute(self._options.checkpoint_dir)
        self._training = Training(self._options, self.model, self, self._files)
        _running.append(self._training)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prepares the counters of the epoch."""
        if self._training is not None:
            self._training.epoch_begins(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Handles the end of an epoch, after the user's callbacks. If a commit is due,
        the commit is made just before the next step."""
        if self._training is not None:
            self._training.epoch_ends(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins the validation of a fit; ignores an `evaluate` call of the program."""
        if self._training is not None and is_validation(self.model):
            self._training.validation_begins()

    def on_test_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Handles a pending preemption before a validation step."""
        if self._training is not None:
            self._training.validation_step()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the validation of a fit."""
        if self._training is not None:
            self._training.validation_ends()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Commits the final state of a fit, together with other workers.

        Raises:
            SaveError: the final state could not be committed.
        """
        training = self._training
        if training is not None:
            try:
                training.end()
            finally:
                self._last = training.run.directory.mirror_status
                self._training = None
                self._names.close()
            _running.remove(training)

    # --- hooks without work ----------------------------------------------------------

    def _not_used(self, *_: Any, **__: Any) -> None:
        """Does nothing: the step boundary is in the train function."""

    _not_used._is_default = True  # type: ignore[attr-defined]  # as Keras marks its own
    set_params = on_batch_begin = on_batch_end = _not_used
    on_train_batch_begin = on_train_batch_end = on_test_batch_end = _not_used
    on_predict_begin = on_predict_end = _not_used
    on_predict_batch_begin = on_predict_batch_end = _not_used

    # --- attributes that tf_keras reads from a callback -------------------------------

    _supports_tf_logs = True

    _implements_train_batch_hooks = staticmethod(lambda: False)
    _implements_test_batch_hooks = staticmethod(lambda: True)
    _implements_predict_batch_hooks = staticmethod(lambda: False)


def _imported_callback_classes() -> tuple[type, ...]:
    """Returns the `Callback` classes of `keras` and `tf_keras`, if imported."""
    modules = (sys.modules.get(f"{line}.callbacks") for line in ("keras", "tf_keras"))
    found = (getattr(module, "Callback", None) for module in modules)
    return tuple(each for each in found if each is not None)


class _NoHook:
    """First base of a class made by `_with_keras_bases`: hides the `__init_subclass__`
    of the user's classes, which expect only classes that the program defines."""

    def __init_subclass__(cls, **arguments: object) -> None:
        """Does nothing."""


@functools.cache
def _with_keras_bases(cls: type, bases: tuple[type, ...]) -> type:
    """Returns a subclass of `cls` and `bases`; `cls` itself if it has the bases.

    A call of the subclass returns an object of `cls`, as `self.__class__(...)` in a
    method of a program expects.
    """
    more = tuple(base for base in bases if not issubclass(cls, base))
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs),
    }
    return type(cls.__name__, (_NoHook, cls, *more), names) if more else cls
