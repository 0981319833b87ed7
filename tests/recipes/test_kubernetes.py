"""docs/recipes/gke: objects that Kubernetes knows, and that say the same thing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

import tfpreempt
from tests.recipes.folders import directory, page, text

VERSION = "1.37"
JOBS = ("job.yaml", "jobset.yaml")
SPOT = "cloud.google.com/gke-spot"
# As the project documents them, for the version that the file names.
DOCUMENTED = {
    "JobSet": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {
            "coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs",
            "startupPolicy", "successPolicy", "suspend", "ttlSecondsAfterFinished",
        },
        "spec.network": {
            "enableDNSHostnames", "publishNotReadyAddresses", "subdomain"
        },
        "spec.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
        "spec.failurePolicy.rules.0": {
            "action", "name", "onJobFailureReasons", "targetReplicatedJobs"
        },
        "spec.replicatedJobs.0": {
            "dependsOn", "groupName", "name", "replicas", "template"
        },
    },
}  # fmt: skip


def load(file: str) -> dict[str, Any]:
    loaded = yaml.safe_load(text("gke", file))
    assert isinstance(loaded, dict)
    return loaded


def at(value: Any, path: str) -> Any:
    for word in filter(None, path.split(".")):
        value = value[int(word)] if word.isdecimal() else value[word]
    return value


def unknown(thing: dict[str, Any]) -> set[str]:
    """The fields that are not documented, with their paths."""
    return {
        f"{path}.{name}"
        for path, names in DOCUMENTED[thing["kind"]].items()
        for name in at(thing, path)
        if name not in names
    }


def job(file: str) -> dict[str, Any]:
    """The batch/v1 Job in a file: itself, or the JobSet's."""
    thing = load(file)
    if thing["kind"] == "Job":
        return thing
    template = at(thing, "spec.replicatedJobs.0.template")
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}}
    return whole | template


def pod(file: str) -> dict[str, Any]:
    found = at(job(file), "spec.template.spec")
    assert isinstance(found, dict)
    return found


def container(file: str) -> dict[str, Any]:
    (found,) = pod(file)["containers"]
    assert isinstance(found, dict)
    return found


def environment(file: str) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container(file)["env"]}


def complaint_of_kubernetes(given: dict[str, Any]) -> Exception | None:
    import kubernetes_validate  # heavy, and for this alone

    try:
        kubernetes_validate.validate(given, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return error
    return None


@pytest.mark.parametrize("file", JOBS)
def test_kubernetes_knows_the_job_and_its_pod(file: str) -> None:
    assert complaint_of_kubernetes(job(file)) is None


def test_kubernetes_knows_the_claim() -> None:
    claim = load("claim.yaml")
    assert complaint_of_kubernetes(claim) is None
    # To the schema any name is a resource.
    assert set(at(claim, "spec.resources.requests")) == {"storage"}
    assert set(container("job.yaml")["resources"]["requests"]) <= {"cpu", "memory"}


def test_the_schema_refuses_what_is_misspelt() -> None:
    spoilt = job("job.yaml")
    pod_spec = spoilt["spec"]["template"]["spec"]
    pod_spec["terminationGracePeriod"] = pod_spec.pop("terminationGracePeriodSeconds")
    assert "terminationGracePeriod" in str(complaint_of_kubernetes(spoilt))


def test_the_jobset_has_documented_fields_only() -> None:
    jobset = load("jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == (
        "jobset.x-k8s.io/v1alpha2", "JobSet"
    )  # fmt: skip
    assert unknown(jobset) == set()
    jobset["spec"]["failurePolicy"]["maxRestart"] = 1
    assert unknown(jobset) == {"spec.failurePolicy.maxRestart"}


@pytest.mark.parametrize("file", JOBS)
def test_the_grace_is_the_same_in_all_places(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = pod(file)["terminationGracePeriodSeconds"]
    for name in ("TFPREEMPT_GRACE_PERIOD", "TFPREEMPT_NOTICE_FILE"):
        monkeypatch.setenv(name, environment(file)[name])
    made = tfpreempt.KubernetesTerminationConfig()
    # SIGTERM and the file.
    assert [each.grace_seconds for each in made._notice_sources()] == [grace, grace]
    assert f"`terminationGracePeriodSeconds: {grace}`" in page("gke")
    assert f"exit with 143, within {grace} s" in page("gke")
    # What a Spot node leaves, however much a pod asks for.
    assert grace <= 15


@pytest.mark.parametrize("file", JOBS)
def test_the_hook_makes_the_notice_file_on_a_volume_of_the_pods_own(file: str) -> None:
    notice = environment(file)["TFPREEMPT_NOTICE_FILE"]
    hook = at(container(file), "lifecycle.preStop.exec.command")
    assert hook == ["touch", notice]
    mounts = {
        each["mountPath"]: each["name"] for each in container(file)["volumeMounts"]
    }
    volumes = {each["name"]: each for each in pod(file)["volumes"]}
    assert volumes[mounts[notice.rpartition("/")[0]]].get("emptyDir") == {}
    (root,) = (path for path in mounts if directory("gke").startswith(f"{path}/"))
    claim = load("claim.yaml")
    claimed = at(volumes[mounts[root]], "persistentVolumeClaim.claimName")
    assert claimed == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("file", JOBS)
def test_nothing_runs_as_root(file: str) -> None:
    (user,) = re.findall(r"(?m)^USER (\d+)$", text("gke", "Dockerfile"))
    context = pod(file)["securityContext"]
    assert context == {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "fsGroup": int(user),
    }
    assert container(file)["securityContext"]["allowPrivilegeEscalation"] is False
    assert f"as user {user}, never as root" in page("gke")


@pytest.mark.parametrize("file", JOBS)
def test_spot_nodes_are_asked_for_and_tolerated(file: str) -> None:
    assert pod(file)["nodeSelector"] == {SPOT: "true"}
    assert pod(file)["tolerations"] == [
        {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    ]


@pytest.mark.parametrize("file", JOBS)
def test_the_program_is_the_first_process_of_the_image(file: str) -> None:
    assert "command" not in container(file)
    dockerfile = text("gke", "Dockerfile")
    assert f"`{container(file)['image']}`" in page("gke")
    (entry,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", dockerfile)
    program, script = json.loads(entry)
    assert program == "python"
    assert f"COPY train.py {script}\n" in dockerfile


@pytest.mark.parametrize(
    ("file", "action"), [("job.yaml", "Ignore"), ("jobset.yaml", "FailJob")]
)
def test_a_preemption_is_told_from_a_failure(file: str, action: str) -> None:
    left, taken = at(job(file), "spec.podFailurePolicy.rules")
    assert left == {
        "action": action,
        "onExitCodes": {
            "containerName": container(file)["name"],
            "operator": "In",
            "values": [tfpreempt.KubernetesTerminationConfig.exit_code],
        },
    }
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert taken == {"action": action, "onPodConditions": [condition]}
    # What a podFailurePolicy needs.
    assert pod(file)["restartPolicy"] == "Never"
    assert at(job(file), "spec.podReplacementPolicy") == "Failed"


def test_the_jobset_restarts_all_and_counts_only_failures() -> None:
    policy = at(load("jobset.yaml"), "spec.failurePolicy")
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert policy["maxRestarts"] > 0
    # One failed pod is the Job's end, so that all workers start together.
    assert at(job("jobset.yaml"), "spec.backoffLimit") == 0


def test_the_jobsets_workers_know_each_other() -> None:
    jobset = load("jobset.yaml")
    replicated = at(jobset, "spec.replicatedJobs.0")
    spec = job("jobset.yaml")["spec"]
    assert spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed"
    prefix = f"{jobset['metadata']['name']}-{replicated['name']}-0"
    domain = at(jobset, "spec.network.subdomain")
    assert at(jobset, "spec.network.enableDNSHostnames") is True
    named = [each["name"] for each in container("jobset.yaml")["env"]]
    # Kubernetes puts in only what stands before.
    assert named.index("WORKER_INDEX") < named.index("TF_CONFIG")
    source = environment("jobset.yaml")["TF_CONFIG"]
    for index in range(spec["completions"]):
        told = json.loads(source.replace("$(WORKER_INDEX)", str(index)))
        assert told == {
            "cluster": {
                "worker": [
                    f"{prefix}-{each}.{domain}:2222"
                    for each in range(spec["completions"])
                ]
            },
            "task": {"type": "worker", "index": index},
        }


def test_the_page_says_the_limits() -> None:
    backoff = at(load("job.yaml"), "spec.backoffLimit")
    restarts = at(load("jobset.yaml"), "spec.failurePolicy.maxRestarts")
    assert f"one of {backoff} retries (`backoffLimit`)" in page("gke")
    assert f"one of {restarts} restarts (`maxRestarts`)" in page("gke")
