"""Keeps client libraries away from Python's global random generator.

They draw from it: the pause before a request is tried again, the boundary between the
parts of an upload. Our requests run beside training, and a draw of theirs there would
give the next step other numbers than the run without interruption has. So the name
`random` in those modules becomes a generator of their own.
"""

from __future__ import annotations

import random
import sys

_DRAWING = (
    "google.api_core.retry.retry_base",
    "google.auth._exponential_backoff",
    "google.cloud.storage._media._helpers",
    "google.cloud.storage._media._upload",
    "google.resumable_media._helpers",
    "google.resumable_media._upload",
    "urllib3.util.retry",
)


def give(modules: tuple[str, ...] = _DRAWING) -> None:
    """Gives each module that is imported a generator of its own. Any thread."""
    for name in modules:
        module = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[union-attr]  # has the name
