"""`tfpreempt run` with real processes: small programs in place of training."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.cli.conftest import Run, is_alive, wait_until
from tfpreempt.cli.signal_handling import NOTICES

pytestmark = pytest.mark.slow  # new interpreters for each

_IGNORES_CHILDREN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_all_finish(supervised: Run) -> None:
    code, out, err = supervised.run(
        "print('hello', os.environ['TFPREEMPT_CHECKPOINT_DIR'])", "--workers", "2"
    )
    assert code == 0
    assert out == f"[worker-0] hello {supervised.directory / 'ckpt'}\n"
    assert "outcome: training is complete, exit code: 0, starts: 1" in err
    assert "hello" in supervised.log(1)


def test_a_run_without_commits_in_the_directory_is_warned(
    supervised: Run,
) -> None:
    kept = """
from pathlib import Path
journal = Path(os.environ["TFPREEMPT_CHECKPOINT_DIR"], "journal")
(journal / "worker-0.jsonl").touch()
"""
    for program, is_told in (("pass", True), (kept, False)):
        code, _, err = supervised.run(program)
        assert code == 0
        assert ("no worker wrote a journal in " in err) == is_told


def test_a_restart_without_a_journal_in_the_directory_is_warned(
    supervised: Run,
) -> None:
    warning = "no worker has written a journal in "
    code, _, err = supervised.run("sys.exit(143 if restart < 2 else 0)")
    assert code == 0
    assert err.count(warning) == 1
    save(open_directory(str(supervised.directory / "ckpt"), OwnContents()), 80)
    code, _, err = supervised.run("sys.exit(0 if restart else 143)")
    assert code == 0
    assert warning not in err


def test_commits_of_a_program_without_a_journal_are_counted(supervised: Run) -> None:
    directory = supervised.directory / "ckpt"
    opened = open_directory(str(directory), OwnContents())
    for step in (80, 100):
        save(opened, step)
    code, _, err = supervised.run("pass")
    assert code == 0
    said = " ".join(err.split())
    assert (
        f"2 commit(s) in {directory}, newest step 100, all made before this run" in said
    )
    waits = "while not os.path.exists('go'): time.sleep(0.01)"
    supervised.start(f"tell('begun', '')\n{waits}")
    supervised.wait_told("begun")
    save(opened, 120)
    (supervised.directory / "go").touch()
    code, _, err = supervised.finish()
    assert code == 0, err
    assert "newest step 120" in err
    assert "made before this run" not in err


def test_a_url_is_passed_to_workers_and_the_journal_is_local(supervised: Run) -> None:
    program = (
        "print(*(os.environ[f'TFPREEMPT_{n}_DIR'] for n in ('CHECKPOINT', 'JOURNAL')))"
    )
    code, out, _ = supervised.run(program, "--checkpoint-dir", "gs://bucket/run")
    assert code == 0
    [journal] = (supervised.directory / "scratch").glob("*/gs-bucket-run-*/journal")
    assert out == f"[worker-0] gs://bucket/run {journal}\n"


def test_a_url_that_no_worker_could_use_is_refused(supervised: Run) -> None:
    code, _, err = supervised.run("pass", "--checkpoint-dir", "hdfs://host/run")
    assert code == 2
    assert "hdfs:// is not supported" in " ".join(err.split())


def test_a_preemption_restarts_all_with_a_new_cluster(supervised: Run) -> None:
    program = """
tell(f"config-{me}-{restart}", os.environ["TF_CONFIG"])
tell(f"incarnation-{me}-{restart}", os.environ["TFPREEMPT_INCARNATION"])
sys.exit(143 if restart == 0 and me == 1 else 0)
"""
    code, out, err = supervised.run(program, "--workers", "2", "--quiet")
    assert (code, out) == (0, "")
    assert "preemptions: 1, failures: 0" in err
    first, second = (
        json.loads(supervised.wait_told(f"config-0-{n}"))["cluster"] for n in (0, 1)
    )
    assert first["worker"] != second["worker"]
    names = [supervised.wait_told(f"incarnation-{i}-1") for i in (0, 1)]
    assert names[0] == names[1]
    assert names[0].endswith("-1")
    assert [r["event"] for r in supervised.records()] == [
        "opened",
        "started",
        "worker_ended",
        "worker_ended",
        "budget",
        "restarted",
        "worker_ended",
        "worker_ended",
        "budget",
        "exited",
    ]


@pytest.mark.parametrize("restart_code", [143, 42])
def test_the_preemption_budget(supervised: Run, restart_code: int) -> None:
    code, _, err = supervised.run(
        f"sys.exit({restart_code})", "--workers", "2", "--max-preemptions", "1"
    )
    assert code == restart_code
    assert "limit of preemptions reached" in err
    assert "starts: 2, preemptions: 2" in err


def test_the_failure_budget_and_the_error_lines(supervised: Run) -> None:
    program = "until_told() if me == 0 else 1 / 0"
    code, _, err = supervised.run(program, "--workers", "2", "--max-failures", "1")
    assert code == 1
    assert "limit of failures reached" in err
    assert "  | Traceback (most recent call last):" in err
    assert "  | ZeroDivisionError: division by zero" in err
    assert "worker 1 failed (exit code 1); error in" in err
    why = "; last failure: worker 1, exit code 1: ZeroDivisionError: division by zero"
    assert err.splitlines()[-1].endswith(why)
    told = "SIGTERM to worker-0, because worker 1 failed (exit code 1) ==="
    assert supervised.log(0).count(told) == 2
    log = supervised.log(1)
    assert log.count("ZeroDivisionError") == 2
    assert log.count("worker-1 starts, restart ") == 2
    budgets = [r for r in supervised.records() if r["event"] == "budget"]
    assert [r["is_used_up"] for r in budgets] == [False, True]
    assert budgets[-1]["failures"] == 2


def test_one_console_shows_an_error_of_worker_0_once(supervised: Run) -> None:
    same = ["sh", "-c", 'exec "$@" 2>&1', "sh"]
    _, out, _ = supervised.run("1 / 0", "--max-failures", "1", wrapper=same)
    assert out.count("Traceback (most recent call last):") == 2  # two starts
    assert "worker 0 ended: exit code 1, see " in out
    assert "last failure: worker 0, exit code 1: ZeroDivisionError" in out


def test_a_second_supervisor_in_a_directory_is_refused(
    supervised: Run, tmp_path: Path
) -> None:
    supervised.start("until_told()")
    supervised.wait_told("ready-0-0")
    other = Run(tmp_path / "other")
    other.directory.mkdir()
    where = ["--checkpoint-dir", str(supervised.directory / "ckpt")]
    # The guard of an earlier supervisor may record the end late.
    late = {"event": "supervisor_terminated", "supervisor": "earlier", "wall": 1.0}
    with open(supervised.directory / "ckpt/journal/supervisor.jsonl", "a") as journal:
        journal.write(json.dumps(late) + "\n")
    code, _, err = other.run("pass", *where)
    assert code == 2
    said = " ".join(err.split())
    assert f"Another supervisor uses {supervised.directory}/ckpt/journal: process " in (
        said
    )
    assert "name another --checkpoint-dir" in said
    events = [each["event"] for each in supervised.records()]
    assert events == ["opened", "started", "supervisor_terminated", "opened"]
    supervised.signal(signal.SIGKILL)  # writes no end
    supervised.finish()
    assert other.run("pass", *where)[0] == 0


def test_of_supervisors_that_begin_together_one_continues(
    supervised: Run, tmp_path: Path
) -> None:
    where = ["--checkpoint-dir", str(supervised.directory / "ckpt")]
    together = [supervised, *(Run(tmp_path / name) for name in "abc")]
    for each in together:
        each.directory.mkdir(exist_ok=True)
        each.start("time.sleep(2)", *where)
    assert sorted(each.finish()[0] for each in together) == [0, 2, 2, 2]
    assert [each["event"] for each in supervised.records()].count("started") == 1


def test_sigkill_of_a_worker_ends_the_others_and_restarts_all(supervised: Run) -> None:
    program = "until_told() if restart == 0 else tell(f'again-{me}')"
    supervised.start(program, "--workers", "3")
    pids = [supervised.wait_told(f"ready-{i}-0") for i in range(3)]
    os.kill(int(pids[1]), signal.SIGKILL)
    code, _, err = supervised.finish()
    assert code == 0
    assert "worker 1 ended: killed by SIGKILL" in err
    assert "worker 1 failed (killed by SIGKILL); last lines of" in err
    assert "preemptions: 0, failures: 1" in err
    assert all((supervised.directory / f"again-{i}").exists() for i in range(3))


def test_the_last_line_of_a_killed_worker_is_not_its_reason(supervised: Run) -> None:
    program = "print('error? no', flush=True); os.kill(os.getpid(), signal.SIGUSR1)"
    _, _, err = supervised.run(program, "--max-failures", "0")
    log = supervised.directory / "logs" / "worker-0.log"
    assert f"worker 0 ended: killed by SIGUSR1, see {log}" in err
    why = f"; last failure: worker 0, killed by SIGUSR1: {log}"
    assert err.splitlines()[-1].endswith(why)


def test_the_code_of_a_killed_worker_is_128_and_the_signal(supervised: Run) -> None:
    program = "os.kill(os.getpid(), signal.SIGKILL)"
    assert supervised.run(program, "--max-failures", "0")[0] == 137


@pytest.mark.parametrize("number", sorted(NOTICES), ids=lambda each: each.name)
def test_a_stop_is_passed_on_and_ends_with_the_restart_code(
    supervised: Run, number: signal.Signals
) -> None:
    supervised.start("until_told(42)", "--workers", "2")
    for i in range(2):
        supervised.wait_told(f"ready-{i}-0")
    began = time.monotonic()
    supervised.signal(number)
    code, _, err = supervised.finish()
    assert code == 42
    assert time.monotonic() - began < 5  # not the grace period
    received, sent, *_, outcome = err.splitlines()[1:]
    assert received == f"tfpreempt: received {number.name}"
    assert sent == (
        "tfpreempt: sent SIGTERM to worker(s) 0, 1; waiting for the workers to commit "
        "(no time limit)"
    )
    assert "stopped by a signal, to be restarted" in outcome
    # The stop itself is not counted.
    assert "starts: 1, earlier preemptions: 0, earlier failures: 0" in outcome
    events = {r["event"]: r for r in supervised.records()}
    assert events["stop_requested"]["signal"] == number.name
    assert events["exited"]["code"] == 42


def test_a_signal_to_all_processes_of_a_job_is_a_stop(supervised: Run) -> None:
    """As Slurm sends SIGUSR1, with `srun tfpreempt run` and --signal=USR1@120."""
    program = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))\nuntil_told()"
    supervised.start(program, "--max-preemptions", "0")
    supervisor = Path(f"/proc/{supervised.wait_told('ready-0-0')}/stat").read_text()
    supervisor = supervisor.rpartition(")")[2].split()[1]
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    for process in [supervisor, *children.split()]:  # the guard is one of these
        os.kill(int(process), signal.SIGUSR1)
    code, _, err = supervised.finish()
    assert code == 143
    assert "received SIGUSR1" in err
    assert [r["event"] for r in supervised.records()][-1] == "exited"


def test_a_worker_starts_with_no_signal_blocked(supervised: Run) -> None:
    """Otherwise a notice would not arrive: the supervisor blocks its own signals."""
    program = "tell('blocked', repr(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    assert supervised.run(program)[0] == 0
    assert supervised.wait_told("blocked") == "set()"


def test_sigterm_is_passed_on_though_the_caller_ignores_it(supervised: Run) -> None:
    wrapper = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh"]
    program = """
tell("ready", signal.getsignal(signal.SIGTERM).name)
until_told()
"""
    supervised.start(program, wrapper=wrapper)
    assert supervised.wait_told("ready") == "SIG_DFL"
    supervised.wait_told("ready-0-0")
    supervised.signal(signal.SIGTERM)
    assert supervised.finish()[0] == 143


def test_a_signal_that_ends_the_supervisor_is_in_the_journal(supervised: Run) -> None:
    supervised.start("until_told()")
    supervised.wait_told("ready-0-0")
    supervised.signal(signal.SIGSEGV)
    supervised.wait_recorded("supervisor_terminated")
    _, started, terminated = supervised.records()
    assert started["event"] == "started"
    assert terminated["supervisor"] == started["supervisor"]
    assert terminated["wall"] >= started["wall"]


def test_a_second_stop_does_not_cut_the_commit_short(supervised: Run) -> None:
    program = """
def commit(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("committing")
    while not os.path.exists("go-on"):
        time.sleep(0.005)
    tell("committed")
    sys.exit(143)
signal.signal(signal.SIGTERM, commit)
tell("ready")
while True:
    time.sleep(0.02)  # pause() could miss a signal just before it
"""
    supervised.start(program)
    supervised.wait_told("ready")
    supervised.signal(signal.SIGTERM)
    supervised.wait_told("committing")
    supervised.signal(signal.SIGTERM)
    supervised.signal(signal.SIGINT)
    (supervised.directory / "go-on").touch()
    assert supervised.finish()[0] == 143
    assert (supervised.directory / "committed").exists()


@pytest.mark.parametrize(
    "keys",
    [[signal.SIGINT] * 3, [signal.SIGINT, signal.SIGQUIT, signal.SIGQUIT]],
    ids=["Ctrl-C", "Ctrl-backslash"],
)
def test_a_second_ctrl_c_gets_a_word_and_a_third_ends_the_workers(
    supervised: Run, keys: list[signal.Signals]
) -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell(f"ready-{me}")
time.sleep(60)
"""
    supervised.start(program, "--workers", "2")
    pids = [supervised.wait_told(f"ready-{i}") for i in range(2)]
    presses = zip(
        keys, ("stop_requested", "stop_requested_again", "exited"), strict=True
    )
    for number, event in presses:
        supervised.signal(number)
        supervised.wait_recorded(event)
    code, _, err = supervised.finish()
    assert code == 143
    assert "still waiting for worker(s) 0, 1. Another Ctrl-C kills" in err
    why = "because Ctrl-C was pressed again"
    assert f"sent SIGKILL to worker(s) 0, 1: {why}" in err
    assert not any(map(is_alive, pids))


def test_preemptions_without_a_newer_commit_have_an_end(supervised: Run) -> None:
    limit = ["--max-preemptions-without-progress", "2"]
    code, _, err = supervised.run("sys.exit(42)", *limit)
    assert code == 42
    assert "giving up: 3 preemptions in a row without a newer commit" in err
    assert "starts: 3, preemptions: 3" in err
    assert supervised.records()[-1]["cause"] == "no_progress"


def test_a_url_without_a_newer_commit_is_no_progress(supervised: Run) -> None:
    options = ["--backoff-max", "0.01", "--checkpoint-dir", "gs://bucket/run"]
    code, _, err = supervised.run("sys.exit(143)", *options)
    assert code == 143
    assert "preemptions in a row without a newer commit" in err


@pytest.mark.parametrize("code", [143, 1])
def test_a_newer_commit_is_progress(supervised: Run, code: int) -> None:
    saver = open_directory(str(supervised.directory / "made"), OwnContents())
    for step in (1, 2):
        save(saver, step)
    program = f"""
step = str(restart + 1)
if restart < 2:
    os.rename(f"made/{{step}}", f"ckpt/{{step}}")
sys.exit({code} if restart < 2 else 0)
"""
    limits = ["--max-preemptions-without-progress", "0", "--max-failures", "1"]
    status, _, err = supervised.run(program, *limits)
    assert status == 0, err
    assert f"{'preemptions' if code == 143 else 'failures'}: 2" in err


SECOND = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}


def test_a_hard_linked_copy_stops_no_start_and_is_unchanged(supervised: Run) -> None:
    """`cp -al ckpt saved` costs nothing, and gives each file a second name."""
    assert supervised.run("print('one')")[0] == 0
    files = ["logs/worker-0.log", "ckpt/journal/supervisor.jsonl"]
    written = [supervised.directory / name for name in files]
    saved = [supervised.directory / path.name for path in written]
    for path, second in zip(written, saved, strict=True):
        second.hardlink_to(path)
    before = [path.read_bytes() for path in saved]
    code, _, err = supervised.run("print('two')")
    assert code == 0, err
    assert [path.read_bytes() for path in saved] == before
    for path, text in zip(written, before, strict=True):
        assert path.read_bytes().startswith(text)
        assert len(path.read_bytes()) > len(text)


_ELSEWHERE = "gs://bucket/run"
RECORDS = """
def record(event, worker):
    times = {"wall": time.time(), "monotonic": time.monotonic()}
    who = {"worker": worker, "incarnation": "a"}
    values = {"step": restart, "save_seconds": 1.0, "bytes": 9, "because": "periodic"}
    text = json.dumps({**times, **who, **values, "event": event})
    path = pathlib.Path(os.environ["TFPREEMPT_JOURNAL_DIR"], f"worker-{worker}.jsonl")
    with path.open("a") as file:
        print(text, file=file)
"""


@pytest.mark.parametrize(
    ("event", "directory", "environment", "status"),
    [
        ("commit", _ELSEWHERE, {}, 0),  # of the next step, after each start
        ("commit", "ckpt", {}, 0),  # in a directory below, one for each fit
        ("decision", _ELSEWHERE, {}, 1),  # the chief is here, and has not committed
        ("decision", _ELSEWHERE, {"TF_CONFIG": json.dumps(SECOND)}, 0),  # it may have
    ],
    ids=["commits", "commits below", "none", "unknown"],
)
def test_commits_elsewhere_are_seen_in_the_chief_s_journal(
    supervised: Run,
    event: str,
    directory: str,
    environment: dict[str, str],
    status: int,
) -> None:
    program = (
        RECORDS
        + f"""
record({event!r}, worker=me)
sys.exit(1 if restart < 3 else 0)
"""
    )
    limits = ["--max-failures", "1", "--backoff-reset", "0"]
    options = ["--checkpoint-dir", directory, *limits]
    code, _, err = supervised.run(program, *options, environment=environment)
    assert code == status, err


def test_commits_of_a_chief_on_another_machine_are_seen_in_a_shared_journal(
    supervised: Run,
) -> None:
    program = (
        RECORDS
        + """
record("commit", worker=0)
sys.exit(1 if restart < 3 else 0)
"""
    )
    code, _, err = supervised.run(
        program, "--max-failures", "1", environment={"TF_CONFIG": json.dumps(SECOND)}
    )
    assert code == 0, err


def test_a_deaf_worker_is_killed_at_the_limit(supervised: Run) -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell(f"ready-{me}")
while True:
    time.sleep(60)
"""
    supervised.start(program, "--workers", "2", "--grace", "0.2")
    pids = [supervised.wait_told(f"ready-{i}") for i in range(2)]
    supervised.signal(signal.SIGTERM)
    code, _, err = supervised.finish()
    assert code == 143  # the platform starts again, from the last commit
    why = "not ended 0.2 s after SIGTERM (--grace)"
    assert f"sent SIGKILL to worker(s) 0, 1: {why}" in err
    assert not any(map(is_alive, pids))


def test_a_straggler_after_a_preemption_is_ended_at_the_limit(supervised: Run) -> None:
    program = """
if restart == 0 and me == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("deaf")
    time.sleep(60)
while restart == 0 and not os.path.exists("deaf"):
    time.sleep(0.005)
sys.exit(143 if restart == 0 else 0)
"""
    limits = ["--grace", "0.1", "--kill-after", "0.1"]
    code, _, err = supervised.run(program, "--workers", "2", *limits)
    assert code == 0
    assert "preemptions: 1, failures: 0" in err


def test_a_stop_in_the_back_off(supervised: Run) -> None:
    supervised.start("sys.exit(5)", "--backoff", "30")
    supervised.wait_recorded("budget")
    supervised.signal(signal.SIGTERM)
    assert supervised.finish()[0] == 143
    [budget] = [r for r in supervised.records() if r["event"] == "budget"]
    assert 20 < budget["delay"] <= 45


def test_children_of_a_worker_do_not_outlive_it(supervised: Run) -> None:
    program = """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
tell("child", str(child.pid))
os._exit(0)
"""
    code, _, _ = supervised.run(program, "--grace", "0.2")
    assert code == 0
    assert not is_alive(supervised.wait_told("child"))


def test_orphans_of_a_worker_are_reaped_while_the_worker_runs(
    supervised: Run,
) -> None:
    program = """
for _ in range(20):
    child = os.fork()
    if not child:
        child = os.getpid()
        if not os.fork():  # an orphan, in a session of its own
            os.setsid()
            while os.getppid() == child:
                time.sleep(0.001)
        os._exit(0)
    os.waitpid(child, 0)
tell("supervisor", str(os.getppid()))
until_told()
"""
    supervised.start(program)
    supervisor = supervised.wait_told("supervisor")
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children")

    def are_reaped() -> bool:  # but for the worker, and the guard
        return len(children.read_text().split()) == 2

    wait_until(are_reaped, "the orphans to be reaped")
    supervised.signal(signal.SIGTERM)
    assert supervised.finish()[0] == 143


@pytest.mark.parametrize("limit", [8, 12])
def test_too_few_descriptors_for_a_supervisor_are_an_error(
    supervised: Run, limit: int
) -> None:
    wrapper = ("bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash")
    code, _, err = supervised.run("pass", wrapper=wrapper)
    assert code == 1
    assert f"Error: Too many open files: the limit of {limit} open files" in err
    assert "Traceback" not in err


def test_a_start_without_descriptors_is_tried_again(supervised: Run) -> None:
    """Descriptors of the supervisor's connections, or of the whole machine."""
    program = "tell('supervisor', str(os.getppid()))\nuntil_told()"
    supervised.start(program, "--backoff", "2")
    worker = int(supervised.wait_told("ready-0-0"))
    supervisor = int(supervised.wait_told("supervisor"))
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (0, before[1]))
    os.kill(worker, signal.SIGTERM)
    wait_until(
        lambda: "restarting after a failure" in supervised.err(), "the first attempt"
    )
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
    supervised.wait_told("ready-0-2")
    supervised.signal(signal.SIGTERM)
    code, out, err = supervised.finish()
    assert code == 143
    assert "worker-0 cannot be started: [Errno 24] Too many open files" in out
    assert "preemptions: 1, failures: 1" in err


def test_a_program_behind_a_shell_gets_sigterm_and_is_waited_for(
    supervised: Run,
) -> None:
    command = ["sh", "-c", f"{sys.executable} -I -S worker.py; true"]
    supervised.start("until_told()", command=command)
    pid = supervised.wait_told("ready-0-0")
    supervised.signal(signal.SIGTERM)
    assert supervised.finish()[0] == 143
    assert not is_alive(pid)


@pytest.mark.parametrize("is_deaf", [False, True])
def test_no_worker_outlives_a_killed_supervisor(supervised: Run, is_deaf: bool) -> None:
    program = f"""
def commit(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("x" * 200_000, "last words", flush=True)
    os._exit(143)
signal.signal(signal.SIGTERM, signal.SIG_IGN if {is_deaf} else commit)
tell(f"ready-{{me}}-0")
for _ in range(3000):
    time.sleep(0.02)  # pause() could miss a signal just before it
"""
    grace = "0.3" if is_deaf else "30"
    supervised.start(program, "--workers", "2", "--grace", grace)
    pids = [supervised.wait_told(f"ready-{i}-0") for i in range(2)]
    supervised.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), "the workers to be ended")
    wait_until(lambda: is_deaf or "last words" in supervised.log(1), "the last words")


def test_the_guard_follows_no_link_below_the_checkpoint_directory(
    supervised: Run,
) -> None:
    elsewhere = supervised.directory / "elsewhere"
    elsewhere.mkdir()
    program = """
def stop(*_):
    print("last words", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
tell("ready-0-0")
for _ in range(3000):
    time.sleep(0.02)
"""
    supervised.start(program, "--log-dir", "ckpt/logs", "--grace", "30")
    pid = supervised.wait_told("ready-0-0")
    for name in ("logs", "journal"):
        (supervised.directory / "ckpt" / name).rename(supervised.directory / name)
        (supervised.directory / "ckpt" / name).symlink_to(elsewhere)
    (elsewhere / "supervisor.jsonl").write_bytes(b"years of work")
    guard = guard_of(pid)
    supervised.signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(guard), "the guard to end")
    assert not is_alive(pid)
    assert os.listdir(elsewhere) == ["supervisor.jsonl"]
    assert (elsewhere / "supervisor.jsonl").read_bytes() == b"years of work"


def guard_of(worker: str) -> str:
    """The other child of the worker's supervisor."""
    above = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
    children = Path(f"/proc/{above}/task/{above}/children").read_text().split()
    return next(each for each in children if each != worker)


def test_a_missing_checkpoint_directory_is_not_created_again(supervised: Run) -> None:
    """A file system that was unmounted: training would begin at 0 on the disk below."""
    program = "os.rename('ckpt', 'away'); sys.exit(143)"
    code, _, err = supervised.run(program, "--log-dir", "ckpt/logs")
    assert code == 1
    assert "the checkpoint directory was moved or replaced" in err
    assert "move it back" in err
    assert not (supervised.directory / "ckpt").exists()
    assert (supervised.directory / "away" / "journal" / "supervisor.jsonl").exists()


def test_an_error_that_each_restart_would_raise_ends_the_run(supervised: Run) -> None:
    program = """
import tfpreempt
def step():
    raise tfpreempt.errors.BadStepsError("10 steps are left out already")
config = tfpreempt.TerminationConfig()
handler = tfpreempt.PreemptionCheckpointHandler(None, None, "ckpt", config)
handler.run(step)
"""
    code, _, err = supervised.run(program, command=[sys.executable, "worker.py"])
    assert code == 1, err
    assert "giving up: each restart would end by the same error" in err
    assert "an error that a restart cannot correct, exit code: 1, starts: 1" in err
    # The next supervisor restarts the corrected program after another failure.
    code, _, err = supervised.run("sys.exit(restart == 0)")
    assert code == 0
    assert "starts: 2" in err


def test_an_error_that_each_restart_would_raise_ends_each_machine(
    supervised: Run,
) -> None:
    """The journal of the chief is on another machine."""
    program = """
from tfpreempt.core.events import Exit, Outcome
from tfpreempt.core.journal import Journal
failed = Exit(outcome=Outcome.FAILED, code=None, step=0, detail="", is_permanent=True)
Journal("ckpt/journal", 1).record(failed)
sys.exit(1)
"""
    code, _, err = supervised.run(
        program,
        command=[sys.executable, "worker.py"],
        environment={"TF_CONFIG": json.dumps(SECOND)},
    )
    assert code == 1, err
    assert "an error that a restart cannot correct, exit code: 1, starts: 1" in err


def test_an_unread_console_does_not_delay_the_end(supervised: Run) -> None:
    program = "print('x' * 5_000_000); sys.exit(143)"
    process = supervised.start(program, "--max-preemptions", "0", wrapper=["env"])
    assert process is not None
    assert process.wait(30) == 143
    assert len(supervised.log(0)) > 5_000_000


def test_a_stalled_console_does_not_delay_a_notice(supervised: Run) -> None:
    program = """
def commit(*_):
    tell("heard")
    os._exit(143)
signal.signal(signal.SIGTERM, commit)
print("x" * 1_000_000, flush=True)
tell("ready")
while True:
    time.sleep(0.02)  # pause() could miss a signal just before it
"""
    together = ["sh", "-c", 'exec "$@" 2>&1', "sh"]
    process = supervised.start(program, wrapper=together)
    assert process is not None
    supervised.wait_told("ready")
    supervised.signal(signal.SIGTERM)
    supervised.wait_told("heard")
    assert process.wait(30) == 143


def test_a_full_disk_ends_no_training(supervised: Run) -> None:
    """Neither the workers nor the supervisor, whose journal is on the disk, too."""
    disk = supervised.directory / "disk"
    disk.mkdir()
    on_disk = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
    wrapper = ["unshare", "--mount", "sh", "-c", on_disk, str(disk)]
    if subprocess.run([*wrapper, "true"], check=False).returncode:
        pytest.skip("a file system of its own needs CAP_SYS_ADMIN")
    program = """
for i in range(2000):
    print(i, "x" * 100, flush=True)
sys.exit(143 if restart == 0 else 0)
"""
    options = ["--workers", "2", "--checkpoint-dir", "disk", "--log-dir", "disk/logs"]
    code, out, err = supervised.run(program, *options, wrapper=wrapper)
    assert code == 0
    assert err.count("cannot write the log") == 1
    assert "No space left on device. Training continues" in err
    assert out.count("[worker-0] ") == 4000


def test_logs_are_rotated(supervised: Run) -> None:
    program = "[print(me, i, 'x' * 100) for i in range(1000)]"
    options = ["--workers", "2", "--log-size", "20KB", "--log-files", "3"]
    assert supervised.run(program, *options)[0] == 0
    names = sorted(path.name for path in (supervised.directory / "logs").iterdir())
    kinds = [".log", ".log.1", ".log.2"]
    assert names == [f"worker-{i}{kind}" for i in (0, 1) for kind in kinds]
    assert "1 999 xxx" in supervised.log(1)
    assert supervised.log(1).splitlines()[-1].endswith("ended: exit code 0 ===")


def test_a_child_that_keeps_the_output_open_is_not_waited_for(supervised: Run) -> None:
    program = """
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
tell("child", str(child.pid))
print("done")
os._exit(sys.stdout.flush() or 0)
"""
    code, out, _ = supervised.run(program)
    assert (code, out) == (0, "[worker-0] done\n")
    os.kill(int(supervised.wait_told("child")), signal.SIGKILL)


def test_a_caller_that_ignores_the_ends_of_its_children(supervised: Run) -> None:
    """An ignored SIGCHLD stays ignored after exec, and then exit codes are lost."""
    program = "sys.exit(143 if restart == 0 else 0)"
    wrapper = [sys.executable, "-c", _IGNORES_CHILDREN]
    code, _, err = supervised.run(program, "--workers", "2", wrapper=wrapper)
    assert code == 0
    assert "preemptions: 1, failures: 0" in err


@pytest.mark.parametrize("closed", [[1], [0, 1, 2]])
def test_a_supervisor_started_with_closed_streams(
    supervised: Run, closed: list[int]
) -> None:
    shut = " ".join(f"{number}>&-" for number in closed)
    wrapper = ["sh", "-c", f'exec "$@" {shut}', "sh"]
    files = "[os.readlink(f'/proc/{os.getppid()}/fd/{number}') for number in (1, 2)]"
    program = f"print('said', {files})"
    code, _, _ = supervised.run(program, "--workers", "2", wrapper=wrapper)
    assert code == 0
    assert "said" in supervised.log(0)
    assert "said" in supervised.log(1)
    assert "supervisor.jsonl" not in supervised.log(0)


def test_a_given_tf_config_is_not_changed(supervised: Run) -> None:
    given = json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    )
    program = """
tell(f"config-{restart}", os.environ["TF_CONFIG"])
sys.exit(143 if restart == 0 else 0)
"""
    code, _, _ = supervised.run(program, environment={"TF_CONFIG": given})
    assert code == 0
    assert supervised.wait_told("config-0") == supervised.wait_told("config-1") == given
    assert "worker-1 starts" in supervised.log(1)
    assert (supervised.directory / "ckpt/journal/supervisor-worker-1.jsonl").exists()


def test_a_given_tf_config_allows_one_worker(supervised: Run) -> None:
    environment = {"TF_CONFIG": '{"task": {"index": 0}}'}
    code, _, err = supervised.run("", "--workers", "2", environment=environment)
    assert code == 2
    assert "--workers 2 was given, and TF_CONFIG is set (task worker-0)" in err


def test_another_number_of_workers_in_the_same_directories(supervised: Run) -> None:
    assert supervised.run("", "--workers", "3")[0] == 0
    assert supervised.run("", "--workers", "1")[0] == 0
    assert [r["workers"] for r in supervised.records() if r["event"] == "started"] == [
        3,
        1,
    ]


def test_the_exit_is_seen_at_once(supervised: Run) -> None:
    program = """
if me == 0:
    until_told()
while not os.path.exists("ready-0-0"):
    time.sleep(0.001)
tell("left", repr(time.monotonic()))
os._exit(3)
"""
    supervised.run(program, "--workers", "2", "--max-failures", "0", "--quiet")
    (seen,) = (r for r in supervised.records() if r["event"] == "workers_signaled")
    assert seen["monotonic"] - float(supervised.wait_told("left")) < 0.5  # idle: 2 ms


def test_a_closed_console_does_not_end_the_run(supervised: Run) -> None:
    program = "until_told() if restart == 0 else print('x' * 100_000)"
    process = supervised.start(program, wrapper=["env"])
    assert process is not None
    assert process.stdout is not None
    assert process.stderr is not None
    pid = supervised.wait_told("ready-0-0")
    process.stdout.close()
    process.stderr.close()
    os.kill(int(pid), signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--", "no-such-program"], "command 'no-such-program' was not found"),
        ([], "No command was given"),
        (["--workers", "0", "--", "true"], "'--workers': 0 is not in the range"),
        (["--max-failures", "-1", "--", "true"], "-1 is not in the range"),
        (
            ["--max-preemptions-without-progress", "-1", "--", "true"],
            "-1 is not in the range",
        ),
        (["--max-preemptions", "-1", "--", "true"], "-1 is not in the range"),
        (["--grace", "nan", "--", "true"], "nan is not a finite number"),
        (["--grace", "inf", "--", "true"], "inf is not a finite number"),
        (["--backoff", "-1", "--", "true"], "is not in the range"),
        (["--hang-timeout", "1", "--", "true"], "1.0 is not in the range x>=2.0"),
        (["--hang-timeout", "soon", "--", "true"], "'soon' is not a valid auto"),
        (["--restart-code", "0", "--", "true"], "0 is not in the range"),
        (["--log-size", "0", "--", "true"], "'0' is not a size"),
        (["--log-files", "0", "--", "true"], "0 is not in the range"),
        (
            ["--quiet", "--log-dir", "file/logs", "--", "true"],
            "Cannot write the log file",
        ),
        (["--checkpoint-dir", "file", "--", "true"], "Cannot use --checkpoint-dir"),
        (["--checkpoint-dir", "a[1]", "--", "true"], "contains the character '['"),
        (
            ["--checkpoint-dir", "c", "--mirror-dir", "c/m", "--", "true"],
            "or one contains the other",
        ),
        (["--", "./train.py"], "use: python ./train.py"),
        (["--no-such-option", "--", "true"], "No such option"),
    ],
)
def test_bad_usage(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from tfpreempt.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    Path("file").touch()
    Path("train.py").touch()
    result = CliRunner().invoke(main, ["run", *options])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_the_names_of_a_new_checkpoint_directory_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[Path]
) -> None:
    """Otherwise a loss of power can remove a parent, with all commits."""
    from click.testing import CliRunner

    from tfpreempt.cli import main
    from tfpreempt.cli.run import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "supervise", lambda options: 0)
    options = ["run", "--checkpoint-dir", "new/ckpt", "--", "true"]
    assert CliRunner().invoke(main, options).exit_code == 0
    assert sorted(synced) == [tmp_path, tmp_path / "new"]


def test_the_help_lists_the_commands() -> None:
    from click.testing import CliRunner

    from tfpreempt.cli import main

    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "run " in result.output
    assert "demo " in result.output
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2
