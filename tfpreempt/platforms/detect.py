"""Detects the platform by environment variables, files and metadata servers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms import metadata_probe
from tfpreempt.platforms.aws import AwsSpotTerminationConfig
from tfpreempt.platforms.azure import AzureTerminationConfig
from tfpreempt.platforms.borg import BorgTpuTerminationConfig
from tfpreempt.platforms.config import (
    BorgTerminationConfig,
    GenericTerminationConfig,
    TerminationConfig,
)
from tfpreempt.platforms.gce import (
    GceCpuTerminationConfig,
    GceGpuTerminationConfig,
    GceSpotTerminationConfig,
    GceTpuTerminationConfig,
)
from tfpreempt.platforms.kubernetes import KubernetesTerminationConfig
from tfpreempt.platforms.metadata_probe import DetectedMachine
from tfpreempt.platforms.slurm import SlurmTerminationConfig

VARIABLE = "TFPREEMPT_PLATFORM"

VARIANTS: Mapping[str, type[TerminationConfig]] = {
    "generic": GenericTerminationConfig,
    "slurm": SlurmTerminationConfig,
    "kubernetes": KubernetesTerminationConfig,
    "gce-cpu": GceCpuTerminationConfig,
    "gce-gpu": GceGpuTerminationConfig,
    "gce-spot": GceSpotTerminationConfig,
    "gce-tpu": GceTpuTerminationConfig,
    "aws": AwsSpotTerminationConfig,
    "azure": AzureTerminationConfig,
    "vertex-ai": GenericTerminationConfig,
    "sagemaker": GenericTerminationConfig,
    "borg": BorgTerminationConfig,
    "borg-tpu": BorgTpuTerminationConfig,
}

# A platform is detected if one of its variables is set; earlier rows take precedence. A
# scheduler takes precedence over the machine's cloud, because the scheduler restarts
# the job, and decides by the exit code.
_BY_VARIABLE: Mapping[str, tuple[str, ...]] = {
    "slurm": ("SLURM_JOB_ID",),
    "vertex-ai": ("CLOUD_ML_PROJECT_ID", "CLOUD_ML_JOB_ID"),
    "sagemaker": ("TRAINING_JOB_ARN", "SM_TRAINING_ENV"),
    "kubernetes": ("KUBERNETES_SERVICE_HOST",),
    "gce-tpu": ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"),
}


_DMI = Path("sys/class/dmi/id")
_PCI = Path("sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # display and 3D controllers
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The detected platform.

    Attributes:
        name: name of the platform; a value that TFPREEMPT_PLATFORM accepts.
        config_class: the TerminationConfig class of the platform.
        evidence: facts that led to the result, as texts for messages.
        cloud: cloud of the machine, as shown by files or the metadata server: "gce",
            "aws" or "azure"; None if unknown.
    """

    name: str
    config_class: type[TerminationConfig]
    evidence: tuple[str, ...]
    cloud: str | None = None

    def termination_config(self, **options: Any) -> TerminationConfig:
        """Returns a new TerminationConfig for the platform.

        Args:
            **options: keyword arguments of `config_class`.

        Raises:
            ConfigurationError: an argument is invalid.
        """
        return self.config_class(**options)


def detect_platform(
    *,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    probes: Mapping[str, metadata_probe.Probe] = metadata_probe.PROBES,
    limit_seconds: float = metadata_probe.LIMIT_SECONDS,
) -> Platform:
    """Detects the platform on which this program runs.

    The function first reads environment variables and files. If these do not show the
    platform, the function contacts the metadata servers in parallel. If the files show
    that the machine is in no known cloud, the function contacts only servers whose
    address is in a variable such as GCE_METADATA_HOST. TFPREEMPT_PLATFORM overrides the
    detection. TensorFlow is not imported.

    Args:
        environment: environment variables; by default os.environ.
        root: directory that contains `sys`; for tests.
        probes: for every cloud, the function that contacts its metadata server.
        limit_seconds: timeout for all servers together.

    Returns:
        The platform; "generic" if nothing was detected.

    Raises:
        ConfigurationError: TFPREEMPT_PLATFORM is set to an unknown name.
    """
    found = read_local(environment, root)
    if found.platform is not None:
        return found.platform
    return find_cloud(found, probes, limit_seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalFindings:
    """The result of reading the environment variables and the files of this machine.

    Attributes:
        environment: the environment variables.
        machine: facts from the files.
        platform: platform shown by an environment variable; None if no variable shows a
            platform.
        to_ask: clouds whose metadata servers should be contacted.
    """

    environment: Mapping[str, str]
    machine: DetectedMachine
    platform: Platform | None
    to_ask: tuple[str, ...]


def read_local(
    environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> LocalFindings:
    """Reads the variables and files that show the platform; takes milliseconds.

    Args:
        environment: environment variables; by default os.environ.
        root: directory that contains `sys`; for tests.

    Raises:
        ConfigurationError: TFPREEMPT_PLATFORM is set to an unknown name.
    """
    environment = os.environ if environment is None else environment
    machine = read_machine(root)
    if machine.cloud is not None and metadata_probe.is_excluded(
        machine.cloud, environment
    ):
        machine = dataclasses.replace(machine, cloud=None, evidence=())
    addressed = tuple(
        cloud
        for cloud, variables in metadata_probe.ADDRESS_VARIABLES.items()
        if any(environment.get(each) for each in variables)
    )
    platform, to_ask = None, addressed
    if chosen := environment.get(VARIABLE, "").strip():
        if chosen not in VARIANTS:
            raise ConfigurationError(
                f"the environment variable {VARIABLE} is {chosen!r}; expected one of "
                f"{', '.join(sorted(VARIANTS))}. Unset the variable to "
                "detect the platform"
            )
        named = [(chosen, f"{VARIABLE} is {chosen!r}")]
    else:
        named = [
            (name, f"{variable} is set")
            for name, variables in _BY_VARIABLE.items()
            for variable in variables
            if environment.get(variable)
        ]
    if named:
        name, evidence = named[0]
        platform = Platform(
            name=name,
            config_class=VARIANTS[name],
            evidence=(evidence, *machine.evidence),
            cloud=machine.cloud,
        )
    elif not (addressed or machine.is_identified):
        to_ask = tuple(metadata_probe.PROBES)
    if machine.cloud == "gce" and not addressed:
        to_ask = ("gce",)  # contact only GCE's server, for the kind of machine
    # The user has chosen the platform, so no server is needed.
    if environment.get(VARIABLE):
        machine, to_ask = DetectedMachine(), ()
    return LocalFindings(
        environment=environment, machine=machine, platform=platform, to_ask=to_ask
    )


def find_cloud(
    found: LocalFindings,
    probes: Mapping[str, metadata_probe.Probe],
    limit_seconds: float,
) -> Platform:
    """Contacts the metadata servers in `found.to_ask`, to find the machine's cloud.

    Args:
        found: result of `read_local`.
        probes: for every cloud, the function that contacts its metadata server.
        limit_seconds: timeout for all servers together.

    Returns:
        The platform of the cloud, even if a variable shows a scheduler; "generic" if
        no cloud was found.
    """
    machine = found.machine
    asked = {name: probes[name] for name in found.to_ask if name in probes}
    answer = metadata_probe.probe_all(asked, found.environment, limit_seconds)
    answer = answer or DetectedMachine(cloud=machine.cloud)
    name, evidence = answer.cloud, machine.evidence + answer.evidence
    if name is None:
        name = "generic"
        evidence = ("no variable, no file and no metadata server names a platform",)
        if machine.is_identified:
            evidence = (f"the files in /{_DMI} name no cloud",)
    elif name == "gce":
        kinds = answer.kinds | machine.kinds
        # A Spot VM with a GPU counts as "spot": at a maintenance the VM is preempted,
        # with the short notice of Spot VMs. Other GPU VMs get a notice one hour ahead.
        kind = next((each for each in ("tpu", "spot", "gpu") if each in kinds), "cpu")
        if kind == "gpu" and "gpu" in machine.kinds:
            evidence = (*evidence, "a PCI device is a GPU of NVIDIA")
        name = f"gce-{kind}"
    return Platform(
        name=name, config_class=VARIANTS[name], evidence=evidence, cloud=answer.cloud
    )


def read_machine(root: Path = Path("/")) -> DetectedMachine:
    """Reads files in /sys that show the cloud and the GPUs; skips unreadable files.

    Args:
        root: directory that contains `sys`; for tests.
    """
    checks = (
        ("gce", "product_name", lambda text: text.startswith("Google")),
        ("aws", "sys_vendor", lambda text: text == "Amazon EC2"),
        ("aws", "bios_version", lambda text: "amazon" in text.lower()),
        ("azure", "chassis_asset_tag", lambda text: text == _AZURE_ASSET_TAG),
    )
    has_gpu = any(
        _read(vendor) == _NVIDIA
        and _read(vendor.with_name("class")).startswith(_DISPLAY_CLASSES)
        for vendor in (root / _PCI).glob("*/vendor")
    )
    kinds = frozenset({"gpu"} if has_gpu else ())
    for cloud, name, matches in checks:
        text = _read(root / _DMI / name)
        if matches(text):
            evidence = (f"/{_DMI}/{name} is {text!r}",)
            return DetectedMachine(
                cloud=cloud, evidence=evidence, kinds=kinds, is_identified=True
            )
    is_identified = any(_read(root / _DMI / name) for _, name, _ in checks)
    return DetectedMachine(kinds=kinds, is_identified=is_identified)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
