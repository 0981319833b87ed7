"""Trains onto a file system of its own that becomes full, and later has room again."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from toy_model import Model, log_to_stdout, make_strategy, say

from tfpreempt import PreemptionCheckpointHandler

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000

directory = Path(sys.argv[1])
log_to_stdout()
libc = ctypes.CDLL(None, use_errno=True)
directory.mkdir()
if (
    libc.unshare(CLONE_NEWNS)
    or libc.mount(None, b"/", None, MS_REC_PRIVATE, None)
    or libc.mount(b"none", bytes(directory), b"tmpfs", 0, b"size=512k")
):
    say("forbidden", os.strerror(ctypes.get_errno()))
    sys.exit(0)

model = Model(make_strategy("none"))
handler = PreemptionCheckpointHandler(None, model.checkpoint, directory)


def save() -> None:
    try:
        made = handler.save()
        say("saved", made.path)
    except Exception as error:
        say("failed", type(error).__name__, error)


handler.run(model.step)
save()
filler = directory / "somebody-elses"
with filler.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
handler.run(model.step)
save()
say("left", sorted(p.name for p in directory.iterdir()))
filler.unlink()
handler.run(model.step)
save()
handler.close()
