"""PreemptionCallback: what a user of `model.fit` adds.

The class has every hook that Keras 3 and tf_keras call, and inherits from neither, so
that one class serves both and importing it imports neither.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.mirror.status import MirrorStatus
from tfpreempt.checkpoint.restore import handle
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.core.arguments import check_timeout
from tfpreempt.core.scratch import local_directory
from tfpreempt.keras.callbacks import files, known
from tfpreempt.keras.callbacks.state import capture_files
from tfpreempt.keras.fit import plan
from tfpreempt.keras.fit.lookup import (
    callbacks_of,
    is_of_tf_keras,
    is_running,
    is_validation,
)
from tfpreempt.keras.fit.training import Options, Training
from tfpreempt.keras.record import Encoded
from tfpreempt.platforms.detected import resolve_config
from tfpreempt.storage import paths

_running: list[Training] = []
"""The fit that a callback of this process serves; the process belongs to one."""


def new_process() -> None:
    """For tests: no fit began in this process yet; one that was cut off has died."""
    while _running:
        _running.pop().abandon()
    plan.PASTS.clear()


class PreemptionCallback:
    """Makes `model.fit` safe to interrupt: add it to the callbacks, run again.

    On a termination notice all workers commit the same step and leave with the code
    that makes their platform start them again; the next start goes on at the next
    batch, bit for bit as if nothing had happened. docs/fit/data.md says what is exact.

    It may stand anywhere among the callbacks and serve several fits, one after another.

    Args:
        checkpoint_dir: a directory of its own, on storage that all workers share; or
            a URL, "gs://bucket/run" or "s3://bucket/run", which is the mirror of a
            scratch directory on each machine.
        save_freq: when to commit without a notice: "epoch" (after each epoch), an int
            (so many batches), a `datetime.timedelta`, or None (on notices only). The
            state at the end of `fit` is committed in any case.
        termination_config: when, with how much grace and how to leave. None: the
            platform is detected. SIGTERM is watched at once; the metadata server of a
            cloud is asked in the background, and a line of the log names the platform.
        restore: False trains from the beginning although there is a checkpoint.
        save_timeout: seconds that any wait for other workers may take where the notice
            came without a grace period. A step, an evaluation or a hook of this
            worker's own has no limit then: the platform ends it, if it must.
        max_to_keep: commits to keep; None keeps all.
        remote_checkpoint_dir: gs://bucket/run or s3://bucket/run: commits are copied
            there in the background, and a start whose directory has nothing newer goes
            on from there. None: TFPREEMPT_REMOTE_CHECKPOINT_DIR, if set.
        async_save: whether the saves of `save_freq` are asynchronous: the state is
            copied in memory, and written while training goes on. False: training waits
            for them, and no memory is taken.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        save_freq: str | int | datetime.timedelta | None = "epoch",
        termination_config: Any = None,
        restore: bool = True,
        save_timeout: float = 30.0,
        max_to_keep: int | None = 2,
        remote_checkpoint_dir: Any = None,
        async_save: bool = True,
    ) -> None:
        if isinstance(checkpoint_dir, os.PathLike):
            checkpoint_dir = os.fspath(checkpoint_dir)
        if not isinstance(checkpoint_dir, str) or not checkpoint_dir:
            raise errors.ConfigurationError(
                f"checkpoint_dir is {checkpoint_dir!r}; expected the path of a "
                "directory of its own for this run, on storage that all workers share"
            )
        every: Any = save_freq
        is_time = isinstance(every, datetime.timedelta) and every.total_seconds() > 0
        is_count = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if not (every is None or every == "epoch" or is_time or is_count):
            raise errors.ConfigurationError(
                f'save_freq is {every!r}; expected "epoch", a positive number of '
                "batches (an int), a positive datetime.timedelta "
                "(timedelta(minutes=5)), or None for notices only"
            )
        self._options = Options(
            checkpoint_dir=checkpoint_dir,
            save_freq=save_freq,
            termination_config=termination_config,
            restore=restore,
            save_timeout=save_timeout,
            max_to_keep=max_to_keep,
            remote_checkpoint_dir=remote_checkpoint_dir,
            async_save=async_save,
        )
        # Keras may start readers before the fit begins.
        resolve_config(termination_config).guard_children()
        self._training: Training | None = None
        self._files: Encoded | None = None
        self._names = contextlib.ExitStack()  # resolved for the newest fit
        self._directory: str | None = None  # of the newest fit
        self._last: MirrorStatus | None = None  # at the end of the newest fit
        self.model: Any = None

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest commit in the directory, or None. Reads the directory."""
        directory = self._directory or self._options.checkpoint_dir
        return handle.latest(paths.absolute(local_directory(directory)))

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """How far the copying to `remote_checkpoint_dir` is; any thread.

        None without one, before the first fit, and on workers other than the chief. A
        fit's end waits for the copy of its last commit; after it this tells how far
        that came.
        """
        training = self._training
        if training is None:
            return self._last
        return training.run.directory.mirror_status

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until every commit is copied to `remote_checkpoint_dir`; any thread.

        An asynchronous save that has begun is one of them.
        After a fit nothing is copied any more, and this only says how it ended.

        Args:
            timeout: seconds; None waits as long as the upload gets on, and gives up
                after five minutes in which it didn't.

        Returns:
            Whether the newest commit is there; True without a `remote_checkpoint_dir`,
            and on workers other than the chief.

        Raises:
            ConfigurationError: the timeout is no number of seconds.
        """
        check_timeout(timeout)
        training = self._training
        if training is not None:
            return training.session.wait_for_mirror(training.run, timeout)
        return self._last is None or self._last.is_complete

    # --- what Keras calls ------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Takes the model, at the start of a fit.

        Raises:
            ConfigurationError: Keras 3 runs on another backend than TensorFlow.
        """
        if not is_of_tf_keras(model):
            import keras

            if (backend := keras.backend.backend()) != "tensorflow":
                raise errors.ConfigurationError(
                    f"Keras runs on the backend {backend!r}; tfpreempt works with the "
                    "TensorFlow backend only. Set KERAS_BACKEND=tensorflow before "
                    "keras is imported."
                )
        self.model = model
        callbacks = callbacks_of(model)
        self._names.close()  # of a fit that died
        loggers = [each for each in callbacks if known.kind(each) == files.KIND]
        if loggers:
            self._names.enter_context(files.resolved(loggers))
        # A logger may empty its file.
        self._files = capture_files(loggers) if loggers else None

    def on_train_begin(self, logs: Any = None) -> None:
        """A fit begins: agrees with all workers on a checkpoint, finds its place."""
        if any(is_running(other.fit) for other in _running):
            raise errors.UsageError(
                "two PreemptionCallbacks are in one fit, or in a fit inside a fit; a "
                "process can be preempted only once. Remove one of them."
            )
        while _running:
            _running.pop().abandon()
        self._directory = paths.absolute(self._options.checkpoint_dir)
        self._training = Training(self._options, self.model, self, self._files)
        _running.append(self._training)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        if self._training is not None:
            self._training.epoch_begins(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch ends; the next step commits it, when all callbacks are through."""
        if self._training is not None:
            self._training.epoch_ends(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """The validation of a fit begins, or an `evaluate` of the user's."""
        if self._training is not None and is_validation(self.model):
            self._training.validation_begins()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step of it."""
        if self._training is not None:
            self._training.validation_step()

    def on_test_end(self, logs: Any = None) -> None:
        """Its end."""
        if self._training is not None:
            self._training.validation_ends()

    def on_train_end(self, logs: Any = None) -> None:
        """A fit ends: commits its final state with all workers.

        Raises:
            SaveError: it could not be committed.
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
        """Nothing: the train function is the boundary."""

    _not_used._is_default = True  # type: ignore[attr-defined]  # as Keras marks its own
    set_params = on_batch_begin = on_batch_end = _not_used
    on_train_batch_begin = on_train_batch_end = on_test_batch_end = _not_used
    on_predict_begin = on_predict_end = _not_used
    on_predict_batch_begin = on_predict_batch_end = _not_used

    # --- what tf_keras asks a callback -----------------------------------------------

    _supports_tf_logs = True

    _implements_train_batch_hooks = staticmethod(lambda: False)
    _implements_test_batch_hooks = staticmethod(lambda: True)
    _implements_predict_batch_hooks = staticmethod(lambda: False)
