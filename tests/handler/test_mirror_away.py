"""Log lines of a handler whose object store is unreachable at the start or the end."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.storage import FaultyObjectStore
from tests.handler.program import Program
from tests.handler.test_mirror import LIMIT, steps, train
from tfpreempt import errors
from tfpreempt.checkpoint.mirror import mirror, mirror_status
from tfpreempt.storage.local import LocalStore

pytestmark = pytest.mark.tensorflow


class Silent(FaultyObjectStore):
    """A store whose listing does not answer within the given time."""

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


def test_a_silent_store_is_logged_before_the_wait(
    program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Silent(errors.CheckpointError("connection refused"), needs=0.0)
    train(program, store, 2)
    store.asked, store.needs = [], 9.0
    program.handler(mirror_dir=store).close()
    assert store.asked[:2] == [2.0, 8.0]  # a local commit is not kept waiting
    text = caplog.text
    assert text.count("does not respond") == 1
    assert text.index("retrying for up to 8 s") < text.index("cannot check")
    store.asked = []
    with Program(tmp_path / "other").handler(mirror_dir=store) as handler:
        assert handler.total_run_calls == 2
    assert store.asked[:2] == [2.0, None]


def test_a_permanent_error_is_not_retried(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    store = Silent(errors.CheckpointError("no such bucket"), needs=0.0)
    train(program, store, 2)
    store.error.is_permanent = True
    store.asked, store.needs = [], 9.0
    handler = program.handler(mirror_dir=store)
    assert store.asked[0] == 2.0
    assert "does not respond" not in caplog.text
    assert "no such bucket" in caplog.text
    handler.close()


def test_the_end_does_not_wait_long_after_a_permanent_error(
    program: Program,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_status, "REFUSED", 0.2)
    monkeypatch.setattr(mirror, "SILENT", 0.0)
    store = FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")
    error = errors.SaveError("no such bucket.")
    error.is_permanent = True
    handler = program.handler(mirror_dir=store)
    store.fail_from(0, error)
    handler.run(program.step)
    handler.close()  # not for as long as a store may be away
    assert f"waiting for the upload of step 1 to {store.uri} (" in caplog.text
    (said,) = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert f"the upload of step 1 to {store.uri} was not complete in time" in said
    assert "SaveError: no such bucket)" in said
    assert said.endswith("resumes from an older commit.")
    assert f"The commit is intact in {program.directory}" in said
    assert "no such bucket" in program.events("fault")[-1]["error"]
    store.revive()
    with program.handler(mirror_dir=store) as handler:
        assert handler.wait_for_mirror(LIMIT)
    assert steps(store) == [1]


def test_the_exit_logs_that_the_upload_is_complete(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")
    handler = program.handler(mirror_dir=store, config={"exit_fn": None})
    handler.run(program.step)
    program.button.press()
    with pytest.raises(SystemExit):
        handler.run(program.step)
    (said,) = [r.message for r in caplog.records if "complete" in r.message]
    assert said == f"the upload of step 1 to {store.uri} is complete"
    handler._run.close()


@pytest.mark.parametrize("beside", ["", "inside", "..", "link"])
def test_a_mirror_that_shares_files_with_the_directory(
    program: Program, tmp_path: Path, beside: str
) -> None:
    program.directory.mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(program.directory)
    place = tmp_path / "link" if beside == "link" else program.directory / beside
    for given in (f"file://{place}", str(place), LocalStore(str(place))):
        with pytest.raises(errors.ConfigurationError, match="contains the other"):
            program.handler(mirror_dir=given)
