"""`tfpreempt run --standby` with real processes; a small module for TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, is_alive, wait_until

pytestmark = pytest.mark.slow  # new interpreters for each

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-S", "worker.py"]
OPTIONS = ["--standby", "--standby-after", "0", "--standby-import", "heavy"]
HEAVY = """
import multiprocessing, os, pathlib, sys
import light, spread.part
print("heavy is imported", file=sys.stderr)
SETTING = os.environ.get("TF_SETTING")
PID = os.getpid()
os.environ["HEAVY_WAS_HERE"] = "yes"
pathlib.Path(f"imported-{PID}").touch()
"""
# `wait_for` waits for an event of the supervisor; the first incarnation then leaves.
PRELUDE = """
def wait_for(event):
    while f'"event": "{event}"' not in open("ckpt/journal/supervisor.jsonl").read():
        time.sleep(0.005)
def leave_once(event="standby_ready"):
    if restart == 0:
        wait_for(event)
        sys.exit(143)
"""
# What a program can see of how it was started, as JSON.
SELF_PORTRAIT = """
import json, os, signal, sys
seen = dict(globals())
import importlib.util
spec = importlib.util.find_spec("heavy")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
fields = ["SigBlk", "SigIgn", "SigCgt", "Threads"]
names = os.listdir("/proc/self/fd")
environ = dict(os.environ)
told = {name: environ.pop(name) for name in
    ["TFPREEMPT_NUM_RESTARTS", "TFPREEMPT_INCARNATION", "TFPREEMPT_SUPERVISED",
     "TF_CONFIG"]}
restart = int(told["TFPREEMPT_NUM_RESTARTS"])
portrait = {
    "globals": {k: repr(v).split(" object at")[0] for k, v in seen.items()},
    "is_main": vars(sys.modules["__main__"]) is globals(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path,
    "flags": repr(sys.flags), "options": repr(sys._xoptions), "warn": sys.warnoptions,
    "status": {name: status[name] for name in fields},
    "handlers": [repr(signal.getsignal(n)) for n in signal.valid_signals()],
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "parent": os.getppid(), "cwd": os.getcwd(), "environ": environ,
    "umask": os.umask(0o22), "oom": open("/proc/self/oom_score_adj").read(),
    "in": os.readlink("/proc/self/fd/0"), "out": os.readlink("/proc/self/fd/1"),
    "err": os.readlink("/proc/self/fd/2"), "mode": [sys.stdout.write_through,
        sys.stdout.line_buffering, sys.stderr.write_through],
    "heavy": "heavy" in sys.modules, "told": sorted(told),
    "spec": [spec.origin, spec.cached, spec.has_location, spec.name, spec.parent,
        spec.submodule_search_locations],
}
with open(f"portrait-{restart}", "w") as file:
    json.dump(portrait, file)
import heavy
import time
assert sys.modules["__mp_main__"] is sys.modules["__main__"]
assert heavy.SETTING is None and os.environ["HEAVY_WAS_HERE"] == "yes"
if restart == 0:
    while '"standby_ready"' not in open("ckpt/journal/supervisor.jsonl").read():
        time.sleep(0.005)
    sys.exit(143)
assert heavy.PID == os.getpid()
assert sys.modules["heavy"] is heavy
"""


@pytest.fixture
def library(supervised: Run) -> Path:
    """Where the module lies, which takes the place of TensorFlow."""
    library = supervised.directory / "library"
    library.mkdir()
    (library / "heavy.py").write_text(HEAVY)
    (library / "light.py").write_text("VALUE = 1\n")
    (library / "spread").mkdir()  # over several places, perhaps
    (library / "spread/part.py").touch()
    return library


@pytest.fixture
def standby(supervised: Run, library: Path) -> Callable[..., Run]:
    """Starts a supervisor with `--standby`."""

    def start(
        program: str, *options: str, command: Sequence[str] = COMMAND, **more: Any
    ) -> Run:
        supervised.start(
            PRELUDE + program,
            *OPTIONS,
            *options,
            command=command,
            environment={"PYTHONPATH": f"{ROOT}:{library}", "PYTHONUNBUFFERED": ""},
            **more,
        )
        return supervised

    return start


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [record for record in run.records() if record["event"] == name]


def waiting_pids(run: Run) -> list[int]:
    """Who has imported the module, apart from the workers."""
    workers = {pid for each in events(run, "started") for pid in each["pids"]}
    found = {int(path.name.split("-")[1]) for path in run.directory.glob("imported-*")}
    return sorted(found - workers)


def test_the_next_start_takes_over_what_waits(standby: Callable[..., Run]) -> None:
    program = """
import heavy
leave_once()
print(heavy.PID == os.getpid(), os.environ["HEAVY_WAS_HERE"])
"""
    run = standby(program, "--workers", "2")
    code, out, err = run.finish()
    assert code == 0, err
    assert "[worker-0] True yes\n" in out
    assert "standby: ready for worker(s) 0, 1, " in err
    assert " MiB each" in err
    assert "worker(s) 0, 1 from standby" in err
    ready, restarted = events(run, "standby_ready")[0], events(run, "restarted")[0]
    assert ready["workers"] == restarted["from_standby"] == [0, 1]
    assert ready["memory"] > 1 << 20
    assert all((run.directory / f"imported-{p}").exists() for p in restarted["pids"])
    # What the import says, each start says once, the waiting process not before.
    assert run.log(0).count("heavy is imported") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["portrait.py"],
        ["./package/../link.py", "one", "-m", "two three"],
        ["-u", "-X", "dev", "-W", "ignore::ImportWarning", "portrait.py"],
        ["-m", "package.program", "--one"],
        ["-O", "-m", "portrait"],
        ["-m", "package"],
    ],
    ids=" ".join,
)
def test_the_program_sees_no_difference(
    standby: Callable[..., Run], supervised: Run, words: list[str]
) -> None:
    directory = supervised.directory
    package = directory / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in ("portrait.py", "package/program.py", "package/__main__.py"):
        (directory / path).write_text(SELF_PORTRAIT)
    (directory / "link.py").symlink_to(package / "program.py")
    run = standby("", command=[sys.executable, "-S", *words])
    code, _, err = run.finish()
    assert code == 0, err + run.log(0)
    assert events(run, "restarted")[0]["from_standby"] == [0]
    cold, warm = (json.loads((directory / f"portrait-{n}").read_text()) for n in (0, 1))
    assert warm == cold


def test_a_variable_that_is_set_before_the_import_is_heeded(
    standby: Callable[..., Run],
) -> None:
    program = """
print("first line")
os.chdir("ckpt")
os.environ["TF_SETTING"] = os.environ["OTHER"] = "new"
import heavy
os.chdir("..")
leave_once()
if restart == 1:
    wait_for("no_standby")
    sys.exit(143)
print(heavy.SETTING, heavy.PID == os.getpid())
"""
    run = standby(program)
    code, out, err = run.finish()
    assert code == 0, err
    assert out.count("first line") == 3  # what is in a buffer is written once
    assert "new True" in out
    why = "the program has set TF_SETTING before its imports"
    assert f"[worker-0] tfpreempt: standby: a cold start after all: {why}" in out
    assert f"standby: the last one started cold: {why}; the next start is cold" in err
    assert [each.get("from_standby") for each in events(run, "restarted")] == [
        [0],
        None,
    ]


def test_a_cold_start_after_all_is_as_clean_as_any(
    standby: Callable[..., Run],
) -> None:
    program = """
def portrait():
    status = open("/proc/self/status").read().split()
    fields = {name: status[status.index(name) + 1] for name in ("SigBlk:", "SigIgn:")}
    return repr((os.getcwd(), fields, len(os.listdir("/proc/self/fd"))))
tell(f"portrait-{restart}", portrait())
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.chdir("ckpt")
os.environ["TF_SETTING"] = "new"
import heavy
os.chdir("..")
leave_once()
"""
    run = standby(program)
    code, out, err = run.finish()
    assert code == 0, err + out
    assert "a cold start after all" in out
    assert run.wait_told("portrait-0") == run.wait_told("portrait-1")


def test_a_child_of_the_program_does_not_start_it_again(
    standby: Callable[..., Run],
) -> None:
    program = """
print("first line", flush=True)
if (child := os.fork()) == 0:
    os.environ["TF_SETTING"] = "new"
    import heavy
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
import heavy
leave_once()
print(heavy.PID == os.getpid(), os.environ["HEAVY_WAS_HERE"])
"""
    run = standby(program)
    code, out, err = run.finish()
    assert code == 0, err + out
    assert out.count("first line") == 2
    assert "a child gets what was imported ahead, although the program has set" in out
    assert "True yes" in out
    assert not events(run, "no_standby")


def test_threads_of_the_program_import_it_once(standby: Callable[..., Run]) -> None:
    program = """
import importlib, threading
seen = []
def look():
    importlib.import_module("light" if len(threading.enumerate()) % 2 else "heavy")
    seen.extend(sys.modules[name] for name in ("light",))
threads = [threading.Thread(target=look) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
import heavy, light
assert set(map(id, seen)) == {id(light)} == {id(heavy.light)}
leave_once()
print(heavy.PID == os.getpid())
"""
    run = standby(program)
    code, out, err = run.finish()
    assert code == 0, err + out
    assert "True" in out


def test_what_the_program_sets_for_others_or_later_costs_nothing(
    standby: Callable[..., Run],
) -> None:
    program = """
os.environ["OTHER"] = "new"
os.environ["TF_CONFIG"] = "{}"
import light
del os.environ["OTHER"]
import heavy
os.environ["TF_SETTING"] = "new"
import heavy, light
leave_once()
print(heavy.SETTING, os.environ["HEAVY_WAS_HERE"])
"""
    run = standby(program)
    code, out, err = run.finish()
    assert code == 0, err + out
    assert "None yes" in out
    assert "cold start" not in out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("open('library/heavy.py', 'a').write('#')", "library/heavy.py has changed"),
        ("open('library/light.py', 'a').write('#')", "library/light.py has changed"),
        (
            "open('library/spread/part.py', 'a').write('#')",
            "spread/part.py has changed",
        ),
        ("open('light.py', 'w').write('')", "light would be imported from "),
        ("os.remove('library/light.py')", "light would be imported from None"),
    ],
)
def test_a_library_that_has_changed_is_imported_anew(
    standby: Callable[..., Run], change: str, why: str
) -> None:
    program = f"""
if restart == 1 and "light.py" in {change!r} and not os.path.exists("library/light.py"):
    open("library/heavy.py", "w").write("import os; PID = os.getpid()")
import heavy
if restart == 0:
    wait_for("standby_ready")
    {change}
    sys.exit(143)
print(heavy.PID == os.getpid())
"""
    code, out, err = standby(program).finish()
    assert code == 0, err + out
    assert "cold start after all: " in out
    assert why in out
    assert "True" in out


def test_a_program_that_is_gone_is_an_error_as_ever(
    standby: Callable[..., Run],
) -> None:
    program = "wait_for('standby_ready'); os.remove('worker.py'); sys.exit(143)"
    code, out, _ = standby(program, "--max-failures", "0").finish()
    assert code == 2
    assert "there is no worker.py any more" in out
    assert "can't open file" in out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["sh", "-c", f"exec {sys.executable} -S worker.py"], "'sh' is no Python"),
        (
            [sys.executable, "-S", "-I", "worker.py"],
            "importing heavy raised ModuleNotFoundError",
        ),
    ],
)
def test_what_can_have_no_standby_is_told_why(
    standby: Callable[..., Run], words: list[str], why: str
) -> None:
    run = standby("leave_once('no_standby')", command=words)
    code, _, err = run.finish()
    assert code == 0, err
    assert why in err
    assert "the next start is cold" in err
    assert "from_standby" not in events(run, "restarted")[0]


def test_one_that_is_not_ready_in_time_is_not_waited_for(
    standby: Callable[..., Run], library: Path
) -> None:
    (library / "heavy.py").write_text("""
import os, pathlib, time
pathlib.Path(f"imported-{os.getpid()}").touch()
time.sleep(60)
""")
    program = """
while restart == 0 and not list(pathlib.Path().glob("imported-*")):
    time.sleep(0.005)
sys.exit(143 if restart == 0 else 0)
"""
    run = standby(program)
    code, _, err = run.finish()
    assert code == 0
    assert "that of worker 0 was not ready in time; the next start is cold" in err
    assert not any(map(is_alive, waiting_pids(run)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_what_waits_and_not_the_training(
    standby: Callable[..., Run], number: signal.Signals
) -> None:
    run = standby("leave_once('no_standby')")
    run.wait_recorded("standby_ready")
    (pid,) = waiting_pids(run)
    os.kill(pid, number)
    code, _, err = run.finish()
    assert code == 0
    assert "standby: that of worker 0 has ended" in err
    assert "preemptions: 1, failures: 0" in err
    assert "from_standby" not in events(run, "restarted")[0]


def test_one_that_hangs_is_given_up(standby: Callable[..., Run]) -> None:
    run = standby(
        "while restart == 0 and not os.path.exists('go'): time.sleep(0.005)\n"
        "sys.exit(143 if restart == 0 else 0)"
    )
    run.wait_recorded("standby_ready")
    (pid,) = waiting_pids(run)
    os.kill(pid, signal.SIGSTOP)
    (run.directory / "go").touch()
    code, _, err = run.finish()
    assert code == 0
    assert "that of worker 0 does not answer" in err
    assert not is_alive(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_waits_longer_than_the_supervisor(
    standby: Callable[..., Run], number: signal.Signals
) -> None:
    run = standby("until_told()", "--workers", "2")
    run.wait_recorded("standby_ready")
    pids = waiting_pids(run)
    assert len(pids) == 2
    run.signal(number)
    wait_until(lambda: not any(map(is_alive, pids)), "the waiting processes to end")
    if number == signal.SIGTERM:
        assert run.finish()[0] == 143


def test_what_waits_holds_nothing_of_the_run(standby: Callable[..., Run]) -> None:
    run = standby("until_told()")
    run.wait_recorded("standby_ready")
    (pid,) = waiting_pids(run)
    held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [path for path in held if str(run.directory) in path]
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


def test_without_the_option_nothing_waits(supervised: Run) -> None:
    code, _, err = supervised.run("sys.exit(143 if restart == 0 else 0)")
    assert code == 0
    assert "standby" not in err
