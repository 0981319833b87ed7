"""A handler whose object store is away, at the start and at the end: what is said."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.handler.program import Program
from tests.handler.test_mirror import train
from tfpreempt import errors
from tfpreempt.testing.storage import FaultyStore

pytestmark = pytest.mark.tensorflow


class Silent(FaultyStore):
    """A store that cannot be listed, at least within the time that it is given."""

    def __init__(self, error: errors.CheckpointError, needs: float) -> None:
        super().__init__(uri=f"memory://{uuid.uuid4()}")
        self.error = error
        self.needs = needs
        self.asked: list[float | None] = []

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        self.asked.append(timeout)
        if timeout is not None and timeout < self.needs:
            raise self.error
        return super().folders()


def test_a_store_that_does_not_answer_is_said_before_it_is_waited_for(
    program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Silent(errors.CheckpointError("connection refused"), needs=0.0)
    train(program, store, 2)
    store.asked, store.needs = [], 9.0
    program.handler(remote_checkpoint_dir=store).close()
    assert store.asked[:2] == [2.0, 8.0]  # a local commit is not kept waiting
    text = caplog.text
    assert text.count("does not answer") == 1
    assert text.index("asked again for up to 8 s") < text.index("cannot be asked")
    store.asked = []
    with Program(tmp_path / "other").handler(remote_checkpoint_dir=store) as handler:
        assert handler.total_run_calls == 2
    assert store.asked[:2] == [2.0, None]


def test_what_only_a_person_mends_is_not_asked_for_twice(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    store = Silent(errors.CheckpointError("no such bucket"), needs=0.0)
    train(program, store, 2)
    store.error.is_permanent = True
    store.asked, store.needs = [], 9.0
    handler = program.handler(remote_checkpoint_dir=store)
    assert store.asked[0] == 2.0
    assert "does not answer" not in caplog.text
    assert "no such bucket" in caplog.text
    handler.close()
