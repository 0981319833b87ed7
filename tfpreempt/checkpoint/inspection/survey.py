"""Which checkpoints lie somewhere, and are they whole: what `tfpreempt inspect` asks.

Nothing is changed, and nothing that lies there is trusted.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import stat

from tfpreempt import errors
from tfpreempt.checkpoint import bundle, flat, layout
from tfpreempt.checkpoint.inspection import control_files, directory_survey
from tfpreempt.checkpoint.inspection.findings import Checked, Condition, Form, Found
from tfpreempt.checkpoint.remote import commits
from tfpreempt.checkpoint.verification import Effort, check_bytes, check_sizes, joined
from tfpreempt.storage import opening, paths
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore
from tfpreempt.storage.local import LocalStore

_INDEX = ".index"
_MAX_EXTRA = 5
_MAX_NAMES = 1_000_000


def at(place: str) -> list[Found]:
    """The checkpoints at a place: all of a run, or the one that it names.

    Args:
        place: a run's directory, a commit's directory, a flat prefix, or the URI of a
            mirror or of one folder of it.

    Raises:
        ConfigurationError: there is nothing of the kind.
        CheckpointError: it cannot be listed or read.
    """
    path = opening.local_path(place)
    if path is not None:
        return _at_path(path, place)
    store = opening.open_store(place)
    name = store.uri.rstrip("/").rpartition("/")[2]
    is_named = commits.parse(name) is not None
    one = control_files.look_into(
        _root(store, name, Form.REMOTE if is_named else Form.OWN)
    )
    if one is not None and is_named and one.manifest is None and not one.problems:
        if next(iter(store.list()), None) is None:
            raise _nothing(place)
        return [one]
    return of_store(store) if one is None else [one]


def of_store(store: ObjectStore) -> list[Found]:
    """All that looks like a commit in a store.

    Raises:
        CheckpointError: the store cannot be listed or read, or lists too much.
    """
    names = list(itertools.islice(store.folders(), commits.MAX_FOLDERS + 1))
    if len(names) > commits.MAX_FOLDERS:
        raise errors.CheckpointError(
            f"{store.uri} has more than {commits.MAX_FOLDERS} folders; expected the "
            "few of one run. Name the place of a run."
        )
    found = []
    for name in names:
        form = control_files.form_of(name)
        if form is not None and paths.why_unsafe(name) is None:
            one = control_files.look_into(
                control_files.blank(store, name, form, f"{store.uri}/{name}")
            )
            if one is not None:
                found.append(one)
    return found


def check(found: Found, *, every_byte: bool, effort: Effort) -> Found:
    """The same, its files checked.

    Args:
        found: what is to be checked; what isn't committed is returned as it is.
        every_byte: whether to read all bytes; the sizes otherwise.
        effort: how.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    if found.condition is Condition.FOREIGN:
        return _check_foreign(found)
    manifest = found.manifest
    if found.condition is not Condition.COMMITTED or manifest is None:
        return found
    look = check_bytes if every_byte else check_sizes
    faults = look(found.store, found.base, manifest.files, effort)
    if faults and _is_gone(found):
        return dataclasses.replace(
            found,
            condition=Condition.NOT_COMMITTED,
            remarks=(*found.remarks, "it was deleted while it was looked at"),
        )
    return dataclasses.replace(
        found,
        condition=Condition.DAMAGED if faults else Condition.COMMITTED,
        checked=Checked.EVERY_BYTE if every_byte else Checked.SIZES,
        problems=tuple(fault.text for fault in faults),
        remarks=(*found.remarks, *(_extra_files(found) if every_byte else ())),
    )


def _is_gone(found: Found) -> bool:
    """Whether retention took it meanwhile: the marker is what goes first."""
    try:
        found.store.get(joined(found.holder, layout.MARKER), io.BytesIO(), length=1)
    except ObjectMissingError:
        return True
    except errors.CheckpointDamagedError:
        pass
    return False


# --- one place -----------------------------------------------------------------------


def _at_path(path: str, place: str) -> list[Found]:
    above, name = os.path.split(path)
    if os.path.isdir(path):
        if not _has_control(path) and commits.parse(name) is None:
            if not os.path.isdir(layout.sidecar(path)):
                return directory_survey.of_directory(path)
        elif not name.endswith(layout.SIDECAR_SUFFIX):
            form = Form.OWN if commits.parse(name) is None else Form.REMOTE
            one = control_files.look_into(_root(LocalStore(path), name, form))
            return [] if one is None else [one]
    elif name == layout.PAYLOAD and _has_control(above):
        return _at_path(above, place)  # TensorFlow's prefix in a directory of our own
    name = name.removesuffix(_INDEX).removesuffix(layout.SIDECAR_SUFFIX)
    if os.path.isdir(above):
        found = [
            each for each in directory_survey.of_directory(above) if each.name == name
        ]
        if found:
            return found
    raise _nothing(place)


def _nothing(place: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"There is no checkpoint at {place!r}. Name a run's directory, a commit's "
        "directory (run/5), a flat prefix (run/ckpt-5), or a URI such as "
        "gs://bucket/run."
    )


def _has_control(path: str) -> bool:
    names = (layout.MARKER, layout.MANIFEST)
    return any(os.path.lexists(os.path.join(path, name)) for name in names)


def _root(store: ObjectStore, name: str, form: Form) -> Found:
    """A store that is one commit as a whole."""
    return Found(
        name=name,
        form=form,
        condition=Condition.NOT_COMMITTED,
        store=store,
        location=store.uri,
    )


def _extra_files(found: Found) -> tuple[str, ...]:
    """A remark about files that the manifest doesn't name."""
    assert found.manifest is not None
    known = {joined(found.base, entry.name) for entry in found.manifest.files}
    control = (layout.MANIFEST, layout.MARKER, layout.METADATA)
    known |= {joined(found.holder, name) for name in control}
    listed = found.store.list(f"{found.holder}/" if found.holder else "")
    names = itertools.islice(listed, _MAX_NAMES)
    extra = [name for name in names if name not in known]
    if not extra:
        return ()
    shown = ", ".join(map(ascii, extra[:_MAX_EXTRA]))
    more = f" and {len(extra) - _MAX_EXTRA} more" if len(extra) > _MAX_EXTRA else ""
    return (f"not in the manifest: {shown}{more}",)


def _check_foreign(found: Found) -> Found:
    found = dataclasses.replace(found, checked=Checked.LENGTHS)
    try:
        for path in (found.location + _INDEX, *flat.payload_files(found.location)):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return control_files.damaged(found, f"{path!r} {directory_survey.LINK}")
        bundle.check(found.location)
    except (errors.CheckpointDamagedError, OSError) as error:
        return control_files.damaged(found, str(error))
    return found
