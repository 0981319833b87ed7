"""Conclusions of `tfpreempt doctor` from its findings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tfpreempt
from tfpreempt.cli.doctor.sources import SourceHealth, SourceState
from tfpreempt.cli.doctor.storage_check import Storage
from tfpreempt.cli.doctor.verdict import DoctorFinding, DoctorFindings, Level, assess
from tfpreempt.cli.sizes import size_text
from tfpreempt.core.deadline import needed_seconds
from tfpreempt.platforms.detect import VARIANTS, Platform


def facts(
    *graces: float | None,
    name: str = "gce-spot",
    filesystem: str = "ext4",
    seconds: float | None = 1.0,
) -> DoctorFindings:
    sources = [
        SourceState(name=f"s{i}", grace_seconds=grace, state=SourceHealth.WORKING)
        for i, grace in enumerate(graces)
    ]
    storage = Storage(
        path=Path("/ckpt"),
        filesystem=filesystem,
        free_bytes=10**9,
        save_bytes=2**20,
        save_seconds=seconds,
        fault="" if seconds is not None else "the disk is gone",
    )
    platform = Platform(name=name, config_class=VARIANTS[name], evidence=("tested",))
    return DoctorFindings(platform=platform, sources=tuple(sources), storage=storage)


def findings(about: str, seen: DoctorFindings) -> list[DoctorFinding]:
    return [each for each in assess(seen) if each.about == about]


@pytest.mark.parametrize(
    ("seconds", "grace", "level"),
    [
        (1.0, 30.0, Level.OK),
        (18.6, 30.0, Level.OK),  # 1.5 * 18.6 + 2 = 29.9
        (18.7, 30.0, Level.PROBLEM),
        (1.0, 2.0, Level.OK),
        (1.1, 2.0, Level.PROBLEM),
        (18.6, None, Level.OK),
        (18.7, None, Level.ADVICE),  # unknown, so no loss is reported
        (None, 30.0, Level.PROBLEM),
    ],
)
def test_a_save_has_to_fit_the_shortest_notice(
    seconds: float | None, grace: float | None, level: Level
) -> None:
    (finding,) = findings(
        "save",
        facts(3600.0, grace, seconds=seconds)
        if grace is not None
        else facts(None, seconds=seconds),
    )
    assert finding.level is level


@pytest.mark.parametrize(
    ("graces", "level"),
    [((30.0, 600.0), Level.PROBLEM), ((60.0,), Level.OK), ((None,), Level.OK)],
)
def test_a_step_has_to_fit_the_shortest_notice(
    graces: tuple[float | None, ...], level: Level
) -> None:
    seen = dataclasses.replace(facts(*graces), step_seconds=45.0)
    (finding,) = findings("steps", seen)
    assert finding.level is level
    assert "a step of the run in the directory takes 45.00 s" in finding.text


@pytest.mark.parametrize(
    ("step", "save", "says"),
    [
        (11.9, 10.0, ""),  # 11.9 + 1.5 * 10 + 2 = 28.9
        (12.1, 10.0, "a save needs 17.0 s"),
        (28.9, 0.1, "the process may be killed during the save"),
        (
            29.1,
            0.1,
            "the process would be killed during a step",
        ),  # it leaves 1 s before
        (27.1, None, "a save needs 2.0 s"),
    ],
)
def test_the_save_must_fit_after_a_step(
    step: float, save: float | None, says: str
) -> None:
    seen = dataclasses.replace(facts(30.0, seconds=save), step_seconds=step)
    (finding,) = findings("steps", seen)
    assert finding.level is (Level.PROBLEM if says else Level.OK)
    assert says in finding.text


def test_there_is_no_finding_about_steps_without_a_step() -> None:
    assert findings("steps", facts(30.0)) == []


def test_margins_of_a_save() -> None:
    assert needed_seconds(10.0, 30.0) == 17.0
    assert needed_seconds(1.0, 4.0) == 2.5


@pytest.mark.parametrize("filesystem", ["tmpfs", "overlay", "ramfs"])
@pytest.mark.parametrize("name", ["gce-spot", "generic"])
def test_storage_that_is_lost_with_the_machine(filesystem: str, name: str) -> None:
    (finding,) = findings("directory", facts(30.0, name=name, filesystem=filesystem))
    assert finding.level is Level.PROBLEM
    assert findings("directory", facts(30.0, name=name)) == []


@pytest.mark.parametrize(
    ("mount", "missing", "level"),
    [
        ("/", "/nonexist", Level.ADVICE),
        ("/", "/mnt/a", Level.OK),
        ("/data", "/data/a", Level.OK),
    ],
)
def test_a_mistyped_mount_point_is_reported(
    mount: str, missing: str, level: Level
) -> None:
    seen = facts(30.0)
    assert seen.storage is not None
    storage = dataclasses.replace(
        seen.storage, mount=Path(mount), missing=Path(missing)
    )
    (finding,) = findings("directory", dataclasses.replace(seen, storage=storage))
    assert finding.level is level
    assert f"it would be created on {mount} (ext4)" in finding.text
    assert (f"because {missing} does not exist" in finding.text) is (
        level is Level.ADVICE
    )


def test_sources_of_one_name_are_distinguished_by_their_grace_period() -> None:
    pair = tuple(
        SourceState(name="azure:x", grace_seconds=grace, state=SourceHealth.WORKING)
        for grace in (30.0, 300.0)
    )
    texts = [
        each.text
        for each in findings("azure:x", dataclasses.replace(facts(), sources=pair))
    ]
    assert "grace period of 30 s" in texts[0]
    assert "grace period of 300 s" in texts[1]


@pytest.mark.parametrize("cloud", ["gce", "aws", "azure"])
@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_a_scheduler_on_a_cloud_s_machine_gets_the_cloud_s_source_to_add(
    name: str, cloud: str
) -> None:
    seen = dataclasses.replace(
        facts(30.0),
        platform=dataclasses.replace(facts(name=name).platform, cloud=cloud),
    )
    (finding,) = findings(f"cloud {cloud}", seen)
    assert finding.level is Level.ADVICE
    names: dict[str, Any] = {"tfpreempt": tfpreempt}
    exec(finding.code, names)
    added = names["config"]._notice_sources()
    assert type(names["config"]) is VARIANTS[name]
    assert added[-1].source.name.startswith(f"{cloud}:")
    watched = SourceState(
        name=added[-1].source.name, grace_seconds=30.0, state=SourceHealth.WORKING
    )
    assert not findings(f"cloud {cloud}", dataclasses.replace(seen, sources=(watched,)))


@pytest.mark.parametrize("name", ["vertex-ai", "sagemaker"])
def test_a_managed_service_needs_no_source_of_a_cloud(name: str) -> None:
    seen = facts(30.0)
    platform = dataclasses.replace(facts(name=name).platform, cloud="gce")
    assert not findings("cloud gce", dataclasses.replace(seen, platform=platform))


def test_an_unknown_grace_period_has_advice() -> None:
    (finding,) = findings("grace period", facts(None, name="kubernetes"))
    assert finding.level is Level.ADVICE
    assert "TFPREEMPT_GRACE_PERIOD" in finding.text
    (finding,) = findings("grace period", facts(None))
    assert "grace_period=" in finding.text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**30, "1 GiB"),
        (2**41, "2 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("versions", "environment", "about", "level", "part"),
    [
        ({"jax": "0.10.2"}, {}, "jax", Level.OK, "0.10.2; a SIGTERM between jax.dis"),
        (
            {"jax": "0.10.2"},
            {"JAX_ENABLE_PREEMPTION_SERVICE": "False"},
            "jax",
            Level.OK,
            "version 0.10.2; JAX_ENABLE_PREEMPTION_SERVICE is False; a SIGTERM",
        ),
        (
            {"jax": "0.5.3"},
            {},
            "jax",
            Level.ADVICE,
            "0.5.3 is not yet tested; tested: ",
        ),
        (
            {"keras": "3.15.1"},
            {"KERAS_BACKEND": "jax"},
            "keras",
            Level.OK,
            "version 3.15.1; KERAS_BACKEND is jax",
        ),
    ],
)
def test_frameworks_are_named_with_the_settings_that_matter(
    versions: dict[str, str],
    environment: dict[str, str],
    about: str,
    level: Level,
    part: str,
) -> None:
    seen = dataclasses.replace(facts(), versions=versions, environment=environment)
    (finding,) = findings(about, seen)
    assert finding.level is level
    assert part in finding.text
