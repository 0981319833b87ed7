"""detect_platform: variables, files and metadata servers in this order, and in time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms.config import GenericTerminationConfig, TerminationConfig
from tfpreempt.platforms.detect import VARIANTS, Platform, detect_platform
from tfpreempt.platforms.gce import GceSpotTerminationConfig
from tfpreempt.platforms.metadata_probe import DetectedMachine, Probe
from tfpreempt.testing.metadata import (
    FakeGce,
)

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def machine(root: Path, *, gpu: bool = False, **names: str) -> Path:
    """Returns a root directory whose firmware has these names."""
    dmi = root / "sys/class/dmi/id"
    dmi.mkdir(parents=True)
    for name, text in names.items():
        (dmi / name).write_text(f"{text}\n")
    devices = root / "sys/bus/pci/devices"
    for address, (vendor, kind) in {
        "0000:00:00.0": ("0x8086", "0x060000"),
        "0000:00:04.0": ("0x10de", "0x030200" if gpu else "0x040300"),
    }.items():
        (devices / address).mkdir(parents=True)
        (devices / address / "vendor").write_text(f"{vendor}\n")
        (devices / address / "class").write_text(f"{kind}\n")
    return root


def answers(cloud: str, *kinds: str) -> Probe:
    def probe(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
        evidence = (f"{cloud} answers",)
        return DetectedMachine(cloud=cloud, evidence=evidence, kinds=frozenset(kinds))

    return probe


def silent(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
    return None


def broken(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
    raise ConnectionRefusedError("nobody listens")


class NeverAsked:
    """A probe that no test here wants to be asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, environment: Mapping[str, str], limit: float) -> None:
        self.calls += 1


@pytest.fixture
def never_asked() -> Iterator[NeverAsked]:
    probe = NeverAsked()
    yield probe
    assert probe.calls == 0, "a metadata server was asked"


def detect(
    root: Path, environment: Mapping[str, str] | None = None, **probes: Probe
) -> Platform:
    # Enough for any fake; only a probe that hangs makes it wait so long.
    return detect_platform(
        environment=environment or {},
        root=root,
        probes={"gce": silent, "aws": silent, "azure": silent, **probes},
        limit_seconds=10.0,
    )


# --- variables -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("SLURM_JOB_ID", "slurm"),
        ("KUBERNETES_SERVICE_HOST", "kubernetes"),
        ("CLOUD_ML_PROJECT_ID", "vertex-ai"),
        ("TRAINING_JOB_ARN", "sagemaker"),
        ("TPU_WORKER_HOSTNAMES", "gce-tpu"),
    ],
)
def test_a_variable_names_the_platform(
    variable: str, name: str, tmp_path: Path, never_asked: NeverAsked
) -> None:
    asked = dict.fromkeys(("gce", "aws", "azure"), never_asked)
    found = detect(tmp_path, {variable: "something"}, **asked)
    assert found.name == name
    assert found.config_class is VARIANTS[name]
    assert found.evidence == (f"{variable} is set",)
    assert detect(tmp_path, {variable: ""}).name == "generic"


def test_the_scheduler_takes_precedence_over_the_machine(
    tmp_path: Path, never_asked: NeverAsked
) -> None:
    root = machine(tmp_path, product_name="Google Compute Engine")
    found = detect(root, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, gce=never_asked)
    assert (found.name, found.cloud) == ("kubernetes", "gce")
    assert found.evidence == (
        "KUBERNETES_SERVICE_HOST is set",
        "/sys/class/dmi/id/product_name is 'Google Compute Engine'",
    )
    both = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": "1"}
    assert detect(root, both).name == "slurm"


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_name_can_be_chosen(
    name: str, tmp_path: Path, never_asked: NeverAsked
) -> None:
    chosen = {"TFPREEMPT_PLATFORM": name, "SLURM_JOB_ID": "1"}
    found = detect(tmp_path, chosen, gce=never_asked)
    assert found.name == name
    assert f"TFPREEMPT_PLATFORM is '{name}'" in found.evidence
    config = found.termination_config(uncommitted_exit_code=75)
    assert isinstance(config, TerminationConfig)
    assert config._exit_code_for(committed=False) == 75


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(tmp_path, {"TFPREEMPT_PLATFORM": "gcp"})
    message = str(caught.value)
    assert "TFPREEMPT_PLATFORM is 'gcp'" in message
    for name in VARIANTS:
        assert name in message


def test_the_process_s_variables_are_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TFPREEMPT_PLATFORM", "gce-spot")
    found = detect_platform()
    assert found.config_class is GceSpotTerminationConfig
    assert found.termination_config(grace_period=20).grace_seconds == 20.0


# --- files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("product_name", "Google Compute Engine", "gce-cpu"),
        ("sys_vendor", "Amazon EC2", "aws"),
        ("bios_version", "4.11.amazon", "aws"),
        ("chassis_asset_tag", AZURE_TAG, "azure"),
        ("sys_vendor", "QEMU", "generic"),
        ("chassis_asset_tag", "7783-none", "generic"),
        ("product_name", "Not by Google", "generic"),
    ],
)
def test_firmware_names_the_cloud(
    file: str, text: str, name: str, tmp_path: Path
) -> None:
    found = detect(machine(tmp_path, **{file: text}))
    assert found.name == name
    assert (f"/sys/class/dmi/id/{file} is {text!r}" in found.evidence) is (
        name != "generic"
    )


def test_only_the_cloud_that_firmware_names_is_asked(
    tmp_path: Path, never_asked: NeverAsked
) -> None:
    root = machine(tmp_path, product_name="Google")
    found = detect(root, gce=answers("gce", "spot"), aws=never_asked, azure=never_asked)
    assert found.name == "gce-spot"
    other = machine(tmp_path / "other", sys_vendor="Amazon EC2")
    assert detect(other, gce=never_asked, aws=never_asked).name == "aws"


def test_a_gpu_changes_the_variant(tmp_path: Path) -> None:
    root = machine(tmp_path, gpu=True, product_name="Google Compute Engine")
    found = detect(root, gce=answers("gce"))
    assert found.name == "gce-gpu"
    assert "a PCI device is a GPU of NVIDIA" in found.evidence
    assert detect(root, gce=broken).name == "gce-gpu"
    assert detect(root, gce=answers("gce", "spot")).name == "gce-spot"
    assert detect(root, gce=answers("gce", "spot", "tpu")).name == "gce-tpu"


def test_no_gce_check(tmp_path: Path, never_asked: NeverAsked) -> None:
    root = machine(tmp_path, product_name="Google Compute Engine")
    found = detect(root, {"NO_GCE_CHECK": "true"}, gce=never_asked)
    assert (found.name, found.cloud) == ("generic", None)


# --- metadata servers ----------------------------------------------------------------


@pytest.mark.parametrize("cloud", ["gce", "aws", "azure"])
def test_a_server_names_the_cloud_if_no_file_does(cloud: str, tmp_path: Path) -> None:
    found = detect(tmp_path, **{cloud: answers(cloud)})
    assert found.name == {"gce": "gce-cpu"}.get(cloud, cloud)
    assert found.evidence == (f"{cloud} answers",)


def test_nothing_at_all(tmp_path: Path) -> None:
    found = detect(tmp_path, gce=broken)
    assert (found.name, found.config_class) == ("generic", GenericTerminationConfig)
    assert len(found.evidence) == 1


def test_one_that_hangs_does_not_hide_another(tmp_path: Path) -> None:
    end = threading.Event()

    def hangs(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
        end.wait(30)
        return None

    try:
        found = detect(tmp_path, gce=hangs, azure=answers("azure"))
        assert found.name == "azure"
        began = time.monotonic()
        found = detect_platform(
            environment={}, root=tmp_path, probes={"gce": hangs}, limit_seconds=0.05
        )
        assert time.monotonic() - began < 5.0
        assert found.name == "generic"
    finally:
        end.set()


def test_all_are_asked_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def meets(environment: Mapping[str, str], limit: float) -> DetectedMachine | None:
        together.wait(10)  # breaks if they come one after the other
        return answers("aws")(environment, limit)

    found = detect(tmp_path, gce=meets, aws=meets, azure=meets)
    assert found.name == "aws"


# --- the real probes on fakes --------------------------------------------------------


def probed(fake_environment: Mapping[str, str], root: Path) -> Platform:
    return detect_platform(environment=fake_environment, root=root, limit_seconds=10.0)


def test_gce_reports_the_kind_of_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, product_name="Google Compute Engine")
    with FakeGce() as fake:
        found = probed(fake.environment(), root)
        assert found.name == "gce-spot"
        assert f"{fake.url} answers as GCE's metadata server" in found.evidence
        fake.set("instance/scheduling/preemptible", "FALSE")
        assert probed(fake.environment(), root).name == "gce-gpu"  # an a2 machine
        fake.set("instance/machine-type", "projects/1/machineTypes/n2-standard-8")
        assert probed(fake.environment(), root).name == "gce-cpu"
        fake.set("instance/attributes/accelerator-type", "v5litepod-16")
        assert probed(fake.environment(), root).name == "gce-tpu"


@pytest.mark.slow  # starts a process
def test_detection_leaves_tensorflow_and_requests_alone() -> None:
    code = (
        "import sys; from tfpreempt.platforms.detect import detect_platform; "
        "detect_platform(environment={'TFPREEMPT_PLATFORM': 'gce-spot'}); "
        "slow = {'tensorflow', 'keras', 'requests'}; "
        "sys.exit(sorted(slow & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
