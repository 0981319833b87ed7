"""Changes random bytes in every form of checkpoint, and then starts a run.

The campaign knows the content of each commit, and which bytes are unchanged. So the
campaign can judge the result of a start without knowing how the start finds corruption.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from campaigns.campaign import Campaign, Facts, Trial

STEPS = (1, 2, 3)  # of the commits in each location; values(step) has the contents
WORLD = 2
PAGE = 4096
LARGE = 1 << 16  # bytes; smallest total that is written in parallel (else 32 MiB)
MANIFEST, MARKER, POINTER = "MANIFEST.json", "COMMITTED", "checkpoint"
WITNESS = ".was-committed"
# Locations: the checkpoint directory, its mirror, and the snapshots of its worker.
DISK, BUCKET, MEMORY = "disk", "bucket", "memory"
_OF_COMMIT = re.compile(
    rf"({DISK}|{BUCKET}|{MEMORY}/[^/]+)/(?:(?:ckpt-)?([123])(?!\d)|states/)"
)
_ADVICE = re.compile(r"[Pp]ut the (files|objects) back")
_FLAT_INDEX = re.compile(rf"{DISK}/ckpt-\d\.index")
_FOOTER = 48  # bytes at the end of an index; some of them have no meaning

Files = dict[str, bytes]
"""The bytes of each file below a directory, by path."""


class MixError(AssertionError):
    """Values of no commit, or values that were assigned before a start was refused."""


# --- the damage -----------------------------------------------------------------------


def damage(directory: Path, rng: random.Random) -> str:
    """Damages one or two files; returns a description."""
    names = sorted(read(directory))
    # Control files are few and small: without this choice they were rarely drawn.
    controls = [each for each in names if Path(each).name in (MANIFEST, MARKER)]
    name = rng.choice(rng.choice([names, controls or names]))
    path = directory / name
    edits = [flip, truncate, delete, zero, grow, garble]
    if _OF_COMMIT.match(name):
        edits.append(remove)
    if name.endswith((MANIFEST, MARKER)):
        edits.append(edit)
    kind = rng.choice([*edits, swap])
    if kind is swap:
        other = rng.choice(names)
        swap(path, directory / other)
        name += f" {other}"
    else:
        kind(path, rng)
    return f"{kind.__name__} {name}"


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    rewrite(path, bytes(data))


def truncate(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    rewrite(path, data[: rng.choice([0, len(data) - 1, rng.randrange(len(data) + 1)])])


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def remove(path: Path, rng: random.Random) -> None:
    """Deletes all files of a commit, as users do by hand."""
    root = next(each for each in path.parents if each.name in (DISK, BUCKET, MEMORY))
    root = root.parent
    of = place_of(path.relative_to(root).as_posix())
    for name in read(root):
        if place_of(name) == of:
            (root / name).unlink()
            with contextlib.suppress(OSError):  # the directory has other files
                os.removedirs((root / name).parent)


def zero(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) // PAGE + 1) * PAGE
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    rewrite(path, bytes(data))


def grow(path: Path, rng: random.Random) -> None:
    more = rng.choice([bytes, rng.randbytes])(rng.choice([1, 100, PAGE]))
    rewrite(path, path.read_bytes() + more)


def garble(path: Path, rng: random.Random) -> None:
    rewrite(path, rng.randbytes(len(path.read_bytes())))


def edit(path: Path, rng: random.Random) -> None:
    """Replaces or deletes a field of a JSON file."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        record = None
    if not isinstance(record, dict):  # an earlier damage changed this file
        return flip(path, rng)
    holder: Any = record
    while True:
        fields = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        if not fields:
            return None
        field = rng.choice(list(fields))
        inner = holder[field]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        holder = inner
    if rng.random() < 0.2:
        del holder[field]
    else:
        near = inner + 1 if isinstance(inner, int) else f"{inner}x"
        holder[field] = rng.choice([near, 0, -1, 2**64, 1e300, "", "../x", None, []])
    rewrite(path, json.dumps(record, indent=1, sort_keys=True).encode())
    return None


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    rewrite(one, second)
    rewrite(other, first)


def rewrite(path: Path, data: bytes) -> None:
    """Overwrites a file and keeps its times, as a failing disk does."""
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# --- the starts ----------------------------------------------------------------------


def values(step: int) -> dict[str, Any]:
    """Returns the values of the variables at a step."""
    import numpy as np

    drawn = np.random.default_rng(step)
    return {
        "large": drawn.random(30_000, np.float32),
        "table": drawn.integers(0, 99, (100, 100)),
        "small": np.int64(step),
    }


class Program:
    """A process that has just started: large and small variables, and a State."""

    def __init__(self, form: Form) -> None:
        import tensorflow as tf

        self.form = form
        self.variables = {name: tf.Variable(v) for name, v in values(0).items()}
        self.checkpoint = tf.train.Checkpoint(**self.variables)
        self.state = self.make_state()

    def make_state(self) -> Any:
        from tfpreempt.states import JsonState

        return JsonState("state", self.held(0))

    def held(self, step: int) -> Any:
        """Returns the value of the State at a step."""
        return step

    def assign(self, step: int) -> None:
        for name, value in values(step).items():
            self.variables[name].assign(value)
        self.state.value = self.held(step)

    def step(self, *, has_state: bool) -> int:
        """Returns the step of the variables and of the State.

        Raises:
            MixError: the values are of several steps.
        """
        held = {name: variable.numpy() for name, variable in self.variables.items()}
        step = int(held["small"])
        meant = values(step)
        wrong = [name for name in held if held[name].tobytes() != meant[name].tobytes()]
        if has_state and self.state.value != self.held(step):
            wrong.append("state")
        if wrong:
            raise MixError(f"'small' is of step {step}, and not so: {wrong}")
        return step

    def manager(self, directory: Path) -> Any:
        import tensorflow as tf

        make = functools.partial(
            tf.train.CheckpointManager, self.checkpoint, str(directory / DISK), None
        )
        try:
            return make()
        except ValueError:  # TensorFlow cannot read its state file
            (directory / DISK / POINTER).unlink()
            return make()

    def handler(self, directory: Path, manager: Any = None) -> Any:
        from tests.handler.program import Button
        from tfpreempt import PreemptionCheckpointHandler, TerminationConfig

        def save() -> str:
            prefix = directory / DISK / f"ckpt-{int(self.variables['small'])}"
            return str(self.checkpoint.write(prefix))

        bucket = (directory / BUCKET).as_uri() if self.form.has_copies else None
        save_fn = save if self.form.has_function else None
        return PreemptionCheckpointHandler(
            None,
            manager or self.checkpoint,
            directory / DISK,
            TerminationConfig(
                exit_fn=int, save_fn=save_fn, signals=(), sources=[Button]
            ),
            max_to_keep=None,
            mirror_dir=bucket,
        )


class Worker(Program):
    """One of WORLD processes, each with its own State and its own random numbers.

    A Worker starts like a handler, but without the agreements on when to save.
    """

    def __init__(self, form: Form, index: int) -> None:
        self.index = index
        super().__init__(form)

    def make_state(self) -> Any:
        from tfpreempt.checkpoint.state.state import StateRegistry
        from tfpreempt.states import JsonState

        self.registry = StateRegistry()  # this process has all workers
        return JsonState("state", self.held(0), per_worker=True, registry=self.registry)

    def held(self, step: int) -> Any:
        return [step, self.index]

    def assign(self, step: int) -> None:
        super().assign(step)
        random.seed(f"{self.held(step)}")

    def agree(self, directory: Path, keys: Any) -> Any:
        """Returns the commits to resume from, as agreed by all workers in threads."""
        from tfpreempt.checkpoint.directory.retention import RetentionPolicy
        from tfpreempt.checkpoint.lease.lease import Lease
        from tfpreempt.core.cluster import Cluster
        from tfpreempt.handler import restore_agreement

        cluster = Cluster(worker=self.index, jobs=(("worker", WORLD),))
        start = restore_agreement.RestoreAgreement(
            checkpoint=self.checkpoint,
            directory=directory / DISK,
            cluster=cluster,
            policy=RetentionPolicy(max_to_keep=None),
            lease=Lease() if cluster.is_chief else None,
            registry=self.registry,
        )
        return restore_agreement.agree(start, keys, "start", 60.0)

    def restore(self, agreed: Any) -> int:
        """Restores the agreed commit; returns the restored step."""
        from tfpreempt.checkpoint.restore.reshard import load_worker_state

        if agreed.candidate is not None:
            agreed.directory.restore(agreed.candidate)
            opened = agreed.directory
            load_worker_state(agreed.candidate, opened.random_state, opened.cluster)
        step = self.step(has_state=True)
        meant = random.Random(f"{self.held(step)}")
        if step and random.getstate() != meant.getstate():
            raise MixError(f"random numbers of {self.index} are not of step {step}")
        return step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A layout of checkpoints, and the kind of program that starts from them.

    Attributes:
        name: name of the form.
        is_managed: whether a CheckpointManager writes the checkpoints.
        has_function: whether a save_fn writes the checkpoints.
        has_copies: whether the checkpoints are mirrored to an object store.
        has_disk: whether the checkpoints also remain on the disk.
        is_foreign: whether TensorFlow alone writes the checkpoints, without tfpreempt.
    """

    name: str
    is_managed: bool = False
    has_function: bool = False
    has_copies: bool = False
    has_disk: bool = True
    is_foreign: bool = False

    def write(self, directory: Path) -> None:
        """Writes one commit of each step; close() writes the last commit."""
        with self._process() as program:
            if self.is_foreign:
                manager = program.manager(directory)
                for step in STEPS:
                    program.assign(step)
                    manager.save()
                return
            with self._handler(program, directory) as handler:
                for step in STEPS:
                    program.assign(step)
                    handler.run(int)
                    if step != STEPS[-1]:
                        handler.save()
        if not self.has_disk:
            shutil.rmtree(directory / DISK)

    def start(self, directory: Path) -> int:
        """Starts the program; returns the restored step, 0 without a checkpoint.

        Raises:
            MixError: the values are of several steps, or a start assigned values and
                was refused.
            Exception: the error of the start.
        """
        with self._process() as program:
            try:
                handler = self._handler(program, directory)
            except Exception as error:
                if program.step(has_state=True):
                    raise MixError("it was restored, and then refused") from error
                raise
            step = program.step(has_state=not self.is_foreign)
            del handler
            return step

    def _handler(self, program: Program, directory: Path) -> Any:
        manager = program.manager(directory) if self.is_managed else None
        return program.handler(directory, manager)

    @contextlib.contextmanager
    def _process(self) -> Iterator[Program]:
        from tests.fakes.process import new_process

        with new_process():
            program = Program(self)
            try:
                yield program
            finally:
                program.state.unregister()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotForm(Form):
    """A commit, and two later snapshots in the memory of a supervisor."""

    def write(self, directory: Path) -> None:
        from tfpreempt.checkpoint.lease import lease
        from tfpreempt.handler.snapshots import SnapshotTiming

        (directory / MEMORY).mkdir(parents=True)
        with self._process() as program, self._lent(directory):
            handler = program.handler(directory)
            program.assign(STEPS[0])
            handler.run(int)
            handler.save()
            run = handler._run
            for step in STEPS[1:]:
                program.assign(step)
                run.steps_made = step
                assert run.take_snapshot(f"round-{step}")
                timing = SnapshotTiming(arrived=0, left=0, steps=step, intervals=0)
                run.snapshots.go_on(timing)
                assert run.snapshots.wait(60.0)
            lease.release_all()  # the process is killed: no close() clears the memory

    def start(self, directory: Path) -> int:
        from tfpreempt.core.snapshot_memory import SnapshotMemory
        from tfpreempt.handler.snapshots import directory_for

        memory = directory / MEMORY
        named = directory_for(
            SnapshotMemory(directory=str(memory), bytes=0), str(directory / DISK), 0
        )
        for each in memory.iterdir():  # the trial copied the memory with the directory
            each.rename(named)
        with self._lent(directory):
            return super().start(directory)

    def _lent(self, directory: Path) -> contextlib.AbstractContextManager[Any]:
        from tfpreempt.core.snapshot_memory import SnapshotMemory

        lent = SnapshotMemory(directory=str(directory / MEMORY), bytes=1 << 30)
        return mock.patch.dict(os.environ, lent.to_environment())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatesForm(Form):
    """Standalone States, without a handler.

    Attributes:
        has_file: whether the newest save is one State in a separate file.
    """

    has_file: bool = False

    def write(self, directory: Path) -> None:
        import tfpreempt

        with self._alone(directory) as states:
            for step in STEPS:
                for state in states:
                    state.value = step
                if self.has_file and step == STEPS[-1]:
                    tfpreempt.save_state(states[0], directory / DISK)
                else:
                    tfpreempt.save_all_states()

    def start(self, directory: Path) -> int:
        import tfpreempt

        with self._alone(directory) as states:
            wanted = states[: 1 if self.has_file else 2]
            try:
                for state in wanted:
                    tfpreempt.load_state(state)
            except Exception as error:
                if any(state.value for state in states):
                    raise MixError("a State was loaded, and then refused") from error
                raise
            steps = [int(state.value) for state in wanted]
            if len(set(steps)) > 1:
                raise MixError(f"the States are of the steps {steps}")
            return steps[0]

    @contextlib.contextmanager
    def _alone(self, directory: Path) -> Iterator[list[Any]]:
        from tests.fakes.process import new_process
        from tfpreempt.checkpoint.lease import lease
        from tfpreempt.states import JsonState, api

        states = [JsonState(name, 0) for name in ("state", "other")]
        named = {"TFPREEMPT_CHECKPOINT_DIR": str(directory / DISK)}
        with (
            new_process(),
            mock.patch.object(api, "_alone", {}),
            mock.patch.dict(os.environ, named),
        ):
            try:
                yield states
            finally:
                lease.release_all()
                for state in states:
                    state.unregister()


class WorkersForm(Form):
    """Commits of several workers; each worker has a part in each commit."""

    def write(self, directory: Path) -> None:
        from tests.checkpoint.fakes import write_part

        workers = [Worker(self, index) for index in range(WORLD)]
        with self._new_processes():
            starts = self._agree(workers, directory)
            for step in STEPS:
                parts = []
                for worker, start in zip(workers, starts, strict=True):
                    worker.assign(step)
                    attempt = f"{start.token}-save-{step}"
                    parts.append(write_part(start.directory, step, attempt))
                parts[0].publish("save", range(WORLD))

    def start(self, directory: Path) -> int:
        workers = [Worker(self, index) for index in range(WORLD)]
        with self._new_processes():
            before = random.getstate()
            try:
                agreed = self._agree(workers, directory)
            except Exception as error:
                is_same = random.getstate() == before
                if not is_same or any(each.step(has_state=True) for each in workers):
                    raise MixError("it was restored, and then refused") from error
                raise
            steps = {
                worker.restore(commits)
                for worker, commits in zip(workers, agreed, strict=True)
            }
        if len(steps) > 1:
            raise MixError(f"the workers are at the steps {steps}")
        return steps.pop()

    def _agree(self, workers: list[Worker], directory: Path) -> list[Any]:
        """Returns the agreed commits of all workers, or raises the common error."""
        from tfpreempt.coordination.in_memory_store import InMemoryStore

        keys = InMemoryStore()
        with ThreadPoolExecutor(WORLD) as pool:
            started = [pool.submit(each.agree, directory, keys) for each in workers]
        refusals = [each.exception() for each in started]
        if len({type(each) for each in refusals}) > 1:
            raise MixError(f"not all were refused: {refusals}")
        return [each.result() for each in started]

    @contextlib.contextmanager
    def _new_processes(self) -> Iterator[None]:
        """Context manager: releases all leases, and restores Python's random state."""
        from tfpreempt.checkpoint.lease import lease

        before = random.getstate()
        try:
            yield
        finally:
            random.setstate(before)
            lease.release_all()


FORMS = (
    Form(name="own"),
    Form(name="flat", is_managed=True),
    Form(name="save_fn", has_function=True),
    Form(name="foreign", is_foreign=True),
    Form(name="remote", has_copies=True, has_disk=False),
    Form(name="disk and remote", has_copies=True),
    SnapshotForm(name="snapshots"),
    WorkersForm(name="workers"),
    StatesForm(name="states"),
    StatesForm(name="state file", has_file=True),
)


# --- the expected result -------------------------------------------------------------


def read(directory: Path) -> Files:
    return {
        each.relative_to(directory).as_posix(): each.read_bytes()
        for each in directory.rglob("*")
        if each.is_file()
    }


def place_of(name: str) -> tuple[int, str] | None:
    """Returns the step and the location of the commit that a file belongs to."""
    match = _OF_COMMIT.match(name)
    return (int(match[2] or STEPS[-1]), match[1]) if match else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """The steps of the commits that are left after the damage.

    Attributes:
        whole: steps with an intact copy.
        possible: steps that a start may find intact: the intact steps, the steps where
            only the marker is missing, and all steps of TensorFlow, which has only
            checksums of its own.
        hidden: steps of TensorFlow whose damage is found only if all bytes are read.
        known: steps that can be recognized as commits: the marker exists, or files
            exist together with a witness or with an unchanged state file that names the
            commit.
        durable: the known steps that are not only snapshots.
        unclear: steps whose files lie beside a changed state file, which may name them,
            or which have the index of a flat commit and a changed manifest.
    """

    whole: set[int]
    possible: set[int]
    hidden: set[int]
    known: set[int]
    durable: set[int]
    unclear: set[int] = dataclasses.field(default_factory=set)


def left(form: Form, before: Files, after: Files) -> Left:
    """Returns the remaining steps, judged only by the bytes of the files."""
    copies: dict[tuple[int, str], set[str]] = collections.defaultdict(set)
    for name in before:
        if of := place_of(name):
            copies[of].add(name)
    found = Left(whole=set(), possible=set(), hidden=set(), known=set(), durable=set())
    for (step, place), names in copies.items():
        witnesses = {name for name in names if name.endswith(WITNESS)}
        names -= witnesses
        changed = {name for name in names if after.get(name) != before[name]}
        markers = {name for name in names if is_marker(form, name)} or names
        has_marker = not form.is_foreign and not markers.isdisjoint(after)
        is_told = (
            not witnesses.isdisjoint(after)
            or is_listed(place, before, after)
            or is_flat_commit(names, before, after)
        )
        if not changed:
            found.whole.add(step)
        if changed <= markers or form.is_foreign:
            found.possible.add(step)
        if form.is_foreign and has_hidden(names, before, after):
            found.hidden.add(step)
        is_seen = has_marker or (is_told and not names.isdisjoint(after))
        is_other = form.is_foreign and has_files_of_another(step, names, before, after)
        if is_seen and not is_other and not passes_for_deleted(names, before, after):
            found.known.add(step)
            if not place.startswith(MEMORY):
                found.durable.add(step)
        elif has_index(names, after) or (
            f"{place}/{POINTER}" in after and not names.isdisjoint(after)
        ):
            found.unclear.add(step)
    if is_of_unknown_rank(form, before, after):
        found.whole.discard(2)
        found.whole.discard(3)
        found.possible.update({2, 3})
    return found


def is_marker(form: Form, name: str) -> bool:
    """Returns whether a file makes the other files a checkpoint."""
    return name.endswith(".index") if form.is_foreign else Path(name).name == MARKER


def has_index(names: set[str], after: Files) -> bool:
    """Returns whether the index of a flat commit is left."""
    return any(name in after for name in names if _FLAT_INDEX.fullmatch(name))


def is_flat_commit(names: set[str], before: Files, after: Files) -> bool:
    """Returns whether an index and a manifest show that a flat commit was made.

    A save has an intent file until its marker is written, and no trial has this file.
    """
    manifests = [name for name in names if Path(name).name == MANIFEST]
    is_same = all(after.get(name) == before[name] for name in manifests)
    return bool(manifests) and is_same and has_index(names, after)


def passes_for_deleted(names: set[str], before: Files, after: Files) -> bool:
    """Returns whether a flat commit looks as if its manager had deleted it.

    Only the indices of this commit and of older commits are missing. A manager deletes
    the oldest commit first, and an interrupted deletion leaves the same files.
    """
    mine = [name for name in names if _FLAT_INDEX.fullmatch(name)]
    every = sorted(name for name in before if _FLAT_INDEX.fullmatch(name))
    if not mine or mine[0] in after:
        return False
    place = every.index(mine[0])
    has_newer = any(each in after for each in every[place + 1 :])
    return has_newer and not any(each in after for each in every[:place])


def has_files_of_another(
    step: int, names: set[str], before: Files, after: Files
) -> bool:
    """Returns whether all files of a checkpoint are those of another step.

    TensorFlow's files do not contain their step, so such a checkpoint is intact.
    """
    others = (f"ckpt-{other}" for other in STEPS if other != step)
    return any(
        all(
            after.get(name) == before[name.replace(f"ckpt-{step}", other)]
            for name in names
        )
        for other in others
    )


def is_listed(place: str, before: Files, after: Files) -> bool:
    """Returns whether an unchanged state file names the commits of a location.

    The state file of a bucket does not count: only other programs read it, and a commit
    without a marker is an unfinished upload.
    """
    pointer = f"{place}/{POINTER}"
    return place != BUCKET and before.get(pointer) == after.get(pointer) is not None


def has_hidden(names: set[str], before: Files, after: Files) -> bool:
    """Returns whether the damage of TensorFlow's files is not visible at first.

    The index is intact (it may be the index of another checkpoint), and no data file is
    shorter than before.
    """
    sound = [
        each[:-_FOOTER] for name, each in before.items() if name.endswith(".index")
    ]
    [index] = [name for name in names if name.endswith(".index")]
    return after.get(index, b"")[:-_FOOTER] in sound and all(
        len(after.get(name, b"")) >= len(before[name]) for name in names - {index}
    )


def is_of_unknown_rank(form: Form, before: Files, after: Files) -> bool:
    """Returns whether the commit before the snapshots may be unknown."""
    manifest = f"{DISK}/{STEPS[0]}/{MANIFEST}"
    is_changed = manifest in after and before[manifest] != after[manifest]
    return isinstance(form, SnapshotForm) and is_changed


def judge(form: Form, there: Left, outcome: int | Exception, said: str) -> str:
    """Returns the result of a start in a few words.

    Raises:
        AssertionError: the start was wrong.
    """
    from tfpreempt import errors

    newest = max(there.whole, default=0)
    if isinstance(outcome, Exception):
        if not isinstance(outcome, errors.CheckpointError):
            raise outcome
        hidden = [step for step in there.hidden if step > newest]
        assert hidden or not newest, f"step {newest} is whole; refused: {outcome}"
        may_have_unclear = form.is_foreign or form.is_managed or form.has_function
        is_there = hidden or there.durable or (may_have_unclear and there.unclear)
        assert is_there, f"nothing was there; refused: {outcome}"
        # For TensorFlow's checkpoints the reason is the checkpoint that was tried.
        since = [{step for step in there.known if step >= tried} for tried in hidden]
        told = named(f"{outcome}\n{said}")
        assert any(lost <= told for lost in since or [there.durable]), (
            f"{told} of {there} are in: {outcome}"
        )
        assert _ADVICE.search(str(outcome)), f"nothing says what to do: {outcome}"
        return "refused"
    if outcome != newest:
        is_right = outcome > newest and outcome in there.possible
        assert is_right, f"restored {outcome}; the newest whole one is {newest}"
    lost = {step for step in there.known if step > outcome}
    silent = lost - named(said)
    assert not silent, f"{outcome} was restored, and nothing is said of {silent}"
    if not outcome:
        assert not there.durable, f"a fresh start, though there was {there.durable}"
        return "nothing was there"
    return "restored" if outcome == STEPS[-1] else "restored an older one"


def named(text: str) -> set[int]:
    """Returns the steps of the commits whose paths are in a text."""
    found = (place_of(text[match.start() :]) for match in _OF_COMMIT.finditer(text))
    return {of[0] for of in found if of}


class Ears(logging.Handler):
    """Logging handler that keeps the warnings, and prints nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[Ears]:
    ears, log = Ears(), logging.getLogger("tfpreempt")
    log.addHandler(ears)
    was, log.propagate = log.propagate, False
    try:
        yield ears
    finally:
        log.propagate = was
        log.removeHandler(ears)


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: writes the commits of each form, which every trial copies.

    A process has one handler at a time, so trials take turns.
    """
    from tfpreempt.checkpoint.bundles import bundle_writer

    turn = threading.Lock()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made,
        mock.patch.object(bundle_writer, "WORTH_BYTES", LARGE),
        listening() as ears,
    ):
        for form in FORMS:
            form.write(Path(made, form.name))
        ears.said.clear()

        def trial(rng: random.Random) -> Facts:
            form = rng.choice(FORMS)
            with (
                turn,
                tempfile.TemporaryDirectory(
                    # A thread of the start may still write: its files are deleted too.
                    dir=made,
                    ignore_cleanup_errors=True,
                ) as copied,
            ):
                directory = Path(copied, form.name)
                shutil.copytree(Path(made, form.name), directory)
                before = read(directory)
                done = [damage(directory, rng) for _ in range(rng.randint(1, 3))]
                there = left(form, before, read(directory))
                outcome: int | Exception
                try:
                    outcome = form.start(directory)
                except MixError as error:
                    raise AssertionError(f"{form.name}: {done}, {there}") from error
                except Exception as error:
                    outcome = error
                said, ears.said[:] = "\n".join(ears.said), []
                try:
                    came = judge(form, there, outcome, said)
                except Exception as error:
                    text = f"{form.name}: {done}, {there}; it said {said!r}"
                    raise AssertionError(text) from error
            return {"form": form.name, "damages": len(done), "outcome": came}

        yield trial


CAMPAIGN = Campaign(
    name="damage",
    promise=(
        "Bits are flipped; files are truncated, deleted, swapped, zeroed, extended "
        "and overwritten; manifests and markers are edited; commits are removed by "
        "hand. The corrupt files are commits in both layouts (directories of "
        "tfpreempt, and flat files of a CheckpointManager), commits with the "
        "parts of two workers, commits of a save_fn, checkpoints of TensorFlow, "
        "mirrored commits, snapshots and States. Every worker of a start restores "
        "the newest intact commit completely, and names each commit that was "
        "skipped. Without an intact commit the start is refused with advice, before "
        "any variable is assigned. Training starts from scratch only if no trace of "
        "a commit is left."
    ),
    trials=5_050,
    short=100,
    mark="tensorflow",
    prepare=prepare,
    fixed=(
        "A flat commit with a corrupt manifest or marker was restored as if another "
        "program had written it, so its States were not restored. A commit without a "
        "marker was skipped without a warning, and deleted. Fixed "
        "(`checkpoint/test_restore.py`).",
        "If all checkpoints of TensorFlow in the directory were corrupt, training "
        "started from scratch with only a warning, not an error. The same happened if "
        "the disk was empty and all mirrored commits were corrupt. Fixed "
        "(`checkpoint/test_restore.py`, `handler/test_mirror.py`, "
        "`states/test_states_remote.py`).",
        "Three kinds of damage were skipped without a warning: the missing marker of "
        "a commit that has only States, the corrupt manifest or marker of a snapshot, "
        "and the missing index of a CheckpointManager's checkpoint. The error for "
        "damage that only TensorFlow detects had no advice. Fixed "
        "(`checkpoint/test_restore.py`, `handler/test_snapshots.py`).",
        "If a save_fn had written TensorFlow's files and their index was missing, the "
        "start assumed that the program had deleted the commit. Fixed "
        "(`checkpoint/test_restore.py`).",
        "If the index of each checkpoint of TensorFlow was missing, training started "
        "from scratch without a warning. If two records of a mirror's lease were "
        "swapped, the start was refused as if the mirror could not be read. Fixed "
        "(`checkpoint/test_restore.py`, `checkpoint/test_store_lease.py`).",
    ),
    again=((1939109493, 22), (202611291, 1176), (202611293, 2702), (202611297, 2942)),
    labels={
        "damages": "damages to files",
        "form": "form of the checkpoint",
        "outcome": "outcome of the start",
    },
)
