"""A replay: the program repeats steps of its run, in a copy of its directory.

`tfpreempt verify --replay` starts the program with an environment variable. The program
then trains in the copy, without a mirror, and exits with a commit after a given step.
The functions that choose the storage (`choose_storage`) and the exit (`resolve_config`)
of a run read the variable, so a replay changes no file of the run, and calls no
`exit_fn` and no platform.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping

from tfpreempt.core.scratch import is_url

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

    def path_in_copy(self, directory: str | os.PathLike[str] | None) -> str | None:
        """Returns the path in the copy that replaces a directory.

        Args:
            directory: a path in the directory of the run or in the copy, or one of
                these two directories.

        Returns:
            The path; None for all other directories, and for a URL.
        """
        named = os.fsdecode(directory or "")
        if not named or is_url(named):
            return None
        path = os.path.realpath(named)
        for root in (self.copy, self.directory):
            below = os.path.relpath(path, root)
            if below.split(os.sep)[0] != os.pardir:
                return os.path.normpath(os.path.join(self.copy, below))
        return None


@functools.cache
def read_replay() -> Replay | None:
    """Returns the replay of this process; None in training."""
    text = os.environ.get(_VARIABLE)
    return Replay(**json.loads(text)) if text else None
