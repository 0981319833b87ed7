"""What a handler's user sees of its commits, here and in the object store."""

from __future__ import annotations

from tfpreempt import errors
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.checkpoint.remote.status import MirrorStatus
from tfpreempt.core.arguments import check_timeout
from tfpreempt.handler.member import Keeper


class Commits:
    """A part of `PreemptionCheckpointHandler`. Main thread unless said otherwise."""

    _keeper: Keeper
    _closed: bool

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest commit in the directory, or None. Reads the directory."""
        return self._keeper.latest()

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Deletes a commit, in the directory and in `remote_checkpoint_dir`.

        Where the local copy is gone already a warning says so, and the remote one
        still goes. On workers other than the chief this does nothing.

        Args:
            checkpoint: of this handler's directory or store.

        Raises:
            ConfigurationError: it is not one of them, or belongs to a
                CheckpointManager, which deletes its own; or it is no handle.
            HandlerClosedError: after `close()`.
            CheckpointError: the store, or the disk.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise errors.ConfigurationError(
                f"delete_checkpoint() got {checkpoint!r}; expected a "
                "tfpreempt.Checkpoint, such as handler.latest_checkpoint or "
                "tfpreempt.Checkpoint(path)"
            )
        if self._closed:
            raise errors.HandlerClosedError(
                f"delete_checkpoint({checkpoint!r}) was called after close(); call it "
                "before, or on a new handler of the same directory"
            )
        self._keeper.delete(checkpoint)

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """How far the copying to `remote_checkpoint_dir` is; any thread.

        None without one, and on workers other than the chief, which copies for all.
        """
        return self._keeper.mirror_status

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until every commit is copied to `remote_checkpoint_dir`; any thread.

        Args:
            timeout: seconds; None waits as long as the upload gets on, and gives up
                after five minutes in which it didn't.

        Returns:
            Whether the newest commit is there; True without a `remote_checkpoint_dir`,
            and on workers other than the chief.

        Raises:
            ConfigurationError: the timeout is no number of seconds.
        """
        check_timeout(timeout)
        return self._keeper.wait_for_mirror(timeout)
