"""Which checkpoint to restore: the newest that is committed and verified.

Our own commits rank by their sequence, not by a clock (`catalog.rank`). Checkpoints
that somebody else wrote have no marker; they rank among ours by the time of their index
file against the times of our markers, after a check that they are complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint import bundle, catalog, flat, layout, pointer
from tfpreempt.checkpoint.catalog import Committed, Kind
from tfpreempt.checkpoint.manifest import Manifest
from tfpreempt.checkpoint.remote.bar import Bar
from tfpreempt.checkpoint.verification import Effort, check_bytes
from tfpreempt.storage import checksum, paths, reading
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.url import UrlStore

_log = logging.getLogger(__name__)
_INDEX = ".index"
_THREADS = 4
MUCH = 2 << 30  # bytes that take so long to check that it is said
_TEMPORARY = re.compile(r"_temp(/|$)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that could be restored.

    Attributes:
        kind: who laid it out.
        path: the directory in the own form, the prefix in the flat form.
        prefix: what `tf.train.Checkpoint.restore` takes; None where it holds named
            States only.
        base: the directory to which the manifest's names are relative.
        step: the step that it carries; None if a foreign writer didn't say.
        sequence: its rank; None for a foreign one.
        manifest: None for a foreign one.
        token: equal on all workers that see this very checkpoint.
    """

    kind: Kind
    path: str
    prefix: str | None
    base: str
    step: int | None
    sequence: int | None
    manifest: Manifest | None
    token: str

    @property
    def shards(self) -> str:
        """The directory with `states/` and the workers' shards."""
        if self.kind is not Kind.OWN:
            return layout.sidecar(self.path)
        # A flat commit that was fetched lies in a directory, with its sidecar in it.
        entries = self.manifest.files if self.manifest else ()
        first = {entry.name.partition("/")[0] for entry in entries}
        inner = [name for name in first if name.endswith(layout.SIDECAR_SUFFIX)]
        return os.path.join(self.path, *inner[:1])


def find_candidates(
    directory: str,
    on_skip: Callable[[str], None] | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> list[Candidate]:
    """All that might be restored from a directory, newest first; nothing is verified.

    Args:
        directory: the checkpoint directory; it need not exist.
        on_skip: called with a description of each that is passed over.
        on_lost: the same of a damaged commit of ours; by default `on_skip`.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    skip = on_skip or _warn
    lost = on_lost or skip
    try:
        committed, problems = catalog.scan(directory)
        for problem in problems:
            lost(problem)
        current = [entry for entry in committed if not is_overwritten(entry)]
        taken = {entry.path for entry in current}
        found = foreign_prefixes(directory, needs_pointer=not current)
        foreign = [p for p in found if p not in taken and _is_whole_save(p, skip)]
        dated = _dated(directory, foreign, lost)
    except OSError as error:
        raise errors.CheckpointError(
            f"The checkpoint directory {directory!r} cannot be read: {error}. Check "
            "the path and its permissions."
        ) from error
    return _merge(current, dated)


def verify(candidate: Candidate) -> None:
    """Checks that every file is there with its size and checksum.

    Raises:
        CheckpointDamagedError: names the file, what it has and what it should have.
    """
    if candidate.manifest is None:
        if candidate.prefix is not None:
            bundle.check(candidate.prefix)
        return
    is_url = paths.is_url(candidate.base)
    store = (UrlStore if is_url else LocalStore)(candidate.base)
    with _shown(candidate.path, candidate.manifest) as tick:
        effort = Effort(_THREADS, tick)
        faults = check_bytes(store, "", candidate.manifest.files, effort)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        path = os.path.join(candidate.base, faults[0].name)
        raise errors.CheckpointDamagedError(
            f"{path!r} of checkpoint {candidate.path!r} is damaged: "
            f"{faults[0].text}{more}"
        )


@contextlib.contextmanager
def _shown(path: str, manifest: Manifest) -> Iterator[Callable[[int], None]]:
    """Says and shows what takes long; gives what is told how many bytes are read."""
    if manifest.bytes < MUCH:
        yield lambda done: None
        return
    _log.warning(
        "tfpreempt: reading %.1f GiB of %s, to see whether they are whole",
        manifest.bytes / (1 << 30),
        path,
    )
    bar = Bar(f"checking step {manifest.step}", manifest.bytes)
    try:
        yield bar.show
    finally:
        bar.close()


def newest_verified(
    directory: str,
    on_skip: Callable[[str], None] | None = None,
    on_lost: Callable[[str], None] | None = None,
    *,
    needs_prefix: bool = False,
    check: Callable[[Candidate], None] = lambda candidate: None,
    on_damaged: Callable[[Candidate], None] | None = None,
) -> Candidate | None:
    """The newest checkpoint that passes `verify`; None if the directory has none.

    Args:
        directory: the checkpoint directory; it need not exist.
        on_skip: called with a description of each that is passed over, which names the
            damaged file; the default logs a warning.
        on_lost: the same of a damaged commit of ours; by default `on_skip`.
        needs_prefix: passes over commits that hold named States only.
        check: raises CheckpointDamagedError for what is whole and yet no use.
        on_damaged: called with each that doesn't pass.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    skip = on_skip or _warn
    lost = on_lost or skip
    for candidate in find_candidates(directory, skip, lost):
        if needs_prefix and candidate.prefix is None:
            skip(
                f"{candidate.path!r} (step {candidate.step}) has no TensorFlow "
                "checkpoint, only named States: restoring it would leave the weights "
                "as they are"
            )
            continue
        try:
            verify(candidate)
            check(candidate)
        except errors.CheckpointDamagedError as error:
            (skip if candidate.manifest is None else lost)(str(error))
            if on_damaged is not None:
                on_damaged(candidate)
        else:
            return candidate
    return None


def find_by_token(directory: str, token: str) -> Candidate | None:
    """The checkpoint that another worker named by its token; None if it isn't here."""
    for candidate in find_candidates(directory, lambda problem: None):
        if candidate.token == token:
            return candidate
    return None


def _warn(problem: str) -> None:
    _log.warning("Passing over a checkpoint: %s", problem)


def warn_about_world(candidate: Candidate, worker: int, world_size: int) -> None:
    """Says what is not restored on a worker that has no shard in a commit of ours."""
    manifest = candidate.manifest
    assert manifest is not None
    if manifest.world_size != world_size:
        _log.warning(
            "%s was written by %d workers, now there are %d: weights and step are "
            "restored as saved, but data positions, random generators and "
            "per-replica parts belong to the old workers and are not; each worker "
            "starts its data anew and ON_READ variables get their reduced value.",
            candidate.path,
            manifest.world_size,
            world_size,
        )
    elif worker not in manifest.workers:
        _log.warning(
            "%s has no shard of worker %d (it was lost when the checkpoint was "
            "committed): its data position, random generators and per-replica "
            "parts are not restored.",
            candidate.path,
            worker,
        )


def from_committed(entry: Committed) -> Candidate:
    """A commit of ours as a candidate."""
    manifest = entry.manifest
    prefix = manifest.prefix
    return Candidate(
        kind=entry.kind,
        path=entry.path,
        prefix=None if prefix is None else os.path.join(entry.base, prefix),
        base=entry.base,
        step=manifest.step,
        sequence=manifest.sequence,
        manifest=manifest,
        token=entry.token,
    )


def _from_foreign(directory: str, prefix: str) -> Candidate:
    size, crc = checksum.of_file(prefix + _INDEX)
    name = os.path.relpath(prefix, directory)
    return Candidate(
        kind=Kind.FOREIGN,
        path=prefix,
        prefix=prefix,
        base=directory,
        step=None,
        sequence=None,
        manifest=None,
        token=f"foreign-{name}-{size}-{crc:08x}",
    )


def _dated(
    directory: str, foreign: list[str], lost: Callable[[str], None]
) -> list[tuple[float, Candidate]]:
    """Checkpoints of others, each with the time of its index."""
    dated = []
    for prefix in foreign:
        index = prefix + _INDEX
        try:
            found = _from_foreign(directory, prefix)
            dated.append((reading.stat(index).modified_ns / 1e9, found))
        except OSError as error:
            lost(f"{index!r} cannot be read: {error}")
    return dated


def _merge(
    committed: list[Committed], dated: list[tuple[float, Candidate]]
) -> list[Candidate]:
    """Newest first: ours in their own order, foreign ones put in by time."""
    dated.sort(key=lambda pair: pair[0], reverse=True)
    merged: list[Candidate] = []
    for entry in committed:
        while dated and dated[0][0] > entry.marked_at:
            merged.append(dated.pop(0)[1])
        merged.append(from_committed(entry))
    return merged + [candidate for _, candidate in dated]


def is_overwritten(entry: Committed) -> bool:
    """Whether the user's manager wrote a flat checkpoint anew after our marker.

    The time alone doesn't tell: copying a directory gives all files new times.
    """
    prefix = entry.manifest.prefix
    if entry.kind is not Kind.FLAT or prefix is None:
        return False
    index = entry.path + _INDEX
    try:
        if reading.stat(index).modified_ns / 1e9 <= entry.marked_at:
            return False
        found = checksum.of_file(index)
    except OSError:
        return False
    return not any(
        file.name == prefix + _INDEX and (file.size, file.crc32c) == found
        for file in entry.manifest.files
    )


def _is_whole_save(prefix: str, skip: Callable[[str], None]) -> bool:
    if not flat.is_half_written(prefix):
        return True
    skip(
        f"{prefix!r} is half-written: a save of ours is under way or died. Its files "
        "are left alone and never restored."
    )
    return False


def foreign_prefixes(directory: str, *, needs_pointer: bool = True) -> list[str]:
    """Prefixes of flat checkpoints, and of those that the state file names.

    Args:
        directory: the checkpoint directory.
        needs_pointer: whether the state file may name all that there is; otherwise one
            that cannot be read is only said.

    Raises:
        OSError: the directory or its state file cannot be read.
    """
    found = set()
    if reading.is_dir(directory):
        for name in reading.names(directory):
            if name.endswith(_INDEX) and name != _INDEX:
                found.add(os.path.join(directory, name[: -len(_INDEX)]))
        try:
            listed = pointer.read(directory)
        except OSError as error:
            if needs_pointer:
                raise
            listed = None
            _log.warning(
                "TensorFlow's state file cannot be read: %s. It is only a pointer; the "
                "commits are found without it.",
                error,
            )
        for name in (listed.latest, *listed.paths) if listed else ():
            relative = os.path.relpath(os.path.join(directory, name), directory)
            prefix = os.path.join(directory, relative)
            first = relative.split(os.sep)[0]
            if paths.why_unsafe(relative):
                continue  # outside of the directory
            control = os.path.join(directory, first)
            if any(
                reading.is_there(os.path.join(control, name))
                for name in (layout.MANIFEST, layout.MARKER)
            ):
                continue  # a directory of our own form: there the markers rule
            found.add(prefix)
    return sorted(
        p for p in found if not _TEMPORARY.search(p) and reading.is_file(p + _INDEX)
    )
