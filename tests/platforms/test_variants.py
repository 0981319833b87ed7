"""The promises of every variant of TerminationConfig."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.platforms.configs import left_with, watched
from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms.aws import AwsSpotTerminationConfig
from tfpreempt.platforms.azure import AzureTerminationConfig
from tfpreempt.platforms.borg import BorgTpuTerminationConfig
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.platforms.gce import (
    GceCpuTerminationConfig,
    GceGpuTerminationConfig,
    GceSpotTerminationConfig,
    GceTpuTerminationConfig,
)
from tfpreempt.platforms.kubernetes import KubernetesTerminationConfig
from tfpreempt.platforms.slurm import SlurmTerminationConfig
from tfpreempt.testing.notice import ScriptedSource

VARIANTS: list[type[TerminationConfig]] = [
    GceCpuTerminationConfig,
    GceGpuTerminationConfig,
    GceSpotTerminationConfig,
    GceTpuTerminationConfig,
    AwsSpotTerminationConfig,
    AzureTerminationConfig,
    BorgTpuTerminationConfig,
    KubernetesTerminationConfig,
    SlurmTerminationConfig,
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_sigterm_is_always_watched(variant: type[TerminationConfig]) -> None:
    assert "signal:SIGTERM" in watched(variant())


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_take_the_arguments_of_the_base(
    variant: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stop = tmp_path_factory.mktemp("notice") / "stop"

    def noticed() -> bool:
        return False

    calls: list[int] = []
    leave, save = functools.partial(calls.append, 1), functools.partial(print, "")
    config: TerminationConfig = variant(
        termination_watcher_fn=noticed,
        exit_fn=leave,
        grace_period=7,
        save_fn=save,
        signals=("SIGTERM", "SIGUSR2"),
        notice_file=stop,
        sources=[functools.partial(ScriptedSource, "own")],
        uncommitted_exit_code=75,
        mirror_incomplete_exit_code=76,
    )
    found = watched(config)
    names = {"signal:SIGTERM", "signal:SIGUSR2", f"file:{stop}", "own"}
    assert names <= found.keys()
    assert {found[name] for name in names} == {7.0}
    assert any(name.startswith("callable:") for name in found)
    assert config.save_fn is save
    config._exit(True)
    assert calls == [1]
    assert left_with(config, committed=False) == 75
    assert left_with(config, mirrored=False) == config._exit_code_for(True, False) == 76


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_check_their_grace(variant: Any) -> None:
    with pytest.raises(ConfigurationError, match="grace_period is -1"):
        variant(grace_period=-1)
    with pytest.raises(TypeError):
        variant(grace=1)


def test_repr_shows_each_source_with_its_grace_period() -> None:
    assert repr(GceSpotTerminationConfig(grace_period=120)) == (
        "GceSpotTerminationConfig("
        "signal:SIGTERM 30 s, gce:preempted 120 s; exit code 143)"
    )
    assert "signal:SIGUSR1 120 s" in repr(
        SlurmTerminationConfig(early_signal="USR1", early_grace_period=120)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_repr_leaves_the_config_as_it_was(variant: type[TerminationConfig]) -> None:
    config = variant()
    config._notice_sources()
    before = dict(vars(config))
    shown = repr(config)
    assert vars(config) == before
    assert "signal:SIGTERM " in shown
    assert f"exit code {config.exit_code}" in shown


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_call_makes_new_sources(variant: type[TerminationConfig]) -> None:
    config = variant()
    first, second = config._notice_sources(), config._notice_sources()
    assert not {id(each.source) for each in first} & {
        id(each.source) for each in second
    }
