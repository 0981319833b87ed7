"""Environment variables: the number of restarts, and the workers."""

from __future__ import annotations

import json

import pytest

import tfpreempt
from tfpreempt import errors
from tfpreempt.core.cluster import cluster_from_environment
from tfpreempt.core.restarts import num_restarts, read_restarts

# --- restarts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 0),
        ({"TFPREEMPT_NUM_RESTARTS": "3", "SLURM_RESTART_COUNT": "1"}, 3),
        ({"TFPREEMPT_NUM_RESTARTS": "", "SLURM_RESTART_COUNT": "1"}, 1),
        ({"SLURM_RESTART_COUNT": " 12 "}, 12),
    ],
)
def test_num_restarts(environment, number):
    assert num_restarts(environment) == number
    assert read_restarts(environment) == (number if environment else None)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "٣", "1" * 10])
@pytest.mark.parametrize("name", ["TFPREEMPT_NUM_RESTARTS", "SLURM_RESTART_COUNT"])
def test_a_nonsensical_number_of_restarts(name, text, monkeypatch):
    monkeypatch.delenv("TFPREEMPT_NUM_RESTARTS", raising=False)
    monkeypatch.setenv(name, text)
    with pytest.raises(errors.ConfigurationError, match=name):
        tfpreempt.num_restarts()


# --- who the workers are -------------------------------------------------------------

TWO = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("config", "worker", "world"),
    [
        (None, 0, 1),
        ({}, 0, 1),
        ({"cluster": {}, "task": {"type": "worker", "index": 0}}, 0, 1),
        ({"cluster": TWO, "task": {"type": "worker", "index": 1}}, 1, 2),
        ({"cluster": TWO, "task": {"index": "1"}}, 1, 2),
        (
            {
                "cluster": {"chief": ["c:1"], "evaluator": ["e:1"], **TWO},
                "task": {"type": "worker", "index": 0},
            },
            1,
            3,
        ),
    ],
)
def test_workers_of_the_environment(config, worker, world):
    environment = {} if config is None else {"TF_CONFIG": json.dumps(config)}
    cluster = cluster_from_environment(environment)
    assert (cluster.worker, cluster.num_workers) == (worker, world)


@pytest.mark.parametrize(
    ("process", "count", "worker", "world"),
    [("1", "3", 1, 3), ("0", "1", 0, 1), ("3", "3", 0, 1), ("x", "3", 0, 1)],
)
def test_processes_of_jax_in_the_environment(process, count, worker, world):
    environment = {"JAX_PROCESS_ID": process, "JAX_NUM_PROCESSES": count}
    cluster = cluster_from_environment(environment)
    assert (cluster.worker, cluster.num_workers) == (worker, world)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        '{"cluster": 3}',
        '{"cluster": {"worker": 3}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"index": "x"}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"index": 1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}',
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"index": 0}}',
    ],
)
def test_an_environment_that_names_no_worker(text):
    with pytest.raises(errors.ConfigurationError, match=r"cluster|TF_CONFIG"):
        cluster_from_environment({"TF_CONFIG": text})
