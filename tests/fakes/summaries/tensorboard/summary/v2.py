"""Scalar summaries."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def scalar(name: str, data: Any, step: Any = None, description: Any = None) -> Any:
    """Writes a scalar to the default writer, marked as TensorBoard's scalars are."""
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    return tf.summary.write(name, tf.cast(data, tf.float32), step, metadata)
