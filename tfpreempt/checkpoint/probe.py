"""Is the checkpoint directory the same storage for every worker?

The chief writes a file with a random token, tells the token to the others by the store,
they look for it, the chief removes it.
"""

from __future__ import annotations

import os
import secrets

from tfpreempt.checkpoint import claims
from tfpreempt.core.clock import Clock
from tfpreempt.storage import failure, reading
from tfpreempt.storage.files import files_for

_PREFIX = ".tfpreempt-probe-"


def write_probe(directory: str) -> str:
    """Writes a probe file; on the chief.

    Returns:
        The token that `check_probe` looks for and `remove_probe` takes.

    Raises:
        SaveError: the directory cannot be written (full, read-only); says what to do.
    """
    token = secrets.token_hex(16)
    path = os.path.join(directory, _PREFIX + token)
    files = files_for(directory)
    with failure.translated("write a probe file", directory):
        files.write(path, token.encode())
        files.sync_file(path)
    return token


def check_probe(directory: str, token: str) -> bool:
    """Whether this worker sees the chief's probe file in its directory."""
    if not token or not all(c in "0123456789abcdef" for c in token):
        return False
    try:
        # network file systems may serve a stale listing; a listing refreshes it
        reading.names(directory)
        with reading.open_file(os.path.join(directory, _PREFIX + token)) as file:
            return file.read(len(token) + 1) == token.encode()
    except OSError:
        return False


def remove_probe(directory: str, token: str) -> None:
    """Removes the probe file, after all have looked; on the chief. Never raises."""
    try:
        files_for(directory).remove(os.path.join(directory, _PREFIX + token))
    except OSError:
        pass  # a leftover of 32 bytes; a later start removes it


def remove_stale_probes(directory: str, clock: Clock) -> None:
    """Removes probe files of runs that died while probing; on the chief.

    Raises:
        OSError: as the file system says.
    """
    for name in reading.names(directory):
        path = os.path.join(directory, name)
        if name.startswith(_PREFIX) and claims.is_quiet(clock.wall(), path):
            remove_probe(directory, name[len(_PREFIX) :])
