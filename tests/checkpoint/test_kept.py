"""Checkpoints of earlier versions: today's code resumes from each of them.

`kept/<number>-<day>-<kind>.tar.xz` is a checkpoint directory without its journal,
written by `kept_program.py <kind> DIRECTORY 4` on that day; for `mirror` only the
mirror, as after the loss of the disk. When a format changes, a new checkpoint is added
(`python -m tests.checkpoint.test_kept NUMBER-DAY`), and no checkpoint is removed. All
checkpoints are older than the first release; only the state of a fit had another form
in the first two.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import kept_program
from tests.multiprocess.harness import RESTART, Cluster, Place, Zygote, place
from tfpreempt import errors

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]

PROGRAM = kept_program.__file__
KEPT = sorted((Path(__file__).parent / "kept").glob("*.tar.xz"))
KINDS = ("loop", "manager", "fit")
APART = ("mirror", "states", "workers")
"""Kinds that need separate processes; kept since number 06."""
REFUSED = ("01-2026-11-21-fit", "02-2026-11-22-fit")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of each kind of program without a notice."""
    return {kind: result(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def result(kind: str, directory: Path) -> Any:
    import tensorflow as tf

    from tests.fakes.process import new_process

    tf.random.set_seed(None)  # as in a new process
    with new_process():
        return kept_program.run(kind, str(directory))


def ended(here: Place, kind: str, directory: Path, last: int = 0) -> Cluster:
    """Waits for the processes of a kind; checks their exit codes."""
    world = 2 if kind == "workers" else 1
    cluster = here.start(PROGRAM, kind, directory, last, world=world)
    code = RESTART if last and kind != "states" else 0
    cluster.expect(*[code] * world, limit=200)
    return cluster


def name_of(archive: Path) -> str:
    return archive.name.split(".")[0]


def kind_of(archive: Path) -> str:
    return name_of(archive).rpartition("-")[2]


def unpack(archive: Path, directory: Path) -> Path:
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory


def check_equal(found: Any, expected: Any) -> None:
    """Compares results except for the last bits, which depend on the processor."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            check_equal(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def kept(*kinds: str) -> Any:
    found = [path for path in KEPT if kind_of(path) in kinds]
    return pytest.mark.parametrize("archive", found, ids=name_of)


@kept(*KINDS)
def test_a_checkpoint_of_an_earlier_day_is_restored(
    archive: Path, tmp_path: Path, undisturbed: dict[str, Any], caplog: Any
) -> None:
    kind = kind_of(archive)
    unpack(archive, tmp_path)
    if name_of(archive) in REFUSED:
        with pytest.raises(errors.CheckpointMismatchError, match="start from scratch"):
            result(kind, tmp_path)
        return
    check_equal(result(kind, tmp_path), undisturbed[kind])
    assert "resumed at step" in caplog.text


@pytest.mark.timeout(600)
@kept(*APART)
def test_so_is_one_of_two_workers_of_states_alone_and_of_a_mirror(
    archive: Path, here: Place, tmp_path: Path
) -> None:
    kind = kind_of(archive)
    new, old = tmp_path / "new", unpack(archive, tmp_path / "old")
    new.mkdir()
    again = ended(here, kind, old)
    assert all("resumed at step 4" in each.output for each in again), again.story()
    undisturbed = ended(here, kind, new)
    for found, expected in zip(again.results(), undisturbed.results(), strict=True):
        check_equal(found, expected)


def test_one_of_each_kind_is_kept_of_each_version() -> None:
    versions = sorted({path.name[:2] for path in KEPT})
    assert len(versions) >= 6
    for version in versions:
        kinds = {kind_of(path) for path in KEPT if path.name.startswith(version)}
        assert kinds == {*KINDS, *(APART if version >= "06" else ())}


def leave(here: Place, kind: str, directory: Path) -> Path:
    """Runs today's program to step 4, as for the kept checkpoints."""
    directory.mkdir()
    ended(here, kind, directory, 4)
    return directory


def layout(directory: Path) -> set[str]:
    """Returns the files without the journal, and the keys of each manifest.

    The step of the commit depends on the delay of the signal.
    """
    found = set()
    for path in files(directory):
        name = re.sub(r"-[0-9a-f]{8}(?=/)", "-<checksum>", str(path))
        name = re.sub(r"(?<![\w.])\d+(?=[./])|(?<=ckpt-)\d+", "<step>", name)
        found.add(name)
        if path.name == "MANIFEST.json":
            manifest = json.loads((directory / path).read_text("utf-8"))
            found |= {f"{name}: {key}" for key in keys(manifest)}
    return found


def files(directory: Path) -> list[Path]:
    """Returns the files of a directory that are kept."""
    left_out = {"journal", "journals", "local", ".tfpreempt-lease"}
    paths = (path.relative_to(directory) for path in sorted(directory.rglob("*")))
    return [
        path
        for path in paths
        if (directory / path).is_file() and not left_out.intersection(path.parts)
    ]


def keys(value: object) -> set[str]:
    """Returns all keys, including those of parts."""
    if isinstance(value, dict):
        inner = {f"{k}.{each}" for k, part in value.items() for each in keys(part)}
        return {*value, *inner}
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [*KINDS, *APART])
def test_files_written_today_have_the_form_of_the_newest_kept_files(
    kind: str, here: Place, tmp_path: Path
) -> None:
    newest = [path for path in KEPT if kind_of(path) == kind][-1]
    before = layout(unpack(newest, tmp_path / "before"))
    again = "keep one of today too: python -m tests.checkpoint.test_kept NUMBER-DAY"
    assert layout(leave(here, kind, tmp_path / "now")) == before, again


def main() -> None:
    """Stores a checkpoint of each kind."""
    zygote = Zygote()
    for kind in (*KINDS, *APART):
        with place(zygote) as here:
            directory = leave(here, kind, here.path / "left")
            archive = Path(__file__).with_name("kept") / f"{sys.argv[1]}-{kind}.tar.xz"
            with tarfile.open(archive, "w:xz") as packed:
                for path in files(directory):
                    packed.add(directory / path, str(path))
    zygote.close()


if __name__ == "__main__":
    main()
