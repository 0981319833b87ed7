"""Chooses the checkpoint to restore: the newest checkpoint with intact files.

The checkpoint is a commit of tfpreempt, or a checkpoint written without tfpreempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, checkpoint_state
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.restore import external_checkpoints
from tfpreempt.checkpoint.restore.verification import faults
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.progress_bar import ByteBar
from tfpreempt.storage.os_errors import ADVICE

_log = logging.getLogger(__name__)
_THREADS = 4
MUCH = 2 << 30  # bytes; the verification of a larger commit shows a progress bar


def _warn(problem: str) -> None:
    _log.warning("skipping a checkpoint: %s", problem)


def find_candidates(
    directory: str,
    on_skip: Callable[[str], None] = _warn,
    on_lost: Callable[[str], None] | None = None,
) -> list[Entry]:
    """Returns the checkpoints that may be restored, newest first. Their files are not
    verified.

    Args:
        directory: path of the checkpoint directory; need not exist.
        on_skip: function called with a message for each skipped checkpoint; by default
            the message is logged.
        on_lost: function called in place of `on_skip` for a corrupt commit of
            tfpreempt; None: `on_skip` is called.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    try:
        listed = external_checkpoints.among(directory, catalog.scan(directory))
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "check the path and its permissions")
        raise errors.CheckpointError(
            f"The checkpoint directory {directory!r} cannot be read: {error}; {advice}."
        ) from error
    found = []
    for entry in listed:
        if entry.kind is Kind.MIRROR:
            # Skip a folder that was copied from a mirror: only `import_commit` restores
            # such folders.
            continue
        if entry.is_committed or entry.condition is CommitStatus.EXTERNAL:
            found.append(entry)
        elif entry.condition is CommitStatus.CORRUPT:
            (on_lost or on_skip)(entry.problems[0])
        elif entry.kind is Kind.FLAT and entry.remarks:
            on_skip(f"{entry.path!r} is {entry.remarks[0]}")
    return found


def verify(
    entry: Entry, sums: Mapping[str, tuple[int, int]] = MappingProxyType({})
) -> None:
    """Checks that every file of a commit exists with the right size and checksum.

    A checkpoint without a manifest has no checksums. Of such a checkpoint, TensorFlow's
    `.index` file and the lengths of the data files are checked.

    Args:
        entry: the commit, or a checkpoint without a manifest.
        sums: size and crc32c, by path, of files that were just read; these files are
            not read again.

    Raises:
        CheckpointCorruptedError: a file differs; the message names the file and the
            difference.
    """
    if entry.manifest is None:
        if entry.prefix is not None:
            external_checkpoints.check(entry)
        return
    if (size := entry.size or 0) < MUCH:
        found = faults(entry, every_byte=True, threads=_THREADS, sums=sums)
    else:
        _log.info(
            "reading %.1f GiB of %s to verify the checksums",
            size / (1 << 30),
            entry.path,
        )
        with ByteBar(f"checking step {entry.step}", size) as bar:
            found = faults(entry, every_byte=True, threads=_THREADS, watch=bar.show)
    if found:
        name, text = next(iter(found.items()))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise errors.CheckpointCorruptedError(
            f"{entry.file(name)!r} of checkpoint {entry.path!r} is corrupt: "
            f"{text}{more}"
        )


def newest_verified(
    directory: str,
    on_skip: Callable[[str], None] = _warn,
    on_lost: Callable[[str], None] | None = None,
    *,
    wants: Callable[[Entry], bool] = lambda entry: True,
    needs_prefix: bool = False,
    check: Callable[[Entry], None] = verify,
) -> Entry | None:
    """Returns the newest intact checkpoint; None if there is no intact checkpoint.

    Args:
        directory: path of the checkpoint directory; need not exist.
        on_skip: function called with a message for each skipped checkpoint; by default
            the message is logged.
        on_lost: function called in place of `on_skip` for a corrupt commit of
            tfpreempt, and for a corrupt checkpoint named in TensorFlow's state file;
            None: `on_skip` is called.
        wants: function that returns whether a checkpoint is considered.
        needs_prefix: whether to skip commits without a TensorFlow checkpoint, which
            contain only named States.
        check: function that verifies a checkpoint; a checkpoint is skipped if the
            function raises CheckpointCorruptedError.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    lost = on_lost or on_skip
    for entry in filter(wants, find_candidates(directory, on_skip, lost)):
        if needs_prefix and entry.prefix is None:
            on_skip(
                f"{entry.path!r} (step {entry.step}) has no TensorFlow checkpoint, "
                "only named States, so a restore would leave the weights unchanged"
            )
            continue
        try:
            check(entry)
        except errors.CheckpointCorruptedError as error:
            # Corrupt files without a manifest may never have been a checkpoint. They
            # were a checkpoint if TensorFlow's state file names them.
            is_one = entry.manifest is not None or checkpoint_state.is_listed(
                directory, entry.name
            )
            (lost if is_one else on_skip)(str(error))
        else:
            return entry
    return None


def warn_about_workers(entry: Entry, cluster: Cluster) -> None:
    """Logs a warning if values of a commit cannot be restored on this worker, because
    the number of workers has changed, or this worker's shard is missing."""
    manifest = entry.manifest
    assert manifest is not None
    if manifest.world_size != cluster.num_workers:
        _log.warning(
            "%s was written by %d worker(s), and this run has %d. Weights and step are "
            "restored. The position in tfpreempt.data is restored, too; so is the "
            "position in other data whose global batches all workers share, if a "
            "strategy distributes the data in both runs. Any other dataset iterator "
            "starts from the beginning. Random generators and per-replica values are "
            "distributed over the current workers (see docs/elastic.md of tfpreempt).",
            entry.path,
            manifest.world_size,
            cluster.num_workers,
        )
    elif cluster.worker not in manifest.workers:
        _log.warning(
            "%s has no part of worker %d, because this part was lost during the "
            "commit: the data position, random generators and per-replica values of "
            "this worker are not restored.",
            entry.path,
            cluster.worker,
        )
