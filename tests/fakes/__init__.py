"""Fakes for tfpreempt's own tests; those for users' tests are in `tfpreempt.testing`.

hostile  a server that is no metadata server: a captive portal, a bug, or an attacker
replies  replies that no correct server gives
storage  disks and an object store that fail where a test says
gcs/     a server of Google Cloud Storage on the loopback interface, with faults
summaries/  a folder for the path, with the part of tensorboard that TensorFlow needs
"""
