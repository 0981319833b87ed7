"""Restarts with another number of workers, corrupt commits, or foreign files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    LIMIT,
    PROGRAMS,
    RESTART,
    STEPS,
    Place,
    records,
    wait_until,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def test_another_number_of_workers(here: Place) -> None:
    """E.2: 2 workers, then 1, then 2: weights and step as saved, and a warning."""
    saved = None
    for count, (world, before) in enumerate([(2, None), (1, 2), (2, 1)]):
        cluster = here.train("mwms", world, "--steps", 4 * (count + 1))
        cluster.expect(*[0] * world)
        for worker in cluster:
            if before is not None:
                assert worker.lines("restored") == [[str(4 * count)] * 2]
                assert worker.lines("weights") == [[saved]]
                told = f"was written by {before} worker(s), and this run has {world}"
                assert told in worker.output
                assert (
                    "Any other dataset iterator starts from the beginning"
                    in worker.output
                )
        results = cluster.results()
        assert len({result["weights"] for result in results}) == 1
        saved = results[0]["weights"]


def test_a_corrupt_commit(here: Place, reference: Reference) -> None:
    """FACTS 2.12: all workers restore the same older commit, with a warning."""
    here.train("mwms", 2, "--save-freq", 8, "--sync-saves").expect(0, 0)
    steps = [r["step"] for r in records(here.checkpoints, "commit")]
    assert steps == [8, STEPS]
    [data] = (here.checkpoints / str(STEPS)).glob("ckpt.data-*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    second = here.train("mwms", 2)
    second.expect(0, 0)
    assert [worker.lines("restored") for worker in second] == [[["8", "8"]]] * 2
    assert second.results() == reference("mwms", 2)
    assert str(data) in second[0].output
    skipped = records(here.checkpoints, "restored", worker=0)[-1]["skipped"]
    assert [str(data) in problem for problem in skipped] == [True]


def test_users_checkpoints_are_not_changed(here: Place) -> None:
    """FACTS 2.11: files that tfpreempt did not write are never deleted."""
    here.train("none", 1, "--form", "manager").expect(0)
    names = {"ckpt-1.index", "ckpt-1.data-00000-of-00001"}
    mine = here.path / "mine"
    mine.mkdir()
    for name in names:
        shutil.copy(here.checkpoints / name, mine / name)
    (mine / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n'
    )
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    shutil.rmtree(here.checkpoints)
    mine.rename(here.checkpoints)
    cluster = here.train("none", 1, "--steps", 3 * STEPS, "--save-freq", 4)
    cluster.expect(0)
    for name in names:
        assert (here.checkpoints / name).read_bytes() == before[name]


def test_every_file_is_synced_before_the_marker(here: Place) -> None:
    """FACTS 2.13: fsync really happens, for files and directories, the marker last."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; tests/checkpoint records the operations")
    here.hold()
    cluster = here.train("none", 1, "--hold-at", 3)
    cluster[0].wait_line("holding")
    trace, told = here.path / "trace", here.path / "strace.stderr"
    calls = "trace=fsync,fdatasync,/^rename"
    command = [strace, "-f", "-y", "-s", "4096", "-e", calls, "-o", str(trace)]
    with told.open("wb") as err:
        tracer = subprocess.Popen(
            [*command, "-p", str(cluster[0].pid)], stdout=err, stderr=err
        )
        try:
            wait_until(
                lambda: "attached" in told.read_text() or tracer.poll() is not None,
                "strace attaches",
            )
            if tracer.poll() is not None:
                pytest.skip(f"this machine forbids ptrace: {told.read_text()}")
            cluster[0].send(15)
            cluster.wait_record("notice")
            here.release()
            cluster.expect(RESTART)
            tracer.wait(LIMIT)
        finally:
            tracer.kill()
    lines = trace.read_text().splitlines()
    [marked] = [i for i, line in enumerate(lines) if '"COMMITTED"' in line]
    # The directory and the name from which the whole marker is moved.
    marker = "/".join(re.findall(r'<([^>]+)>, "([^"]+)"', lines[marked])[0])
    paths = [line.partition("<")[2].partition(">")[0] for line in lines]
    synced = [path for path, line in zip(paths, lines, strict=True) if "sync(" in line]
    assert marker in paths[:marked]
    before = [Path(path).name.removesuffix(".tmp") for path in paths[:marked]]
    [commit] = records(here.checkpoints, "commit")
    written = {p.name for p in Path(commit["path"]).rglob("*") if p.is_file()}
    assert set(before) >= written - {"COMMITTED"}
    assert str(here.checkpoints) in synced


# --- TensorFlow's own files ----------------------------------------------------------


def test_plain_tensorflow_restores_a_commit(here: Place) -> None:
    """G.1: in a process without tfpreempt, by `tf.train.latest_checkpoint`."""
    first = here.train("mwms", 2)
    first.expect(0, 0)
    environment = {"PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "stock_restore.py"), str(here.checkpoints)],
        env=environment | {"CUDA_VISIBLE_DEVICES": "-1"},
        cwd=here.path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    result = first.results()[0]
    assert done.stdout.split() == [result["weights"], str(STEPS), str(STEPS)]


def test_a_checkpoint_of_tensorflows_handler_is_restored(here: Place) -> None:
    """G.2: a run changes from TensorFlow's handler to tfpreempt between two starts."""
    here.hold()
    first = here.start("tf_handler.py", tf_config=True)
    first[0].wait_line("holding")
    first[0].send(15)
    first[0].wait_text("has received termination notice")
    here.release()
    first.expect(42)
    saved = first.results()[0]
    second = here.train("mwms", 1)
    second.expect(0)
    assert second[0].lines("restored") == [[str(saved["runs"]), str(saved["trained"])]]
    assert second[0].lines("weights") == [[saved["weights"]]]
    assert second.results()[0]["trained"] == STEPS
