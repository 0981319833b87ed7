"""States of two workers that share nothing but a directory, as real processes.

TensorFlow is not imported, so a process takes a quarter of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import supervised  # noqa: F401  (a fixture)
from tfpreempt.checkpoint.restore import newest_verified

ROOT = Path(__file__).parents[2]
LIMIT = 60.0

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

# `Meets.sync` ends only when the other worker is in the sync of the same State, as a
# collective does: two workers that come in different order would wait for ever.
PRELUDE = """
import json, os, pathlib, signal, sys, time
import tfpreempt
from tfpreempt.states import JsonState, alone, registered
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
here = pathlib.Path(os.environ["MEETING"])
class Meets(JsonState):
    count = 0
    def sync(self):
        self.count += 1
        name = f"{self.name}-{self.count}"
        (here / f"{name}-{me}").touch()
        end = time.monotonic() + 20
        while not (here / f"{name}-{1 - me}").exists():
            if time.monotonic() > end:
                sys.exit(f"nobody came to the sync of {self.name}")
            time.sleep(0.002)
"""


class Workers:
    """Processes of one incarnation, each with a program of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *programs: str, world: int = 2, **environment: str) -> None:
        meeting = self.directory / f"meeting-{len(self.started)}"
        meeting.mkdir()
        cluster = {"worker": [f"127.0.0.1:{port}" for port in range(1, world + 1)]}
        inherited = {k: v for k, v in os.environ.items() if "TFPREEMPT" not in k}
        for index, program in enumerate(programs):
            task = {"type": "worker", "index": index}
            told = {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
                "TFPREEMPT_CHECKPOINT_DIR": str(self.directory / "ckpt"),
                "MEETING": str(meeting),
                "PYTHONPATH": str(ROOT),
            }
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-c", PRELUDE + program],
                    env=inherited | told | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def run(self, *programs: str, **more) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each."""
        self.start(*programs, **more)
        ends = []
        for each in self.started[-len(programs) :]:
            out, err = each.communicate(timeout=LIMIT)
            ends.append((each.returncode, out, err))
        return ends


@pytest.fixture
def workers(tmp_path):
    found = Workers(tmp_path)
    yield found
    for each in found.started:
        if each.poll() is None:
            each.kill()
            each.communicate()


def newest(workers):
    found = newest_verified(str(workers.directory / "ckpt"))
    assert found is not None
    return found


def names_below(path):
    return sorted(str(each.relative_to(path)) for each in Path(path).rglob("*.state"))


FOUR = """
order = ["a", "b", "c", "d"]
if me == 1:
    order.reverse()
states = {n: Meets(n, f"{n} of {me}", per_worker=n in "bd") for n in order}
print([tfpreempt.load_state(states[n]) and states[n].value for n in "abcd"])
for n in order:
    states[n].value = f"{n} of {me}, new"
for _ in range(3):
    print(tfpreempt.save_all_states())
"""


def test_any_order_of_registration_and_shards_of_all(workers):
    ckpt = workers.directory / "ckpt"
    first = workers.run(FOUR, FOUR)
    assert [code for code, _, _ in first] == [0, 0], first
    assert first[0][1].splitlines() == [
        "[False, False, False, False]",
        *(str(ckpt / name) for name in "123"),
    ]
    assert first[1][1].splitlines()[1:] == [str(ckpt)] * 3
    found = newest(workers)
    assert names_below(found.path) == [
        "states/a.state",
        "states/c.state",
        "worker-0000/b.state",
        "worker-0000/d.state",
        "worker-0001/b.state",
        "worker-0001/d.state",
    ]
    assert found.manifest.workers == (0, 1)
    assert not (ckpt / ".tfpreempt-staging").exists()
    second = workers.run(FOUR, FOUR)
    assert [code for code, _, _ in second] == [0, 0], second
    assert [out.splitlines()[0] for _, out, _ in second] == [
        f"['a of 0, new', 'b of {me}, new', 'c of 0, new', 'd of {me}, new']"
        for me in (0, 1)
    ]


def test_all_load_what_all_saved_last(workers):
    """A worker that is quicker than the chief waits for its commit."""
    program = """
from tfpreempt.storage import files
if me == 0:
    rename = files.LocalFiles.rename
    def slowly(self, source, target):
        if "states-" in source:
            time.sleep(0.3)
        rename(self, source, target)
        time.sleep(0.05)
    files.LocalFiles.rename = slowly
state = JsonState("a", 0, per_worker=True)
for state.value in (1, 2):
    tfpreempt.save_all_states()
    print(tfpreempt.load_state(state), state.value)
"""
    ends = workers.run(program, program)
    assert [out for _, out, _ in ends] == ["True 1\nTrue 2\n"] * 2, ends


def test_what_a_dead_run_left_passes_for_nothing(workers):
    """A run that was killed at any moment leaves files like those of this one."""
    folder = workers.directory / "ckpt" / ".tfpreempt-staging" / ".workers"
    folder.mkdir(parents=True)
    stale = {
        "hello-1": '"dead"',
        "plan": '{"run": "gone", "numbers": {"1": "dead"}}',
        "ack-1": '"gone"',
    }
    for name, text in stale.items():
        (folder / name).write_text(text)
    half = folder.parent / "states-gone-1"
    (half / "worker-0001").mkdir(parents=True)
    (half / "worker-0001" / "b.state").write_text('"of a dead worker"')
    (folder.parent / "states-gone-1.done").mkdir()
    ends = workers.run(FOUR, FOUR)
    assert [code for code, _, _ in ends] == [0, 0], ends
    shard = Path(newest(workers).path) / "worker-0001" / "b.state"
    assert json.loads(shard.read_text()) == "b of 1, new"
    assert not folder.parent.exists()


def test_replicated_states_wait_for_nobody(workers):
    program = """
state = JsonState("a", "of the chief")
print(tfpreempt.save_all_states())
"""
    ((code, out, err),) = workers.run(program)  # the other worker never starts
    assert code == 0, err
    assert out == f"{workers.directory / 'ckpt' / '1'}\n"
    assert newest(workers).manifest.world_size == 2


SHORT = """
alone.StatesAlone.__init__.__kwdefaults__["seconds"] = 0.2
state = JsonState("a", 1, per_worker=True)
try:
    tfpreempt.save_all_states()
except tfpreempt.errors.SaveError as error:
    print(error)
"""


def test_a_worker_that_never_comes_is_named(workers):
    (chief,) = workers.run(SHORT, world=3)
    assert chief[0] == 0, chief[2]
    assert "from worker(s) 1, 2 in" in chief[1]
    assert newest_verified(str(workers.directory / "ckpt")) is None


def test_a_chief_that_never_comes_is_named(workers):
    ends = workers.run("", SHORT)
    assert "from worker(s) 0 in" in ends[1][1], ends
    assert newest_verified(str(workers.directory / "ckpt")) is None


def test_a_worker_that_dies_between_two_saves_is_named(workers):
    chief = """
state = JsonState("a", 1, per_worker=True)
tfpreempt.save_all_states()
(alone,) = registered._alone.values()
alone._meeting._seconds = 0.2
state.value = 2
try:
    tfpreempt.save_all_states()
except tfpreempt.errors.SaveError as error:
    print(error)
state.value = None
print(tfpreempt.load_state(state), state.value)
"""
    other = """
state = JsonState("a", 1, per_worker=True)
tfpreempt.save_all_states()
"""
    ends = workers.run(chief, other)
    assert [code for code, _, _ in ends] == [0, 0], ends
    lines = ends[0][1].splitlines()
    assert "from worker(s) 1 in" in lines[0]
    assert lines[1] == "True 1"
    left = sorted(os.listdir(workers.directory / "ckpt"))
    assert left == [".tfpreempt-directory", "1"]


def test_a_worker_that_cannot_save_is_heard_at_once(workers):
    other = """
state = JsonState("a", (1, 2), per_worker=True)
tfpreempt.save_all_states()
"""
    ends = workers.run(SHORT.replace("0.2", "50"), other)
    assert ends[0][0] == 0, ends
    assert "worker 1: SaveError: The value of <JsonState 'a' per_worker>" in ends[0][1]
    assert ends[1][0] == 1
    assert newest_verified(str(workers.directory / "ckpt")) is None


def test_other_workers_than_before(workers):
    ends = workers.run(FOUR, FOUR)
    assert [code for code, _, _ in ends] == [0, 0], ends
    alone = """
for n, shared in (("a", True), ("b", False)):
    state = JsonState(n, per_worker=not shared)
    print(tfpreempt.load_state(state), state.value)
"""
    ((code, out, err),) = workers.run(alone, world=1)
    assert code == 0, err
    assert out.splitlines() == ["True a of 0, new", "False None"]
    assert "was written by 2 workers, now there are 1" in err


# --- a plain loop under the supervisor -----------------------------------------------

LOOP = """
import random
import tfpreempt
from tfpreempt.states import JsonState, PythonRandomState, StepCounter
step, drawn = StepCounter(), JsonState("drawn", [])
rng = random.Random(7)
generator = PythonRandomState("rng", rng)
for state in (step, drawn, generator):
    tfpreempt.load_state(state)
tell(f"start-{restart}", str(step.value))
assert tfpreempt.num_restarts() == restart
while step.value < 20:
    drawn.value.append(rng.random())
    if step.increment() % 4 == 0:
        tfpreempt.save_all_states()
    if restart < 2 and step.value == 10 + 5 * restart:
        tell(f"ready-{restart}", str(os.getpid()))
        time.sleep(60)  # ended by the signal
tell("result", json.dumps(drawn.value))
assert "tensorflow" not in sys.modules
"""


def test_a_plain_loop_resumes_exactly(supervised):  # noqa: F811
    command = [sys.executable, "worker.py"]
    supervised.start(LOOP, command=command)
    for restart in range(2):
        pid = int(supervised.wait_told(f"ready-{restart}"))
        os.kill(pid, signal.SIGTERM)  # the machine goes; nobody catches it
    code, _, err = supervised.finish()
    assert code == 0, err + supervised.log(0)
    starts = [supervised.wait_told(f"start-{n}") for n in range(3)]
    assert starts == ["0", "8", "12"]
    rng = random.Random(7)
    result = json.loads(supervised.wait_told("result"))
    assert result == [rng.random() for _ in range(20)]
