"""Reads and writes the file of a single State, outside of any commit.

The file begins with a magic number and a checksum of the remaining bytes. Then follow
the highest sequence number that a commit had at the time of the write, and the bytes
that the State saved. If a commit has a higher sequence number than the file, the commit
is newer; so no clock is needed. The file is written under a temporary name and then
renamed, so readers always see a complete file.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
from typing import IO

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.state.state import State, naming
from tfpreempt.core.snapshot_memory import available_bytes
from tfpreempt.storage import checksum, file_reading
from tfpreempt.storage.files import Files, write_durably

_MAGIC = b"tfploose"
_HEADER = struct.Struct("<8sI")  # magic number; crc32c of the following bytes
_RANK = struct.Struct("<Q")  # highest sequence number; the State's bytes follow


def path_of(directory: str, worker: int, state: State) -> str:
    """Returns the path of the file of a State.

    Args:
        directory: the checkpoint directory.
        worker: index of this worker; used only if every worker saves the State
            (`per_worker`).
        state: the State.
    """
    folder = layout.worker_name(worker) if state.per_worker else layout.STATES
    return os.path.join(
        directory, folder, layout.check_state_name(state.name) + layout.STATE_SUFFIX
    )


def write(files: Files, directory: str, worker: int, state: State) -> str:
    """Writes the file of a State, atomically and durably.

    Args:
        files: file operations for the directory.
        directory: the checkpoint directory, which must exist.
        worker: index of this worker.
        state: State to save.

    Returns:
        The path of the file.

    Raises:
        OSError: a file operation failed.
        CheckpointError: the sequence of a checkpoint is above the limit.
        Exception: any error raised by the `save` of the State.
    """
    buffer = io.BytesIO()
    with naming(state, "save"):
        state.save(buffer)
    body = (
        _RANK.pack(catalog.highest_sequence(catalog.scan(directory)))
        + buffer.getvalue()
    )
    path = path_of(directory, worker, state)
    files.make_dirs(os.path.dirname(path))
    write_durably(files, path, _HEADER.pack(_MAGIC, checksum.of_bytes(body)) + body)
    # The folder of the file may be new: make its name durable.
    files.sync_dir(directory)
    return path


def _check_memory(size: int) -> None:
    """Raises MemoryError if a file of a size cannot be read, and copied, in memory: a
    sparse file of another user would fill the memory."""
    with contextlib.suppress(OSError):  # the free memory is unknown
        if 2 * size > (free := available_bytes()):
            raise MemoryError(f"{size} bytes, and {free} bytes of memory are free")


def read(path: str) -> tuple[int, IO[bytes]] | None:
    """Reads and checks a file written by `write`.

    Returns:
        The sequence number in the file, and a file object with the State's bytes; None
        if the file does not exist.

    Raises:
        CheckpointCorruptedError: the file has another format, a wrong checksum, or
            cannot be read.
    """
    try:
        # Follow no link in the checkpoint directory: neither the folder nor the file.
        root = os.path.dirname(os.path.dirname(path))
        with file_reading.open_inside(path, root) as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or not head.startswith(_MAGIC):
                raise errors.CheckpointCorruptedError(
                    f"{path!r} is not a State that tfpreempt saved; expected a file "
                    f"that begins with {_MAGIC!r}. Remove the file."
                )
            _check_memory(os.fstat(file.fileno()).st_size)
            body = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, MemoryError) as error:  # a hostile sparse file may be huge
        raise errors.CheckpointCorruptedError(
            f"The State in {path!r} cannot be read: {error!r}"
        ) from error
    crc, expected = checksum.of_bytes(body), _HEADER.unpack(head)[1]
    if crc != expected or len(body) < _RANK.size:
        raise errors.CheckpointCorruptedError(
            f"The State in {path!r} has crc32c {crc:08x} in {len(body)} bytes; "
            f"expected {expected:08x}, the checksum in its header."
        )
    (sequence,) = _RANK.unpack_from(body)
    return sequence, io.BytesIO(body[_RANK.size :])
