"""Decides which commits stay; deletes the others, and leftovers of interrupted saves.

`reasons` is the only function that decides, from the policy and the manifests alone, so
a restart, the mirror and another machine decide alike. `record` decides once, when a
commit is made, whether the commit is the first of its period. So such a commit stays
after a restart with other rules, a deletion of other commits, or a change of the clock.

Only files written by tfpreempt are deleted: the files that the manifest of a commit
names, and directories that are then empty. The evidence that a commit exists is deleted
first: the entry in TensorFlow's state file, or the witness file. The marker is deleted
next; the manifest is the last file. So an interrupted deletion leaves an uncommitted
save, which the next start of the program deletes completely.

Directories `workertemp_*` are never deleted: they belong to TensorFlow's own handler.
tfpreempt creates no such directories (the workers write into `.parts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, checkpoint_state, layout
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.directory.manifest import Manifest
from tfpreempt.core import contained
from tfpreempt.core.arguments import is_period
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files, remove_if_empty
from tfpreempt.storage.local import TEMPORARY

_log = logging.getLogger(__name__)

LEFT_BEHIND = "could not delete %s, which only takes up disk space: %s"
"""Log message with the path and the error of a deletion that is not necessary."""

_LARGE_BYTES = 1 << 25
"""Smallest size in bytes of a file that is removed by one of several threads."""

# Names in the staging directory of a save, and in its `.parts`.
_STAGED = re.compile(
    rf"{layout.PAYLOAD}[._].*|{layout.STATES}|{layout.WORKER}\d+|\d{{4,}}"
    rf"|({layout.MANIFEST}|{layout.MARKER}|{layout.WITNESS}|{layout.METADATA})(\.tmp)?"
)

QUIET_SECONDS = 3600.0
"""Seconds without a change after which a save counts as ended, if there is no lease."""


NEWEST = "newest"
"""The reason shown for a commit that stays because of `max_to_keep`."""

# Minimum number of newest commits that stay if `keep_every` or `best_by` is set.
_FEWEST = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The rules by which commits stay: a commit stays if at least one rule keeps it.

    Attributes:
        max_to_keep: number of newest commits to keep, at least 1; None keeps every
            commit. With one of the other rules, at least the two newest stay.
        keep_every: length of a period, as a number of steps or a timedelta: the first
            commit of each period stays for ever. None: the rule keeps no commit.
        best_by: name of a metric, "min" or "max", and the number of best commits to
            keep. None: the rule keeps no commit.
        is_cache: whether the directory is a cache of the mirror. If True, only the
            newest commit and the commits that are not uploaded yet stay.

    Raises:
        ConfigurationError: a rule is invalid.
    """

    max_to_keep: int | None = 2
    keep_every: int | datetime.timedelta | None = None
    best_by: Sequence[Any] | None = None
    is_cache: bool = False

    def __post_init__(self) -> None:
        keep, every, best = self.max_to_keep, self.keep_every, self.best_by
        if keep is not None and (type(keep) is not int or keep < 1):
            raise errors.ConfigurationError(
                f"max_to_keep must be None (keep all) or 1 or more; got {keep!r}."
            )
        if not is_period(every):
            raise errors.ConfigurationError(
                f"keep_every is {every!r}; expected a number of steps (an int from 1 "
                "on), a positive datetime.timedelta, or None"
            )
        match best:
            case None:
                return
            case [str(name), "min" | "max", count] if name and type(count) is int:
                if count > 0:
                    return
        raise errors.ConfigurationError(
            f'best_by is {best!r}; expected the name of a metric, "min" or "max", and '
            'the number of commits to keep: best_by=("val_loss", "min", 3); or None'
        )

    @property
    def has_rules(self) -> bool:
        """Whether there are rules besides `max_to_keep`."""
        return self.keep_every is not None or self.best_by is not None

    @property
    def num_newest(self) -> int | None:
        """Number of newest commits to keep; None keeps every commit."""
        most = self.max_to_keep
        if self.is_cache:
            return 1
        return max(most, _FEWEST) if most is not None and self.has_rules else most


def reasons(
    commits: Sequence[Manifest | None], policy: RetentionPolicy
) -> list[tuple[str, ...]]:
    """Decides which commits stay, and why.

    Args:
        commits: manifests of all intact commits of a run, newest first; None for a
            manifest that cannot be read, or is not needed for the decision.
        policy: the rules.

    Returns:
        For each commit, the reasons why the commit stays: "newest", "every 1000 steps"
        or "best val_loss". An empty tuple if the commit is to be deleted.
    """
    newest, best = policy.num_newest, _best(commits, policy)
    name, found = policy.best_by and policy.best_by[0], list[tuple[str, ...]]()
    for place, commit in enumerate(commits):
        why = [NEWEST] if newest is None or place < newest else []
        if commit is not None and not policy.is_cache:
            why += [f"every {period}"] if (period := first_of(commit)) else []
            why += [f"best {name}"] if place in best else []
        found.append(tuple(why))
    return found


def _best(commits: Sequence[Manifest | None], policy: RetentionPolicy) -> set[int]:
    """Returns the positions of the best commits; of equal values, the oldest is best.

    Of two commits of the same step with the same value, only the newest counts: a run
    trains a step again if the older commit was found corrupt at a restart.
    """
    if policy.best_by is None:
        return set()
    name, mode, count = policy.best_by
    sign = 1.0 if mode == "min" else -1.0
    found: dict[tuple[int, float], int] = {}
    for place in range(len(commits) - 1, -1, -1):
        commit = commits[place]
        value = None if commit is None else metrics_of(commit).get(name)
        if commit is not None and value is not None:
            found[commit.step, sign * value] = place
    ranked = sorted(found, key=lambda each: (each[1], -found[each]))
    return {found[each] for each in ranked[:count]}


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Returns the metrics that a manifest records."""
    found = manifest.metadata.get("metrics")
    found = found if isinstance(found, dict) else {}
    return {
        name: value
        for name, value in found.items()
        if type(value) is float and math.isfinite(value)
    }


def is_seen(metric: str, commits: Iterable[Manifest | None]) -> bool:
    """Returns whether at least one of the commits has a metric."""
    return any(metric in metrics_of(each) for each in commits if each is not None)


def _recorded(manifest: Manifest | None) -> dict[str, Any]:
    found = None if manifest is None else manifest.metadata.get("retention")
    return found if isinstance(found, dict) else {}


def first_of(manifest: Manifest) -> str:
    """Returns the length of a period, such as "1000 steps", if the commit is the first
    commit of such a period. Returns "" for any other commit, and if the run that made
    the commit had no `keep_every`."""
    period = _recorded(manifest).get("first_of")
    return period if isinstance(period, str) else ""


def record(
    policy: RetentionPolicy,
    commits: Iterable[Entry],
    step: int,
    saved_at: float,
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the values that the manifest of a new commit records for `reasons`.

    A commit is the first of its period unless an earlier commit belongs to the same
    period. Commits that were made without the rule, before a restart with other rules,
    do not count, because they do not stay. Only the commits directly before the new
    commit are compared: after the clock was set back, or training has returned to an
    earlier step, a second commit of a period stays.

    Args:
        policy: the rules of the run.
        commits: the intact commits before the new commit, newest first.
        step: step of the new commit. Periods begin at the multiples of `keep_every`.
        saved_at: time of the new commit, in seconds since the epoch. The periods of a
            timedelta are counted from the epoch.
        metrics: metrics of the step; only finite values are recorded.
    """
    finite = {name: each for name, each in metrics.items() if math.isfinite(each)}
    found: dict[str, Any] = {"metrics": finite} if metrics else {}
    if not policy.has_rules:
        return found
    every, rule, period = policy.keep_every, "", ""
    if every is not None:
        if isinstance(every, datetime.timedelta):
            rule, length, now = str(every), every.total_seconds(), saved_at
        else:
            rule, length, now = f"{every} steps", every, step

        def is_of_period(entry: Entry) -> bool:
            at = entry.step if isinstance(every, int) else entry.saved_at
            return at is not None and at // length == now // length

        same = itertools.takewhile(is_of_period, commits)
        rules = [_recorded(each.manifest) for each in same]
        if not any(e.get("first_of") or e.get("keep_every") == rule for e in rules):
            period = rule
    return found | {
        "saved_at": saved_at,
        "retention": {
            "num_newest": dataclasses.replace(policy, is_cache=False).num_newest,
            "best_by": policy.best_by,
            "keep_every": rule,
            "first_of": period,
        },
    }


def explain(entries: Iterable[Entry]) -> dict[str, str]:
    """Returns the reasons why commits of a directory or of a mirror stay, by the tokens
    of the commits.

    The rules are the rules that the newest commit records.

    Args:
        entries: the checkpoints of the directory or the mirror, newest first.
    """
    kinds = (Kind.OWN, Kind.MIRROR)
    own = [e for e in entries if e.is_committed and e.kind in kinds and e.name]
    manifests = [each.manifest for each in own]
    recorded = _recorded(manifests[0]) if manifests else {}
    policy = RetentionPolicy(max_to_keep=None)
    with contextlib.suppress(errors.ConfigurationError):
        policy = RetentionPolicy(
            max_to_keep=recorded.get("num_newest"), best_by=recorded.get("best_by")
        )
    found = zip(own, reasons(manifests, policy), strict=True)
    return {entry.token: ", ".join(why) for entry, why in found}


def plan(
    entries: Iterable[Entry], policy: RetentionPolicy, corrupt: Collection[str] = ()
) -> tuple[list[Entry], list[Entry]]:
    """Decides which commits to keep and which to delete. Flat checkpoints are in
    neither list: the user's CheckpointManager deletes flat checkpoints.

    Args:
        entries: the checkpoints in the directory, newest first.
        policy: the rules.
        corrupt: tokens of commits known to be corrupt. No rule keeps such a commit: the
            commit is deleted, unless the policy keeps every commit.

    Returns:
        The commits to keep and the commits to delete, both oldest first.
    """
    own = [e for e in entries if e.is_committed and e.kind is Kind.OWN]
    intact = [entry for entry in own if entry.token not in corrupt]
    why = reasons([entry.manifest for entry in intact], policy)
    kept = [entry for entry, each in zip(intact, why, strict=True) if each]
    if policy.num_newest is None:
        kept = own
    names = {entry.name for entry in kept}
    return kept[::-1], [entry for entry in own[::-1] if entry.name not in names]


def delete(files: Files, entry: Entry) -> None:
    """Deletes the files of a commit that tfpreempt wrote. Does nothing if the manifest,
    which names the files, cannot be read.

    Args:
        files: file system operations that make the changes.
        entry: the commit. For a flat checkpoint, only the sidecar is deleted.

    Raises:
        OSError: error of the file system.
    """
    holder = os.path.join(entry.store.uri, entry.holder)
    if entry.manifest is None or not file_reading.is_real_dir(holder):
        return  # tfpreempt did not write the files, or has deleted the files already
    if entry.kind is Kind.OWN:
        checkpoint_state.unlist(
            files, entry.store.uri, f"{entry.name}/{layout.PAYLOAD}"
        )
        witness = os.path.join(holder, layout.WITNESS)
        if file_reading.is_there(witness):
            files.remove(witness)
            files.sync_dir(holder)
    files.remove(os.path.join(holder, layout.MARKER))
    files.sync_dir(holder)
    sizes = {entry.file(file.name): file.size for file in entry.files}
    # Files outside of the directory belong to the user's manager, and stay.
    paths = [path for path in sizes if path.startswith(holder + "/")]
    folders = {holder, *map(os.path.dirname, paths)}
    # Remove large files with several threads: the kernel frees the memory pages of a
    # file in the thread that removes the file.
    large = [path for path in paths if sizes[path] >= _LARGE_BYTES]
    # A RuntimeError means that no thread can be started. Then the large files are
    # removed together with the small files.
    with contextlib.suppress(RuntimeError):
        map_in_threads(
            files.remove, large, threads=os.cpu_count() or 1, name="tfpreempt-delete"
        )
        paths = [path for path in paths if sizes[path] < _LARGE_BYTES]
    with contained.parents_kept_open():
        for path in paths:
            files.remove(path)
    files.remove(os.path.join(holder, layout.METADATA))
    for name in file_reading.names(holder):
        # Remove the temporary file of the metadata, left by a killed process.
        if name.startswith(TEMPORARY):
            files.remove(os.path.join(holder, name))
    for name in (layout.MARKER, layout.MANIFEST, layout.METADATA, layout.WITNESS):
        files.remove(os.path.join(holder, name + ".tmp"))
    for folder in sorted(folders, key=len, reverse=True):
        # Remove the manifest last: it proves that tfpreempt wrote the directory.
        if folder == holder:
            files.remove(os.path.join(holder, layout.MANIFEST))
        if file_reading.is_real_dir(folder) and not file_reading.names(folder):
            files.remove_dir(folder)


def try_delete(files: Files, entry: Entry) -> bool:
    """Deletes a commit as `delete` does. Logs an error of the file system: a commit
    that cannot be deleted, for example of another user, must not keep the others.

    Returns:
        Whether the commit was deleted.
    """
    try:
        delete(files, entry)
    except OSError as error:
        _log.warning(LEFT_BEHIND, entry.path, error)
        return False
    return True


def delete_staging(files: Files, path: str) -> None:
    """Deletes a staging directory and its content. Does nothing if the path is a link.

    Files are deleted from the top down, in name order, so a marker, if there is one,
    is deleted before other files. The manifest is deleted last: a process that lost the
    lease may rename the directory to a commit's name during the deletion. With a
    manifest, the remaining files count as an uncommitted save, which the next start of
    the program deletes.

    Raises:
        OSError: error of the file system.
    """
    if not file_reading.is_real_dir(path):
        return
    found = list(file_reading.walk(path))
    manifest = os.path.join(path, layout.MANIFEST)
    for folder, _, names in found:
        for name in names:
            if os.path.join(folder, name) != manifest:
                files.remove(os.path.join(folder, name))
    for folder, folders, _ in reversed(found):
        for name in folders:
            inner = os.path.join(folder, name)
            if file_reading.is_link(inner):
                files.remove(inner)
            else:
                files.remove_dir(inner)
    files.remove(manifest)
    files.remove_dir(path)


def try_delete_staging(files: Files, path: str) -> bool:
    """Deletes a directory of staged files, and the directory above it if that is then
    empty. Logs a failure, because the files only take up disk space.

    Returns:
        Whether the directory was deleted.
    """
    try:
        delete_staging(files, path)
        remove_if_empty(files, os.path.dirname(path))
    except (OSError, errors.CheckpointError) as error:
        _log.warning(LEFT_BEHIND, path, error)
        return False
    return True


def clean(
    files: Files, directory: str, clock: Clock, *, is_sole: bool = True
) -> list[str]:
    """Deletes uncommitted saves that have ended. Called before the first save of the
    process.

    The chief holds the lease of the directory, so no other process can commit there,
    and every uncommitted save has ended. A worker with separate storage has no lease,
    and another worker on the machine may use the same directory. In this case a save
    counts as ended after `QUIET_SECONDS` without a change.

    Args:
        files: file system operations that make the changes.
        directory: the checkpoint directory.
        clock: time source that is compared with the modification times of files.
        is_sole: whether no other process can commit in the directory.

    Returns:
        The removed paths.

    Raises:
        OSError: error of the file system.
    """
    removed = []

    def is_over(path: str) -> bool:
        return is_sole or _is_quiet(path, clock.wall())

    # Delete staged saves, and the `.parts` of workers, but no download:
    # `mirror/import_commit.py` completes or deletes downloads.
    staging = os.path.join(directory, layout.STAGING)
    is_there = file_reading.is_real_dir(staging)
    for name in file_reading.names(staging) if is_there else ():
        path = os.path.join(staging, name)
        # The name of a commit: another user has renamed the directory of another run.
        is_other = name.startswith(layout.FETCH) or catalog.kind_of(name) is not None
        is_ours = layout.ATTEMPT.fullmatch(name) and not is_other
        is_doomed = is_ours and _is_staged(path) and is_over(path)
        if is_doomed and try_delete_staging(files, path):
            removed.append(path)
    if is_there:
        remove_if_empty(files, staging)
    for entry in filter(is_uncommitted, catalog.scan(directory)):
        if is_over(entry.path) and try_delete(files, entry):
            removed.append(entry.path)
    return removed


def _is_staged(path: str) -> bool:
    """Returns whether a path is a directory with nothing but names of a save.

    Another user who may rename a directory of this user, but not delete its files,
    could give it the name of the directory for staged saves.
    """
    if not file_reading.is_real_dir(path):
        return False
    try:
        return all(map(_STAGED.fullmatch, file_reading.names(path)))
    except OSError as error:  # a directory of another user
        _log.warning(LEFT_BEHIND, path, error)
        return False


def is_uncommitted(entry: Entry) -> bool:
    """Returns whether an entry is a save without a marker, with the directory name of a
    commit. (Flat checkpoints do not count.)"""
    is_unmarked = entry.condition is CommitStatus.NOT_COMMITTED
    return entry.kind is Kind.OWN and is_unmarked and entry.manifest is not None


def _is_quiet(path: str, now: float) -> bool:
    """Returns whether no file at or below a path has changed for QUIET_SECONDS."""
    changed = 0
    for each in (path, *(os.path.join(path, name) for name in file_reading.tree(path))):
        with contextlib.suppress(FileNotFoundError):
            changed = max(changed, os.stat(each).st_mtime_ns)
    return now - changed / 1e9 > QUIET_SECONDS
