"""Where bytes lie; it knows of no commits.

A directory, by its path:
    files               changes it: fsync, rename, remove
    reading             reads it
    gfile               TensorFlow's side of both, for URLs
    paths               what is a URL, and which names become paths

Object stores:
    interface           what a store can do
    opening             finds the store that a place names
    local               a directory of the local file system
    gcs                 gs://, by google-cloud-storage
    gcs_connection      its client, one for each bucket
    gcs_failure         its errors, as ours
    gcs_session         a resumable upload
    gcs_transfer        single requests, with deadlines
    s3                  s3://, by obstore
    s3_client           its client and options
    s3_failure          its errors, as ours
    filesystem          a file system of fsspec, or of pyarrow by fsspec
    url                 reads what TensorFlow's file system reads
    prefixed            a part of another store

What they share:
    checksum            crc32c
    crew                a few threads that do many tasks
    failure             what an error of the system means, and what to do
    limits              how long a request may take
    pieces              a file in parts
    private_random      randomness that draws from no generator of the program
"""
