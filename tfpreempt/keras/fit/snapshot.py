"""The state of a fit as two named States: what all workers share, what each has."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable
from typing import IO, Any

from tfpreempt import errors
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
    """Equal on all workers; the chief's is saved.

    Attributes:
        progress: how far the fit is.
        variables: name and kind of the metrics and seed generators.
        callbacks: what the other callbacks remember.
    """

    progress: Progress
    variables: list[tuple[str, str]]
    callbacks: CallbackStates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One worker's.

    Attributes:
        random: the random generators, as `RandomState` writes them.
        files: what callbacks keep in files.
        attributes: what the model keeps in Python.
        replicas: how many have a value here, of each metric and seed generator.
        position: in the training data; None where the fit has taken none.
        variables: header of the variables that a validation found, in a commit that
            was made while it ran; None in others, where those of the commit hold.
        values: their bytes.
    """

    random: bytes
    files: CallbackStates
    attributes: CallbackStates
    replicas: list[int]
    position: Position | None
    variables: Any = None
    values: tuple[bytes, ...] = ()


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
            "progress": encode(dataclasses.asdict(shared.progress)),
            "variables": shared.variables,
            "callbacks": shared.callbacks.header,
        }
        write_parts(fileobj, header, list(shared.callbacks.arrays))

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        if "variables" not in header:
            raise errors.CheckpointMismatchError(
                "The checkpoint is of an earlier tfpreempt, which kept the metrics and "
                "seeds of a fit elsewhere. Finish that run with the version that began "
                "it, or begin anew in another checkpoint directory; the weights can be "
                "restored with tf.train.Checkpoint."
            )
        self.loaded = Shared(
            progress=Progress(**decode(header["progress"])),
            variables=header["variables"],
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
        files, attributes, position = own.files, own.attributes, own.position
        header = {
            "files": [files.header, len(files.arrays)],
            "attributes": [attributes.header, len(attributes.arrays)],
            "replicas": own.replicas,
            "variables": [own.variables, len(own.values)],
            "position": None if position is None else position.to_json(),
        }
        states = [] if position is None else position.parts
        parts = [own.random, *files.arrays, *attributes.arrays, *own.values, *states]
        write_parts(fileobj, header, parts)

    def load(self, fileobj: IO[bytes]) -> None:
        header, parts = read_parts(fileobj)
        left = iter(parts)
        random = next(left)
        files, attributes, (variables, values) = (
            (head, tuple(itertools.islice(left, count)))
            for head, count in map(header.get, ("files", "attributes", "variables"))
        )
        position = header["position"]
        self.loaded = Own(
            random=random,
            files=CallbackStates(header=files[0], arrays=files[1]),
            attributes=CallbackStates(header=attributes[0], arrays=attributes[1]),
            replicas=header["replicas"],
            variables=variables,
            values=values,
            position=position and Position.from_json(position, left),
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
