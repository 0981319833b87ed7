"""Checkpoints that earlier versions wrote: today's code goes on from each.

`kept/<number>-<day>-<kind>.tar.xz` is a checkpoint directory without its journal, as
`kept_program.py <kind> DIRECTORY 4` left it that day. Where a format gains something,
one of that day is added; none is ever taken away. All of these are of days before the
first release; only the state of a fit had another form in the first two.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import kept_program
from tfpreempt import errors

pytestmark = pytest.mark.tensorflow

KEPT = sorted((Path(__file__).parent / "kept").glob("*.tar.xz"))
KINDS = ("loop", "manager", "fit")
REFUSED = ("01-2026-11-21-fit", "02-2026-11-22-fit")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each kind of program yields from the beginning, told by nobody."""
    return {kind: result(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def result(kind: str, directory: Path) -> Any:
    from tfpreempt.handler import session

    with session.new_process():
        return kept_program.run(kind, str(directory))


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.split(".")[0])
def test_a_checkpoint_of_an_earlier_day_is_gone_on_from(
    archive: Path, tmp_path: Path, undisturbed: dict[str, Any], caplog: Any
) -> None:
    name = archive.name.split(".")[0]
    kind = name.rpartition("-")[2]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    if name in REFUSED:
        with pytest.raises(errors.CheckpointMismatchError, match="begin anew"):
            result(kind, tmp_path)
        return
    assert result(kind, tmp_path) == undisturbed[kind]
    assert "goes on at step" in caplog.text


def test_one_of_each_kind_is_kept_of_each_version() -> None:
    versions = {path.name[:2] for path in KEPT}
    assert len(versions) >= 5
    assert len(KEPT) == len(versions) * len(KINDS)
