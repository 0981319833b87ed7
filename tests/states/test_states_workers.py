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
from tfpreempt.checkpoint.restore.restore import newest_verified

ROOT = Path(__file__).parents[2]
LIMIT = 60.0

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

# `Meets.sync` ends only when the other worker is in the sync of the same State, as a
# collective does: two workers that come in different order would wait for ever.
PRELUDE = """
import json, os, pathlib, signal, sys, time
import tfpreempt
from tfpreempt.states import JsonState
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
    """Processes of one incarnation, each with its own program."""

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
states = {n: Meets(n, f"{n} of {me}") for n in order}
print([tfpreempt.load_state(states[n]) and states[n].value for n in "abcd"])
for n in order:
    states[n].value = f"{n} of {me}, new"
for _ in range(3):
    print(tfpreempt.save_all_states())
"""


def test_any_order_of_registration_and_the_chiefs_values(workers):
    ckpt = workers.directory / "ckpt"
    first = workers.run(FOUR, FOUR)
    assert [code for code, _, _ in first] == [0, 0], first
    assert first[0][1].splitlines() == [
        "[False, False, False, False]",
        *(str(ckpt / name) for name in "123"),
    ]
    assert first[1][1].splitlines()[1:] == [str(ckpt)] * 3
    assert names_below(newest(workers).path) == [f"states/{n}.state" for n in "abcd"]
    assert not (ckpt / ".tfpreempt-staging").exists()
    second = workers.run(FOUR, FOUR)
    assert [code for code, _, _ in second] == [0, 0], second
    all_of_the_chief = str([f"{n} of 0, new" for n in "abcd"])
    assert [out.splitlines()[0] for _, out, _ in second] == [all_of_the_chief] * 2


def test_per_worker_states_need_a_handler(workers):
    program = """
state = JsonState("mine", 1, per_worker=True)
try:
    tfpreempt.save_all_states()
except tfpreempt.errors.ConfigurationError as error:
    print(error)
"""
    for code, out, err in workers.run(program, program):
        assert code == 0, err
        assert "'mine' per_worker" in out
        assert "PreemptionCheckpointHandler(resolver, None," in out
    assert newest_verified(str(workers.directory / "ckpt")) is None


def test_replicated_states_wait_for_no_worker(workers):
    program = """
state = JsonState("a", "of the chief")
print(tfpreempt.save_all_states())
"""
    ((code, out, err),) = workers.run(program)  # the other worker never starts
    assert code == 0, err
    assert out == f"{workers.directory / 'ckpt' / '1'}\n"
    assert newest(workers).manifest.world_size == 2


SLOWER_THAN_THE_CHIEF = """
step, own = tfpreempt.states.StepCounter(), JsonState("own", me, per_worker=True)
own.unregister()
print(tfpreempt.load_state(step), tfpreempt.load_state(own), step.value, own.value)
Meets("loaded").sync()
step.increment()
marker = pathlib.Path(os.environ["TFPREEMPT_CHECKPOINT_DIR"], f"{step.value}/COMMITTED")
end = time.monotonic() + 20
while me and not marker.exists():
    if time.monotonic() > end:
        sys.exit("the chief did not commit")
    time.sleep(0.002)
own.value += 10
tfpreempt.save_state(own, os.environ["TFPREEMPT_CHECKPOINT_DIR"])
print(tfpreempt.save_all_states())
"""


def test_a_worker_saves_after_the_chief_has_committed(workers):
    ckpt = workers.directory / "ckpt"
    for start in range(3):
        ends = workers.run(SLOWER_THAN_THE_CHIEF, SLOWER_THAN_THE_CHIEF)
        for worker, (code, out, err) in enumerate(ends):
            assert code == 0, err
            assert err == ""
            value = worker + 10 * start
            loaded = f"{start > 0} {start > 0} {start} {value}"
            path = ckpt if worker else ckpt / str(start + 1)
            assert out.splitlines() == [loaded, str(path)]


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
        os.kill(pid, signal.SIGTERM)  # the machine ends; no code catches this
    code, _, err = supervised.finish()
    assert code == 0, err + supervised.log(0)
    starts = [supervised.wait_told(f"start-{n}") for n in range(3)]
    assert starts == ["0", "8", "12"]
    rng = random.Random(7)
    result = json.loads(supervised.wait_told("result"))
    assert result == [rng.random() for _ in range(20)]
