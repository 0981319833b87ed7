"""TerminationConfig: arguments, watched sources, and exits."""

from __future__ import annotations

import datetime
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.platforms import detect
from tfpreempt.platforms.config import (
    NOTICE_FILE_VARIABLE,
    BorgTerminationConfig,
    GenericTerminationConfig,
    TerminationConfig,
)
from tfpreempt.testing.notice import ScriptedSource

VARIANTS = [TerminationConfig, GenericTerminationConfig, BorgTerminationConfig]


@pytest.fixture(autouse=True)
def _no_notice_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFPREEMPT_NOTICE_FILE", raising=False)


def noticed() -> bool:
    return False


def names(config: TerminationConfig) -> list[str]:
    return [watched.source.name for watched in config._notice_sources()]


def left_with(config: TerminationConfig, committed: bool) -> object:
    with pytest.raises(SystemExit) as caught:
        config._exit(committed)
    return caught.value.code


# --- what is watched -----------------------------------------------------------------


def test_sigterm_by_default() -> None:
    assert names(TerminationConfig()) == ["signal:SIGTERM"]


def test_sigterm_beside_a_watcher_fn() -> None:
    assert names(TerminationConfig(noticed)) == ["signal:SIGTERM", "callable:noticed"]


def test_an_empty_tuple_watches_no_signals() -> None:
    assert names(TerminationConfig(noticed, signals=())) == ["callable:noticed"]


def test_signals_by_name_and_number() -> None:
    config = TerminationConfig(signals=("USR1", "SIGINT", 15))
    assert names(config) == ["signal:SIGUSR1", "signal:SIGINT", "signal:SIGTERM"]
    assert names(TerminationConfig(signals="USR2")) == ["signal:SIGUSR2"]


def test_an_unknown_signal_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="'SIGNOPE'"):
        TerminationConfig(signals=("SIGTERM", "SIGNOPE"))


def test_a_notice_file(tmp_path: Path) -> None:
    config = TerminationConfig(notice_file=tmp_path / "stop")
    assert names(config) == ["signal:SIGTERM", f"file:{tmp_path}/stop"]


def test_the_notice_file_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFPREEMPT_NOTICE_FILE", f"{tmp_path}/env")
    assert names(TerminationConfig())[-1] == f"file:{tmp_path}/env"
    given = TerminationConfig(notice_file=tmp_path / "given")
    assert names(given)[1:] == [f"file:{tmp_path}/given"]
    monkeypatch.setenv("TFPREEMPT_NOTICE_FILE", "")
    assert names(TerminationConfig()) == ["signal:SIGTERM"]


def test_a_bad_notice_file_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="expected the path of a file"):
        TerminationConfig(notice_file="")


def test_own_sources_have_their_own_grace_or_that_of_the_config() -> None:
    def plain() -> ScriptedSource:
        return ScriptedSource("plain")

    def timed() -> NoticeSourceConfig:
        return NoticeSourceConfig(ScriptedSource("timed"), 5.0)

    config = TerminationConfig(grace_period=60, sources=[plain, timed])
    assert [
        (watched.source.name, watched.grace_seconds)
        for watched in config._notice_sources()
    ] == [("signal:SIGTERM", 60.0), ("plain", 60.0), ("timed", 5.0)]


def test_each_call_makes_new_sources(tmp_path: Path) -> None:
    config = TerminationConfig(
        noticed, notice_file=tmp_path / "stop", sources=[ScriptedSource]
    )
    first, second = config._notice_sources(), config._notice_sources()
    assert len(first) == 4
    assert not {id(each.source) for each in first} & {
        id(each.source) for each in second
    }


# --- grace ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, None),
        (0.0, None),
        (30, 30.0),
        (0.5, 0.5),
        (np.float32(7), 7.0),
        (np.int64(7), 7.0),
        (datetime.timedelta(minutes=2), 120.0),
        (datetime.timedelta(0), None),
    ],
)
def test_a_grace_is_seconds_or_none(given: Any, seconds: float | None) -> None:
    config = TerminationConfig(grace_period=given)
    assert config.grace_seconds == seconds
    assert config._notice_sources()[0].grace_seconds == seconds


@pytest.mark.parametrize(
    "given",
    [
        *(-1, -0.001, math.nan, math.inf, -math.inf, True, False, "30", [30]),
        *(datetime.timedelta(seconds=-1), np.float64("nan")),
    ],
)
def test_a_grace_that_cannot_be_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TerminationConfig(grace_period=given)
    message = str(caught.value)
    assert "grace_period" in message
    assert "expected" in message


# --- the way out ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "code"), list(zip(VARIANTS, [143, 143, 42], strict=True))
)
def test_every_variant_has_one_restart_code(
    variant: type[TerminationConfig], code: int
) -> None:
    assert variant.exit_code == code
    assert [left_with(variant(), committed) for committed in (True, False)] == [
        code
    ] * 2
    assert variant()._exit_code_for(True) == variant()._exit_code_for(False) == code


def test_another_exit_code_without_a_commit() -> None:
    config = TerminationConfig(uncommitted_exit_code=75)
    assert (left_with(config, True), left_with(config, False)) == (143, 75)
    assert (config._exit_code_for(True), config._exit_code_for(False)) == (143, 75)


def test_an_exit_fn_is_called_whatever_was_committed() -> None:
    calls: list[int] = []
    config = TerminationConfig(exit_fn=functools.partial(calls.append, 1))
    config._exit(True)
    config._exit(False)
    assert calls == [1, 1]
    assert config._exit_code_for(True) is None


def test_an_exit_fn_gives_way_to_the_uncommitted_code() -> None:
    calls: list[int] = []
    config = TerminationConfig(
        exit_fn=functools.partial(calls.append, 1), uncommitted_exit_code=75
    )
    assert left_with(config, False) == 75
    assert calls == []


@pytest.mark.parametrize("code", [0, 256, -1, True, "75", 1.0])
def test_exit_codes_that_cannot_be_are_refused(code: Any) -> None:
    with pytest.raises(ConfigurationError, match="uncommitted_exit_code"):
        TerminationConfig(uncommitted_exit_code=code)


@pytest.mark.parametrize("name", ["termination_watcher_fn", "exit_fn", "save_fn"])
@pytest.mark.parametrize("value", [143, "sys.exit", False])
def test_what_cannot_be_called_is_refused(name: str, value: object) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=name):
        TerminationConfig(**arguments)


# --- the object ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["exit_fn", "grace_period", "save_fn", "termination_watcher_fn"]
)
def test_nothing_can_be_set_afterwards(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(TerminationConfig(), name, None)


def test_a_subclass_may_change_its_attributes() -> None:
    class Counting(TerminationConfig):
        asked = 0

        def _notice_sources(self) -> tuple[NoticeSourceConfig, ...]:
            self.asked += 1
            return super()._notice_sources()

    config = Counting()
    for _ in range(2):
        config._notice_sources()
    assert config.asked == 2


def test_positional_arguments_are_those_of_tensorflow() -> None:
    def leave() -> None: ...

    def save() -> None: ...

    config = TerminationConfig(noticed, leave, 7, save)
    assert config.termination_watcher_fn is noticed
    assert config.exit_fn is leave
    assert config.grace_period == 7.0
    assert config.save_fn is save


def test_repr_shows_the_settings() -> None:
    shown = repr(BorgTerminationConfig(grace_period=30, signals=("USR1",)))
    assert shown == "BorgTerminationConfig(signal:SIGUSR1 30 s; exit code 42)"


def test_repr_asks_nothing_of_the_user_s_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(NOTICE_FILE_VARIABLE, raising=False)

    def call() -> Any:
        pytest.fail("called")

    config = TerminationConfig(
        call, exit_fn=call, save_fn=call, sources=[call], uncommitted_exit_code=75
    )
    name = call.__qualname__
    shown = repr(config)
    assert shown.startswith(
        "TerminationConfig(signal:SIGTERM with an unknown grace period, "
    )
    assert shown.endswith(
        f", 1 of sources=; 75 if nothing was committed, exit_fn={name}, save_fn={name})"
    )


@pytest.mark.parametrize("name", detect.VARIANTS)
def test_a_config_has_no_public_methods(name: str) -> None:
    variant = detect.VARIANTS[name]
    public = [each for each in dir(variant) if not each.startswith("_")]
    assert not [each for each in public if callable(getattr(variant, each))]


def test_repr_never_raises() -> None:
    class Broken(TerminationConfig):
        def _notice_sources(self) -> Any:
            raise OSError("no such thing")

    assert repr(Broken()) == "Broken(cannot be shown: OSError: no such thing)"
    assert repr(object.__new__(TerminationConfig)).startswith("TerminationConfig(")


def test_an_uncommitted_exit_code_equal_to_the_restart_code_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="uncommitted_exit_code is 42; expec"):
        BorgTerminationConfig(uncommitted_exit_code=42)
    GenericTerminationConfig(uncommitted_exit_code=42)
    BorgTerminationConfig(exit_fn=lambda: None, uncommitted_exit_code=42)
