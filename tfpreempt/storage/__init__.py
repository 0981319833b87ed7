"""Files and object stores, without knowledge of commits.

A local directory:
    files               changes a directory: fsync, rename, remove
    file_reading        reads a directory
    paths               recognizes URLs, and names that are safe as paths

Object stores:
    object_store        ObjectStore: the operations of every store
    open_store          opens the store at a path or URI
    local               store in a directory of the local file system
    bucket_store        base class of the stores for gs://, s3:// and az://
    gcs                 store for gs://, through the JSON API of Google Cloud Storage
    gcs_client          requests, retries, credentials and errors of gs://
    gcs_transfer        uploads and downloads of gs://, in bounded memory
    obstore_store       base class of the stores for s3:// and az://, by obstore
    s3                  store for s3://
    azure               store for az://
    fsspec_store        store in a file system object of fsspec or pyarrow

For files and stores:
    checksum            computes and combines crc32c checksums
    request_deadline    timeout of a call to a store, for all requests of the call
    os_errors           translates errors of the operating system into advice
    chunks              reads and writes a file in pieces

Imported by checkpoint, cli, handler, jax, keras, notice, platforms, states.
"""
