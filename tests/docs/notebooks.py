"""Runs the notebooks under colab/, and keeps what they print and draw.

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
"""What TensorFlow's libraries say at an import, whatever level is set."""
TEMPORARY = re.compile(r"(?<=[ '])/[\w/]*/tmp\w{8}/")


def read(path: Path) -> Any:
    """A notebook, which is checked against the format."""
    import nbformat  # takes long, and most runs do without

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(notebook: Any, directory: str | Path) -> None:
    """Runs a notebook of the clone top to bottom; its outputs are those of this run.

    Noise of libraries and names of this machine's temporary directories are removed.

    Args:
        notebook: as `read()` returns it; changed in place.
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
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = TEMPORARY.sub("", NOISE.sub("", output.text))
        if "outputs" in cell:
            cell.outputs = [each for each in cell.outputs if each.get("text", "-")]


def outputs(notebook: Any) -> dict[str, list[str]]:
    """What kinds of output each code cell has, by its id."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: sorted({_kind(out) for out in cell.outputs}) for cell in cells}


def _kind(output: Any) -> str:
    if "image/png" in output.get("data", {}):
        return "picture"
    return str(output.get("name", output.output_type))  # stdout, stderr, error


def main() -> None:
    """Runs those that are named, or all, and stores them."""
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
