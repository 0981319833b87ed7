"""Reads curves from TensorBoard's event files, without TensorFlow.

A file is a sequence of frames. A frame has the length of a record, a checksum of the
length, the record, and a checksum of the record. A record is a protocol buffer (an
Event); tensorboardX has the definition.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfpreempt.cli.report.run_report import Point
from tfpreempt.core.lazy_import import to_install
from tfpreempt.core.record_validation import is_time
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage import file_reading

_HEAD = struct.Struct("<QI")
_SUM_BYTES = 4
_LARGEST = 1 << 30
_FLOATS = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8"}  # by TensorFlow's DataType number


def read_scalars(logdir: Path) -> tuple[dict[str, tuple[Point, ...]], list[str]]:
    """Returns the curves in TensorBoard's event files, and warnings.

    Args:
        logdir: log directory of TensorBoard.

    Returns:
        The points of every curve, by the curve's name: its folder in `logdir`, and its
        tag. And a warning for every file that cannot be read to the end.

    Raises:
        ConfigurationError: there are no event files, or tensorboardX is not installed.
    """
    paths = sorted(logdir.rglob("*tfevents*"))
    if not paths:
        raise ConfigurationError(
            f"--tensorboard {str(logdir)!r}: no event files found. Name the log_dir "
            "of the TensorBoard callback, or of the tf.summary writer."
        )
    event_type = _event_type()
    curves: dict[str, list[Point]] = defaultdict(list)
    warnings = []
    for path in paths:
        folder = os.path.relpath(path.parent, logdir)
        prefix = "" if folder == os.curdir else f"{folder}/"
        try:
            for tag, point in _scalars(path, event_type):
                curves[prefix + tag].append(point)
        except (OSError, ValueError) as error:
            warnings.append(f"{path.name}: not read to the end ({error})")
    return {name: tuple(sorted(curves[name])) for name in sorted(curves)}, warnings


def _event_type() -> Any:
    try:
        from tensorboardX.proto.event_pb2 import Event
    except ImportError as error:
        raise ConfigurationError(
            "--tensorboard needs tensorboardX, which reads the files without "
            f"TensorFlow. Install it with: {to_install('report')}"
        ) from error
    return Event


def _scalars(path: Path, event_type: Any) -> Iterator[tuple[str, Point]]:
    from google.protobuf.message import DecodeError

    for data in _frames(path):
        try:
            event = event_type.FromString(data)
        except DecodeError as error:
            raise ValueError(str(error)) from error
        if not is_time(event.wall_time):
            raise ValueError(f"a record with the time {event.wall_time!r}")
        for value in event.summary.value:
            number = _number(value)
            if number is not None and np.isfinite(number):
                yield value.tag, (event.wall_time, float(event.step), number)


def _frames(path: Path) -> Iterator[bytes]:
    """Yields the records of an event file, as bytes.

    Raises:
        ValueError: the file ends within a record, or a record is too large.
    """
    with file_reading.open_file(str(path)) as file:
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise ValueError("the file ends within a record")
            size, _ = _HEAD.unpack(head)
            if not 0 < size <= _LARGEST:  # 0: a hole of a sparse file
                raise ValueError(f"a record of {size} bytes")
            data = file.read(size)
            if len(data) < size or len(file.read(_SUM_BYTES)) < _SUM_BYTES:
                raise ValueError("the file ends within a record")
            yield data


def _number(value: Any) -> float | None:
    """Returns the value in a summary as a float; None if the value is no scalar."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = value.tensor
    if tensor.tensor_shape.dim:
        return None
    for numbers in (tensor.float_val, tensor.double_val, tensor.int64_val):
        if len(numbers) == 1:
            return float(numbers[0])
    kind = _FLOATS.get(tensor.dtype)
    if kind and len(tensor.tensor_content) == np.dtype(kind).itemsize:
        return float(np.frombuffer(tensor.tensor_content, kind)[0])
    return None
