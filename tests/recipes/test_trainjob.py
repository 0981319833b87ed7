"""docs/recipes/trainjob: a runtime with the pods of gke-jax, and a job of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.recipes import test_kubernetes as kubernetes
from tests.recipes.folders import page

# The fields of Kubeflow Trainer 2.3; those of the runtime's template are the JobSet's.
FIELDS = {
    "runtime.yaml": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"mlPolicy", "podGroupPolicy", "template"},
        "spec.mlPolicy": {"flux", "jax", "mpi", "numNodes", "torch", "xgboost"},
        "spec.template": {"metadata", "spec"},
    },
    "trainjob.yaml": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {
            "activeDeadlineSeconds", "initializer", "managedBy", "runtimePatches",
            "runtimeRef", "suspend", "trainer",
        },
        "spec.runtimeRef": {"apiGroup", "kind", "name"},
        "spec.trainer": {
            "args", "command", "env", "image", "numNodes", "numProcPerNode",
            "resourcesPerNode",
        },
    },
}  # fmt: skip
JAX = "gke-jax/gpu.yaml"
TEMPLATE = "spec.replicatedJobs.0.template.spec"


def load(file: str) -> dict[str, Any]:
    return kubernetes.load(f"trainjob/{file}")


def jobset() -> dict[str, Any]:
    """The JobSet that Kubeflow Trainer makes of the runtime."""
    found = kubernetes.at(load("runtime.yaml"), "spec.template")
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"} | found


@pytest.mark.parametrize("file", FIELDS)
def test_the_fields_are_documented(file: str) -> None:
    found = load(file)
    assert found["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    for path, names in FIELDS[file].items():
        assert set(kubernetes.at(found, path)) <= names, path
    assert kubernetes.unknown(jobset()) == set()


def test_the_job_names_the_runtime_and_the_image_of_jax() -> None:
    job, runtime = load("trainjob.yaml"), load("runtime.yaml")
    named = kubernetes.at(job, "spec.runtimeRef")
    assert named == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    trainer = kubernetes.at(job, "spec.trainer")
    assert trainer["image"] == kubernetes.container(JAX)["image"]
    assert f"`{trainer['image']}`" in page("trainjob")
    assert kubernetes.at(runtime, "spec.mlPolicy") == {
        "numNodes": trainer["numNodes"], "jax": {}
    }  # fmt: skip
    resources = kubernetes.container(JAX)["resources"]
    assert trainer["resourcesPerNode"] == resources


def test_restarts_and_pods_are_those_of_gke_with_jax() -> None:
    ours, theirs = jobset(), kubernetes.load(JAX)
    assert ours["spec"]["failurePolicy"] == theirs["spec"]["failurePolicy"]
    (replicated,) = ours["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"  # as Kubeflow Trainer expects
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert replicated["template"]["metadata"]["labels"] == {label: "trainer"}
    mine, other = (kubernetes.at(each, TEMPLATE) for each in (ours, theirs))
    # The number of pods comes from numNodes.
    for name in ("parallelism", "completions", "completionMode"):
        del other[name]
    (container,), (of_jax,) = (
        each["template"]["spec"]["containers"] for each in (mine, other)
    )
    rule = other["podFailurePolicy"]["rules"][0]["onExitCodes"]
    rule["containerName"] = of_jax["name"] = "node"
    # The image and the resources are the TrainJob's; Kubeflow sets JAX's variables.
    del of_jax["image"], of_jax["resources"]
    of_jax["env"] = [e for e in of_jax["env"] if not e["name"].startswith("JAX_")]
    of_jax["readinessProbe"]["exec"]["command"].append("--trainjob")
    assert container == of_jax
    assert mine == other
    assert kubernetes.probe_of(container["readinessProbe"])["trainjob"] is True


def test_kubernetes_knows_the_pod() -> None:
    spec = kubernetes.at(jobset(), TEMPLATE)
    # As Kubeflow Trainer does.
    spec["template"]["spec"]["containers"][0]["image"] = "train-jax:1"
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}}
    assert kubernetes.complaint_of_kubernetes({**job, "spec": spec}) is None


def test_the_page_names_the_limits_and_each_file() -> None:
    told = page("trainjob")
    restarts = kubernetes.at(jobset(), "spec.failurePolicy.maxRestarts")
    assert f"one of {restarts} restarts (`maxRestarts`)" in " ".join(told.split())
    assert set(re.findall(r"\]\(trainjob/([^)]+)\)", told)) == set(FIELDS)
