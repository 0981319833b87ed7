"""docs/recipes/skypilot: the commands of the nodes run, are preempted, and resume."""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import tfpreempt
from tests.fakes.gcs import GcsServer
from tests.multiprocess.harness import records, wait_until
from tests.multiprocess.jax_processes import (
    JaxProcess,
    ended,
    environment,
    killed_at_the_end,
)
from tests.ports import free_ports
from tests.recipes.folders import RECIPES, page, text

# As SkyPilot documents them, of those that a managed job may have.
FIELDS = {
    "": {
        "config", "envs", "file_mounts", "name", "num_nodes", "resources", "run",
        "secrets", "setup", "volumes", "workdir",
    },
    "resources": {
        "accelerators", "any_of", "autostop", "cpus", "disk_size", "disk_tier",
        "image_id", "infra", "instance_type", "job_recovery", "labels", "memory",
        "network_tier", "ordered", "ports", "use_spot",
    },
    "resources.job_recovery": {
        "max_restarts_on_errors", "recover_on_exit_codes", "strategy"
    },
}  # fmt: skip


def task() -> dict[str, Any]:
    loaded = yaml.safe_load(text("skypilot", "train.yaml"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_fields_are_documented() -> None:
    found = task()
    assert set(found) <= FIELDS[""]
    assert set(found["resources"]) <= FIELDS["resources"]
    recovery = found["resources"]["job_recovery"]
    assert set(recovery) <= FIELDS["resources.job_recovery"]


def test_a_preemption_is_told_from_a_failure() -> None:
    resources = task()["resources"]
    assert resources["use_spot"] is True
    code = tfpreempt.GceSpotTerminationConfig.exit_code
    recovery = resources["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [code]
    assert f"`recover_on_exit_codes: [{code}]`" in page("skypilot")
    errors = recovery["max_restarts_on_errors"]
    assert f"one of {errors} restarts (`max_restarts_on_errors`)" in page("skypilot")
    # The last line replaces the shell, so that the program's exit code is the node's.
    assert task()["run"].splitlines()[-1] == "exec python train.py"
    ast.parse(text("skypilot", "train.py"))


def test_skypilot_loads_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(RECIPES / "skypilot")
    loaded = sky.Task.from_yaml("train.yaml")
    assert (loaded.name, loaded.num_nodes) == ("train", task()["num_nodes"])
    (resources,) = loaded.resources
    assert resources.use_spot is True
    assert resources.job_recovery["recover_on_exit_codes"] == [143]
    assert resources.job_recovery["max_restarts_on_errors"] == 3


@contextmanager
def nodes(folder: Path, program: str, server: GcsServer) -> Iterator[list[JaxProcess]]:
    """Context manager: the commands of all nodes, each with an empty disk.

    Args:
        folder: parent of the disks.
        program: source of train.py.
        server: server of the bucket.
    """
    (port,) = free_ports(1)
    found = task()
    run = found["run"].replace(":8476", f":{port}")
    with killed_at_the_end() as started:
        for rank in range(found["num_nodes"]):
            disk = folder / f"node-{rank}"
            disk.mkdir(parents=True)
            (disk / "train.py").write_text(program)
            env = environment(
                CHECKPOINT_DIR=found["envs"]["CHECKPOINT_DIR"].replace("my-", ""),
                **server.environment(),
                TFPREEMPT_SCRATCH_DIR=str(disk),
                SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
                SKYPILOT_NUM_NODES=str(found["num_nodes"]),
                SKYPILOT_NODE_RANK=str(rank),
                PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            )
            command = ["bash", "-c", run]
            started.append(JaxProcess.start(command, disk / "log", env, disk))
        yield started


@pytest.mark.multiprocess
def test_the_commands_resume_on_an_empty_disk(tmp_path: Path) -> None:
    """A node gets a notice; other nodes resume from the bucket."""
    source = text("skypilot", "train.py")
    assert source.count("10_000") == 1
    with GcsServer() as server:
        endless = source.replace("10_000", "1_000_000")
        with nodes(tmp_path / "first", endless, server) as first:
            disk = tmp_path / "first/node-0"
            wait_until(lambda: journal(disk, "firststep") or has_ended(first), "a step")
            first[0].process.send_signal(signal.SIGTERM)
            ended(first, 143, 143)
        step = journal(disk, "commit")[-1]["step"]
        source = source.replace("10_000", str(step + 10))
        with nodes(tmp_path / "second", source, server) as second:
            ended(second, 0, 0)
    disk = tmp_path / "second/node-0"
    assert {each["step"] for each in journal(disk, "restored")} == {step}
    assert journal(disk, "commit")[-1]["step"] == step + 10


def has_ended(processes: list[JaxProcess]) -> bool:
    return any(each.process.poll() is not None for each in processes)


def journal(disk: Path, event: str) -> list[dict[str, Any]]:
    """The records of an event in the scratch directory of a node."""
    return [
        record
        for path in disk.glob("tfpreempt-scratch-*/*")
        for record in records(path, event)
    ]
