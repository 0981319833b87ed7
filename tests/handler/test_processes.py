"""A process with a handler, besides training: forks, threads, saves."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.harness import Zygote

pytestmark = pytest.mark.tensorflow

HEAD = """
import multiprocessing, os, signal, sys, threading, time
import numpy as np, tensorflow as tf, tfpreempt
from tfpreempt.notice.file import FileSource
v = tf.Variable(0.0)
d = sys.argv[1]
def make(**kwargs):
    return tfpreempt.PreemptionCheckpointHandler(
        None, tf.train.Checkpoint(v=v), d, **kwargs)
def step():
    v.assign_add(1.0)
    return np.random.rand()
"""


Python = Callable[[str, Path], subprocess.CompletedProcess[str]]


@pytest.fixture
def python(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Python:
    """`python(code, directory)` runs a program that uses that directory."""
    file = tmp_path_factory.mktemp("program") / "program.py"

    def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
        file.write_text(HEAD + code)
        return zygote.run(file, directory, directory=file.parent)

    return run


def test_a_forked_child_leaves_the_checkpoint_alone(
    python: Python, tmp_path: Path
) -> None:
    """The end of the child is not the end of training."""
    done = python(
        """
h = make()
for _ in range(3): h.run(step)
child = multiprocessing.get_context("fork").Process(target=lambda: None)
child.start(); child.join()
print(child.exitcode, sorted(os.listdir(d)))
h.run(step); h.close()
print(sorted(os.listdir(d)))
""",
        tmp_path,
    )
    assert done.stdout.splitlines() == [
        "0 ['.tfpreempt-directory', '.tfpreempt-lease', 'journal']",
        "['.tfpreempt-directory', '4', 'checkpoint', 'journal']",
    ], done.stderr


@pytest.mark.parametrize("busy", ["tf.io.gfile.copy(big, big + '2', True)", ""])
def test_a_source_in_a_c_function_costs_no_exit_code(
    python: Python, tmp_path: Path, busy: str
) -> None:
    """The process would abort with a thread that Python ends in a C++ function."""
    done = python(
        f"""
big = d + "-big"
with open(big, "wb") as file: file.truncate(60_000_000)
def is_told():
    end = time.monotonic() + 0.9
    while time.monotonic() < end:
        {busy or "tf.io.gfile.exists('/no/such/file')"}
    return False
h = make(termination_config=tfpreempt.TerminationConfig(is_told))
for number in range(1000):
    if number == 10: os.kill(os.getpid(), signal.SIGTERM)
    h.run(step)
    time.sleep(0.01)
""",
        tmp_path / "run",
    )
    assert done.returncode == 143, done.stderr


def test_a_refused_block_closes_its_handler(python: Python, tmp_path: Path) -> None:
    """After an error that was reported to the other workers."""
    done = python(
        """
h = make()
h.run(step)
h._session.exit.detached = True
try:
    with h: h.run(step)
except tfpreempt.errors.UsageError as error:
    print("refused", ".tfpreempt-lease" in os.listdir(d))
""",
        tmp_path,
    )
    assert done.stdout.splitlines() == ["refused False"], done.stderr


def test_a_forked_child_is_refused_its_parent_s_handler(
    python: Python, tmp_path: Path
) -> None:
    """The threads belong to the parent: a wait in the child would never end."""
    done = python(
        """
import faulthandler
def enter():
    with h: pass
calls = dict(
    close=lambda: h.close(), run=lambda: h.run(step), save=lambda: h.save(),
    enter=enter, check=lambda: h.check_preemption(),
    bare=lambda: h.save_checkpoint_if_preempted(),
    wait=lambda: h.wait_for_mirror(),
    delete=lambda: h.delete_checkpoint(h.checkpoints()[-1]))
h = make()
for _ in range(9): h.run(step)
h.save()
if os.fork() == 0:
    faulthandler.dump_traceback_later(30, exit=True)
    for name, call in calls.items():
        try: call()
        except tfpreempt.errors.UsageError as error:
            assert f"belongs to process {os.getppid()}" in str(error)
            print(name, "refused", flush=True)
    os._exit(0)
os.wait()
try:
    with h:
        if os.fork() == 0: sys.exit(3)
        os.wait()
        h.run(step)
except SystemExit:
    os._exit(7)
print(h.total_run_calls, os.path.basename(h.checkpoints()[-1].path))
""",
        tmp_path,
    )
    names = ["close", "run", "save", "enter", "check", "bare", "wait", "delete"]
    refused = [f"{name} refused" for name in names]
    assert done.stdout.splitlines() == [*refused, "10 10"], done.stderr


def test_a_handler_that_a_forked_child_makes_sees_the_child_s_notices(
    python: Python, tmp_path: Path
) -> None:
    done = python(
        """
h = make()
h.run(step)
if os.fork() == 0:
    d += "/child"
    mine = make()
    mine.run(step)
    os.kill(os.getpid(), 15)
    end = time.monotonic() + 20
    while time.monotonic() < end: mine.run(step); time.sleep(0.01)
print(os.waitstatus_to_exitcode(os.wait()[1]))
h.close()
""",
        tmp_path,
    )
    assert done.stdout.splitlines() == ["143"], done.stderr


def test_training_off_the_main_thread_leaves_with_the_restart_code(
    python: Python, tmp_path: Path
) -> None:
    """SystemExit in another thread would let the program end with 0."""
    done = python(
        """
def train():
    config = tfpreempt.TerminationConfig(signals=(), notice_file=d + "/stop")
    h = make(termination_config=config)
    h.run(step)
    open(d + "/stop", "w").close()
    while True:
        h.run(step); time.sleep(0.01)
thread = threading.Thread(target=train); thread.start(); thread.join()
print("main goes on")
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert "main goes on" not in done.stdout


def test_more_signals_on_the_way_out_change_nothing(
    python: Python, tmp_path: Path
) -> None:
    """A launcher and its scheduler may both send a signal; the exit code matters."""
    done = python(
        """
import atexit
atexit.register(lambda: (os.kill(os.getpid(), 15), print("exit hooks", flush=True)))
try:
    with make() as h:
        h.run(step)
        os.kill(os.getpid(), 15); time.sleep(0.5)
        h.run(step)
finally:
    os.kill(os.getpid(), 15); time.sleep(0.5)
    print("finally")
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout.splitlines() == ["finally", "exit hooks"]


def test_a_program_that_stays_can_be_ended_again(
    python: Python, tmp_path: Path
) -> None:
    """Like a notebook, the program catches SystemExit and trains on."""
    done = python(
        """
for _ in range(2):
    try:
        with make() as h:
            assert signal.getsignal(15) not in (signal.SIG_DFL, signal.SIG_IGN)
            h.run(step)
            if h.total_run_calls == 1:
                os.kill(os.getpid(), 15); time.sleep(0.5)
            h.run(step)
    except SystemExit:
        print("caught", signal.getsignal(15).name)
print(signal.getsignal(15).name)
os.kill(os.getpid(), 15); time.sleep(5)
""",
        tmp_path,
    )
    assert done.stdout.splitlines() == ["caught SIG_IGN", "SIG_DFL"], done.stderr
    assert done.returncode == -15


def test_a_thread_that_never_ends_does_not_keep_the_process(
    python: Python, tmp_path: Path
) -> None:
    """The restart code counts, and after the grace it would be SIGKILL's."""
    done = python(
        """
forever = threading.Event()
threading.Thread(target=forever.wait, name="uploader").start()
h = make(termination_config=tfpreempt.TerminationConfig(grace_period=2))
try:
    h.run(step)
    os.kill(os.getpid(), 15)
    while True:
        h.run(step); time.sleep(0.01)
finally:
    print("finally")
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == "finally\n"
    assert "waits for the thread 'uploader'" in done.stderr


_THREAD = 'threading.Thread(target=threading.Event().wait, name="uploader").start()'
_HOOK = "import atexit; atexit.register(threading.Event().wait)"


@pytest.mark.parametrize(
    ("end", "stays", "named"),
    [
        ("h.close()", _THREAD, "the thread 'uploader'"),
        ("pass", _THREAD, "the thread 'uploader'"),
        ("h.close()", _HOOK, "line "),  # of the file in which the main thread is
    ],
)
def test_a_known_deadline_holds_until_the_process_has_ended(
    python: Python, tmp_path: Path, end: str, stays: str, named: str
) -> None:
    """Training has ended within the grace, and its end is committed."""
    done = python(
        f"""
class Last(tfpreempt.State):
    "The notice arrives in the final save."
    def save(self, file):
        if h.total_run_calls == 2: os.kill(os.getpid(), 15); time.sleep(0.5)
    def load(self, file): pass
last = Last("last")
h = make(termination_config=tfpreempt.TerminationConfig(grace_period=4))
h.run(step); h.run(step)
{stays}
{end}
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert f"the process waits for {named}" in done.stderr


def test_a_program_without_standard_streams_leaves_with_the_restart_code(
    python: Python, tmp_path: Path
) -> None:
    """A test runner or a daemon may have closed the streams; the exit needs none."""
    done = python(
        """
h = make()
h.run(step)
os.kill(os.getpid(), 15); time.sleep(0.5)
sys.stdout.close(); sys.stderr.close()
for fd in (1, 2):
    try: os.close(fd)
    except OSError: pass
""",
        tmp_path,
    )
    assert done.returncode == 143
    assert (tmp_path / "1" / "COMMITTED").exists()


def test_an_exit_function_that_restarts_in_the_process_leaves_signals(
    python: Python, tmp_path: Path
) -> None:
    """Between two incarnations the program itself can still be ended."""
    done = python(
        """
class Again(Exception):
    pass
def leave():
    raise Again
try:
    with make(termination_config=tfpreempt.TerminationConfig(exit_fn=leave)) as h:
        h.run(step)
        os.kill(os.getpid(), 15); time.sleep(0.5)
        h.run(step)
except Again:
    print(signal.getsignal(15).name)
""",
        tmp_path,
    )
    assert done.stdout.splitlines() == ["SIG_DFL"], done.stderr


def test_a_save_before_the_first_run_holds_the_restored_generators(
    python: Python, tmp_path: Path
) -> None:
    """The next start draws the numbers of an uninterrupted run."""
    first = python(
        "np.random.seed(7); h = make()\nfor _ in range(3): h.run(step)\nh.save()",
        tmp_path,
    )
    assert first.returncode == 0, first.stderr
    again = python(
        "np.random.seed(7); h = make(); h.save(); os.kill(os.getpid(), 9)", tmp_path
    )
    assert again.returncode == -9, again.stderr
    last = python("h = make(); print(h.total_run_calls, h.run(step))", tmp_path)
    expected = python(
        "np.random.seed(7); print(3, [np.random.rand() for _ in range(4)][3])",
        tmp_path,
    )
    assert last.stdout == expected.stdout, last.stderr


@pytest.mark.parametrize("where", ["h.run(fail)", "fail()"])
def test_a_program_that_fails_finishes_the_upload_first(
    python: Python, tmp_path: Path, where: str
) -> None:
    """If the disk is lost too, only the upload remains of the run."""
    done = python(
        f"""
from tfpreempt.storage.local import LocalStore
class Slow(LocalStore):
    def put_if_absent(self, *args, **kwargs):
        time.sleep(0.3)
        return super().put_if_absent(*args, **kwargs)
def fail():
    raise ValueError("a bug")
h = make(mirror_dir=Slow(d + "-copy"))
h.run(step)
h.save()
{where}
""",
        tmp_path / "ckpt",
    )
    assert "ValueError: a bug" in done.stderr
    assert done.returncode == 1
    assert len(list(tmp_path.glob("ckpt-copy/*/COMMITTED"))) == 1


def test_a_data_reader_killed_with_the_group_is_a_preemption(
    python: Python, tmp_path: Path
) -> None:
    """The error does not pass through the handler, and may come before the notice."""
    done = python(
        """
os.setsid()
ours, theirs = multiprocessing.Pipe(False)
reader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
reader.start(); theirs.close()
h = make()
h.run(step)
os.killpg(0, 15)
ours.recv()
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert "SIGTERM" in done.stderr.partition("children of this process were killed")[2]
    assert (tmp_path / "1" / "COMMITTED").exists()


KILL_GROUP = """
import subprocess
def kill_group():
    code = f"import os; os.killpg({os.getpid()}, 15)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)
"""


def test_readers_outlive_a_signal_to_the_group_until_the_commit(
    python: Python, tmp_path: Path
) -> None:
    """As systemd and Slurm send it; the running step still gets its batch."""
    done = python(
        KILL_GROUP
        + """
os.setsid()
def square(x): return x * x
def train(x):
    if x == 3: kill_group(); time.sleep(0.3)
    v.assign_add(float(pool.apply(square, (x,))))
    print(float(v), flush=True)
fork = multiprocessing.get_context("fork")
with make() as h, fork.Pool(2) as pool:
    pool.map(square, range(4))
    endless = fork.Process(target=time.sleep, args=(600,))
    endless.start()  # no daemon: the interpreter's end waits for it
    for x in range(100): h.run(train, x)
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout.split() == ["0.0", "1.0", "5.0", "14.0"]
    assert "waits for" not in done.stderr.partition("is committed")[2]
    assert (tmp_path / "4" / "COMMITTED").exists()


def test_readers_of_a_fit_outlive_a_signal_to_the_group(
    python: Python, tmp_path: Path
) -> None:
    """Keras starts some before the fit begins, because the model is not built."""
    done = python(
        KILL_GROUP
        + """
import keras, tfpreempt.keras
os.setsid()
class Data(keras.utils.PyDataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return np.full([2, 1], i), np.zeros([2, 1])
def count(batch, logs):
    if batch == 3: kill_group()
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
counts = keras.callbacks.LambdaCallback(on_train_batch_end=count)
model.fit(Data(workers=2, use_multiprocessing=True), verbose=0, epochs=9, callbacks=[
    tfpreempt.keras.PreemptionCallback(d), counts])
""",
        tmp_path,
    )
    assert done.returncode == 143, done.stderr
    assert "children" not in done.stderr
    [commit] = tmp_path.glob("*/COMMITTED")
    assert int(commit.parent.name) < 1000
