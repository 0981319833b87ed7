"""docs/recipes/gke and gke-jax: objects that Kubernetes knows, and that agree."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

import tfpreempt
from tests.multiprocess.harness import records, wait_until
from tests.multiprocess.jax_processes import ended, jax_processes
from tests.recipes.folders import page, text
from tfpreempt.cli import main

VERSION = "1.37"
JOBSETS = ("gke/jobset.yaml", "gke-jax/tpu.yaml", "gke-jax/gpu.yaml")
JOBS = ("gke/job.yaml", *JOBSETS)
GKE = "cloud.google.com/gke"
SPOT = f"{GKE}-spot"
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


def recipe(file: str) -> str:
    return file.partition("/")[0]


def load(file: str) -> dict[str, Any]:
    loaded = yaml.safe_load(text(*file.split("/")))
    assert isinstance(loaded, dict)
    return loaded


def at(value: Any, path: str) -> Any:
    for word in filter(None, path.split(".")):
        value = value[int(word)] if word.isdecimal() else value[word]
    return value


def unknown(thing: dict[str, Any]) -> set[str]:
    """Returns the undocumented fields, with their paths."""
    return {
        f"{path}.{name}"
        for path, names in DOCUMENTED[thing["kind"]].items()
        if path != "spec.network" or "network" in thing["spec"]
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
    claim = load("gke/claim.yaml")
    assert complaint_of_kubernetes(claim) is None
    # To the schema any name is a resource.
    assert set(at(claim, "spec.resources.requests")) == {"storage"}
    assert set(container("gke/job.yaml")["resources"]["requests"]) <= {"cpu", "memory"}


def test_the_schema_refuses_a_misspelt_field() -> None:
    spoilt = job("gke/job.yaml")
    pod_spec = spoilt["spec"]["template"]["spec"]
    pod_spec["terminationGracePeriod"] = pod_spec.pop("terminationGracePeriodSeconds")
    assert "terminationGracePeriod" in str(complaint_of_kubernetes(spoilt))


@pytest.mark.parametrize("file", JOBSETS)
def test_the_jobset_has_documented_fields_only(file: str) -> None:
    jobset = load(file)
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
    assert f"`terminationGracePeriodSeconds: {grace}`" in page(recipe(file))
    assert f"exit with 143, within {grace} s" in page(recipe(file))
    # The grace period on a Spot node, for any request of a pod.
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
    (used,) = re.findall(r'"(/srv/.*)"', text(recipe(file), "train.py"))
    (root,) = (path for path in mounts if used.startswith(f"{path}/"))
    claim = load("gke/claim.yaml")
    claimed = at(volumes[mounts[root]], "persistentVolumeClaim.claimName")
    assert claimed == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("file", JOBS)
def test_only_a_container_with_a_capability_runs_as_root(file: str) -> None:
    (user,) = re.findall(r"(?m)^USER (\d+)$", text("gke", "Dockerfile"))
    limits = container(file)["securityContext"]
    assert limits["allowPrivilegeEscalation"] is False
    assert limits["capabilities"]["drop"] == ["ALL"]
    assert f"as user {user}, never as root" in page(recipe(file))
    context = pod(file)["securityContext"]
    assert context.pop("fsGroup") == int(user)
    if "add" in limits["capabilities"]:
        assert (file, context) == ("gke-jax/tpu.yaml", {})
        (capability,) = limits["capabilities"]["add"]
        assert f"the capability {capability}" in page("gke-jax")
    else:
        assert context == {"runAsNonRoot": True, "runAsUser": int(user)}


@pytest.mark.parametrize("file", JOBS)
def test_spot_nodes_are_requested_and_tolerated(file: str) -> None:
    assert pod(file)["nodeSelector"][SPOT] == "true"
    assert pod(file)["tolerations"] == [
        {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    ]


@pytest.mark.parametrize("file", JOBS)
def test_the_program_is_the_first_process_of_the_image(file: str) -> None:
    dockerfile = text(recipe(file), "Dockerfile")
    assert f"`{container(file)['image']}`" in page(recipe(file))
    (entry,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", dockerfile)
    program, script = json.loads(entry)
    assert program == "python"
    assert f"COPY train.py {script}\n" in dockerfile
    if "command" in container(file):
        shell, option, command = container(file)["command"]
        assert (shell, option) == ("sh", "-c")
        assert command.endswith(f" && exec {program} {script}")


@pytest.mark.parametrize("file", JOBS)
def test_a_preemption_is_distinguished_from_a_failure(file: str) -> None:
    action = "FailJob" if file in JOBSETS else "Ignore"
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
    # Requirements of a podFailurePolicy.
    assert pod(file)["restartPolicy"] == "Never"
    assert at(job(file), "spec.podReplacementPolicy") == "Failed"


@pytest.mark.parametrize("file", JOBSETS)
def test_the_jobset_restarts_all_and_counts_only_failures(file: str) -> None:
    policy = at(load(file), "spec.failurePolicy")
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert policy["maxRestarts"] > 0
    # The first failed pod ends the Job, so that all workers restart together.
    assert at(job(file), "spec.backoffLimit") == 0


@pytest.mark.parametrize("file", JOBS)
def test_the_probes_are_commands_of_the_directory_and_the_steps(file: str) -> None:
    found = container(file)
    source = text(recipe(file), "train.py")
    (directory,) = re.findall(r'"(/srv/.*)"', source)
    ready = probe_of(found["readinessProbe"])
    alive = probe_of(found["livenessProbe"])
    assert (ready["condition"], alive["condition"]) == ("ready", "alive")
    assert {ready["location"], alive["location"]} == {directory}
    if loops := re.findall(r"range\(.*, (\S+)\)", source):
        steps = int(loops[0].replace("_", ""))
    else:
        assert "size=(4096, 8)" in source
        assert "batch_size=16" in source
        steps = 4096 // 16 * int(re.findall(r"epochs=(\d+)", source)[0])
    assert ready["total_steps"] == steps
    assert alive["hang_timeout"] >= 600
    # A volume is not needed, and the user may write there.
    assert str(ready["progress_file"]) == "/tmp/progress.json"


def probe_of(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a probe's command, as the command reads them.

    Args:
        found: the probe.
    """
    assert found["timeoutSeconds"] < found["periodSeconds"]
    program, name, *words = found["exec"]["command"]
    assert program == "tfpreempt"
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command.make_context(name, words).params


def addresses(file: str, port: int) -> list[str]:
    """The addresses of a JobSet's pods."""
    jobset = load(file)
    replicated = at(jobset, "spec.replicatedJobs.0")
    spec = job(file)["spec"]
    assert spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed"
    prefix = f"{jobset['metadata']['name']}-{replicated['name']}-0"
    domain = at(jobset, "spec.network.subdomain")
    assert at(jobset, "spec.network.enableDNSHostnames") is True
    pods = range(spec["completions"])
    return [f"{prefix}-{each}.{domain}:{port}" for each in pods]


def test_the_jobsets_workers_know_each_other() -> None:
    named = [each["name"] for each in container("gke/jobset.yaml")["env"]]
    # Kubernetes inserts only variables that are defined before.
    assert named.index("WORKER_INDEX") < named.index("TF_CONFIG")
    source = environment("gke/jobset.yaml")["TF_CONFIG"]
    workers = addresses("gke/jobset.yaml", 2222)
    for index in range(len(workers)):
        told = json.loads(source.replace("$(WORKER_INDEX)", str(index)))
        assert told == {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": index},
        }


def test_the_processes_of_jax_know_their_coordinator() -> None:
    told = environment("gke-jax/gpu.yaml")
    pods = addresses("gke-jax/gpu.yaml", 8476)
    assert told["JAX_COORDINATOR_ADDRESS"] == pods[0]
    assert told["JAX_NUM_PROCESSES"] == str(len(pods))
    [index] = [e for e in container("gke-jax/gpu.yaml")["env"] if "valueFrom" in e]
    assert index["name"] == "JAX_PROCESS_ID"
    field = at(index, "valueFrom.fieldRef.fieldPath")
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_a_slice_has_a_pod_for_each_host() -> None:
    topology = pod("gke-jax/tpu.yaml")["nodeSelector"][f"{GKE}-tpu-topology"]
    chips = int(container("gke-jax/tpu.yaml")["resources"]["limits"]["google.com/tpu"])
    pods = job("gke-jax/tpu.yaml")["spec"]["completions"]
    assert math.prod(map(int, topology.split("x"))) == chips * pods
    assert f"`{topology}` is the topology" in page("gke-jax")
    assert f"`google.com/tpu: {chips}`" in page("gke-jax")


def test_the_page_names_the_limits() -> None:
    backoff = at(load("gke/job.yaml"), "spec.backoffLimit")
    assert f"one of {backoff} retries (`backoffLimit`)" in page("gke")
    for file in JOBSETS:
        restarts = at(load(file), "spec.failurePolicy.maxRestarts")
        told = " ".join(page(recipe(file)).split())
        assert f"one of {restarts} restarts (`maxRestarts`)" in told


def answers(directory: Path) -> list[int]:
    """Returns the exit codes of the pods' probes for a directory."""
    found = []
    for name in ("readiness", "liveness"):
        words = container("gke-jax/gpu.yaml")[f"{name}Probe"]["exec"]["command"][1:]
        words = [w.replace("/srv/ckpt/train", str(directory)) for w in words]
        words = [w.replace("/tmp/", f"{directory}/") for w in words]
        found.append(CliRunner().invoke(main, words).exit_code)
    return found


@pytest.mark.multiprocess
def test_the_program_on_jax_resumes_after_a_preemption(tmp_path: Path) -> None:
    """Two processes with the environment of the pods, on CPUs; a pod's hook runs."""
    directory = tmp_path / "ckpt" / "train"
    source = text("gke-jax", "train.py")
    assert source.count('"/srv/ckpt/train"') == 1
    source = source.replace('"/srv/ckpt/train"', repr(str(directory)))
    assert set(environment("gke-jax/gpu.yaml")) > {"JAX_NUM_PROCESSES"}
    program = tmp_path / "train.py"
    notice = tmp_path / "preempted"
    more = {
        "TFPREEMPT_GRACE_PERIOD": environment("gke-jax/gpu.yaml")[
            "TFPREEMPT_GRACE_PERIOD"
        ],
        "TFPREEMPT_NOTICE_FILE": str(notice),
    }
    program.write_text(source.replace("10_000", "1_000_000"))
    with jax_processes(tmp_path, program=program, **more) as pods:
        wait_until(lambda: records(directory, "commit"), "the first commit")
        wait_until(lambda: answers(directory) == [0, 0], "the probes")
        notice.touch()
        ended(pods, 143, 143)
    assert answers(directory) == [1, 0]
    notice.unlink()
    step = records(directory, "commit")[-1]["step"]
    program.write_text(source.replace("10_000", str(step + 10)))
    with jax_processes(tmp_path, program=program, **more) as pods:
        ended(pods, 0, 0)
    starts = [each["step"] for each in records(directory, "restored")]
    assert starts == [0, 0, step, step]
    assert records(directory, "commit")[-1]["step"] == step + 10
