"""docs/recipes/tpu: a new VM after each preemption, and resumed training."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tfpreempt
from tests.journals import read_journal
from tests.multiprocess.harness import wait_until
from tests.multiprocess.jax_processes import environment
from tests.recipes.folders import RECIPES, config, page, text, unit
from tfpreempt.core import private_api
from tfpreempt.core.journal import journal_directory

pytestmark = pytest.mark.slow  # starts shells

SHARE = "10.0.0.2:/ckpt"
WHEEL = f"https://host/tfpreempt-1.0-py3-none-any.whl#sha256={'0f' * 32}"
GCLOUD = """#!/bin/bash
echo "$*" >>"$CALLS"
if [[ $3 == describe ]]; then
  state=$(head -n 1 "$STATES"); sed -i 1d "$STATES"
  [[ $state == NONE ]] && exit 1
  echo "$state"
fi
[[ $3 != "$FAILS" ]]
"""
SLEEP = """#!/bin/bash
[[ -s $STATES ]] || kill -TERM $PPID
"""


def calls_of_keep(tmp_path: Path, *states: str, fails: str = "") -> list[str]:
    """Returns the calls of gcloud by keep.sh, with these states of the VM in sequence.

    Args:
        tmp_path: directory for the fake commands.
        *states: states of the VM, in order.
        fails: command of gcloud that fails, such as "create".
    """
    for name, source in (("gcloud", GCLOUD), ("sleep", SLEEP)):
        (tmp_path / name).write_text(source)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    subprocess.run(
        [RECIPES / "tpu" / "keep.sh", SHARE, WHEEL],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "CALLS": str(tmp_path / "calls"),
            "STATES": str(tmp_path / "states"),
            "FAILS": fails,
        },
        timeout=60,
        check=False,
    )
    return (tmp_path / "calls").read_text().splitlines()


def verbs(calls: list[str]) -> list[str]:
    return [call.split()[2] for call in calls]


def test_a_vm_is_created_once_and_again_after_each_preemption(tmp_path: Path) -> None:
    """A preempted VM is deleted by Google Cloud, a stopped one by the script."""
    states = "NONE", "STAGING", "RUNNING", "NONE", "RUNNING", "TERMINATED", "NONE"
    calls = calls_of_keep(tmp_path, *states)
    changes = [verb for verb in verbs(calls) if verb != "describe"]
    assert changes == ["create", "create", "delete", "create"]
    assert {tuple(call.split()[:2]) for call in calls} == {("compute", "instances")}
    [created] = {call for call in calls if " create " in call}
    given = created.split()
    assert "--provisioning-model=SPOT" in given
    assert "--instance-termination-action=DELETE" in given
    assert f"--metadata=ckpt-share={SHARE},wheel={WHEEL}" in given
    assert "`--instance-termination-action=DELETE`" in page("tpu")
    [kind] = re.findall(r"--machine-type=(\S+)", created)
    assert f"`{kind}`" in page("tpu")


@pytest.mark.parametrize(
    ("verb", "state"), [("create", "NONE"), ("delete", "TERMINATED")]
)
def test_a_command_that_fails_once_is_retried(
    tmp_path: Path, verb: str, state: str
) -> None:
    """A quota or a connection may fail, and no user restarts the script."""
    calls = calls_of_keep(tmp_path, state, state, fails=verb)
    assert verbs(calls) == ["describe", verb] * 2


def test_the_vm_gets_the_files_that_its_startup_asks_for(tmp_path: Path) -> None:
    [created] = [c for c in calls_of_keep(tmp_path, "NONE") if " create " in c]
    [given] = re.findall(r"--metadata-from-file=(\S+)", created)
    files = dict(pair.split("=") for pair in given.split(","))
    assert all((RECIPES / "tpu" / file).is_file() for file in files.values())
    assert files.pop("startup-script") == "startup.sh"
    asked = set(re.findall(r"attribute ([a-z-]+)", text("tpu", "startup.sh")))
    assert asked == {*files, "ckpt-share", "wheel"}


def test_a_share_is_needed() -> None:
    done = subprocess.run([RECIPES / "tpu" / "keep.sh"], capture_output=True)
    assert done.returncode != 0


def test_the_page_names_the_files_and_the_versions() -> None:
    linked = set(re.findall(r"\]\(tpu/([^)]+)\)", page("tpu")))
    assert linked == {path.name for path in (RECIPES / "tpu").iterdir()}
    [version] = re.findall(r"jax\[tpu\]==([\d.]+)", text("tpu", "startup.sh"))
    assert f"JAX {version} is" in page("tpu")
    assert version in private_api.SEEN["jax"]


def test_the_unit_and_the_config_fit_each_other() -> None:
    assert text("tpu", "train.service") == text("gce", "train.service")
    made = config("tpu")
    assert type(made) is tfpreempt.GceTpuTerminationConfig
    service = unit(text("tpu", "train.service"))["Service"]
    assert service["RestartForceExitStatus"] == str(made.exit_code)
    assert f"exits with {made.exit_code}, within 30 s" in page("tpu")


@pytest.mark.slow
def test_the_program_resumes_after_a_preemption(tmp_path: Path) -> None:
    """With a CPU instead of the TPU, and SIGTERM instead of Google's notice."""
    directory = tmp_path / "train"
    source = text("tpu", "train.py")
    for there, here in (
        ("tfpreempt.GceTpuTerminationConfig()", "tfpreempt.TerminationConfig()"),
        ('"/srv/ckpt/train"', repr(str(directory))),
    ):
        assert source.count(there) == 1
        source = source.replace(there, here)
    program = tmp_path / "train.py"
    program.write_text(source.replace("10_000", "1_000_000"))

    def records(event: str) -> list[dict[str, object]]:
        found = read_journal(journal_directory(directory))
        return [each for each in found if each["event"] == event]

    on_cpu = environment()
    with subprocess.Popen([sys.executable, program], env=on_cpu) as first:
        try:
            wait_until(lambda: records("commit"), "the first commit")
            first.send_signal(signal.SIGTERM)
            assert first.wait(60) == 143
        finally:
            first.kill()
    step = records("commit")[-1]["step"]
    assert isinstance(step, int)
    program.write_text(source.replace("10_000", str(step + 10)))
    subprocess.run([sys.executable, program], env=on_cpu, check=True, timeout=120)
    assert [each["step"] for each in records("restored")] == [0, step]
    assert records("commit")[-1]["step"] == step + 10
