"""The state of the callbacks of Keras 3 and tf_keras, class by class.

The attribute names are from the sources of Keras 3.15 and tf_keras 2.21. Names that a
version lacks are skipped. The lists exclude attributes that the hooks of a callback set
when a training, an epoch or a batch begins, because Keras calls these hooks before a
restore. Examples are ModelCheckpoint's `_current_epoch`, the model and the open event
files. The module imports neither Keras 3 nor tf_keras.
"""

from __future__ import annotations

import time
from typing import Any

ROOTS = ("keras.", "tf_keras.")
"""Prefixes of module names of Keras 3 and tf_keras."""

REMEMBERED: dict[str, tuple[str, ...]] = {
    "BackupAndRestore": (),  # the callback saves its own state
    "CSVLogger": (),  # state in a file: see callback_files.py
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "History": ("epoch", "history"),
    "LambdaCallback": (),  # the state of its functions is not accessible
    "LearningRateScheduler": (),
    "ModelCheckpoint": (
        "best",
        "epochs_since_last_save",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    "MonitorCallback": ("best",),
    "OrbaxCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_total_batches_seen",
    ),
    "ProgbarLogger": ("seen", "target"),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "RemoteMonitor": (),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": (
        "_global_train_batch",
        "_global_test_batch",
        "_previous_epoch_iterations",
        "_should_write_train_graph",
    ),
    "TerminateOnNaN": (),
}
"""Saved attributes by class. A subclass is looked up by its built-in base class."""

KEPT = {name for name, found in REMEMBERED.items() if found} - {"ProgbarLogger"}
"""Callbacks with saved attributes that affect more than the display."""

_BAR = ("_seen_so_far", "_values", "_values_order")
_BAR_TIMES = ("_start", "_time_after_first_step", "_time_at_epoch_start")
_BOARD_TIMES = ("_epoch_start_time",)


def kind(callback: Any) -> str | None:
    """Returns the class or base class of a callback found in `REMEMBERED`, or None."""
    for cls in type(callback).__mro__:
        if cls.__name__ in REMEMBERED and cls.__module__.startswith(ROOTS):
            return cls.__name__
    return None


def has_hooks(callback: Any) -> bool:
    """Returns whether the callback has `get_state()` and `set_state(state)`."""
    hooks = (getattr(callback, name, None) for name in ("get_state", "set_state"))
    return all(callable(hook) for hook in hooks)


def class_name(callback: Any) -> str:
    """Returns the callback's class name, equal in every version of Keras."""
    cls = type(callback)
    module = cls.__module__
    if module.startswith(ROOTS):
        module = module.partition(".")[0]
    return f"{module}.{cls.__qualname__}"


def capture(callback: Any) -> dict[str, Any]:
    """Returns the state of a callback; empty for a callback without known state."""
    name = kind(callback)
    state = _attributes(callback, REMEMBERED[name] if name else ())
    if hasattr(callback, "_set_monitor_op") and callback.monitor_op is not None:
        # Save whether larger or smaller is better: Keras 3 finds out only at the end of
        # the first epoch.
        is_more = "greater" in callback.monitor_op.__name__
        state["direction"] = "max" if is_more else "min"
    if name == "TensorBoard":
        state["elapsed"] = _elapsed(callback, _BOARD_TIMES)
        for writer in callback._writers.values():
            writer.flush()  # flush, because the process may exit after the save
    if name == "ProgbarLogger" and callback.progbar is not None:
        state["bar"] = _attributes(callback.progbar, _BAR)
        state["elapsed"] = _elapsed(callback.progbar, _BAR_TIMES)
    return state


def restore(callback: Any, state: dict[str, Any], *, extends: bool) -> None:
    """Restores the state of a callback.

    Sets only the attributes that `capture` saves. In a commit of another user, further
    names could be settings, such as the path of a file or of a directory that the
    callback writes or deletes.

    Args:
        callback: a callback of the captured class. The hooks that lead to the resumed
            position have run.
        state: result of `capture`.
        extends: whether the state was saved at the end of a fit that now continues with
            more epochs.
    """
    name = kind(callback)
    state = dict(state)
    direction = state.pop("direction", None)
    if direction is not None and callback.monitor_op is None:
        # Set `monitor_op`, which the callback needs to compare the best value. Keras
        # would derive `monitor_op` from the metrics, but these may be unknown before
        # the first step.
        mode, callback.mode = callback.mode, direction
        callback._set_monitor_op()
        callback.mode = mode
    if name == "ProgbarLogger":
        _restore_bar(callback, state, extends)
    elif name == "TensorBoard":
        _restore_board(callback, state, extends)
    elif name == "SwapEMAWeights" and extends:
        pass  # the new epoch has already put the raw (non-EMA) weights into the model
    else:
        _set(callback, state, REMEMBERED[name] if name else ())


def _restore_bar(logger: Any, state: dict[str, Any], extends: bool) -> None:
    """Restores the progress bar to the resumed batch. If a complete fit is extended,
    the new epoch's bar stays unchanged."""
    bar = logger.progbar
    if logger.target is None:
        logger.target = state["target"]
        if bar is not None:
            bar.target = logger.target
    if extends:
        return
    logger.seen = state["seen"]
    if bar is not None and "bar" in state:
        _set(bar, state["bar"], _BAR)
        _set_elapsed(bar, state["elapsed"], _BAR_TIMES)


def _restore_board(board: Any, counters: dict[str, Any], extends: bool) -> None:
    """Restores the counters of a TensorBoard. The speeds that the callback computes do
    not include the time of the restart."""
    elapsed = counters.pop("elapsed")
    if extends:
        # The hooks of the next batch ran before the restore. They counted this batch
        # from zero, so add their count to the saved count.
        counters["_global_train_batch"] += board._global_train_batch
        counters["_previous_epoch_iterations"] = board._previous_epoch_iterations
        if board.write_steps_per_second:
            iterations = int(board.model.optimizer.iterations.numpy())
            counters["_previous_epoch_iterations"] = iterations
    else:
        _set_elapsed(board, elapsed, _BOARD_TIMES)
    _set(board, counters, REMEMBERED["TensorBoard"])
    _renew_step(board)


def _renew_step(board: Any) -> None:
    """Makes the open summary writer count from the restored step (Keras 3 only).

    When a batch begins, Keras 3 gives the writer the step as a number, which the
    restore has to replace. tf_keras gives the writer a variable of the model, which the
    restore of the model sets.
    """
    contexts = getattr(board, "_prev_summary_state", ())
    if not contexts or not hasattr(board, "_global_test_batch"):
        return
    # The validation's writer is pushed on top of the training's writer.
    is_test = len(contexts) > 1
    board._pop_writer()
    if is_test:
        board._push_writer(board._val_writer, board._global_test_batch)
    else:
        board._push_writer(board._train_writer, board._global_train_batch)


def _attributes(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _set(owner: Any, values: dict[str, Any], names: tuple[str, ...]) -> None:
    """Sets the attributes `names` that have a value. Updates lists and dicts in place,
    as objects may share them."""
    for name in (each for each in names if each in values):
        value, current = values[name], getattr(owner, name, None)
        if type(current) is dict and type(value) is dict:
            current.clear()
            current.update(value)
        elif type(current) is list and type(value) is list:
            current[:] = value
        else:
            setattr(owner, name, value)


def _elapsed(owner: Any, names: tuple[str, ...]) -> dict[str, float]:
    """Returns the seconds that have passed since some `time.time()` values.

    Args:
        owner: object that has the `time.time()` values as attributes.
        names: names of the attributes.
    """
    now = time.time()
    found = _attributes(owner, names)
    return {name: now - when for name, when in found.items() if when is not None}


def _set_elapsed(owner: Any, elapsed: dict[str, float], names: tuple[str, ...]) -> None:
    now = time.time()
    _set(owner, {name: now - each for name, each in elapsed.items()}, names)
