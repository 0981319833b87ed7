"""Values of a fit that a commit contains in addition to the variables."""

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


# Without slots, because of the cached `digest`.
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedValue:
    """A value of plain Python and NumPy types, in encoded form.

    Later changes of the value do not affect the encoded form. Objects of the type bytes
    are not copied, because the state of an input pipeline may fill the memory.

    Attributes:
        header: description of the value, JSON-able.
        arrays: the bytes of the NumPy arrays in the value, and the bytes objects in the
            value. The header refers to them by index.
    """

    header: Any
    arrays: tuple[bytes, ...] = ()

    @staticmethod
    def of(value: Any, path: str = "the value") -> EncodedValue:
        """Encodes a value; the types of all its parts are preserved.

        Args:
            value: value of the types that `checkpoint.state.encoding` supports.
            path: name of the value in error messages.

        Raises:
            SaveError: a part of the value has a type that cannot be saved.
        """
        arrays: list[bytes] = []
        header = encode(value, path, arrays, takes_bytes=True)
        return EncodedValue(header=header, arrays=tuple(arrays))

    @functools.cached_property
    def digest(self) -> bytes:
        """Digest of the value. Two values have the same digest if they are equal bit
        for bit."""
        text = repr(self.header).encode()
        if not self.arrays:
            return text
        found = hashlib.sha256(text)
        for array in self.arrays:
            found.update(array)
        return found.digest()

    def value(self) -> Any:
        """Returns the encoded value; lists, dicts and arrays are new objects.

        Raises:
            CheckpointCorruptedError: the header and arrays were not made by `of`.
        """
        with readable("model.fit"):
            return decode(self.header, self.arrays)


class FitRecord(State):
    """State that saves named values of a fit. A load only stores the saved values in
    `loaded`; the fit applies them later.

    Args:
        name: name of the State.
        take: function returning the values by name; called on the main thread when the
            State is saved.
        per_worker: whether every worker saves its own values; see `State`.

    Attributes:
        loaded: values of the restored checkpoint; None if no checkpoint was restored.
    """

    _is_reserved = True

    def __init__(
        self,
        name: str,
        take: Callable[[], Mapping[str, EncodedValue]],
        *,
        per_worker: bool = False,
    ) -> None:
        self.loaded: dict[str, EncodedValue] | None = None
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
    def read(fileobj: IO[bytes]) -> dict[str, EncodedValue]:
        """Returns the values in a file written by `save`.

        Raises:
            CheckpointCorruptedError: the file is corrupt.
            CheckpointMismatchError: the file was written by an earlier version.
        """
        header, parts = read_parts(fileobj)
        if not isinstance(header, dict) or "record" not in header:
            raise errors.CheckpointMismatchError(
                "The checkpoint was written by an earlier version of tfpreempt, which "
                "saved the state of a fit in another format. Finish the run with the "
                "earlier version, or start from scratch in another checkpoint "
                "directory; tf.train.Checkpoint can restore the weights."
            )
        left = iter(parts)
        with readable("model.fit"):
            return {
                name: EncodedValue(
                    header=head, arrays=tuple(itertools.islice(left, count))
                )
                for name, (head, count) in header["record"].items()
            }
