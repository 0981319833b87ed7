"""Replacements for features of Python 3.11 that Python 3.10 lacks.

Delete the module when Python 3.10 is no longer supported. Features for type annotations
come from the package typing_extensions, not from this module.
"""

from __future__ import annotations

import enum
import logging
import sys

log = logging.getLogger(__name__)

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:

    class StrEnum(str, enum.Enum):
        """An enumeration whose values are strings, also when formatted as text."""

        __str__ = str.__str__


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an exception, as `add_note` of Python 3.11 does.

    Python 3.10 shows no notes in a traceback, so there the note is also logged.

    Args:
        error: the exception; its class does not change.
        note: text of the note, for people.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        vars(error).setdefault("__notes__", []).append(note)
        log.error("%s: %s", type(error).__name__, note)
