"""A Python in which TensorFlow and Keras are not installed, as far as programs see."""

from __future__ import annotations

from pathlib import Path

WITHOUT_TENSORFLOW = (
    "sys.modules |= dict.fromkeys(('tensorflow', 'keras', 'tf_keras', 'tensorboard'))"
)
"""A statement after `import sys`: Python imports no module that is None there."""


WITHOUT_TENSORFLOW_ALONE = (
    "sys.modules |= dict.fromkeys(('tensorflow', 'tf_keras', 'tensorboard'))"
)
"""Keras is installed, for another backend."""


def python_path_without(folder: Path, statement: str = WITHOUT_TENSORFLOW) -> str:
    """Creates a folder for PYTHONPATH, with which no process can import TensorFlow.

    Python runs the file `sitecustomize.py` before a program. All child processes
    inherit the variable.

    Args:
        folder: folder to create.
        statement: statement that hides the modules.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\n{statement}\n")
    return str(folder)
