"""`tfpreempt verify --replay`: repeats the steps between two commits, and compares."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.mirror.import_commit import bring
from tfpreempt.checkpoint.state import array_contents, state_file
from tfpreempt.checkpoint.state.encoding import decode, read_parts, readable
from tfpreempt.checkpoint.state.state import RESERVED
from tfpreempt.core.events import BadStep
from tfpreempt.core.journal import journal_directory, read_records
from tfpreempt.core.replay import Replay
from tfpreempt.errors import TfpreemptError
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.local import LocalStore

_KEPT = ("TFPREEMPT_PLATFORM", "TFPREEMPT_SCRATCH_DIR", "TFPREEMPT_CACHE_DIR")


class ReplayError(click.ClickException):
    """Error: the steps could not be repeated, so the commits were not compared."""

    exit_code = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a replay.

    Attributes:
        older: commit from which the program was started.
        newer: commit with which the result was compared.
        count: number of values compared.
        differing: names of the values that differ.
    """

    older: Entry
    newer: Entry
    count: int
    differing: Sequence[str]


def replay(commits: Sequence[Entry], command: Sequence[str]) -> Comparison:
    """Runs a program from the second newest commit to the step of the newest commit,
    and compares the values.

    Args:
        commits: intact commits of a run in one process, newest first.
        command: the program and its arguments.

    Raises:
        ReplayError: there are no two commits to compare, or the program ended before
            the step.
    """
    newer, older = _pair(commits)
    directory, until = os.path.realpath(newer.store.uri), newer.step or 0
    with tempfile.TemporaryDirectory(prefix="tfpreempt-replay-") as parent:
        copy = os.path.join(os.path.realpath(parent), "run")
        try:
            bring(LocalFiles(copy), older, copy)
            _copy_states(directory, copy, older)
        except (TfpreemptError, OSError) as error:
            raise ReplayError(str(error)) from error
        _copy_bad_steps(directory, copy)
        steps = Replay(directory=directory, copy=copy, until=until)
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if name in _KEPT or not name.startswith("TFPREEMPT_")
            },
            "TFPREEMPT_CHECKPOINT_DIR": copy,
            **steps.to_environment(),
        }
        try:
            code = subprocess.run([*command], env=environment, check=False).returncode
        except OSError as error:
            raise ReplayError(f"cannot start {command[0]!r}: {error}") from error
        found = [each for each in catalog.scan(copy) if each.is_committed]
        again = [each for each in found if each.step == until]
        if not again:
            reached = max((each.step or 0 for each in found), default=0)
            raise ReplayError(
                f"the program ended with exit code {code}, and its newest commit is of "
                f"step {reached}; expected a commit of step {until}. Pass the command "
                "with which the run was started, with the same data and arguments"
            )
        # The program may have committed the step too, as by `save()`, before the end.
        same = [each for each in again if each.because == newer.because]
        try:
            values, repeated = _values(newer), _values([*same, *again][0])
        except TfpreemptError as error:
            raise ReplayError(str(error)) from error
    differing = [
        name
        for name in sorted(values.keys() | repeated.keys())
        if values.get(name) != repeated.get(name)
    ]
    return Comparison(older=older, newer=newer, count=len(values), differing=differing)


def _pair(commits: Sequence[Entry]) -> tuple[Entry, Entry]:
    """Returns the newest commit that a replay can reach, and the commit before."""
    if commits[0].kind is Kind.MIRROR:
        raise ReplayError(
            f"{commits[0].store.uri} is a mirror; expected a local directory, because "
            "the program trains in a copy of it. Copy the two newest commits by "
            'tfpreempt.Checkpoint(URI).to_directory("run/STEP"), and pass "run" in '
            "place of the URI, also to the program"
        )
    for number, newer in enumerate(commits):
        for older in commits[number + 1 :]:
            pair = (newer, older)
            is_usable = all(
                each.kind is Kind.OWN
                and isinstance(each.store, LocalStore)
                and each.manifest is not None
                and each.manifest.world_size == 1
                for each in pair
            )
            is_usable = is_usable and (older.step or 0) < (newer.step or 0)
            # The state of a validation is from before the validation; a replay passes
            # the validation.
            if is_usable and _phase(newer) != "validation":
                return pair
    raise ReplayError(
        f"found {len(commits)} intact commits; expected two commits of different steps "
        "in a directory, made by one process with a handler or PreemptionCallback, the "
        "newer one not during a validation. Keep more commits (max_to_keep=), or save "
        "more often (save_freq=)"
    )


def _phase(commit: Entry) -> str:
    """Returns the phase of a fit in a commit; "" for a loop."""
    name = "tfpreempt.keras" + layout.STATE_SUFFIX
    path = os.path.join(commit.shards, layout.STATES, name)
    # An error means that the manifest does not name the file: the commit is intact.
    with (
        contextlib.suppress(OSError, TfpreemptError),
        file_reading.open_file(path) as file,
    ):
        header, parts = read_parts(file)
        with readable(name):
            progress, count = header["record"]["progress"]  # the first value
            return str(decode(progress, parts[:count])["phase"])
    return ""


def _copy_bad_steps(directory: str, copy: str) -> None:
    """Copies the records of the steps that the run has left out."""
    target = journal_directory(copy)
    target.mkdir()
    name, owner = "worker-0.jsonl", os.stat(directory).st_uid
    records = read_records(journal_directory(directory) / name, BadStep, owner)
    if records:
        lines = "".join(f"{json.dumps(each)}\n" for each in records)
        Path(target, name).write_text(lines, encoding="utf-8")
        Path(target, name).chmod(0o600)


def _copy_states(directory: str, copy: str, older: Entry) -> None:
    """Copies the files of `save_state` that were written before a commit.

    A later file has a value that the program did not have at the commit.
    """
    for folder in (layout.STATES, layout.worker_name(0)):
        for path in Path(directory, folder).glob(f"*{layout.STATE_SUFFIX}"):
            with contextlib.suppress(TfpreemptError):
                found = state_file.read(str(path))
                if found is not None and found[0] < (older.sequence or 0):
                    Path(copy, folder).mkdir(exist_ok=True)
                    with (
                        file_reading.open_inside(str(path), directory) as file,
                        open(Path(copy, folder, path.name), "wb") as new,
                    ):
                        shutil.copyfileobj(file, new)


def _values(commit: Entry) -> Mapping[str, Any]:
    """Returns the bytes of all tensors, and the checksums of all named States."""
    found: dict[str, Any] = {}
    arrays = dict(array_contents.read(commit.prefix)[0]) if commit.prefix else {}
    arrays |= array_contents.read_worker_values(commit)
    for name, array in arrays.items():
        found[name] = (str(array.dtype), array.shape, array.tobytes())
    for file in commit.files:
        name = file.name.rpartition("/")[2]
        if name.endswith(layout.STATE_SUFFIX) and not name.startswith(RESERVED):
            found[f"State {file.name}"] = (file.size, file.crc32c)
    return found
