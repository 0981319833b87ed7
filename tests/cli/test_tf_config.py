"""TF_CONFIG and the ports of a local cluster."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.restart_policy import RestartLimits
from tfpreempt.cli.run.tf_config import claimed_ports, make_tf_config
from tfpreempt.core.snapshot_memory import SnapshotMemory
from tfpreempt.errors import ConfigurationError


def test_tf_config_of_a_worker() -> None:
    assert json.loads(make_tf_config([1001, 1002], 1)) == {
        "cluster": {"worker": ["127.0.0.1:1001", "127.0.0.1:1002"]},
        "task": {"type": "worker", "index": 1},
    }


def test_a_claimed_port_is_free_and_no_other_supervisor_s() -> None:
    with claimed_ports(3) as ports, claimed_ports(3) as others:
        assert len({*ports, *others}) == 6
        with socket.socket() as server:
            server.bind(("127.0.0.1", ports[0]))
            server.listen()


def test_a_port_is_claimed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.SystemRandom
    with claimed_ports(1) as (port,):
        monkeypatch.setattr(chance, "randrange", lambda *_: port)
        with pytest.raises(ConfigurationError, match="0 free ports on"):
            claimed_ports(1).__enter__()
    with claimed_ports(1) as again:
        assert again == (port,)


def test_without_descriptors_nothing_is_known_of_the_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        claimed_ports(1).__enter__()


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with claimed_ports(4) as ports:
        assert low <= 11_000 or max(ports) < low


JAX = ("JAX", "KER")


def make_options(task: str | None) -> RunOptions:
    return RunOptions(
        command=("true",),
        workers=1,
        limits=RestartLimits(),
        checkpoint_dir="/c",
        mirror_dir="gs://b/run",
        log_dir=Path("/l"),
        log_size=1,
        log_files=1,
        journal_dir=Path("/j"),
        task=task,
        has_echo=False,
        environment={
            "TF_CONFIG": "given",
            "PATH": "/bin",
            "TFPREEMPT_SNAPSHOT_DIR": "/of/another/supervisor",
        },
    )


def test_the_variables_of_a_local_worker() -> None:
    options = make_options(None)
    told = options.worker_environment(1, "ab-2", 2, (1001, 1002))
    assert json.loads(told.pop("TF_CONFIG"))["task"]["index"] == 1
    of_jax = {name: told.pop(name) for name in sorted(told) if name[:3] in JAX}
    assert of_jax == {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1001",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:1001",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": "1",
    }
    assert told == {
        "PATH": "/bin",
        "TFPREEMPT_SUPERVISED": "ab-2",
        "TFPREEMPT_NUM_RESTARTS": "2",
        "TFPREEMPT_INCARNATION": "ab-2",
        "TFPREEMPT_CHECKPOINT_DIR": "/c",
        "TFPREEMPT_MIRROR_DIR": "gs://b/run",
        "TFPREEMPT_JOURNAL_DIR": "/j",
    }
    assert options.journal_path == Path("/j/supervisor.jsonl")


def test_a_worker_gets_the_variables_of_its_memory() -> None:
    memory = SnapshotMemory(directory="/m", bytes=7)
    options = dataclasses.replace(make_options(None), memory=memory)
    told = options.worker_environment(0, "ab-2", 2, (1001,))
    assert told["TFPREEMPT_SNAPSHOT_DIR"] == "/m"
    assert told["TFPREEMPT_SNAPSHOT_BYTES"] == "7"


def test_the_variables_of_a_worker_in_a_real_cluster() -> None:
    options = make_options("worker-3")
    told = options.worker_environment(0, "ab-2", 2, ())
    assert told["TF_CONFIG"] == "given"
    assert "TFPREEMPT_INCARNATION" not in told
    assert options.label(0) == "worker-3"
    assert options.journal_path == Path("/j/supervisor-worker-3.jsonl")


def test_a_single_worker_may_be_a_process_that_jax_finds_by_itself() -> None:
    """On a TPU slice and in a Slurm job such an address would be wrong."""
    told = make_options(None).worker_environment(0, "ab-2", 2, (1001,))
    assert [name for name in told if name[:3] in JAX] == []


def test_processes_of_several_machines_keep_the_address_that_the_user_gave() -> None:
    given = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_PROCESS_ID": "3"}
    options = dataclasses.replace(make_options(None), environment=given)
    told = options.worker_environment(0, "ab-2", 2, (1001, 1002))
    assert {name: told[name] for name in told if name[:3] in JAX} == given
    assert "TFPREEMPT_INCARNATION" not in told


@pytest.mark.slow  # starts a process
def test_the_command_line_never_imports_tensorflow() -> None:
    program = (
        "import sys, tfpreempt.cli, tfpreempt.cli.run.command, tfpreempt.core.journal\n"
        "sys.exit('tensorflow' in sys.modules or 'numpy' in sys.modules)"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, env=here)
