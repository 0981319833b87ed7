"""A Python in which TensorFlow and Keras are not installed, as far as programs see."""

from __future__ import annotations

from pathlib import Path

WITHOUT_TENSORFLOW = (
    "sys.modules |= dict.fromkeys(('tensorflow', 'keras', 'tf_keras', 'tensorboard'))"
)
"""A statement after `import sys`: Python imports no module that is None there."""


def python_path_without(folder: Path) -> str:
    """Makes a folder for PYTHONPATH, with which no process can import TensorFlow.

    Python runs the file `sitecustomize.py` before a program. All processes that a
    process starts inherit the variable.

    Args:
        folder: is made.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\n{WITHOUT_TENSORFLOW}\n")
    return str(folder)
