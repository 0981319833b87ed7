"""Runs the notebooks under colab/, and stores their text outputs and plots.

python -m tests.docs.notebooks [NAME ...]
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLAB = ROOT / "colab"
CELL_SECONDS = 200
NOISE = re.compile(r"(WARNING: All log messages before absl|[IWE]\d{4} \d\d:).*\n")
"""Lines that TensorFlow's libraries print at an import, at every log level."""
TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w{8}/")
"""Temporary directories, which have other names on the machine of a reader."""


def read(path: Path) -> Any:
    """Returns a notebook, after a check of its format."""
    import nbformat  # slow, and not needed by most users of this module

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(notebook: Any, directory: str | Path) -> None:
    """Runs a notebook of the clone top to bottom; stores the outputs in the notebook.

    Args:
        notebook: notebook as returned by `read()`; changed in place.
        directory: working directory of the notebook, in place of the clone's `colab/`.
    """
    import nbclient

    nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    ).execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = cleaned(cell.outputs)


def cleaned(found: list[Any]) -> list[Any]:
    """Returns the outputs of a cell as a reader of the notebook should see them.

    Removes noise of libraries and names of temporary directories. Joins neighboring
    texts of one stream: their number depends on the speed of the machine.
    """
    kept: list[Any] = []
    for output in found:
        if output.output_type != "stream":
            kept.append(output)
        elif text := TEMPORARY.sub("", NOISE.sub("", output.text)):
            if kept and kept[-1].get("name") == output.name:
                kept[-1].text += text
            else:
                output.text = text
                kept.append(output)
    return kept


def printed(notebook: Any) -> str:
    """Returns the text outputs of all cells."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "".join(out.get("text", "") for cell in cells for out in cell.outputs)


def outputs(notebook: Any) -> dict[str, list[str]]:
    """Returns the kinds of output of each code cell, by the id of the cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: sorted({_kind(out) for out in cell.outputs}) for cell in cells}


def _kind(output: Any) -> str:
    if "image/png" in output.get("data", {}):
        return "picture"
    return str(output.get("name", output.output_type))  # stdout, stderr, error


def main() -> None:
    """Runs the named notebooks, or all notebooks, and stores their outputs."""
    import nbformat

    names = sys.argv[1:] or sorted(path.stem for path in COLAB.glob("*.ipynb"))
    for name in names:
        path = COLAB / f"{name}.ipynb"
        notebook = read(path)
        with tempfile.TemporaryDirectory() as directory:
            run(notebook, directory)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
