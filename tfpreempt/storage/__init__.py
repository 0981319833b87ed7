"""Files and object stores, without knowledge of commits.

A local directory:
    files               changes a directory: fsync, rename, remove
    file_reading        reads a directory
    paths               recognizes URLs, and names that are safe as paths

Object stores:
    object_store        operations of a store
    open_store          opens the store at a path or URI
    local               a directory of the local file system
    bucket_store        common parts of gs:// and s3://
    gcs                 gs://, by its JSON API
    gcs_client          requests, retries, credentials and errors of gs://
    gcs_transfer        uploads and downloads of gs://, a large file in one request
    s3                  s3://, by obstore
    prefixed            a part of another store
    fsspec_store        files in a file system of fsspec, or of pyarrow by fsspec

Shared by both:
    checksum            crc32c
    request_deadline    time limit of a call, whatever the number of its requests
    os_errors           meaning of the system's errors, with advice
    chunks              reads and writes a file in pieces

Imported by checkpoint, cli, handler, keras, notice, platforms, states.
"""
