"""What a run has gained: the step of its newest commit."""

from __future__ import annotations

from tfpreempt.checkpoint import catalog
from tfpreempt.storage import paths


def newest_step(checkpoint_dir: str | None) -> int | None:
    """The step of the newest commit; None where none is seen.

    What lies behind a URL is not looked for: the supervisor's one thread has no time
    for requests.
    """
    if checkpoint_dir is None or paths.is_url(checkpoint_dir):
        return None
    try:
        found = catalog.scan(checkpoint_dir)
    except OSError:
        return None
    return next((entry.step for entry in found if entry.is_committed), None)
