"""Functions of a forked supervisor; imports nothing of pytest."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from tfpreempt.cli import main


def supervise(
    directory: str, variables: Mapping[str, str], arguments: Sequence[str]
) -> None:
    """`tfpreempt run` there, with its output in the files `out` and `err`."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(["run", *arguments], prog_name="tfpreempt")
