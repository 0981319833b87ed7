"""Reads the history that W&B keeps on the disk while it is offline."""

import struct

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = struct.Struct("<IHB"), 32768


def _records(file):
    """The records of a `.wandb` file, which is a log as LevelDB writes it.

    A process that was killed leaves the last one cut off, which is passed over.
    """
    data, at, record = file.read_bytes(), 7, b""  # behind the mark of W&B
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK  # too little is left in the block for a header
            continue
        _checksum, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        record += data[at : at + length]
        at += length
        if at <= len(data) and kind in (1, 4):  # the whole of a record, or its end
            yield Record.FromString(record)
            record = b""


def steps(folder, run_id):
    """The steps that were logged to a run, in order of the starts and the logging.

    Args:
        folder: a path, which has the `offline-run-*` folders.
        run_id: of the run.
    """
    return [
        record.history.step.num
        for file in sorted(folder.glob(f"offline-run-*-{run_id}/*.wandb"))
        for record in _records(file)
        if record.HasField("history")
    ]
