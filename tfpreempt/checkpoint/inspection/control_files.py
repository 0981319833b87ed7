"""The marker and the manifest of whatever may be a commit, read with suspicion.

A store is a directory of this machine or a place in a cloud; here they are the same.
"""

from __future__ import annotations

import dataclasses
import io

from tfpreempt import errors
from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.inspection.findings import Condition, Form, Found, saved_at
from tfpreempt.checkpoint.manifest import Manifest, from_json
from tfpreempt.checkpoint.remote import commits
from tfpreempt.checkpoint.verification import joined
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore

_MAX_MANIFEST_BYTES = 64 << 20
NO_MARKER = "no marker: this save is under way, or it died"
_UPLOAD = "no marker: this upload is under way, or it died"


def form_of(name: str) -> Form | None:
    """The form of what a folder of this name holds; None if it can be none of ours."""
    if layout.is_step_name(name):
        return Form.OWN
    if commits.parse(name) is not None:
        return Form.REMOTE
    if name.endswith(layout.SIDECAR_SUFFIX) and name != layout.SIDECAR_SUFFIX:
        return Form.FLAT
    return None


def blank(store: ObjectStore, folder: str, form: Form, location: str) -> Found:
    """Something whose marker and manifest are in a folder, before they are read."""
    is_flat = form is Form.FLAT
    return Found(
        name=folder.removesuffix(layout.SIDECAR_SUFFIX) if is_flat else folder,
        form=form,
        condition=Condition.NOT_COMMITTED,
        store=store,
        location=location.removesuffix(layout.SIDECAR_SUFFIX) if is_flat else location,
        holder=folder,
        base="" if is_flat else folder,
    )


def damaged(blank: Found, reason: str) -> Found:
    """The same, found damaged."""
    return dataclasses.replace(blank, condition=Condition.DAMAGED, problems=(reason,))


def look_into(blank: Found) -> Found | None:
    """With what its marker and manifest say; None if it is none of ours."""
    named = commits.parse(blank.name) if blank.form is Form.REMOTE else None
    if named is not None:
        blank = dataclasses.replace(blank, token=named.token)
    try:
        commit = commits.read(blank.store, blank.holder)
    except errors.CheckpointDamagedError as error:
        return damaged(blank, str(error))
    if commit is None:
        return uncommitted(blank)
    found = _with_manifest(blank, commit.manifest)
    if named is not None and named.token != commit.token:
        return damaged(
            found, f"its marker makes it the commit {commit.token}; somebody moved it"
        )
    return dataclasses.replace(found, condition=Condition.COMMITTED, token=commit.token)


def uncommitted(blank: Found) -> Found | None:
    """With its manifest, though it has no marker; None if it has neither."""
    is_remote = blank.form is Form.REMOTE
    remarks = (_UPLOAD if is_remote else NO_MARKER,)
    target = io.BytesIO()
    name = joined(blank.holder, layout.MANIFEST)
    try:
        blank.store.get(name, target, length=_MAX_MANIFEST_BYTES)
        found = _with_manifest(blank, from_json(target.getvalue(), name))
    except ObjectMissingError:
        return dataclasses.replace(blank, remarks=remarks) if is_remote else None
    except errors.CheckpointDamagedError as error:
        return dataclasses.replace(blank, remarks=(*remarks, str(error)))
    return dataclasses.replace(found, remarks=remarks)


def _with_manifest(blank: Found, manifest: Manifest) -> Found:
    time = saved_at(manifest)
    return dataclasses.replace(
        blank,
        manifest=manifest,
        size=manifest.bytes,
        time=blank.time if time is None else time,
    )
