"""The notebooks under colab/ run top to bottom, and contain the outputs of a run."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

import pytest

from tests.docs import notebooks
from tests.multiprocess.harness import wait_until

NOTEBOOKS = sorted(notebooks.COLAB.glob("*.ipynb"))
ALL = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_notebooks_are_there() -> None:
    names = {path.name for path in NOTEBOOKS}
    assert {
        "custom_loop_multiworker.ipynb",
        "durable_gcs.ipynb",
        "preemption_quickstart.ipynb",
        "tpu_watch_scope.ipynb",
    } <= names


@ALL
def test_a_notebook_contains_the_output_of_a_run(path: Path) -> None:
    cells = [c for c in notebooks.read(path).cells if c.cell_type == "code"]
    counts = [cell.execution_count for cell in cells]
    assert counts == [*range(1, len(cells) + 1)], "python -m tests.docs.notebooks"
    found = notebooks.outputs(notebooks.read(path))
    assert ["error"] not in found.values()
    assert "picture" in found[cells[-1].id]


@ALL
def test_outputs_are_plain_text_with_one_prefix(path: Path) -> None:
    text = notebooks.printed(notebooks.read(path))
    assert "\x1b" not in text
    assert re.findall(r"tfpreempt[\w.]*: ?tfpreempt:.*", text) == []


@ALL
def test_outputs_have_no_path_of_the_machine(path: Path) -> None:
    text = notebooks.printed(notebooks.read(path))
    assert re.findall(r"/(?:dev|home|opt|root|tmp|usr|var|work)/.*", text) == []


def test_outputs_are_cleaned() -> None:
    v4 = pytest.importorskip("nbformat.v4")
    temporary = tempfile.mkdtemp()
    Path(temporary).rmdir()
    texts = ("a\n", "W0000 00:00:1.0 1 x.cc:1] no GPU\n", f"{temporary}/ckpt/7\n")
    found = [v4.new_output("stream", name="stderr", text=text) for text in texts]
    found.append(v4.new_output("stream", name="stdout", text="b\n"))
    cleaned = [(each.name, each.text) for each in notebooks.cleaned(found)]
    assert cleaned == [("stderr", "a\nckpt/7\n"), ("stdout", "b\n")]


@ALL
def test_the_first_cell_clones_and_installs_on_a_new_machine(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(c for c in notebooks.read(path).cells if c.cell_type == "code")
    cell = re.sub(r"[%!]((?:pip|git|cd) .*)", r"commands.append(r'\1')", first.source)
    with_url = cell.replace('REPOSITORY_URL = ""', 'REPOSITORY_URL = "file:///repo"')
    assert with_url != cell

    def commands(text: str) -> list[str]:
        done: list[str] = []
        exec(text, {"commands": done})
        return done

    assert commands(cell) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(notebooks.COLAB)
    (pip,) = commands(cell)
    assert pip.split()[3].startswith('"../.[tensorflow')
    monkeypatch.chdir(tmp_path)
    assert commands(with_url) == [
        'git clone --quiet "$REPOSITORY_URL" tfpreempt',
        "cd -q tfpreempt/colab",
        pip,
    ]
    with pytest.raises(RuntimeError, match="set REPOSITORY_URL"):
        commands(cell)


@pytest.mark.tensorflow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@ALL
def test_a_notebook_runs_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbclient")
    notebook = notebooks.read(path)
    stored = notebooks.outputs(notebook)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebooks.run(notebook, tmp_path)
    assert notebooks.outputs(notebook) == stored
    wait_until(lambda: not commands_with(str(tmp_path)), "the processes to end")


def commands_with(text: str) -> list[str]:
    """The command lines of all processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            found.append(path.read_text())
    return [each for each in found if text in each]
