"""The scratch directory of a checkpoint directory that is a URL.

If `checkpoint_dir` is a URL such as `gs://bucket/run`, the run writes commits to a
local directory, the scratch directory. A mirror copies each commit to the URL. See
`checkpoint/mirror/store_selection.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile

VARIABLE = "TFPREEMPT_SCRATCH_DIR"
"""Environment variable with the directory that contains all scratch directories; by
default the system's temporary directory.
"""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Maximum number of a URL's last characters that the name of its scratch directory has.
_LONGEST_READABLE = 60


def is_url(location: str | os.PathLike[str]) -> bool:
    """Returns whether a location is a URL, and not a local path."""
    return _URL.match(os.fspath(location)) is not None


def scratch_directory(url: str) -> str:
    """Returns the path of a URL's scratch directory, without creating the directory.

    All processes of a user on a machine get the same path for a URL.
    """
    root = os.environ.get(VARIABLE) or tempfile.gettempdir()
    url = url.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url)[-_LONGEST_READABLE:].strip("-")
    name = f"{readable}-{hashlib.sha256(os.fsencode(url)).hexdigest()[:8]}"
    return os.path.join(os.path.abspath(root), _folder(), name)


def is_scratch(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a scratch directory."""
    return os.path.basename(os.path.dirname(os.fspath(directory))) == _folder()


def _folder() -> str:
    return f"tfpreempt-scratch-{os.getuid()}"


def local_directory(checkpoint_dir: str | os.PathLike[str]) -> str:
    """Returns the local directory of a run: `checkpoint_dir` itself if it is a path, or
    the scratch directory of a URL.

    Args:
        checkpoint_dir: path or URL of the checkpoint directory, as given by the user.
    """
    text = os.fspath(checkpoint_dir)
    return scratch_directory(text) if is_url(text) else text
