"""Schedulers that restart jobs: Borg-like systems, Kubernetes, Slurm."""

from __future__ import annotations

import functools
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.configs import left_with, watched
from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms.borg import BorgTpuTerminationConfig
from tfpreempt.platforms.kubernetes import KubernetesTerminationConfig
from tfpreempt.platforms.slurm import SlurmTerminationConfig

# --- Borg-like with TPUs -------------------------------------------------------------


def test_borg_tpu_leaves_after_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfpreempt.platforms.borg.POLL_SECONDS", 0.01)
    answers = iter([True, True, False])
    config = BorgTpuTerminationConfig(has_workers=lambda: next(answers))
    assert left_with(config) == 42
    assert list(answers) == []  # asked until the answer was no


def test_borg_tpu_assumes_that_unreachable_workers_have_ended() -> None:
    def has_workers() -> bool:
        raise ConnectionError("nobody answers")

    assert left_with(BorgTpuTerminationConfig(has_workers=has_workers)) == 42


def test_borg_tpu_waits_with_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    config = BorgTpuTerminationConfig(has_workers=lambda: True, wait_limit=0.05)
    began = time.monotonic()
    assert left_with(config) == 42
    assert time.monotonic() - began < 20.0
    assert "still run after" in caplog.text


def test_borg_tpu_survives_a_question_that_hangs() -> None:
    end = threading.Event()
    config = BorgTpuTerminationConfig(has_workers=end.wait, wait_limit=0.05)
    assert left_with(config) == 42
    end.set()


def test_borg_tpu_does_not_wait_without_has_workers() -> None:
    assert left_with(BorgTpuTerminationConfig()) == 42


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"has_workers": True}, "has_workers"),
        ({"wait_limit": 0}, "wait_limit"),
        ({"wait_limit": "60"}, "wait_limit"),
    ],
)
def test_borg_tpu_refuses_invalid_arguments(arguments: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        BorgTpuTerminationConfig(**arguments)


# --- Kubernetes ----------------------------------------------------------------------


def test_kubernetes_has_the_given_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watched(KubernetesTerminationConfig()) == {"signal:SIGTERM": None}
    monkeypatch.setenv("TFPREEMPT_GRACE_PERIOD", " 25 ")
    assert KubernetesTerminationConfig().grace_seconds == 25.0
    assert KubernetesTerminationConfig(grace_period=60).grace_seconds == 60.0
    monkeypatch.setenv("TFPREEMPT_GRACE_PERIOD", "")
    assert KubernetesTerminationConfig().grace_seconds is None


@pytest.mark.parametrize("text", ["30s", "-1", "nan"])
def test_kubernetes_names_a_variable_that_cannot_be(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFPREEMPT_GRACE_PERIOD", text)
    with pytest.raises(ConfigurationError, match="TFPREEMPT_GRACE_PERIOD is"):
        KubernetesTerminationConfig()


def test_kubernetes_leaves_with_143() -> None:
    assert left_with(KubernetesTerminationConfig()) == 143


# --- Slurm ---------------------------------------------------------------------------


class Scontrol:
    """Records the commands; fails with an error text, if there is one."""

    def __init__(self, fault: str = "") -> None:
        self.commands: list[list[str]] = []
        self._fault = fault

    def __call__(self, command: list[str], limit: float) -> str:
        self.commands.append(command)
        if self._fault:
            raise subprocess.CalledProcessError(1, command, stderr=self._fault)
        return ""


def requeued(
    scontrol: Scontrol, environment: dict[str, str] | None = None, **options: Any
) -> SlurmTerminationConfig:
    return SlurmTerminationConfig(
        requeue="scontrol",
        environment={"SLURM_JOB_ID": "17", **(environment or {})},
        run_command=scontrol,
        **options,
    )


def test_slurm_watches_sigterm_with_kill_wait() -> None:
    assert watched(SlurmTerminationConfig()) == {"signal:SIGTERM": 30.0}


def test_slurm_watches_an_early_signal_with_its_own_grace() -> None:
    config = SlurmTerminationConfig(
        grace_period=60, early_signal="USR1", early_grace_period=120
    )
    assert watched(config) == {"signal:SIGTERM": 60.0, "signal:SIGUSR1": 120.0}


def test_slurm_exits_with_143_without_a_call_of_scontrol() -> None:
    scontrol = Scontrol()
    config = SlurmTerminationConfig(
        environment={"SLURM_JOB_ID": "17"}, run_command=scontrol
    )
    assert (left_with(config), left_with(config, committed=False)) == (143, 143)
    assert scontrol.commands == []


@pytest.mark.parametrize(
    ("count", "code"), [(None, 143), ("0", 143), ("2", 143), ("3", 1), ("9", 1)]
)
def test_slurm_has_a_budget_of_restarts(
    count: str | None, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {} if count is None else {"SLURM_RESTART_COUNT": count}
    config = SlurmTerminationConfig(
        max_restarts=3, environment=environment, uncommitted_exit_code=75
    )
    assert left_with(config) == config._exit_code_for(True) == code
    uncommitted = 75 if code == 143 else code
    assert left_with(config, False) == config._exit_code_for(False) == uncommitted
    assert ("submit the job again" in caplog.text) is (code == 1)


def test_slurm_ends_for_good_with_the_given_code() -> None:
    scontrol, calls = Scontrol(), []
    config = requeued(
        scontrol,
        {"SLURM_RESTART_COUNT": "1"},
        max_restarts=1,
        exhausted_exit_code=9,
        exit_fn=functools.partial(calls.append, 1),
    )
    assert left_with(config) == 9
    assert (scontrol.commands, calls) == ([], [])


def test_scontrol_is_the_last_act() -> None:
    scontrol = Scontrol()

    def leave() -> None:
        assert scontrol.commands == []
        raise SystemExit(5)

    assert left_with(requeued(scontrol, exit_fn=leave)) == 5
    assert scontrol.commands == [["scontrol", "requeue", "17"]]


@pytest.mark.parametrize(
    ("code", "committed", "times"),
    [(75, False, 0), (75, True, 1), (None, False, 1)],
)
def test_scontrol_is_not_called_with_the_code_of_a_loss(
    code: int | None, committed: bool, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As with RequeueExit=143, for any exit_fn after a commit."""
    scontrol = Scontrol()
    config = requeued(scontrol, uncommitted_exit_code=code)
    expected = 143 if committed or code is None else code
    assert left_with(config, committed) == expected
    assert len(scontrol.commands) == times
    assert ("`scontrol requeue 17`" in caplog.text) is (times == 0)


def test_scontrol_is_not_called_with_the_code_of_a_copy_that_was_late() -> None:
    scontrol = Scontrol()
    config = requeued(scontrol, mirror_incomplete_exit_code=76)
    assert left_with(config, mirrored=False) == 76
    assert scontrol.commands == []
    assert left_with(config) == 143
    assert len(scontrol.commands) == 1


def test_scontrol_is_not_called_if_training_continues() -> None:
    scontrol = Scontrol()
    requeued(scontrol, exit_fn=lambda: None)._exit(True)
    assert scontrol.commands == []


def test_scontrol_is_called_by_one_process() -> None:
    scontrol = Scontrol()
    for rank in ("1", "0", "2"):
        assert left_with(requeued(scontrol, {"SLURM_PROCID": rank})) == 143
    assert len(scontrol.commands) == 1


@pytest.mark.parametrize(("worker", "times"), [(0, 1), (1, 0)])
def test_scontrol_is_called_by_the_chief(worker: int, times: int) -> None:
    """Whichever of Slurm's tasks that is."""
    scontrol = Scontrol()
    config = requeued(scontrol, {"SLURM_PROCID": str(1 - worker)})
    assert left_with(config, worker=worker) == 143
    assert len(scontrol.commands) == times


def test_a_failure_of_scontrol_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert left_with(requeued(Scontrol("Access denied"))) == 143
    told = "`scontrol requeue 17` failed (CalledProcessError: Access denied)"
    assert told in caplog.text
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING"]  # the call, and its failure


@pytest.mark.slow  # starts a process
def test_a_missing_scontrol_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    config = SlurmTerminationConfig(
        requeue="scontrol", environment={"SLURM_JOB_ID": "17"}
    )
    assert left_with(config) == 143
    assert "No such file" in caplog.text


@pytest.mark.slow  # starts a process
def test_scontrol_may_write_invalid_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nprintf 'denied \\377' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = SlurmTerminationConfig(
        requeue="scontrol", environment={"SLURM_JOB_ID": "17"}
    )
    assert left_with(config) == 143
    assert "CalledProcessError: denied" in caplog.text


def test_the_message_of_scontrol_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = SlurmTerminationConfig(
        requeue="scontrol",
        environment={"SLURM_JOB_ID": "17"},
        run_command=lambda command, limit: "slurm_update error: Access denied",
    )
    assert left_with(config) == 143
    assert "`scontrol requeue 17` failed (slurm_update error: Access denied)" in (
        caplog.text
    )


def test_whatever_scontrol_raises_the_job_leaves_with_its_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(command: list[str], limit: float) -> str:
        raise ValueError("nobody has thought of this")

    config = SlurmTerminationConfig(
        requeue="scontrol", environment={"SLURM_JOB_ID": "17"}, run_command=run
    )
    assert left_with(config) == 143
    assert "call `scontrol requeue 17` by hand" in caplog.text
    assert "nobody has thought of this" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requeue": "scontrol"}, "SLURM_JOB_ID is not set"),
        ({"requeue": True}, "requeue is True"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"max_restarts": "3"}, "max_restarts is '3'"),
        ({"exhausted_exit_code": 143}, "exhausted_exit_code is 143"),
        ({"exhausted_exit_code": 256}, "exhausted_exit_code is 256"),
        ({"early_signal": "SIGKILL"}, "'SIGKILL'"),
        ({"early_signal": "USR1", "early_grace_period": -1}, "early_grace_period"),
        ({"early_grace_period": 120}, "early_signal is missing"),
        (
            {"max_restarts": 1, "environment": {"SLURM_RESTART_COUNT": "x"}},
            "SLURM_RESTART_COUNT is 'x'",
        ),
    ],
)
def test_slurm_refuses_invalid_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SlurmTerminationConfig(**arguments)
