"""The versions of TensorFlow, JAX, Keras and Python that the package is tried with.

`make matrix` runs a cell after the other and prints a table. A cell installs the
package with one TensorFlow into an environment of its own, looks for the private names
that we take, and then, in real processes: preempts two workers and restarts them,
resumes a `model.fit` exactly in each line of Keras that is there, and preempts a remote
worker of one client. On the newest Keras and its nightly build a fit over each kind of
data is resumed. The cells `jax-...` have JAX and no TensorFlow: they try the key-value
store in JAX's coordination service, preempt the two processes of a loop, and resume a
`model.fit` on JAX. One more cell, `no-tensorflow`, has neither, and no row in a table.
`make matrix CELLS="oldest newest"` runs some of them. A cell whose interpreter or
packages are not there is skipped, and its table says so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

TESTS = "tests/multiprocess/"
CHECKS = {
    "seams": "tests/contracts/test_private_api.py",
    "2 workers": f"{TESTS}test_exact_resume.py::"
    "test_real_clusters[2-checkpoint-run-nothing]",
    "fit, Keras 3": f"{TESTS}test_fit.py::test_one_process[keras-repeated-mid]",
    "fit, tf_keras": f"{TESTS}test_fit.py::"
    "test_one_process[tf_keras-tfdata-validation]",
    "each data": f"{TESTS}test_fit.py::test_each_kind_of_data",
    "coordinator": f"{TESTS}test_remote.py::"
    "test_a_worker_is_preempted_and_the_client_restarted[0]",
}
CHECKS_ON_JAX = {
    "seams": "tests/contracts/test_private_api.py::test_every_name_is_there",
    "store": "tests/contracts/test_stores.py::"
    "test_the_coordination_service_keeps_the_contract[jax]",
    "2 processes": f"{TESTS}test_jax_loops.py::test_two_processes_resume_exactly",
    "fit": f"{TESTS}test_jax_fit.py::test_exact_and_without_tensorflow",
}
WITHOUT_TENSORFLOW = (
    f"{TESTS}test_without_tensorflow.py",
    "tests/checkpoint/test_core_alone.py",
    "tests/core/test_lazy_import.py",
)
# Of what the rest of the development is pinned to; here new versions are tried.
NEW_VERSIONS = (
    "tests/contracts/test_private_api.py::test_the_installed_version_was_seen"
)
TOOLS = ("pytest>=9.0", "pytest-timeout>=2.3", "hypothesis>=6.100", "scikit-learn>=1.4")
GRAIN = "grain>=0.2.12"
RESULTS = Path(".nox/matrix.jsonl")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of a table.

    Attributes:
        name: for the command line.
        python: the interpreter's version.
        tensorflow: the requirement, by any of the names that it is published under.
        jax: the requirement, in place of TensorFlow's.
        keras: another Keras 3 than the newest that the framework and Python allow.
        tf_keras: of the same minor; None where there is none yet.
        nightly: replaces Keras once all else is installed.
        is_newest: whether each kind of data is tried; else one is.
        more: requirements besides.
        environment: variables besides.
    """

    name: str
    python: str
    tensorflow: str | None = None
    jax: str | None = None
    keras: str | None = None
    tf_keras: str | None = None
    nightly: str | None = None
    is_newest: bool = False
    more: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def framework(self) -> str:
        """The requirement of the one framework."""
        return self.tensorflow or str(self.jax)

    @property
    def checks(self) -> dict[str, str]:
        """The checks of the cell's table."""
        return CHECKS if self.jax is None else CHECKS_ON_JAX


CELLS = (
    Cell(
        name="oldest", python="3.10", tensorflow="tensorflow==2.16.*", tf_keras="2.16"
    ),
    Cell(
        name="keras-3.7",
        python="3.10",
        tensorflow="tensorflow==2.16.*",
        keras="keras==3.7.*",
    ),
    Cell(
        name="keras-3.8",
        python="3.11",
        tensorflow="tensorflow==2.17.*",
        keras="keras==3.8.*",
    ),
    Cell(
        name="2.17",
        python="3.11",
        tensorflow="tensorflow==2.17.*",
        keras="keras==3.9.*",
        tf_keras="2.17",
    ),
    Cell(
        name="2.18",
        python="3.11",  # tf_keras 2.18 draws a seed as Python 3.12 no longer can
        tensorflow="tensorflow==2.18.*",
        keras="keras==3.11.*",
        tf_keras="2.18",
    ),
    Cell(
        name="2.19",
        python="3.12",
        tensorflow="tensorflow==2.19.*",
        keras="keras==3.13.*",
        tf_keras="2.19",
    ),
    Cell(
        name="2.20",
        python="3.13",
        tensorflow="tensorflow==2.20.*",
        keras="keras==3.14.*",
        tf_keras="2.20",
    ),
    Cell(
        name="2.21",
        python="3.11",
        tensorflow="tensorflow==2.21.*",
        tf_keras="2.21",
        is_newest=True,
    ),
    Cell(
        name="keras-nightly",
        python="3.11",
        tensorflow="tensorflow==2.21.*",
        nightly="keras-nightly",
        is_newest=True,
    ),
    Cell(
        name="newest",
        python="3.13",
        tensorflow="tensorflow==2.22.0rc0",
        is_newest=True,
    ),
    Cell(
        name="cpu",
        python="3.12",
        tensorflow="tensorflow-cpu==2.20.*",
        keras="keras==3.10.*",
        tf_keras="2.20",
    ),
    Cell(
        name="tpu",
        python="3.12",
        tensorflow="tensorflow-tpu==2.20.*",
        tf_keras="2.20",
        # Without a TPU: its library must not be found, or the import aborts.
        environment={"TPU_LIBRARY_PATH": "/nonexistent/libtpu.so"},
    ),
    Cell(
        name="jax-oldest",
        python="3.10",
        jax="jax==0.6.2",
        keras="keras==3.10.*",
        environment={"KERAS_BACKEND": "jax"},
    ),
    Cell(
        name="jax-newest",
        python="3.13",
        jax="jax",
        nightly="keras-nightly",
        environment={"KERAS_BACKEND": "jax"},
    ),
)


def run(cell: Cell, session: nox.Session) -> None:
    """Installs a cell, runs its checks and records what came out."""
    row = {"name": cell.name, "python": cell.python}
    keras = () if cell.keras is None else (cell.keras,)
    loaders = (GRAIN,) if cell.is_newest else ()
    package = "." if cell.jax is None else ".[jax]"
    wanted = (cell.framework, *keras, *loaders, *cell.more, *TOOLS, package)
    try:
        session.install("--dry-run", *wanted, silent=True)
    except nox.command.CommandFailed:
        record(row | {"skipped": "pip finds no such versions together"})
        session.skip("pip finds no such versions together")
    session.install(*wanted, silent=True)
    if cell.tf_keras is not None:  # it asks for `tensorflow` by that name
        session.install("--no-deps", f"tf_keras=={cell.tf_keras}.*", silent=True)
    if cell.nightly is not None:  # in the folder of `keras`, which must be empty first
        session.run("python", "-m", "pip", "uninstall", "-qy", "keras", silent=True)
        session.install("--no-deps", "--pre", cell.nightly, silent=True)
    environment = {**cell.environment, "TF_CPP_MIN_LOG_LEVEL": "2"}
    row["versions"] = session.run(
        "python", "-c", VERSIONS, env=environment, silent=True, stderr=None
    )
    if row["versions"] is None:  # nox is to install only
        return
    checks = dict(cell.checks)
    if cell.tf_keras is None:
        checks.pop("fit, tf_keras", None)
    if not cell.is_newest:
        checks.pop("each data", None)
    report = Path(session.create_tmp()) / "report.xml"
    report.unlink(missing_ok=True)  # an earlier run's
    failed = []
    try:
        session.run(
            *("python", "-m", "pytest", "-q", "-m", "", f"--junit-xml={report}"),
            f"--deselect={NEW_VERSIONS}",
            *checks.values(),
            env=environment,
            success_codes=[0, 1],  # 1: a test failed, and the report says which
        )
    except nox.command.CommandFailed as error:
        failed.append(f"pytest: {error}")
    row["checks"] = outcomes(report, checks)
    record(row)
    failed += [check for check, came in row["checks"].items() if came != "passed"]
    if failed:
        session.error(", ".join(failed))


@nox.session(name="cell-no-tensorflow", python="3.11")
def no_tensorflow(session: nox.Session) -> None:
    """Preempts and resumes a program of named States where TensorFlow is missing."""
    session.install(*TOOLS, ".", silent=True)
    session.run(
        *("python", "-m", "pytest", "-q", "-m", "not tensorflow"),
        *WITHOUT_TENSORFLOW,
    )


LIBRARIES = {"tensorflow": "TensorFlow", "keras": "Keras", "tf_keras": "tf_keras"}
LIBRARIES_ON_JAX = {"jax": "JAX", "keras": "Keras"}
VERSIONS = """
import importlib.metadata as m, json
names = m.packages_distributions()
libraries = ("tensorflow", "jax", "keras", "tf_keras")
wanted = {n: names.get(n, [])[:1] for n in libraries}
found = {n: f"{d[0]} {m.version(d[0])}" for n, d in wanted.items() if d}
print(json.dumps(found))
"""


WORST = ("did not run", "skipped", "passed", "FAILED")
"""A check is what the last of these says; some of its tests may be skipped, not all."""


def outcomes(report: Path, checks: dict[str, str]) -> dict[str, str]:
    """What each check came to, of pytest's report; a crash leaves none, or half."""
    found = dict.fromkeys(checks, "did not run")
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        return found
    for case in cases:
        file = case.get("classname", "").replace(".", "/") + ".py"
        outcome = "passed" if case.find("skipped") is None else "skipped"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "FAILED"
        for check, test in checks.items():
            name = str(case.get("name"))
            if test in (file, f"{file}::{name}", f"{file}::{name.partition('[')[0]}"):
                found[check] = max(found[check], outcome, key=WORST.index)
    return found


def record(row: dict[str, object]) -> None:
    """Keeps a row for the table."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


for _cell in CELLS:
    nox.session(name=f"cell-{_cell.name}", python=_cell.python)(
        functools.wraps(run)(functools.partial(run, _cell))
    )


@nox.session(python=False, default=False)
def begin(session: nox.Session) -> None:
    """Forgets the rows of an earlier run."""
    RESULTS.unlink(missing_ok=True)


@nox.session(python=False, default=False)
def table(session: nox.Session) -> None:
    """Prints the tables in Markdown; of cells that did not run they say why."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    for is_on_jax, libraries in ((False, LIBRARIES), (True, LIBRARIES_ON_JAX)):
        cells = [each for each in CELLS if (each.jax is not None) is is_on_jax]
        heads = ["Python", *libraries.values(), *cells[0].checks]
        print("|", " | ".join(heads), "|")
        print("|---" * len(heads) + "|")
        for each in cells:
            print("|", " | ".join(columns(each, rows.get(each.name), libraries)), "|")


def columns(
    cell: Cell, row: dict[str, Any] | None, libraries: dict[str, str]
) -> list[str]:
    """The columns of one cell."""
    if row is None or "skipped" in row:
        why = "not run: no such Python, or left out" if row is None else row["skipped"]
        empty = [""] * (len(libraries) - 1), [""] * (len(cell.checks) - 1)
        return [cell.python, cell.framework, *empty[0], why, *empty[1]]
    versions = json.loads(row["versions"].strip().splitlines()[-1])
    names = [versions.get(name, "-") for name in libraries]
    checks = [row["checks"].get(check, "-") for check in cell.checks]
    return [cell.python, *names, *checks]
