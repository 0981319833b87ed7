"""Names that Ray's Checkpoint had, and what to call instead.

A name that is only missing sends people to search; one that says where it went doesn't.
"""

from __future__ import annotations

from typing import NoReturn


class _Moved:
    """A class attribute that is not there, and says why."""

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} has no attribute {self._name!r}: {self._instead}"
        )


_DICT = (
    "keep values in a State (tfpreempt.State), or write files into a directory and use "
    "Checkpoint.from_directory(path)."
)
_BYTES = (
    "a checkpoint is a directory of files; use to_directory() and from_directory()."
)
_REFERENCE = "a checkpoint is itself a reference; pass it on as it is."
_PREPROCESSOR = "use set_metadata() and get_metadata(), or a State."


class NamesOfRay:
    """What Checkpoint doesn't have."""

    __slots__ = ()

    from_dict = _Moved(_DICT)
    to_dict = _Moved("use as_directory() to read its files, get_metadata() for notes.")
    from_bytes = _Moved(_BYTES)
    to_bytes = _Moved(_BYTES)
    from_uri = _Moved("use Checkpoint(uri).")
    to_uri = _Moved("use .path, which is the URI where the checkpoint is remote.")
    uri = _Moved("use .path, which is the URI where the checkpoint is remote.")
    from_object_ref = _Moved(_REFERENCE)
    to_object_ref = _Moved(_REFERENCE)
    from_checkpoint = _Moved(_REFERENCE)
    get_internal_representation = _Moved("use .path and .filesystem.")
    get_preprocessor = _Moved(_PREPROCESSOR)
    set_preprocessor = _Moved(_PREPROCESSOR)
