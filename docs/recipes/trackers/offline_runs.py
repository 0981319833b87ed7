"""Reads the history that W&B writes to the disk in offline mode."""

import struct

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = struct.Struct("<IHB"), 32768


def _records(file):
    """Yields the records of a `.wandb` file, a log in LevelDB's format.

    An incomplete last record, left by a killed process, is skipped.
    """
    data, at, record = file.read_bytes(), 7, b""  # after W&B's file header
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK  # the block has no room for a header
            continue
        _checksum, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        record += data[at : at + length]
        at += length
        if at <= len(data) and kind in (1, 4):  # a full record, or its last part
            yield Record.FromString(record)
            record = b""


def steps(folder, run_id):
    """Returns the logged steps of a run, ordered by start and by log call.

    Args:
        folder: path of the folder with the `offline-run-*` folders.
        run_id: id of the run.
    """
    return [
        record.history.step.num
        for file in sorted(folder.glob(f"offline-run-*-{run_id}/*.wandb"))
        for record in _records(file)
        if record.HasField("history")
    ]
