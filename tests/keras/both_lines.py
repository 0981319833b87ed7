"""Helpers of the callback tests for both Keras: saved states and comparisons."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest

from tfpreempt.keras.fit_record import EncodedValue

LINES = pytest.mark.parametrize("line", ["keras", "tf_keras"])

PLAIN = (type(None), bool, int, float, str, list, dict, np.generic, np.ndarray)
OWN_TO_A_FIT = {
    *("params", "_model", "model", "csv_file", "writer", "filepath", "filename"),
    *("log_dir", "_log_write_dir", "_train_dir", "_val_dir", "_write_filepath"),
    *("_writers", "_prev_summary_state", "_batch_start_time", "_epoch_start_time"),
    "_previous_epoch_iterations",  # a tensor, which is restored as a NumPy number
}


def callbacks_of(line):
    """The module of the callbacks."""
    return importlib.import_module(line).callbacks


def travelled(states):
    """Returns states after a commit and a read by another process."""
    header = json.loads(json.dumps(states.header))
    return EncodedValue(header=header, arrays=tuple(map(bytes, states.arrays)))


def looks(callbacks):
    """Returns all comparable values of callbacks and their progress bars."""
    found = []
    for callback in callbacks:
        found.append(
            {
                name: repr(value)
                for name, value in vars(callback).items()
                if isinstance(value, PLAIN) and name not in OWN_TO_A_FIT
            }
        )
        if (bar := getattr(callback, "progbar", None)) is not None:
            found.append((bar._seen_so_far, repr(bar._values), bar._values_order))
    return found
