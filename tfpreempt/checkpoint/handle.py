"""Checkpoint: a reference to one checkpoint, by its path."""

from __future__ import annotations

import os
from typing import NoReturn


class Checkpoint:
    """A reference to one checkpoint; reads and writes nothing by itself.

    Args:
        path: the commit's directory in the own form, the prefix in the flat form.
        prefix: what `tf.train.Checkpoint.restore` takes; None where the commit holds
            named States only.
        step: the step that it carries; None if a foreign writer didn't say.
    """

    __slots__ = ("_path", "_prefix", "_step")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str | None = None,
        step: int | None = None,
    ) -> None:
        self._path = os.fspath(path)
        self._prefix = prefix
        self._step = step

    @property
    def path(self) -> str:
        """The commit's directory in the own form, the prefix in the flat form."""
        return self._path

    @property
    def prefix(self) -> str | None:
        """What `tf.train.Checkpoint.restore` takes."""
        return self._prefix

    @property
    def step(self) -> int | None:
        """The step that it carries."""
        return self._step

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is a reference, not a path. Use `.path` for its directory or "
            "`.prefix` for tf.train.Checkpoint.restore()."
        )

    def __repr__(self) -> str:
        return f"Checkpoint({self._path!r}, step={self._step})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return (self._path, self._step) == (other._path, other._step)

    def __hash__(self) -> int:
        return hash((self._path, self._step))
