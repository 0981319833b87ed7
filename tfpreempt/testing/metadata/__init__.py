"""Fakes of the clouds' metadata servers, on the loopback interface.

    with FakeGce() as fake:
        monkeypatch.setenv(...)  # each of fake.environment()
        fake.preempt()

The fakes are HTTP servers, and refuse the requests that the real servers refuse. So any
client can be tested with them, in this process or in another process.

_aws    a fake of the instance metadata service of Amazon EC2, version 2
_azure  a fake of Azure's instance metadata service, with Scheduled Events
_gce    a fake of the metadata server of Google Compute Engine

Imported by cli.
"""

from __future__ import annotations

from tfpreempt.testing._server import Reply, Request
from tfpreempt.testing.metadata._aws import FakeAws
from tfpreempt.testing.metadata._azure import FakeAzure
from tfpreempt.testing.metadata._gce import FakeGce

__all__ = ["FakeAws", "FakeAzure", "FakeGce", "Reply", "Request"]
