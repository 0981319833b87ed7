"""Where a program commits, and which object store its commits are copied to."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.remote.scratch import Scratch
from tfpreempt.core.scratch import is_url
from tfpreempt.storage import paths
from tfpreempt.storage.filesystem import FsspecStore
from tfpreempt.storage.interface import ObjectStore
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.opening import check_apart, is_store, open_store

_log = logging.getLogger(__name__)

REMOTE_VARIABLE = "TFPREEMPT_REMOTE_CHECKPOINT_DIR"
DIRECTORY_VARIABLE = "TFPREEMPT_CHECKPOINT_DIR"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a run commits, and where its commits are copied to.

    Attributes:
        directory: of this machine; as the user gave it, or the scratch directory.
        store: the mirror; None where there is none.
        scratch: None where `checkpoint_dir` is no URL.
    """

    directory: Any
    store: ObjectStore | None = None
    scratch: Scratch | None = None

    def max_to_keep(self, given: int | None) -> int | None:
        """Returns how many commits stay in the directory.

        Args:
            given: how many stay in the mirror, or in the directory without a mirror.
        """
        return given if self.scratch is None else self.scratch.max_to_keep(given)


def choose_places(given: Any, checkpoint_dir: Any) -> Places:
    """Returns where a run commits, and where its commits are copied to.

    Args:
        given: `remote_checkpoint_dir`; None asks the environment, where the supervisor
            names the place of its own checkpoint directory, and of those below it.
        checkpoint_dir: as the user gave it. A URL becomes the mirror of a scratch
            directory.

    Raises:
        ConfigurationError: a place cannot be one.
    """
    place, directory = given, os.fsdecode(checkpoint_dir or "")
    if given is None and directory and (named := os.environ.get(REMOTE_VARIABLE)):
        place = _below(named, directory)
    for each in (place, directory):
        if isinstance(each, str):
            paths.check_no_user_info(each)
    has_mirror = place is not None and place != ""
    if is_url(directory):
        if has_mirror:
            raise errors.ConfigurationError(
                f"checkpoint_dir is {checkpoint_dir!r} and remote_checkpoint_dir is "
                f"{place!r}; commits of a local directory can be copied, those of a "
                "URL are in object storage already. Leave one of the two out."
            )
        scratch = Scratch.of(directory)
        return Places(
            directory=scratch.directory, store=open_store(scratch.url), scratch=scratch
        )
    if not has_mirror:
        return Places(directory=checkpoint_dir)
    if not is_store(place) and not isinstance(place, str | os.PathLike):
        raise errors.ConfigurationError(
            f"remote_checkpoint_dir is {place!r}; expected a URI such as "
            '"gs://bucket/run", or an ObjectStore of tfpreempt'
        )
    if isinstance(place, FsspecStore):
        raise errors.ConfigurationError(
            f"remote_checkpoint_dir is the file system {place.uri!r}; expected a URI "
            'such as "gs://bucket/run", s3:// or file://. A file system of fsspec or '
            "pyarrow promises no exclusive create, so two runs could mix their commits "
            "there. Mount it and pass file:///path, or copy single checkpoints by "
            "tfpreempt.Checkpoint(path, filesystem)."
        )
    store: ObjectStore = place if is_store(place) else open_store(place)
    if directory and isinstance(store, LocalStore):
        check_apart(store.uri, directory)
    return Places(directory=checkpoint_dir, store=store)


def _below(place: str, checkpoint_dir: str) -> str | None:
    """The place for a directory's copies in the one that the environment names.

    Args:
        place: for the copies of the supervisor's directory.
        checkpoint_dir: a handler's, the same or below it.

    Returns:
        None, with a warning, for a directory elsewhere.
    """
    root = os.environ.get(DIRECTORY_VARIABLE, "")
    if not root or is_url(root):
        return place
    below = os.path.relpath(os.path.abspath(checkpoint_dir), os.path.abspath(root))
    if below == os.curdir:
        return place
    if below.split(os.sep)[0] == os.pardir:
        _log.warning(
            "tfpreempt: %s=%s is for what lies in %s; the checkpoints in %s are not "
            "copied there. Pass remote_checkpoint_dir= to have them copied.",
            REMOTE_VARIABLE,
            place,
            root,
            checkpoint_dir,
        )
        return None
    return f"{place.rstrip('/')}/{below.replace(os.sep, '/')}"
