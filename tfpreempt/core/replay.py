"""A replay: the program repeats steps of its run, in a copy of its directory.

`tfpreempt verify --replay` starts the program with an environment variable. The program
then trains in the copy, without a mirror, and exits with a commit after a given step.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping

_VARIABLE = "TFPREEMPT_REPLAY"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The steps to repeat.

    Attributes:
        directory: real path of the checkpoint directory of the run.
        copy: real path of the directory to train in, which has an older commit.
        until: number of completed steps after which the program commits and exits.
    """

    directory: str
    copy: str
    until: int

    def to_environment(self) -> Mapping[str, str]:
        """Returns the environment variable for the program."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}

    def is_for(self, directory: str | os.PathLike[str] | None) -> bool:
        """Returns whether a directory is the directory of the run, or the copy."""
        if not directory:
            return False
        return os.path.realpath(os.fsdecode(directory)) in (self.directory, self.copy)


@functools.cache
def read_replay() -> Replay | None:
    """Returns the replay of this process; None in training."""
    text = os.environ.get(_VARIABLE)
    return Replay(**json.loads(text)) if text else None
