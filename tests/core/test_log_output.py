"""Log lines in processes with and without a configuration of `logging`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.harness import Zygote

pytestmark = pytest.mark.slow  # starts programs

START = """
import logging
from tfpreempt.core.log_output import FallbackHandler, show_log_lines
log = logging.getLogger("tfpreempt.handler.run")
other = logging.getLogger("other")
def say():
    log.debug("debug")
    log.info("resumed at step %d", 3)
    log.warning("disk full")
"""
USUAL = "tfpreempt: resumed at step 3\ntfpreempt: WARNING: disk full\n"


def stderr_of(program: str, *before: str) -> str:
    command = [sys.executable, "-c", START + "\n".join([*before, program])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    return ended.stderr


def test_a_program_without_logging_sees_normal_events() -> None:
    assert stderr_of("show_log_lines(); show_log_lines(); say()") == USUAL


def test_text_of_others_cannot_control_the_terminal() -> None:
    program = r"show_log_lines(); log.warning('%s is corrupt', 'a\x1b[2Jb\u202ec')"
    expected = "tfpreempt: WARNING: a\\x1b[2Jb\\u202ec is corrupt\n"
    assert stderr_of(program) == expected


def test_text_of_others_cannot_look_like_another_line() -> None:
    program = r"show_log_lines(); log.warning('%s is corrupt', 'a\ntfpreempt: resumed')"
    expected = "tfpreempt: WARNING: a\n  tfpreempt: resumed is corrupt\n"
    assert stderr_of(program) == expected


def test_the_text_of_an_error_cannot_control_the_terminal() -> None:
    program = (
        "show_log_lines()\n"
        "try: raise OSError('\x1b[2J\\ntfpreempt: resumed')\n"
        "except OSError: log.exception('failed')"
    )
    first, *others = stderr_of(program).splitlines()
    assert first == "tfpreempt: ERROR: failed"
    assert others[-2:] == ["  OSError: \\x1b[2J", "  tfpreempt: resumed"]


def test_an_import_alone_configures_nothing() -> None:
    program = "import tfpreempt; assert not logging.getLogger('tfpreempt').handlers"
    assert stderr_of(program + "; say()") == "disk full\n"


@pytest.mark.parametrize("is_before", [False, True])
def test_no_line_comes_twice_if_the_root_logger_has_a_handler(is_before: bool) -> None:
    calls = ["logging.basicConfig(format='%(name)s %(message)s')", "show_log_lines()"]
    expected = (
        "tfpreempt.handler.run resumed at step 3\ntfpreempt.handler.run disk full\n"
    )
    ordered = calls if is_before else calls[::-1]
    assert stderr_of("say()", *ordered) == expected


def test_levels_of_the_program_have_precedence() -> None:
    warning = "logging.getLogger('tfpreempt').setLevel(logging.WARNING)"
    line = "tfpreempt: WARNING: disk full\n"
    assert stderr_of("say()", warning, "show_log_lines()") == line
    assert stderr_of("say()", "show_log_lines()", warning) == line


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("ERROR", ""),
        ("WARNING", "resumed at step 3\ndisk full\n"),  # the default level
        ("DEBUG", "debug\nresumed at step 3\ndisk full\n"),
    ],
)
def test_a_level_of_the_root_logger_has_precedence(
    level: str, expected: str, is_before: bool
) -> None:
    """`handle_early_notices()` is in the first line, before a `basicConfig()`."""
    root = f"logging.basicConfig(level=logging.{level}, format='%(message)s')"
    calls = [root, "show_log_lines()"]
    first = [] if is_before else ["show_log_lines()", "log.debug('no')"]
    assert stderr_of("say()", *first, *calls) == expected


def test_a_level_of_the_program_stays_whatever_the_root_logger_has() -> None:
    own = "logging.getLogger('tfpreempt').setLevel(logging.INFO)"
    root = "logging.basicConfig(level=logging.ERROR, format='%(message)s')"
    expected = "resumed at step 3\ndisk full\n"
    assert stderr_of("say()", "show_log_lines()", own, root) == expected
    assert stderr_of("say()", own, root, "show_log_lines()") == expected


@pytest.mark.parametrize("is_before", [False, True])
def test_a_handler_of_the_program_is_the_only_handler(is_before: bool) -> None:
    handler = "logging.getLogger('tfpreempt').addHandler(logging.StreamHandler())"
    expected = "resumed at step 3\ndisk full\n"
    calls = [handler, "show_log_lines()"]
    ordered = calls if is_before else calls[::-1]
    assert stderr_of("say()", *ordered) == expected


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "sys.stderr = None"])
def test_no_line_fails_a_program_that_has_closed_stderr(closing: str) -> None:
    """As a daemon does; logging's own error report would also fail."""
    program = f"import sys; {closing}; say(); sys.stderr = sys.__stderr__"
    assert stderr_of(program, "show_log_lines()") == ""


def test_lines_during_a_save_come_once() -> None:
    # `other` has the lines of Python without any handler; TensorFlow has a handler.
    during = "logging.root.addHandler(FallbackHandler())"
    others = "other.info('no'); other.warning('once')"
    own = "other.addHandler(logging.StreamHandler())"
    assert stderr_of(f"say(); {others}", "show_log_lines()", during) == USUAL + "once\n"
    assert stderr_of(f"say(); {others}", "show_log_lines()", during, own) == (
        USUAL + "once\n"
    )


@pytest.mark.parametrize(
    "call", ["tfpreempt.Checkpoint('somewhere')", "tfpreempt.save_all_states()"]
)
def test_programs_without_a_handler_see_the_lines_too(call: str) -> None:
    """A program that evaluates checkpoints, or only saves named States."""
    lines = stderr_of("say()", "import tfpreempt", call)
    assert lines.endswith(USUAL)
    assert all(each.startswith("tfpreempt: ") for each in lines.splitlines())


def stderr_of_fork(zygote: Zygote, program: str, directory: Path) -> str:
    """`stderr_of` for a program that imports TensorFlow."""
    file = directory / "program.py"
    file.write_text(START + program, encoding="utf-8")
    ended = zygote.run(file, directory=directory)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    return ended.stderr


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "call",
    [
        "tfpreempt.keras.enable_multi_worker()",
        "with contextlib.suppress(Exception): tfpreempt.connect_to_cluster(None)",
    ],
)
def test_calls_before_a_handler_show_the_lines_too(
    zygote: Zygote, tmp_path: Path, call: str
) -> None:
    program = f"import contextlib, tfpreempt\n{call}\nsay()"
    assert stderr_of_fork(zygote, program, tmp_path).endswith(USUAL)


@pytest.mark.tensorflow
def test_a_training_program_shows_each_line_once(
    zygote: Zygote, tmp_path: Path
) -> None:
    """TensorFlow's save configures the root logger."""
    program = f"""
import tensorflow as tf, tfpreempt
step = tf.Variable(0)
for number in range(2):
    checkpoint = tf.train.Checkpoint(step=step)
    made = tfpreempt.PreemptionCheckpointHandler(None, checkpoint, {str(tmp_path)!r})
    with made as handler:
        handler.run(lambda: step.assign_add(1))
    assert bool(logging.root.handlers) == bool(number), logging.root.handlers
    tf.train.Checkpoint(step=step).save({str(tmp_path / "other" / "ckpt")!r})
assert logging.root.handlers
"""
    written = stderr_of_fork(zygote, program, tmp_path).splitlines()
    lines = [each for each in written if "checkpoint for" in each]
    place = f"{tmp_path}/"
    assert lines == [
        f"tfpreempt: checkpoint for step 1 committed: {place}1",
        f"INFO:tfpreempt.handler.run:checkpoint for step 2 committed: {place}2",
    ]
