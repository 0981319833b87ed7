"""What the session needs of a handler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tfpreempt.core.events import Commit, Event


class Participant(Protocol):
    """A handler, as the session sees it. Main thread unless said otherwise."""

    @property
    def token(self) -> str:
        """Unique to this handler, equal on all workers."""

    @property
    def directory(self) -> str:
        """Where it commits."""

    @property
    def step(self) -> int:
        """The step that a save would carry; any thread."""

    @property
    def has_moved(self) -> bool:
        """Whether there are steps since its newest save; equal on all workers."""

    @property
    def is_amid(self) -> bool:
        """Whether its state is not whole outside of steps too, as within a fit."""

    def stage(self, name: str) -> Any:
        """Writes this worker's part of the save of that name."""

    def commit(
        self, staged: Any, because: str, workers: Sequence[int]
    ) -> Commit | None:
        """Makes it durable; chief only."""

    def discard(self, staged: Any) -> None:
        """Throws a staged part away; chief only."""

    def needs_peers(self) -> bool:
        """Whether `stage` needs all workers at once."""

    def save_now(self) -> str:
        """All workers save now; the directory of the commit, on the chief."""

    def load_state(self, state: Any) -> bool:
        """Loads one named State of what the workers restored, or saved since."""

    def record(self, event: Event) -> None:
        """Writes to the journal; any thread."""

    def finish_mirror(self, seconds: float) -> bool:
        """Gives the newest commit's copy so much time; whether it is whole."""

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until all is copied; whether the newest commit is."""

    def leave(self, committed: bool, mirrored: bool = True) -> None:
        """Ends the process by SystemExit, or returns; any thread."""

    def close(self, timeout: float | None = None) -> None:
        """The last boundary."""

    def give_way(self) -> None:
        """Closes without a last boundary: another handler goes on in its directory."""
