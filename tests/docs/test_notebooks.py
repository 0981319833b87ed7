"""The notebooks under colab/ are stored without outputs and run top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

COLAB = Path(__file__).parents[2] / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))
CELL_SECONDS = 200


def read(path: Path) -> Any:
    import nbformat  # takes long, and most runs do without

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_the_notebooks_are_there() -> None:
    names = {path.name for path in NOTEBOOKS}
    assert {
        "custom_loop_multiworker.ipynb",
        "durable_gcs.ipynb",
        "preemption_quickstart.ipynb",
        "tpu_watch_scope.ipynb",
    } <= names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.tensorflow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_top_to_bottom(path: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    notebook = read(path)
    nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs), "no picture"
