"""Fakes for tfpreempt's own tests; fakes for users are in `tfpreempt.testing`.

clock  a clock that a test advances by hand
hostile  a wrong metadata server: a captive portal, a bug, or an attacker
key_value_store  a key-value store with faults at chosen operations
process  a new process, as far as handlers and fits see
replies  replies that no correct server sends
storage  disks and an object store with faults at chosen operations
gcs/     a server of Google Cloud Storage on the loopback interface, with faults
summaries/  a folder for the path, with the part of tensorboard that TensorFlow needs
"""
