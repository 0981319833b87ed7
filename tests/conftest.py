"""Fixtures of all tests: seeds in the header, Hypothesis profiles, a zygote.

Set TFPREEMPT_TEST_PROFILE to "fast" (100 examples of each) or "full" (10,000), and
TFPREEMPT_TEST_SEED to the seed that a failing run printed, in order to repeat its
cases.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.docs.failures import named, unshown
from tests.thorough import NAMED, thorough

if TYPE_CHECKING:
    from tests.multiprocess.harness import Place, Zygote

PROFILE = os.environ.get("TFPREEMPT_TEST_PROFILE", "fast")
SEED = int(
    os.environ.get("TFPREEMPT_TEST_SEED") or random.SystemRandom().getrandbits(32)
)
os.environ["TFPREEMPT_TEST_SEED"] = str(SEED)  # xdist's workers draw the same
# A handler without a config asks no metadata server, whichever machine tests run on.
os.environ["TFPREEMPT_PLATFORM"] = "generic"

# Threads make single examples uneven: a deadline per example would fail on a busy
# machine and find nothing.
_SHARED = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("fast", max_examples=100, **_SHARED)
settings.register_profile("full", max_examples=10_000, **_SHARED)
settings.load_profile(PROFILE)

COLLECTED = pytest.StashKey[set[str]]()
"""Node ids of all tests, in a run of all tests."""

_UNWANTED = re.compile(r"not \w+(?: and not \w+)*")
_MARKED = re.compile(r"^pytestmark = ([^#]*?)(?:#|\n\n|\Z)", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Gives Hypothesis the printed seed, unless the command line names another.

    A shell's background job ignores Ctrl-C and quit; here both are pressed on purpose.
    """
    # `caplog` has what a user sees, whether or not a test before made a handler.
    logging.getLogger("tfpreempt").setLevel(logging.INFO)
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files alone of which nothing is wanted: TensorFlow's import takes 9 s."""
    expression = config.option.markexpr
    if not _UNWANTED.fullmatch(expression) or collection_path.suffix != ".py":
        return None
    found = _MARKED.search(collection_path.read_text(encoding="utf-8"))
    marks = set(re.findall(r"mark\.(\w+)", found[1])) if found else set()
    return bool(marks & set(re.findall(r"not (\w+)", expression))) or None


def pytest_collection() -> None:
    """Turns off garbage collection, because the collection makes hardly any garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks the tests that `make test-thorough` runs, if `-m` asks for the mark."""
    if config.args == config.getini("testpaths"):
        config.stash[COLLECTED] = {item.nodeid for item in items}
    if "thorough" not in config.option.markexpr:
        return
    chosen = set(thorough(items, named()))
    for item in items:
        if item.nodeid in chosen:
            item.add_marker("thorough")


def pytest_collection_finish() -> None:
    """Freezes the existing objects, which exist until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freezes the objects of a finished file, such as models of TensorFlow: later
    garbage collections took up to 16 s to traverse them. Reaps the children that the
    file left: a fit names killed children of its process."""
    if nextitem is None or nextitem.path != item.path:
        gc.freeze()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


_passed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run of all tests if a test that the docs name did not pass."""
    config = session.config
    is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_whole = is_all and PROFILE == "full" and not config.option.keyword
    if not is_whole or hasattr(config, "workerinput") or not _passed:
        return
    missing = unshown(_passed)
    if "thorough" in config.option.markexpr:
        is_thorough = "not thorough" not in config.option.markexpr
        missing = [m for m in missing if m.startswith(NAMED) == is_thorough]
    if missing:
        print(f"\ndocs/reliability-tests.md names tests that did not pass: {missing}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header() -> str:
    return f"tfpreempt: profile {PROFILE}, TFPREEMPT_TEST_SEED={SEED}"


@pytest.fixture(scope="session", autouse=True)
def _no_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """In `make test-fast`, a test that starts a program fails."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the test starts a program: give it the mark `slow`")

    with pytest.MonkeyPatch.context() as patch:
        marks = request.config.option.markexpr
        if "not slow" in marks and "not tensorflow" in marks:
            patch.setattr(subprocess.Popen, "__init__", refuse)
        yield


@pytest.fixture
def rng() -> random.Random:
    """Random numbers from the seed that the header shows."""
    return random.Random(SEED)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths of the files and directories that the test has synced, in order."""
    paths, sync = [], os.fsync

    def spy(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    return paths


@pytest.fixture(scope="session")
def zygote_of() -> Iterator[Callable[[str], Zygote]]:
    """Returns the process that has a framework imported, and forks programs."""
    from tests.multiprocess.harness import Zygote

    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(framework: str) -> Zygote:
            return stack.enter_context(contextlib.closing(Zygote(framework)))

        yield start


@pytest.fixture(scope="session")
def zygote(zygote_of: Callable[[str], Zygote]) -> Zygote:
    """Returns a process that has imported TensorFlow, and forks programs."""
    return zygote_of("tensorflow")


@pytest.fixture
def framework() -> str:
    """Returns the framework of the programs; `parametrize` replaces it."""
    return "tensorflow"


@pytest.fixture
def here(framework: str, zygote_of: Callable[[str], Zygote]) -> Iterator[Place]:
    """Returns a directory for this test, in which the zygote's programs run."""
    from tests.multiprocess.harness import place

    with place(zygote_of(framework)) as made:
        yield made
