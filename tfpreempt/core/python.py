"""What Python 3.10 lacks of the later versions; goes when 3.10 does.

What only types need comes from typing_extensions.
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
        """An enumeration whose members are strings, as text too."""

        __str__ = str.__str__


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an exception, as `add_note` of Python 3.11 does.

    Python 3.10 shows no notes in a traceback, so there it is logged besides.

    Args:
        error: stays of its kind.
        note: for people.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        vars(error).setdefault("__notes__", []).append(note)
        log.error("tfpreempt: %s: %s", type(error).__name__, note)
