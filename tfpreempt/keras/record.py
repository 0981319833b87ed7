"""What a commit holds of a fit besides the Checkpoint: named values in a State."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import IO, Any

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    decode,
    encode,
    read_parts,
    readable,
    write_parts,
)
from tfpreempt.checkpoint.state.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)  # without slots, for `digest`
class Encoded:
    """A value of plain Python and NumPy as it was when it was taken.

    Bytes are not copied on the way: those of a pipeline can be as large as memory.

    Attributes:
        header: JSON.
        arrays: the bytes of its arrays, and its bytes; the header says what they are.
    """

    header: Any
    arrays: tuple[bytes, ...] = ()

    @staticmethod
    def of(value: Any, path: str = "the value") -> Encoded:
        """Takes it, type for type.

        Args:
            value: what `checkpoint.encoding` knows.
            path: names it in an error.

        Raises:
            SaveError: a part of it is of a kind that cannot be kept.
        """
        arrays: list[bytes] = []
        header = encode(value, path, arrays, takes_bytes=True)
        return Encoded(header=header, arrays=tuple(arrays))

    @functools.cached_property
    def digest(self) -> bytes:
        """Equal where the values are, bit for bit."""
        text = repr(self.header).encode()
        if not self.arrays:
            return text
        found = hashlib.sha256(text)
        for array in self.arrays:
            found.update(array)
        return found.digest()

    def value(self) -> Any:
        """What was taken; lists, dicts and arrays are new.

        Raises:
            CheckpointDamagedError: it was not made by `of`.
        """
        with readable("a fit"):
            return decode(self.header, self.arrays)


class Record(State):
    """Saves what `take` gives, keeps what was loaded.

    Args:
        name: of the State.
        take: called on the main thread when a save is staged.
        per_worker: see `State`.

    Attributes:
        loaded: of the restored checkpoint; None without one.
    """

    _is_reserved = True

    def __init__(
        self,
        name: str,
        take: Callable[[], Mapping[str, Encoded]],
        *,
        per_worker: bool = False,
    ) -> None:
        self.loaded: dict[str, Encoded] | None = None
        self._take = take
        super().__init__(name, per_worker)

    def save(self, fileobj: IO[bytes]) -> None:
        taken = self._take()
        heads = {name: [one.header, len(one.arrays)] for name, one in taken.items()}
        arrays = itertools.chain.from_iterable(one.arrays for one in taken.values())
        write_parts(fileobj, {"record": heads}, list(arrays))

    def load(self, fileobj: IO[bytes]) -> None:
        self.loaded = self.read(fileobj)

    @staticmethod
    def read(fileobj: IO[bytes]) -> dict[str, Encoded]:
        """What one file holds.

        Raises:
            CheckpointDamagedError: it is something else.
            CheckpointMismatchError: it is of an earlier version.
        """
        header, parts = read_parts(fileobj)
        if not isinstance(header, dict) or "record" not in header:
            raise errors.CheckpointMismatchError(
                "The checkpoint is of an earlier tfpreempt, which kept the state of a "
                "fit in another form. Finish that run with the version that began it, "
                "or begin anew in another checkpoint directory; the weights can be "
                "restored with tf.train.Checkpoint."
            )
        left = iter(parts)
        with readable("a fit"):
            return {
                name: Encoded(header=head, arrays=tuple(itertools.islice(left, count)))
                for name, (head, count) in header["record"].items()
            }
