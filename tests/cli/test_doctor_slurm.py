"""`tfpreempt doctor` on Slurm: whether the job would be started again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.recipes.slurm import Slurm, why_not
from tfpreempt.cli import main
from tfpreempt.cli.doctor.slurm_settings import (
    ANSWER_SECONDS,
    Requeue,
    SlurmState,
    ask_slurm,
    parse_codes,
)
from tfpreempt.cli.doctor.verdict import DoctorFindings, Level, assess
from tfpreempt.platforms.detect import VARIANTS, Platform

JOB = {"SLURM_JOB_ID": "17"}


class Scontrol:
    """Prints the text for its last two arguments."""

    def __init__(self, config: str = "", job: str = "") -> None:
        self.commands: list[list[str]] = []
        self._texts = {"show config": config, "show job": job}

    def __call__(self, command: list[str], limit: float) -> str:
        assert limit == ANSWER_SECONDS
        self.commands.append(command)
        (text,) = [t for name, t in self._texts.items() if name in " ".join(command)]
        return text


def config(**settings: object) -> str:
    """Returns a configuration as scontrol prints it."""
    told = {"JobRequeue": 1, "RequeueExit": "(null)", "RequeueExitHold": "(null)"}
    lines = [f"{name:23} = {value}" for name, value in {**told, **settings}.items()]
    return "\n".join(["Configuration data as of now", *lines, ""])


def job(requeue: int = 1, batch: int = 1) -> str:
    return (
        f"JobId=17 JobName=a b UserId=root(0) Reason=None Requeue={requeue} "
        f"Restarts=0 BatchFlag={batch} Command=(null) Power= \n"
    )


def verdict(state: SlurmState) -> tuple[Level, str]:
    platform = Platform(name="slurm", config_class=VARIANTS["slurm"], evidence=())
    facts = DoctorFindings(platform=platform, sources=(), storage=None, slurm=state)
    (finding,) = [each for each in assess(facts) if each.about == "requeue"]
    return finding.level, finding.text


def judged(
    scontrol: Scontrol,
    requeue: Requeue = "exit",
    environment: Mapping[str, str] = JOB,
) -> tuple[Level, str]:
    return verdict(ask_slurm(environment, requeue, scontrol))


# --- by exit code --------------------------------------------------------------------


@pytest.mark.parametrize("text", ["143", "1,142-150", "1, 143 ,7"])
def test_a_listed_code_requeues(text: str) -> None:
    scontrol = Scontrol(config(RequeueExit=text, RequeueExitHold="143"), job())
    assert judged(scontrol)[0] is Level.OK
    assert scontrol.commands == [
        ["scontrol", "show", "config"],
        ["scontrol", "-o", "show", "job", "17"],
    ]


@pytest.mark.parametrize("text", ["(null)", "1,144-150", ""])
def test_a_code_that_is_not_listed_ends_the_job(text: str) -> None:
    for told in (job(), job(batch=0)):
        level, line = judged(Scontrol(config(RequeueExit=text), told))
        assert level is Level.PROBLEM
        assert "RequeueExit does not list 143" in line
        assert "set RequeueExit=143 in slurm.conf, or pass requeue='scontrol'" in line


def test_a_code_that_holds_the_job() -> None:
    level, line = judged(Scontrol(config(RequeueExitHold="143"), job()))
    assert level is Level.PROBLEM
    assert "`scontrol release`" in line


def test_no_requeue_leaves_the_exit_code_only() -> None:
    level, line = judged(Scontrol(config(RequeueExit="143"), job(requeue=0)))
    assert level is Level.ADVICE
    assert "only exit code 143 requeues the job" in line


def test_a_job_of_srun_is_never_requeued() -> None:
    level, line = judged(Scontrol(config(RequeueExit="143"), job(batch=0)))
    assert level is Level.ADVICE
    assert "use sbatch" in line


def test_outside_of_a_job_the_default_is_read() -> None:
    scontrol = Scontrol(config(RequeueExit="143", JobRequeue=0))
    assert judged(scontrol, environment={})[0] is Level.ADVICE
    assert len(scontrol.commands) == 1
    assert judged(Scontrol(config(RequeueExit="143")), environment={})[0] is Level.OK


# --- by scontrol ---------------------------------------------------------------------


@pytest.mark.parametrize(("may", "level"), [(1, Level.OK), (0, Level.PROBLEM)])
def test_scontrol_needs_a_job_that_may_be_requeued(may: int, level: Level) -> None:
    found, line = judged(Scontrol(config(), job(requeue=may)), "scontrol")
    assert found is level
    assert ("sbatch --requeue" in line) is (level is Level.PROBLEM)


# --- nobody answers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file", "scontrol"), "No such file"),
        (subprocess.TimeoutExpired("scontrol", 5.0), "timed out"),
        (subprocess.CalledProcessError(1, "s", "", "error: x\nfatal: y\n"), "fatal: y"),
        (subprocess.CalledProcessError(1, "scontrol"), "exit status 1"),
    ],
)
@pytest.mark.parametrize(
    ("requeue", "level"), [("exit", Level.ADVICE), ("scontrol", Level.PROBLEM)]
)
def test_a_failed_check_is_reported(
    error: Exception, text: str, requeue: Requeue, level: Level
) -> None:
    def run(command: list[str], limit: float) -> str:
        raise error

    found, line = verdict(ask_slurm(JOB, requeue, run))
    assert found is level
    assert "not checked" in line
    assert text in line
    assert "error: x" not in line


@pytest.mark.parametrize(
    ("text", "codes"),
    [("(null)", []), ("", []), ("1,5-7", [1, 5, 6, 7]), ("x,9-,3", [3]), ("7-5", [])],
)
def test_lists_of_codes(text: str, codes: list[int]) -> None:
    assert [*parse_codes(text)] == codes


def test_a_number_of_any_length_is_a_flag() -> None:
    for text, flag in (("9" * 5000, True), ("000", False), ("²", None), ("", None)):
        answers = Scontrol(config(), f"JobId=17 Requeue={text} BatchFlag=1")
        assert ask_slurm(JOB, "exit", answers).may_requeue is flag


# --- the command ---------------------------------------------------------------------


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    command = ["doctor", "--platform", "slurm", "--json", *arguments]
    result = CliRunner().invoke(main, command, env=variables)
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.slow  # starts a process
def test_the_command_asks_scontrol(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\ncat <<END\n{config(RequeueExit='142')}END\n")
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    code, told = doctor(PATH=path, SLURM_JOB_ID="")
    assert code == 1
    assert told["slurm"]["requeued_codes"] == [142]
    assert any("list 143" in each["text"] for each in told["findings"])
    code, told = doctor("--requeue", "scontrol", PATH=path, SLURM_JOB_ID="17")
    assert code == 0
    assert told["slurm"]["requeue"] == "scontrol"


def test_requeue_is_for_slurm() -> None:
    command = ["doctor", "--platform", "generic", "--requeue", "exit"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "--requeue exit is for Slurm, and this is generic" in result.output


@pytest.mark.multiprocess
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_real_slurm_does_as_the_verdict_says(tmp_path: Path) -> None:
    slurm = Slurm(
        tmp_path, "RequeueExit=1,142-144\nPartitionName=low Nodes=ALL Default=YES\n"
    )

    def run(command: list[str], limit: float) -> str:
        return slurm.run(*command)

    with slurm.running():
        told = slurm.submit("--no-requeue", "--wrap", "exit 143", cwd=tmp_path)
        slurm.wait(lambda: slurm.state(told).get("Restarts") == "1", "the requeue")
        assert "disabled" in slurm.run("scontrol", "requeue", told)
        state = ask_slurm({"SLURM_JOB_ID": told}, "scontrol", run)
    assert state == SlurmState(
        requeue="scontrol",
        requeued_codes=(1, 142, 143, 144),
        may_requeue=False,
        is_batch=True,
    )
    assert verdict(state)[0] is Level.PROBLEM
