"""The state of a fit as two named States: what all workers share, what each has."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import IO, Any

from tfpreempt.checkpoint.encoding import decode, encode, read_parts, write_parts
from tfpreempt.checkpoint.random_state import RandomState
from tfpreempt.checkpoint.state import State
from tfpreempt.keras.callbacks.state import CallbackStates
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.fit.progress import Progress

SHARED = "tfpreempt.keras"
OWN = "tfpreempt.keras.worker"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Equal on all workers; the chief's is saved."""

    progress: Progress
    callbacks: CallbackStates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One worker's.

    Attributes:
        variables: header of the variables that are kept apart.
        values: their bytes.
        random: the random generators, as `RandomState` writes them.
        files: what callbacks keep in files.
        attributes: what the model keeps in Python.
        position: in the training data; None where the fit has taken none.
    """

    variables: Any
    values: tuple[bytes, ...]
    random: bytes
    files: CallbackStates
    attributes: CallbackStates
    position: Position | None


class SharedState(State):
    """Saves what `take` gives, keeps what was loaded.

    Args:
        take: called on the main thread when a save is staged.

    Attributes:
        loaded: of the restored checkpoint; None without one.
    """

    _is_reserved = True

    def __init__(self, take: Callable[[], Shared]) -> None:
        self.loaded: Shared | None = None
        self._take = take
        super().__init__(SHARED)

    def save(self, fileobj: IO[bytes]) -> None:
        shared = self._take()
        header = {
            "progress": encode(shared.progress.to_json()),
            "callbacks": shared.callbacks.header,
        }
        write_parts(fileobj, header, list(shared.callbacks.arrays))

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        self.loaded = Shared(
            progress=Progress.from_json(decode(header["progress"])),
            callbacks=CallbackStates(header=header["callbacks"], arrays=tuple(parts)),
        )


class OwnState(State):
    """Likewise, for each worker."""

    _is_reserved = True

    def __init__(self, take: Callable[[], Own]) -> None:
        self.loaded: Own | None = None
        self._take = take
        super().__init__(OWN, per_worker=True)

    def save(self, fileobj: IO[bytes]) -> None:
        own = self._take()
        position = () if own.position is None else own.position.parts
        header = {
            "variables": own.variables,
            "files": own.files.header,
            "attributes": own.attributes.header,
            "place": None if own.position is None else own.position.to_json(),
            "counts": [len(own.values), len(own.files.arrays)],
        }
        parts = [*own.values, *own.files.arrays, own.random, *position]
        write_parts(fileobj, header, [*own.attributes.arrays, *parts])

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        attributes = header.get("attributes", [])  # older commits have none
        count = sum(entry["arrays"] for entry in attributes)
        arrays, parts = parts[:count], parts[count:]
        values, files = header["counts"]
        rest = parts[values + files :]
        place = header["place"]
        self.loaded = Own(
            variables=header["variables"],
            values=tuple(parts[:values]),
            files=CallbackStates(
                header=header["files"], arrays=tuple(parts[values : values + files])
            ),
            attributes=CallbackStates(header=attributes, arrays=tuple(arrays)),
            random=rest[0],
            position=None if place is None else Position.from_json(place, rest[1:]),
        )


def random_bytes() -> bytes:
    """The random generators of this process."""
    buffer = io.BytesIO()
    _RANDOM.save(buffer)
    return buffer.getvalue()


def set_random(state: bytes) -> None:
    """Sets them to what `random_bytes` gave."""
    _RANDOM.load(io.BytesIO(state))


_RANDOM = RandomState()
