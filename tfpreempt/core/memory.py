"""Memory that whoever supervises a program lends it for snapshots.

It is a directory that lies in memory, and outlives the program's processes. Nobody else
writes there. Two variables of the environment say where it is, and how much of it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

_DIRECTORY = "TFPREEMPT_SNAPSHOT_DIR"
_BYTES = "TFPREEMPT_SNAPSHOT_BYTES"

VARIABLES = (_DIRECTORY, _BYTES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LentMemory:
    """What each worker of this machine may use.

    Attributes:
        directory: in memory; it exists.
        bytes: that one worker's snapshots may take, with the copies that it makes while
            it takes one.
    """

    directory: str
    bytes: int

    def to_environment(self) -> dict[str, str]:
        """The variables by which a worker is told."""
        return {_DIRECTORY: self.directory, _BYTES: str(self.bytes)}


def lent_memory(environment: Mapping[str, str] | None = None) -> LentMemory | None:
    """What was lent to this process; None if nothing was, or it is gone.

    Args:
        environment: to read it from; None: this process's.
    """
    environment = os.environ if environment is None else environment
    directory, text = (environment.get(name, "") for name in VARIABLES)
    is_number = text.isascii() and text.isdecimal()
    if not (is_number and os.path.isabs(directory) and os.path.isdir(directory)):
        return None
    return LentMemory(directory=directory, bytes=int(text))
