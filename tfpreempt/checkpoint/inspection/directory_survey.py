"""Which checkpoints lie in a directory of this machine, whole or not.

Shown is also what a restart passes over: damaged commits, saves that are under way or
died, links that lead elsewhere. Nothing is changed.
"""

from __future__ import annotations

import dataclasses
import os

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, flat, layout, restore
from tfpreempt.checkpoint.inspection import control_files
from tfpreempt.checkpoint.inspection.findings import Condition, Form, Found
from tfpreempt.storage import paths
from tfpreempt.storage.local import LocalStore

_INDEX = ".index"
_LOOKS = 5
_DELETED = "its checkpoint was deleted; what is left goes at the next commit"
LINK = "is a symbolic link; links aren't followed"


def of_directory(directory: str) -> list[Found]:
    """All that looks like a checkpoint, or was to become one, in a directory.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    store = LocalStore(directory)
    fault: OSError | None = None
    for _ in range(_LOOKS):
        try:
            return _listed(store) + _staged(store)
        except FileNotFoundError as error:
            fault = error  # a run deletes what it no longer wants: look again
        except OSError as error:
            fault = error
            break
    raise errors.CheckpointError(
        f"The directory {directory!r} cannot be read: {fault}. Check the path and its "
        "permissions."
    ) from fault


def _listed(store: LocalStore) -> list[Found]:
    with os.scandir(store.uri) as entries:
        named = sorted(entries, key=lambda entry: entry.name)
    found = [
        one
        for entry in named
        if (form := control_files.form_of(entry.name)) is not None
        and (one := _of_entry(store, entry, form)) is not None
    ]
    overwritten = {each.name for each in found if _is_overwritten(each)}
    found = [_unless_deleted(e) for e in found if e.name not in overwritten]
    taken = {each.name for each in found}
    found += [
        each
        for entry in named
        if (each := _of_intent(store, entry)) is not None and each.name not in taken
    ]
    taken = {each.name for each in found}
    for prefix in restore.foreign_prefixes(store.uri):
        name = os.path.relpath(prefix, store.uri)
        if name not in taken:
            found.append(_foreign(store, name, name in overwritten))
    return found


def _of_entry(store: LocalStore, entry: os.DirEntry[str], form: Form) -> Found | None:
    blank = control_files.blank(
        store, entry.name, form, os.path.join(store.uri, entry.name)
    )
    blank = dataclasses.replace(blank, time=entry.stat(follow_symlinks=False).st_mtime)
    if entry.is_symlink():
        return control_files.damaged(blank, f"{entry.name!r} {LINK}")
    if not entry.is_dir(follow_symlinks=False):
        return None
    if reason := paths.why_unsafe(entry.name):
        return control_files.damaged(blank, f"its name {reason}")
    return control_files.look_into(blank)


def _is_overwritten(found: Found) -> bool:
    """Whether the user's manager saved under the same name after our commit."""
    if found.form is not Form.FLAT or found.condition is not Condition.COMMITTED:
        return False
    assert found.manifest is not None
    assert found.token is not None
    marker = os.path.join(found.store.uri, found.holder, layout.MARKER)
    return not os.path.islink(found.location + _INDEX) and restore.is_overwritten(
        catalog.Committed(
            kind=catalog.Kind.FLAT,
            path=found.location,
            base=found.store.uri,
            manifest=found.manifest,
            token=found.token,
            marked_at=os.lstat(marker).st_mtime,
        )
    )


def _unless_deleted(found: Found) -> Found:
    """A flat commit whose manager deleted it is none any more."""
    paths = (found.location, found.location + _INDEX)
    is_commit = found.condition is Condition.COMMITTED
    if found.form is not Form.FLAT or not is_commit or any(map(os.path.lexists, paths)):
        return found
    return dataclasses.replace(
        found, condition=Condition.NOT_COMMITTED, remarks=(_DELETED,)
    )


def _of_intent(store: LocalStore, entry: os.DirEntry[str]) -> Found | None:
    """A flat save of ours that is under way, or died."""
    name = entry.name.removesuffix(layout.INTENT_SUFFIX)
    if name in ("", entry.name) or not entry.is_file(follow_symlinks=False):
        return None
    prefix = os.path.join(store.uri, name)
    try:
        if not flat.is_half_written(prefix):
            return None
    except (TypeError, AttributeError, RecursionError):
        pass  # an intent that isn't ours to read says nothing in its favour
    return Found(
        name=name,
        form=Form.FLAT,
        condition=Condition.NOT_COMMITTED,
        store=store,
        location=prefix,
        time=entry.stat(follow_symlinks=False).st_mtime,
        remarks=("half-written: this save is under way, or it died",),
    )


def _staged(store: LocalStore) -> list[Found]:
    """What saves are writing, or left when they died."""
    root = os.path.join(store.uri, layout.STAGING)
    if os.path.islink(root) or not os.path.isdir(root):
        return []
    found = []
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        folder = f"{layout.STAGING}/{name}"
        blank = control_files.blank(store, folder, Form.STAGING, path)
        blank = dataclasses.replace(
            blank, time=os.lstat(path).st_mtime, size=_size_below(path)
        )
        unsafe = paths.why_unsafe(folder) is not None
        one = None if unsafe else control_files.uncommitted(blank)
        found.append(
            one or dataclasses.replace(blank, remarks=(control_files.NO_MARKER,))
        )
    return found


def _size_below(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                pass  # the save goes on meanwhile
    return total


def _foreign(store: LocalStore, name: str, is_overwritten: bool) -> Found:
    location = os.path.join(store.uri, name)
    remark = "not ours: without a manifest only index and lengths can be checked"
    if is_overwritten:
        remark = (
            "saved again without tfpreempt after our commit of this name; " + remark
        )
    return Found(
        name=name,
        form=Form.FOREIGN,
        condition=Condition.FOREIGN,
        store=store,
        location=location,
        time=os.lstat(location + _INDEX).st_mtime,
        size=sum(os.lstat(path).st_size for path in flat.payload_files(location)),
        remarks=(remark,),
    )
