"""The config of a handler without one: the platform, detected beside training."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notice.rigs import wait_until
from tests.platforms.configs import left_with, watched
from tests.platforms.test_detect import AZURE_TAG, machine
from tests.replays import replaying
from tfpreempt.core.events import Notice
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms import detected
from tfpreempt.platforms.config import (
    BorgTerminationConfig,
    GenericTerminationConfig,
    TerminationConfig,
)
from tfpreempt.platforms.detected import resolve_config
from tfpreempt.platforms.slurm import SlurmTerminationConfig
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce

VARIANTS = [TerminationConfig, GenericTerminationConfig, BorgTerminationConfig]
SIGTERM = "signal:SIGTERM"
NO_SOURCE: dict[str, float | None] = {}
GCE = {"gce:preempted": 30.0, "gce:maintenance-event": 60.0}
GPU = {**GCE, "gce:maintenance-event": 3600.0}


class TensorFlowConfig:
    """Has the attributes of TensorFlow's TerminationConfig only."""

    def __init__(
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = grace_period
        self.save_fn = save_fn


def noticed() -> bool:
    return False


@pytest.fixture(autouse=True)
def _log_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    detected._log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tfpreempt.platforms")


def found_by(config: TerminationConfig) -> dict[str, float | None] | None:
    """Returns the sources that are detected later, with their grace periods."""
    find = config._source_finder()
    if find is None:
        return None
    return {each.source.name: each.grace_seconds for each in find()}


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGce]:
    """A metadata server of Compute Engine, which the process's variables name."""
    with FakeGce() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        fake.set("instance/machine-type", "projects/1/machineTypes/n2-standard-8")
        fake.set("instance/scheduling/preemptible", "FALSE")
        yield fake


# --- what is watched -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "files", "signal_grace", "later"),
    [
        # No file and no variable names a cloud: no server is asked.
        ({}, {"sys_vendor": "QEMU"}, None, None),
        ({"SLURM_JOB_ID": "1"}, {}, 30.0, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"sys_vendor": "QEMU"}, None, None),
        ({"NO_GCE_CHECK": "true"}, {"product_name": "Google"}, None, None),
        (
            {"AWS_EC2_METADATA_DISABLED": "true"},
            {"sys_vendor": "Amazon EC2"},
            None,
            None,
        ),
        ({"TFPREEMPT_PLATFORM": "generic"}, {"product_name": "Google"}, None, None),
        ({"TFPREEMPT_PLATFORM": "slurm"}, {"product_name": "Google"}, 30.0, None),
        # The cloud of a managed service does not notify its jobs.
        ({"SM_TRAINING_ENV": "{}"}, {"sys_vendor": "Amazon EC2"}, None, None),
        # Files name the cloud, whose SIGTERM may be that of a container engine.
        (
            {},
            {"sys_vendor": "Amazon EC2"},
            None,
            {"aws:spot-interruption": 115.0, "aws:lifecycle": None},
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "1", "TFPREEMPT_GRACE_PERIOD": "40"},
            {"chassis_asset_tag": AZURE_TAG},
            40.0,
            {
                "azure:Preempt": 30.0,
                "azure:Terminate": 300.0,
                "azure:Reboot": 300.0,
                "azure:Redeploy": 300.0,
            },
        ),
    ],
)
def test_variables_and_files_decide_without_a_request(
    variables: dict[str, str],
    files: dict[str, str],
    signal_grace: float | None,
    later: dict[str, float | None] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was opened: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = resolve_config(None, root=machine(tmp_path, **files))
    assert watched(config) == {SIGTERM: signal_grace}
    assert found_by(config) == later
    assert left_with(config) == 143


def test_the_metadata_server_reports_the_kind_of_machine(
    gce: FakeGce, tmp_path: Path
) -> None:
    root = machine(tmp_path, product_name="Google Compute Engine")
    config = resolve_config(None, root=root)
    assert watched(config) == {SIGTERM: None}
    assert gce.requests == []
    assert found_by(config) == GCE
    gce.set("instance/machine-type", "projects/1/machineTypes/a2-highgpu-1g")
    assert found_by(config) == GPU
    gce.set("instance/scheduling/preemptible", "TRUE")
    assert found_by(config) == {"gce:preempted": 30.0}


def test_a_scheduler_s_job_sees_the_notices_of_its_machine(
    gce: FakeGce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    config = resolve_config(None, root=tmp_path)
    assert watched(config) == {SIGTERM: 30.0}
    assert found_by(config) == GCE


@pytest.mark.parametrize(
    ("fake_class", "first"),
    [(FakeAws, "aws:spot-interruption"), (FakeAzure, "azure:Preempt")],
)
def test_a_machine_without_files_is_known_by_its_server(
    fake_class: Any, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_class() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        found = found_by(resolve_config(None, root=tmp_path))
        assert found is not None
        assert first in found


def test_a_server_that_does_not_answer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(detected, "LIMIT_SECONDS", 0.05)
        nothing = resolve_config(None, root=tmp_path)
        assert found_by(nothing) == NO_SOURCE
        root = machine(tmp_path, gpu=True, product_name="Google Compute Engine")
        assert found_by(resolve_config(None, root=root)) == GPU  # watched, and retried


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),  # nothing listens there
        ("https://metadata", "https://metadata"),
        ("metadata/computeMetadata", "metadata/computeMetadata"),
        ("http://me:secret@127.0.0.1", None),
    ],
)
def test_an_address_without_a_metadata_server_is_named(
    value: str,
    shown: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", value)
    assert found_by(resolve_config(None, root=tmp_path)) == NO_SOURCE
    [warning] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"GCE_METADATA_HOST={shown!r}" in warning.message or shown is None
    assert "secret" not in caplog.text


def test_notices_of_a_cloud_arrive_after_a_late_answer(
    gce: FakeGce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives meanwhile is a notice at once."""
    ask, answers = detected.find_cloud, threading.Event()

    def late(*arguments: Any) -> Any:
        answers.wait(10)
        return ask(*arguments)

    monkeypatch.setattr(detected, "find_cloud", late)
    heard: list[Notice] = []
    config = resolve_config(None, root=tmp_path)
    watcher = Watcher(
        config._notice_sources(), 0, heard.append, find_more=config._source_finder()
    )
    watcher.start()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert wait_until(lambda: len(heard) == 1)
        answers.set()
        gce.set("instance/preempted", "TRUE")
        assert wait_until(lambda: len(heard) == 2)
    finally:
        watcher.close()
    assert [(each.source, each.grace_seconds) for each in heard] == [
        (SIGTERM, None),
        ("gce:preempted", 30.0),
    ]


# --- one line ------------------------------------------------------------------------


def test_one_line_names_the_platform_and_one_more_a_cloud(
    gce: FakeGce, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # two fits of one program
        found_by(resolve_config(None, root=tmp_path))
    assert [each for each in caplog.messages if "platform" in each] == [
        "platform generic; no metadata server of a cloud has answered yet; until then "
        "notices come from signal:SIGTERM (grace period unknown)",
        f"platform gce-cpu ({gce.url} answers as GCE's metadata server); watches "
        "signal:SIGTERM (grace period unknown), gce:preempted (30 s), "
        "gce:maintenance-event (60 s)",
    ]


def test_the_line_comes_before_the_answer_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order of the first lines of a program does not depend on a server."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    config = resolve_config(None, root=tmp_path)
    [line] = caplog.messages
    assert line.startswith("platform generic; no metadata server")
    found_by(config)  # no cloud is found
    assert [each for each in caplog.messages if "platform" in each] == [line]


def test_the_line_of_a_machine_of_no_cloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_config(None, root=machine(tmp_path, sys_vendor="QEMU"))
    [line] = caplog.messages
    assert line == (
        "platform generic (the files in /sys/class/dmi/id name no cloud); watches "
        "signal:SIGTERM (grace period unknown)"
    )


# --- what is given -------------------------------------------------------------------


def test_a_config_of_tfpreempt_is_returned_unchanged(gce: FakeGce) -> None:
    for variant in VARIANTS:
        config = variant()
        assert resolve_config(config) is config
        assert config._source_finder() is None


def test_a_named_platform_is_that_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPREEMPT_PLATFORM", "borg")
    assert left_with(resolve_config(None)) == 42
    monkeypatch.setenv("TFPREEMPT_PLATFORM", "gcp")
    with pytest.raises(ConfigurationError, match="TFPREEMPT_PLATFORM is 'gcp'"):
        resolve_config(None)


def test_arguments_of_tensorflows_config_are_used(gce: FakeGce) -> None:
    def leave() -> None:
        raise SystemExit(42)

    theirs = TensorFlowConfig(noticed, leave, 45, lambda: None)
    config = resolve_config(theirs)
    assert config.termination_watcher_fn is noticed
    assert config.save_fn is theirs.save_fn
    assert left_with(config) == 42  # by their function, as there
    assert watched(config) == {SIGTERM: 45.0, "callable:noticed": 45.0}
    assert found_by(config) == {"gce:preempted": 30.0, "gce:maintenance-event": 45.0}
    at_once = resolve_config(TensorFlowConfig(grace_period=0))
    assert found_by(at_once) == dict.fromkeys(GCE)
    assert found_by(resolve_config(TensorFlowConfig())) == GCE


def test_arguments_of_tensorflows_config_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="grace_period"):
        resolve_config(TensorFlowConfig(grace_period=-1))


@pytest.mark.parametrize("value", [143, "generic", object(), noticed, *VARIANTS])
def test_the_rest_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="termination_config"):
        resolve_config(value)


def test_a_replay_only_exits(gce: FakeGce, tmp_path: Path) -> None:
    """Without a call of the user's function, of the scheduler or of the cloud."""

    def called(*_: object) -> Any:
        raise AssertionError("called in a replay")

    slurm = SlurmTerminationConfig(
        requeue="scontrol", environment={"SLURM_JOB_ID": "17"}, run_command=called
    )
    theirs = TensorFlowConfig(called, called, 45, called)
    given = [None, theirs, slurm, TerminationConfig(exit_fn=called, save_fn=called)]
    with replaying(tmp_path / "run", tmp_path / "copy"):
        found = [resolve_config(each) for each in given]
        with pytest.raises(ConfigurationError, match="termination_config"):
            resolve_config("generic")
    for config in found:
        assert left_with(config) == 143
        assert watched(config) == {SIGTERM: None}
        assert config._source_finder() is None
    # A program whose save_fn writes the checkpoints is refused in a replay.
    assert [each.save_fn for each in found] == [None, called, None, called]
