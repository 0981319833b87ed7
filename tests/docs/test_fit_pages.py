"""Programs on the pages of docs/fit run; Troubleshooting quotes the messages."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, read
from tests.multiprocess.harness import Place

# One program: each page uses the model and the data of the first page.
PAGES = (
    "fit/index.md",
    "fit/restored-state.md",
    "fit/data.md",
    "fit/callbacks.md",
    "fit/several-fits.md",
    "fit/bad-steps.md",
    "migrating/backup-and-restore.md",
    "index.md",
)
WORKERS = "fit/many-workers.md"
JAX = "fit/jax.md"


def run(command: list[str], directory: Path) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    ended = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.tensorflow
def test_the_examples_run_one_after_the_other(here: Place) -> None:
    program = [block for page in PAGES for block in blocks(page)]
    shown = [
        'assert counter.get_state()["last"] is not None',
        "assert seen.samples == 2 * 2048",
    ]
    page = here.path / "page.py"
    page.write_text("\n".join([*program, *shown]), encoding="utf-8")
    for said in (
        "epochs in the history: 40",
        "this fit was complete after 40 epochs; nothing is left to train",
    ):
        cluster = here.start(str(page))
        cluster.expect(0, limit=240)
        assert said in cluster[0].output


@pytest.mark.multiprocess
@pytest.mark.tensorflow
def test_two_workers(tmp_path: Path) -> None:
    (program,) = blocks(WORKERS)
    (tmp_path / "workers.py").write_text(program, encoding="utf-8")
    found = blocks(WORKERS, "bash")
    run(found[0].split(), tmp_path)
    assert list((tmp_path / "ckpt-keras-2").glob("*/COMMITTED"))


@pytest.mark.multiprocess
def test_keras_on_jax(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    program, _ = blocks(JAX)
    (tmp_path / "keras_jax.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "keras_jax.py"]
    for said in ("epochs in the history: 20", "nothing is left to train"):
        assert said in run(command, tmp_path)


@pytest.mark.multiprocess
def test_keras_on_jax_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    _, program = blocks(JAX)
    (tmp_path / "keras_jax_workers.py").write_text(program, encoding="utf-8")
    (command,) = blocks(JAX, "bash")
    assert "epochs in the history: 20" in run(command.split(), tmp_path)
    assert list((tmp_path / "ckpt-jax-2").glob("*/COMMITTED"))


def messages() -> list[str]:
    """The texts in the first columns of the tables of errors and log lines."""
    rows = re.findall(r"^\| (`.*?) \|", read("troubleshooting.md"), re.MULTILINE)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


@functools.cache
def source() -> str:
    """Returns the source of the package, with multi-line strings joined."""
    files = sorted((ROOT / "tfpreempt").rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"""["'] *\n\s*f?["']""", "", text)


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_page_exists(message: str) -> None:
    """Word for word, except for `...` and for inserted values."""
    known = source()
    filled_in = "signal:SIGTERM", "None s", "ModelCheckpoint", "filepath="
    examples = "|".join(map(re.escape, ["...", " failed", *filled_in]))
    examples += r"|ckpt-keras/\d+|\d+"
    words = [part.strip(" :;,`") for part in re.split(examples, message)]
    missing = [part for part in words if len(part) > 3 and part not in known]
    assert not missing
