"""What is safe to print."""

from __future__ import annotations


def plain(text: str) -> str:
    """Text of others, such as a journal's, unable to move a terminal's cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]
