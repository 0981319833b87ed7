"""Where bytes lie; it knows of no commits.

A directory, by its path:
    files               changes it: fsync, rename, remove
    reading             reads it
    paths               what is a URL, and which names become paths

Object stores:
    interface           what a store can do
    opening             finds the store that a place names
    local               a directory of the local file system
    bucket              what gs:// and s3:// have in common
    gcs                 gs://, by its JSON API
    gcs_client          its requests, retry and credentials; the meaning of its errors
    gcs_transfer        an object's bytes on their way, a large file in one request
    s3                  s3://, by obstore
    prefixed            a part of another store
    filesystem          files in a file system of fsspec, or of pyarrow by fsspec

What they share:
    checksum            crc32c
    deadline            how long a call may take, whatever its requests do
    failure             what an error of the system means, and what to do
    pieces              a file in parts

Imported by checkpoint, cli, handler, keras, notice, platforms, states.
"""
