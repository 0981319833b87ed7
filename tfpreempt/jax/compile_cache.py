"""Adapter for JAX: keeps JAX's compilation cache with the run (`compile_cache=True`).

JAX writes each compiled function to a file, and a restarted program loads the file. The
files are in a private folder on the machine's disk. An archive of the files is kept in
the checkpoint directory and in the mirror:

    .tfpreempt-compiled/<machine>.zip       the archive, replaced as a whole
    .tfpreempt-compiled/loading-<worker>    created at the load of the archive, removed
                                            at the second step or at the exit; a start
                                            that finds the file follows a crash
    compiled/<machine>.zip                  in the mirror

JAX's folder is not in the checkpoint directory, because JAX writes files under their
final names. So a killed process leaves an incomplete file, which JAX never replaces;
and with zstandard, the files have no checksum.

JAX's key depends on the function, the versions, the flags and the devices, but not on
the type of the CPU. JAX would load code for another CPU, and the process could crash.
So each type of CPU has its own archive.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import logging
import os
import platform
import re
import shutil
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.cache import private_directory
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.core import contained
from tfpreempt.jax import distributed
from tfpreempt.storage import checksum, file_reading
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.object_store import ObjectStore, read_object

log = logging.getLogger(__name__)

MOST_BYTES = 512 << 20
"""Maximum number of bytes of the files in an archive."""

_NAME = re.compile(r"[\w.-]{1,250}-cache")
_LOOKS_EVERY = 2.0  # seconds between two searches for new files of JAX
_DIRECTORY, _IS_ON = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
_SETTINGS: dict[str, Any] = {
    # No limit in JAX, because `_packed` limits the archive to `MOST_BYTES`.
    "jax_compilation_cache_max_size": -1,
    # Also keep functions with a short compile time, because building a model compiles
    # many such functions.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # With caches of XLA, JAX's key on a GPU would depend on the path of the folder.
    "jax_persistent_cache_enable_xla_caches": "none",
}


@functools.cache
def machine() -> str:
    """Returns a name for the type of this machine's CPU."""
    first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    kinds = "model name|flags|Features|CPU (implementer|part|variant)"
    facts = [line for line in first.splitlines() if re.match(kinds, line)]
    return f"{platform.machine()}-{checksum.of_bytes(repr(facts).encode()):08x}"


class CompileCache:
    """The compilation cache of a run, on one worker. Makes the folder for JAX's files.

    Args:
        directory: the checkpoint directory of this worker.
        store: object store of the mirror; None without a mirror.

    Raises:
        OSError, TfpreemptError: the folder or the archive cannot be used.
    """

    def __init__(self, directory: str, store: ObjectStore | None) -> None:
        cluster = distributed.cluster()
        self._worker = 0 if cluster is None else cluster.worker
        self.directory = directory
        self._files = LocalFiles(directory)
        root, name = os.path.join(directory, layout.COMPILED), f"{machine()}.zip"
        self._archive, self._object = os.path.join(root, name), f"compiled/{name}"
        self._loading = os.path.join(root, f"loading-{self._worker:04d}")
        self._has_stepped = False  # whether `keep` was called
        # Key: name of a file. Value: modification time and size, at the last search.
        self._seen: dict[str, tuple[int, int]] = {}
        self._kept = set[str]()
        # The mirror that has the archive, or whose thread will upload the archive.
        self._mirror: Mirror | None = None
        self._look_at = 0.0  # monotonic seconds of the next search

        of_user = os.path.join(tempfile.gettempdir(), f"tfpreempt-jax-{os.getuid()}")
        key = hashlib.sha256(f"{directory}\0{self._worker}".encode()).hexdigest()[:16]
        self.folder = os.path.join(private_directory(of_user, "TMPDIR"), key)
        shutil.rmtree(self.folder, ignore_errors=True)
        private_directory(self.folder, "TMPDIR")
        self._files.make_dirs(root)
        if file_reading.is_there(self._loading):
            log.warning(
                "the last start crashed before its second step. A compiled function "
                "may be the cause, so all functions are compiled again"
            )
            return
        found = _unpacked(self._read())
        self._kept = {*found}  # names of the files in the archive
        if not found and store is not None:
            found = _unpacked(read_object(store, self._object, 2 * MOST_BYTES) or b"")
        for name, data in found.items():
            Path(self.folder, name).write_bytes(data)
        if found:
            self._files.write(self._loading, [])
            # If a loaded function crashes the process, the exit hook does not run, so
            # the file stays, and the next start does not load the archive.
            atexit.register(self._files.remove, self._loading)

    def keep(self, mirror: Mirror | None) -> None:
        """Writes and uploads the archive if JAX has written files.

        Called on a single thread, once per second after the process has made two steps.

        Args:
            mirror: the mirror, on the chief; None on other workers.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOKS_EVERY
        if not self._has_stepped:
            self._files.remove(self._loading)
            self._has_stepped = True
        if self._worker != 0:  # JAX writes files in process 0 only
            return
        found, before = {}, self._seen
        for name in filter(_NAME.fullmatch, file_reading.names(self.folder)):
            status = os.stat(os.path.join(self.folder, name))
            found[name] = status.st_mtime_ns, status.st_size
        self._seen = found
        # Pack the files under two conditions. No file has changed since the last
        # search: JAX may still be writing a changed file. At least one file is new: if
        # files are only missing, another program has cleaned the temporary directory.
        if found == before and not found.keys() <= self._kept:
            self._write(self._packed())
            self._kept, self._mirror = {*found}, None
        if mirror and self._kept and self._mirror is not mirror:
            self._mirror = mirror
            mirror.enqueue(functools.partial(self._upload, mirror.store))

    def _packed(self) -> bytes:
        """Returns an archive of the newest files, at most `MOST_BYTES` in total, in
        order from the oldest file to the newest."""
        chosen, left, target = list[str](), MOST_BYTES, io.BytesIO()
        for (_, size), name in sorted(((v, k) for k, v in self._seen.items()))[::-1]:
            if (left := left - size) >= 0:
                chosen.insert(0, name)
        with zipfile.ZipFile(target, "w") as archive:
            for name in chosen:
                data = Path(self.folder, name).read_bytes()
                # Store no modification time, so that equal files give equal archives.
                archive.writestr(zipfile.ZipInfo(name), data)
        return target.getvalue()

    def _write(self, archive: bytes) -> None:
        """Replaces the archive with a file that only this user can change."""
        temporary = self._archive + ".tmp"
        self._files.remove(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        opened = contained.open_file(temporary, flags, 0o644, root=self.directory)
        with open(opened, "wb") as file:
            file.write(archive)
        self._files.sync_file(temporary)
        self._files.rename(temporary, self._archive)
        self._files.sync_dir(os.path.dirname(self._archive))

    def _read(self) -> bytes:
        """Returns the bytes of the archive; no bytes if there is no archive."""
        try:
            opened = contained.open_file(
                self._archive, os.O_RDONLY, root=self.directory
            )
        except FileNotFoundError:
            return b""
        with open(opened, "rb") as file:
            status = os.fstat(opened)
            if status.st_uid != os.getuid() or status.st_mode & 0o002:
                raise PermissionError(
                    f"{self._archive!r} contains code, and belongs to another user or "
                    "can be changed by every user. Delete the file"
                )
            return contained.read_all(file, 2 * MOST_BYTES, self._archive)

    def _upload(self, store: ObjectStore) -> None:
        """Uploads the archive if the mirror's archive is different or missing. Called
        on the mirror's thread."""
        try:
            data, found = self._read(), store.stat(self._object)
            sums = None, checksum.of_bytes(data)
            is_same = found and found.size == len(data) and found.crc32c in sums
            if data and not is_same:
                store.replace(self._object, data)
        except Exception:
            self._mirror = None  # `keep` queues the upload again
            raise


def _unpacked(archive: bytes) -> dict[str, bytes]:
    """Returns the files of an archive; no files if the archive is corrupt."""
    if archive:
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as opened:
                return {
                    each.filename: opened.read(each)  # `read` also checks the checksum
                    for each in opened.infolist()
                    if _NAME.fullmatch(each.filename)
                    and each.compress_type == zipfile.ZIP_STORED
                }
        except Exception as error:  # noqa: BLE001 - zipfile raises errors of many types
            log.warning("the archive of compiled functions is corrupt: %s", error)
    return {}


_current: CompileCache | None = None
"""The cache that JAX uses: JAX's settings apply to the whole process."""


def open_cache(directory: str, store: ObjectStore | None) -> None:
    """Makes JAX use the cache of a run, from now to the end of the process.

    After an error, a warning is logged, and JAX compiles all functions.

    Args:
        directory: the checkpoint directory of this worker.
        store: object store of the mirror; None without a mirror.
    """
    global _current
    given, is_on = getattr(jax.config, _DIRECTORY), getattr(jax.config, _IS_ON)
    is_of_run = _current is not None and given == _current.folder
    if not is_on or (given and not is_of_run):
        log.warning(
            "compile_cache=True has no effect, because the program or the environment "
            "configures JAX's cache: %s=%r, %s=%r. To keep the cache with the run, "
            "remove these settings",
            *(_DIRECTORY, given, _IS_ON, is_on),
        )
        return
    if is_of_run and _current is not None and _current.directory == directory:
        return
    try:
        _current = CompileCache(directory, store)
    except (OSError, errors.TfpreemptError) as error:
        log.warning("compiled functions are not kept with the run: %s", error)
        return
    for name, value in {_DIRECTORY: _current.folder, **_SETTINGS}.items():
        # An AttributeError means that this version of JAX lacks the setting.
        with contextlib.suppress(AttributeError):
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
    compilation_cache.reset_cache()


def keep(directory: str, mirror: Mirror | None) -> None:
    """Calls `CompileCache.keep` if JAX uses the cache of a run; logs an error.

    Args:
        directory: the checkpoint directory of the run.
        mirror: the mirror, on the chief; None on other workers.
    """
    if _current is None or not layout.is_same(_current.directory, directory):
        return
    try:
        _current.keep(mirror)
    except (OSError, errors.TfpreemptError) as error:
        _current._look_at = float("inf")
        log.warning("new compiled functions are not kept with the run: %s", error)
