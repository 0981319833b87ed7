"""`keep_every` and `best_by`: the rules, on the disk and in the mirror."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import random

import pytest
from click.testing import CliRunner

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.checkpoint.uploads import PATIENCE, Gate, folders
from tests.fakes.clock import FakeClock
from tests.fakes.storage import FaultyFiles, FaultyObjectStore, SimulatedCrash, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, retention
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.directory.manifest import Manifest
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror.mirror_retention import delete
from tfpreempt.checkpoint.mirror.store_selection import Scratch
from tfpreempt.checkpoint.restore.handle import checkpoints_in
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.cli import main
from tfpreempt.storage.files import LocalFiles

HOUR = datetime.timedelta(hours=1)


def seeded(seed=None):
    """A generator whose seed is shown if the test fails."""
    seed = random.randrange(1 << 30) if seed is None else seed
    print(f"seed {seed}")
    return random.Random(seed)


class Settable(FakeClock):
    """A clock whose wall time an administrator sets."""

    shift = 0.0

    def wall(self):
        return super().wall() + self.shift


@pytest.fixture
def store():
    return FaultyObjectStore()


def run_in(path, **rules):
    """A process that commits in a directory, by the rules."""
    clock = rules.pop("clock", None)
    policy = RetentionPolicy(**rules)
    return open_directory(path, OwnContents(), retention=policy, clock=clock)


def commit(opened, step, **metrics):
    """Commits a step with its metrics."""
    opened.set_metrics(step, metrics)
    save(opened, step)


def kept(path):
    """Returns the reasons why each commit in a directory stays, oldest first."""
    return {os.path.basename(e.path): e.kept_because for e in checkpoints_in(str(path))}


def steps(path):
    return [entry.step for entry in reversed(catalog.scan(str(path)))]


# --- the rules -----------------------------------------------------------------------


def test_the_first_commit_of_each_period_stays(tmp_path):
    opened = run_in(tmp_path, keep_every=100)
    for step in (40, 80, 120, 160, 200, 240, 330, 340):
        commit(opened, step)
    every = "every 100 steps"
    assert kept(tmp_path) == {
        "40": every, "120": every, "200": every,
        "330": f"newest, {every}", "340": "newest",
    }  # fmt: skip


def test_periods_of_time_are_those_of_the_wall_clock(tmp_path):
    clock = FakeClock()
    clock.advance(10 * 3600 - clock.wall() % 3600 - 60)  # a minute before the hour
    opened = run_in(tmp_path, keep_every=HOUR, clock=clock)
    for step in range(8):  # at :59, :24, :49, :14, :39, :04, :29, :54
        commit(opened, step)
        clock.advance(25 * 60)
    every = "every 1:00:00"
    assert kept(tmp_path) == {
        "0": every, "1": every, "3": every, "5": every, "6": "newest", "7": "newest",
    }  # fmt: skip


def test_the_best_commits_stay_until_better_ones_come(tmp_path):
    opened = run_in(tmp_path, best_by=("val_loss", "min", 2))
    for step, value in enumerate([5.0, 3.0, 4.0, 3.0, math.nan, 9.0]):
        commit(opened, step, val_loss=value)
    best = "best val_loss"
    assert kept(tmp_path) == {"1": best, "3": best, "4": "newest", "5": "newest"}
    commit(opened, 6, val_loss=1.0)
    assert kept(tmp_path) == {"1": best, "5": "newest", "6": f"newest, {best}"}


def test_the_highest_value_may_be_the_best(tmp_path):
    opened = run_in(tmp_path, best_by=("accuracy", "max", 1))
    for step, value in enumerate([0.5, 0.9, math.inf, 0.7, 0.8]):
        commit(opened, step, accuracy=value, loss=1.0)
    assert kept(tmp_path) == {"1": "best accuracy", "3": "newest", "4": "newest"}


def test_metrics_belong_to_their_step(tmp_path):
    opened = run_in(tmp_path, best_by=("loss", "min", 1))
    commit(opened, 1, loss=0.1)
    save(opened, 2)
    newest, first = catalog.scan(str(tmp_path))
    assert retention.metrics_of(first.manifest) == {"loss": 0.1}
    assert retention.metrics_of(newest.manifest) == {}


def test_the_newest_two_stay_beside_those_of_the_rules(tmp_path):
    opened = run_in(tmp_path, max_to_keep=1, best_by=("loss", "min", 1))
    for step in range(5):
        commit(opened, step, loss=float(step))
    assert steps(tmp_path) == [0, 3, 4]


def test_without_the_rules_nothing_more_is_recorded(tmp_path):
    save(run_in(tmp_path), 1)
    (entry,) = catalog.scan(str(tmp_path))
    expected = {"attempt", "process", "restart", "saved_at"}
    assert entry.manifest.metadata.keys() == expected
    assert kept(tmp_path) == {"1": "newest"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_every", 0), ("keep_every", True), ("keep_every", 1.5),
        ("keep_every", datetime.timedelta(0)), ("best_by", "val_loss"),
        ("best_by", ("val_loss", "min")), ("best_by", ("val_loss", "low", 1)),
        ("best_by", ("val_loss", "min", 0)), ("best_by", ("", "min", 1)),
        ("best_by", (3, "min", 1)), ("best_by", ("val_loss", "min", True)),
    ],
)  # fmt: skip
def test_rules_that_cannot_work(name, value):
    with pytest.raises(errors.ConfigurationError, match=f"{name} is") as raised:
        RetentionPolicy(**{name: value})
    assert repr(value) in str(raised.value)


def test_a_metric_that_never_appears_is_named_once(tmp_path, caplog):
    opened = run_in(tmp_path, best_by=("vall_loss", "min", 1))
    save(opened, 1)
    assert caplog.text == ""  # a commit in the middle of an epoch
    for step in (2, 3):
        commit(opened, step, loss=1.0, val_loss=2.0)
    assert caplog.text.count("'vall_loss' of best_by=") == 1
    assert "has the metrics: loss, val_loss." in caplog.text


# --- restarts, clocks, corruption ----------------------------------------------------


def test_commits_that_stay_for_ever_outlive_other_rules(tmp_path):
    opened = run_in(tmp_path, keep_every=100, best_by=("loss", "min", 1))
    for step in (100, 150, 200, 250):
        commit(opened, step, loss=float(step == 100))
    opened = run_in(tmp_path, keep_every=1000)
    for step in (260, 270, 1000):
        commit(opened, step)
    assert steps(tmp_path) == [100, 200, 270, 1000]
    opened = run_in(tmp_path, max_to_keep=1)
    commit(opened, 1010)
    assert steps(tmp_path) == [100, 200, 1000, 1010]


@pytest.mark.parametrize("before", [{}, {"keep_every": 10_000}])
def test_a_period_that_began_under_other_rules_has_a_first_commit(tmp_path, before):
    """The commits of the period that were made before do not stay."""
    opened = run_in(tmp_path, **before)
    for step in (90, 110):
        commit(opened, step)
    opened = run_in(tmp_path, keep_every=100)
    for step in (120, 150, 190, 210, 220, 230):
        commit(opened, step)
    assert steps(tmp_path)[-4:] == [120, 210, 220, 230]


@pytest.mark.parametrize("hours", [-30, -1, 30])
def test_a_clock_that_is_set_loses_no_commit(tmp_path, hours):
    clock = Settable()
    opened = run_in(tmp_path, keep_every=HOUR, clock=clock)
    commit(opened, 1)
    clock.shift = hours * 3600
    for step in range(2, 7):
        commit(opened, step)
    assert steps(tmp_path) == [1, 2, 5, 6]


def test_training_from_scratch_has_periods_of_its_own(tmp_path):
    opened = run_in(tmp_path, keep_every=100)
    for step in (100, 200, 210, 5, 100, 110, 120):  # restore=False after step 210
        commit(opened, step)
    assert list(kept(tmp_path)) == ["100", "200", "5", "100.5", "110", "120"]


def test_a_commit_whose_name_was_taken_counts_by_its_step(tmp_path):
    opened = run_in(tmp_path, best_by=("loss", "min", 2))
    for step, value in ((1, 0.5), (348, 0.1)):
        commit(opened, step, loss=value)
    damage(tmp_path / "348" / "ckpt.index")
    opened = run_in(tmp_path, best_by=("loss", "min", 2))
    assert opened.newest().step == 1
    commit(opened, 348, loss=0.1)
    for step in (400, 401):
        commit(opened, step, loss=1.0)
    assert list(kept(tmp_path)) == ["1", "348.3", "400", "401"]


def test_a_corrupt_commit_does_not_count_as_kept(tmp_path):
    opened = run_in(tmp_path, keep_every=100, best_by=("loss", "min", 1))
    for step, value in ((100, 2.0), (200, 1.0), (201, 3.0)):
        commit(opened, step, loss=value)
    damage(tmp_path / "200" / "ckpt.index")
    damage(tmp_path / "201" / "ckpt.index")
    opened = run_in(tmp_path, keep_every=100, best_by=("loss", "min", 1))
    assert opened.newest().step == 100
    commit(opened, 202, loss=3.0)
    # The commit before is that of step 100, so step 202 is the first of its period.
    assert kept(tmp_path) == {
        "100": "newest, every 100 steps, best loss", "202": "newest, every 100 steps",
    }  # fmt: skip


@pytest.mark.parametrize(
    "recorded", [None, 3, {}, {"first_of": 7}, {"best_by": "x"}, {"num_newest": -1}]
)
def test_records_that_make_no_sense_keep_nothing(recorded):
    manifest = Manifest(
        step=1, sequence=1, world_size=1, workers=(0,), files=(),
        metadata={"retention": recorded, "metrics": recorded},
    )  # fmt: skip
    assert retention.first_of(manifest) == ""
    assert retention.metrics_of(manifest) == {}
    entry = Entry(
        store=None, name="1", kind=Kind.OWN, condition=CommitStatus.COMMITTED,
        manifest=manifest, token="1-0",
    )  # fmt: skip
    assert retention.explain([entry]) == {"1-0": "newest"}


def test_an_interrupted_deletion_is_completed_and_no_other_commit_lost(tmp_path):
    rules = {"keep_every": 100, "best_by": ("loss", "min", 1)}
    for fail_at in range(200):
        path = tmp_path / str(fail_at)
        opened = run_in(path, **rules)
        for step in (100, 110, 120, 130):
            commit(opened, step, loss=float(step != 110))
        files = FaultyFiles(fail_at=fail_at)
        crashing = open_directory(
            path, OwnContents(), files=files, retention=opened.retention
        )
        crashing.set_metrics(140, {"loss": -1.0})  # 110 and 120 go
        try:
            save(crashing, 140)
        except SimulatedCrash:
            assert {100, 130} <= set(steps(path)), fail_at
        else:
            break
        opened = run_in(path, **rules)
        opened.start()
        assert all(each.is_committed for each in catalog.scan(str(path))), fail_at
        commit(opened, 150, loss=1.0)
        assert {100, 150} <= set(steps(path)) <= {100, 110, 130, 140, 150}, fail_at
    assert steps(path) == [100, 130, 140]


@pytest.mark.parametrize("number", range(30))
def test_random_runs(number):
    """The rules hold for random steps, times, metrics and clocks."""
    rng = seeded()
    every = rng.choice([None, rng.randint(1, 50), rng.randint(1, 9) * HOUR])
    best = rng.choice([None, ("m", rng.choice(["min", "max"]), rng.randint(1, 3))])
    policy = RetentionPolicy(
        max_to_keep=rng.choice([1, 2, 3, None]), keep_every=every, best_by=best
    )
    disk: list[Entry] = []  # newest first
    mirror: list[Entry] = []
    values: dict[int, float] = {}
    lasting: set[int] = set()
    step, seconds = 0, 1e9
    for sequence in range(1, 80):
        step = max(0, step + rng.choice([1, 5, 30, -20]))
        seconds += rng.choice([60.0, 4000.0, 50000.0, -7000.0])
        value = rng.choice([math.nan, float(sequence), -float(sequence), None])
        metrics = {} if value is None else {"m": value}
        recorded = retention.record(policy, disk, step, seconds, metrics)
        manifest = Manifest(
            step=step, sequence=sequence, world_size=1, workers=(0,), files=(),
            metadata=json.loads(json.dumps({"saved_at": seconds, **recorded})),
        )  # fmt: skip
        entry = Entry(
            store=None, name=str(sequence), kind=Kind.OWN, step=step,
            condition=CommitStatus.COMMITTED, manifest=manifest, sequence=sequence,
        )  # fmt: skip
        is_first = not disk or (
            (isinstance(every, int) and disk[0].step // every != step // every)
            or (
                isinstance(every, datetime.timedelta)
                and disk[0].saved_at // every.total_seconds()
                != seconds // every.total_seconds()
            )
        )
        if every is not None and is_first:
            lasting.add(sequence)
        if value is not None and math.isfinite(value):
            values[sequence] = value
        disk = retention.plan([entry, *disk], policy)[0][::-1]
        # The mirror gets the commits late, several at once, without reading the disk.
        mirror.insert(0, entry)
        if rng.random() < 0.3:
            mirror = retention.plan(mirror, policy)[0][::-1]
        there = {each.sequence for each in disk}
        if policy.max_to_keep is None:
            assert len(there) == sequence
        fewest = policy.max_to_keep or sequence
        if policy.has_rules:
            fewest = max(fewest, 2)
        assert set(range(max(1, sequence - fewest + 1), sequence + 1)) <= there
        assert lasting <= there
        if best is not None:
            sign = 1 if best[1] == "min" else -1
            ranked = sorted(values, key=lambda each: (sign * values[each], each))
            assert set(ranked[: best[2]]) <= there
        most = fewest + len(lasting) + (best[2] if best else 0)
        assert len(there) <= most
        assert there <= {each.sequence for each in mirror}
    mirror = retention.plan(mirror, policy)[0]
    assert [e.sequence for e in mirror] == [e.sequence for e in disk[::-1]]


# --- the mirror ----------------------------------------------------------------------


@pytest.mark.parametrize("number", range(3))
def test_the_mirror_keeps_the_commits_that_the_disk_keeps(
    tmp_path, store, make_mirror, number
):
    rng = seeded()
    policy = RetentionPolicy(keep_every=40, best_by=("m", "max", 2))
    mirror = make_mirror(policy=policy)
    opened = open_directory(tmp_path, OwnContents(), retention=policy, mirror=mirror)
    step = 0
    for _ in range(15):
        step += rng.randint(1, 30)
        commit(opened, step, m=rng.random())
        if rng.random() < 0.5:
            assert mirror.wait(PATIENCE)
    assert mirror.wait(PATIENCE)
    mirror.close()
    assert [int(name.split(".")[0]) for name in folders(store)] == steps(tmp_path)[::-1]
    explained = retention.explain(catalog.contents(store))
    assert explained == retention.explain(catalog.scan(str(tmp_path)))


def test_the_mirror_reads_each_manifest_once(tmp_path, store, make_mirror):
    """And with `max_to_keep` alone only those of the commits to delete, as before."""
    policy = RetentionPolicy(keep_every=1)
    mirror = make_mirror(policy=policy)
    opened = open_directory(tmp_path, OwnContents(), retention=policy, mirror=mirror)
    reads = []
    get = store.get
    store.get = lambda name, *args, **kwargs: (
        reads.append(name),
        get(name, *args, **kwargs),
    )[1]
    for step in range(6):
        commit(opened, step)
        assert mirror.wait(PATIENCE)
    mirror.wait(PATIENCE)
    mirror.close()
    manifests = [name for name in reads if name.endswith("MANIFEST.json")]
    newest = [name for name in manifests if name.startswith(("4.", "5."))]
    older = [name for name in manifests if name not in newest]
    assert len(folders(store)) == 6
    # Once for TensorFlow's state file when it was the newest, once for its rules.
    assert len(older) == 8


def test_a_commit_that_stays_is_uploaded_after_a_restart(tmp_path, store, make_mirror):
    """The preemption uploaded the newest commit only."""
    policy = RetentionPolicy(keep_every=100, best_by=("m", "min", 1))
    gate = Gate(store)
    mirror = make_mirror(gate, policy=policy)
    opened = open_directory(tmp_path, OwnContents(), retention=policy, mirror=mirror)
    for step in (100, 150, 160, 170):
        commit(opened, step, m=float(step != 150))
    mirror.close()
    assert folders(store) == []
    newest = catalog.scan(str(tmp_path))[0]
    mirror = make_mirror(policy=policy, begins=(str(tmp_path), newest))
    assert mirror.wait(PATIENCE)
    mirror.close()
    assert [int(name.split(".")[0]) for name in folders(store)] == [170, 150, 100]
    operations = len(store.operations)
    mirror = make_mirror(policy=policy, begins=(str(tmp_path), newest))
    assert mirror.wait(PATIENCE)
    assert not [w for w, _ in store.operations[operations:] if "put" in w]
    assert [int(name.split(".")[0]) for name in folders(store)] == [170, 150, 100]


def test_a_scratch_directory_keeps_the_newest_and_those_to_be_uploaded(
    tmp_path, store, make_mirror
):
    policy = RetentionPolicy(keep_every=100)
    gate = Gate(store)
    scratch = Scratch("gs://b/run", str(tmp_path))
    mirror = make_mirror(gate, policy=policy, scratch=scratch)
    cache = dataclasses.replace(policy, is_cache=True)
    opened = open_directory(tmp_path, OwnContents(), retention=cache, mirror=mirror)
    commit(opened, 100)
    assert gate.entered.acquire(timeout=PATIENCE)
    for step in (110, 120, 130, 140):
        commit(opened, step)
    assert steps(tmp_path) == [100, 120, 130, 140]
    gate.open.set()
    assert mirror.wait(PATIENCE)
    assert [int(name.split(".")[0]) for name in folders(store)] == [140, 130, 100]
    commit(opened, 150)
    assert mirror.wait(PATIENCE)
    mirror.close()
    assert steps(tmp_path) == [150]
    assert [int(name.split(".")[0]) for name in folders(store)] == [150, 140, 100]


def test_a_deletion_at_the_url_is_noticed_after_the_upload_of_an_older_commit(
    tmp_path, store, make_mirror
):
    """The user deletes the newest commit, to resume from an older commit."""
    policy = RetentionPolicy(keep_every=100)
    gate = Gate(store)
    scratch = Scratch("gs://b/run", str(tmp_path))
    mirror = make_mirror(gate, policy=policy, scratch=scratch, lease=Lease())
    cache = dataclasses.replace(policy, is_cache=True)
    opened = open_directory(tmp_path, OwnContents(), retention=cache, mirror=mirror)
    commit(opened, 100)
    assert gate.entered.acquire(timeout=PATIENCE)
    for step in (110, 120, 130):
        commit(opened, step)
    scratch.settle([], LocalFiles(str(tmp_path)))
    gate.open.set()
    assert mirror.wait(PATIENCE)
    mirror.close()
    newest, *_ = copies = catalog.copies(store)
    assert [each.step for each in copies] == [130, 120, 100]
    delete(newest)
    scratch.settle(catalog.copies(store), LocalFiles(str(tmp_path)))
    assert steps(tmp_path) == []


# --- shown to users ------------------------------------------------------------------


def test_inspect_shows_why_each_commit_is_kept(tmp_path):
    path = str(tmp_path / "run")
    opened = run_in(path, keep_every=100, best_by=("loss", "min", 1))
    for step in (100, 110, 120, 130):
        commit(opened, step, loss=float(step != 110))
    # A line each, so that a narrow terminal cuts no reason.
    for columns in ("60", "200"):
        result = CliRunner().invoke(main, ["inspect", path], env={"COLUMNS": columns})
        lines = [each for each in result.stdout.splitlines() if "kept" in each]
        assert lines == ["kept: 110: best loss", "kept: 100: every 100 steps"]
    result = CliRunner().invoke(main, ["inspect", path, "--json"])
    said = {each["step"]: each["kept_because"] for each in json.loads(result.stdout)}
    assert said == {
        100: "every 100 steps", 110: "best loss", 120: "newest", 130: "newest",
    }  # fmt: skip


def test_inspect_has_no_line_more_without_the_rules(tmp_path):
    save(run_in(tmp_path), 1)
    result = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert "kept" not in result.stdout


def test_a_save_records_the_metrics_of_its_capture(tmp_path):
    """An asynchronous save is published during later steps."""
    opened = run_in(tmp_path, best_by=("loss", "min", 1))
    opened.set_metrics(1, {"loss": 0.5})
    part = Save(opened, 1, "attempt")
    part.capture()
    opened.set_metrics(2, {"loss": 7.0})
    part.write()
    part.publish("periodic", [0])
    (entry,) = catalog.scan(str(tmp_path))
    assert retention.metrics_of(entry.manifest) == {"loss": 0.5}
