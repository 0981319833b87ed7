"""Which object store a program's commits are copied to."""

from __future__ import annotations

import logging
import os
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import paths
from tfpreempt.storage.interface import ObjectStore
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.opening import check_apart, is_store, is_uri, open_store

_log = logging.getLogger(__name__)

REMOTE_VARIABLE = "TFPREEMPT_REMOTE_CHECKPOINT_DIR"
DIRECTORY_VARIABLE = "TFPREEMPT_CHECKPOINT_DIR"


def chosen_store(given: Any, checkpoint_dir: Any) -> ObjectStore | None:
    """The store that a handler's commits are copied to.

    Args:
        given: `remote_checkpoint_dir`; None asks the environment, where the supervisor
            names the place of its own checkpoint directory, and of those below it.
        checkpoint_dir: the handler's.

    Returns:
        The store; None where there is to be none.

    Raises:
        ConfigurationError: the place cannot be one.
    """
    place, directory = given, os.fsdecode(checkpoint_dir or "")
    if given is None and directory and (named := os.environ.get(REMOTE_VARIABLE)):
        place = _below(named, directory)
    if place is None or place == "":
        return None
    for each in (place, directory):
        if isinstance(each, str):
            paths.check_no_user_info(each)
    if is_uri(directory):
        raise errors.ConfigurationError(
            f"checkpoint_dir is {checkpoint_dir!r} and remote_checkpoint_dir is "
            f"{place!r}; commits of a local directory can be copied, those of a URI "
            "are in object storage already. Leave one of the two out."
        )
    if not is_store(place) and not isinstance(place, str | os.PathLike):
        raise errors.ConfigurationError(
            f"remote_checkpoint_dir is {place!r}; expected a URI such as "
            '"gs://bucket/run", or an ObjectStore of tfpreempt'
        )
    store: ObjectStore = place if is_store(place) else open_store(place)
    if directory and isinstance(store, LocalStore):
        check_apart(store.uri, directory)
    return store


def _below(place: str, checkpoint_dir: str) -> str | None:
    """The place for a directory's copies in the one that the environment names.

    Args:
        place: for the copies of the supervisor's directory.
        checkpoint_dir: a handler's, the same or below it.

    Returns:
        None, with a warning, for a directory elsewhere.
    """
    root = os.environ.get(DIRECTORY_VARIABLE, "")
    if not root or is_uri(root):
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
