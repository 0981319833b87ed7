"""A method of one object that is another one for the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def instead_once(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Puts a function in place of a method, until it is called.

    Args:
        owner: whose method it is.
        name: of the method.
        instead: is called in its place, when it may call the method again.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        delattr(owner, name)  # uncovers the class's own
        return instead(*args, **kwargs)

    setattr(owner, name, called)
