"""Small commits in a store, for tests of their readers."""

from __future__ import annotations

import dataclasses
import io
import json
import os

from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.manifest import FileEntry, Manifest, to_json
from tfpreempt.storage import checksum

STEP = 7
FILES = {
    "ckpt.index": b"index",
    "ckpt.data-00000-of-00001": bytes(range(256)) * 40,
    "states/epoch.state": b"3",
    "worker-0000/empty.state": b"",
}


def manifest_of(contents, *, sequence=3, **changes):
    entries = [
        FileEntry(name=name, size=len(data), crc32c=checksum.of_bytes(data))
        for name, data in sorted(contents.items())
    ]
    manifest = Manifest(
        step=STEP,
        sequence=sequence,
        world_size=1,
        workers=(0,),
        files=tuple(entries),
        prefix="ckpt" if "ckpt.index" in contents else None,
    )
    return dataclasses.replace(manifest, **changes)


def put_commit(store, contents=FILES, *, manifest=None, at=None):
    """Puts a commit; returns its entry in the catalog."""
    manifest = manifest or manifest_of(contents)
    data = to_json(manifest)
    marker = catalog.marker_bytes(data, manifest.sequence)
    token = f"{manifest.sequence}-{checksum.of_bytes(marker):08x}"
    folder = catalog.folder_name(manifest.step, token) if at is None else at
    named = {**contents, layout.MANIFEST: data, layout.MARKER: marker}
    for name, content in named.items():
        store.put_if_absent(os.path.join(folder, name), io.BytesIO(content))
    return catalog.read(catalog.unread_entry(store, folder))


def put_hostile(store, entries):
    """Puts a commit with the given claims in its manifest."""
    record = json.loads(to_json(manifest_of({})))
    record["files"] = [
        {"name": "ok", "size": 0, "crc32c": 0} | entry for entry in entries
    ]
    data = json.dumps(record).encode()
    marker = catalog.marker_bytes(data, record["sequence"])
    for name, content in ((layout.MANIFEST, data), (layout.MARKER, marker)):
        store.put_if_absent(name, io.BytesIO(content))
