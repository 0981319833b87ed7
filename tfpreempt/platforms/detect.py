"""Which variant of TerminationConfig this machine wants, and why."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfpreempt.errors import ConfigurationError
from tfpreempt.platforms import probing
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
from tfpreempt.platforms.probing import Finding
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

# What starts a job again decides before what it runs on: its exit code must be right.
# A platform is there if one of its variables is set.
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
    """Where this program runs.

    Attributes:
        name: one of the names that TFPREEMPT_PLATFORM takes.
        variant: the TerminationConfig for it.
        evidence: what says so, for people.
        cloud: the cloud whose machine it is, as its files or its metadata server tell:
            "gce", "aws" or "azure"; None where they do not.
    """

    name: str
    variant: type[TerminationConfig]
    evidence: tuple[str, ...]
    cloud: str | None = None

    def termination_config(self, **options: Any) -> TerminationConfig:
        """The variant's config.

        Args:
            **options: the variant's own keyword arguments.

        Raises:
            ConfigurationError: one of them cannot work.
        """
        return self.variant(**options)


def detect_platform(
    *,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    probes: Mapping[str, probing.Probe] = probing.PROBES,
    limit_seconds: float = probing.LIMIT_SECONDS,
) -> Platform:
    """Finds out where this program runs.

    It reads variables and files first and asks metadata servers only where these leave
    something open, all at once and within `limit_seconds`. Where the files name a
    machine of no cloud, no server is asked, unless a variable such as GCE_METADATA_HOST
    holds the server's address. TFPREEMPT_PLATFORM overrides all of it. TensorFlow is
    neither imported nor started.

    Args:
        environment: the variables; by default the process's.
        root: the directory that holds `sys`.
        probes: asks the servers of clouds.
        limit_seconds: for all servers together.

    Returns:
        The platform; "generic" where nothing names another.

    Raises:
        ConfigurationError: TFPREEMPT_PLATFORM is set to an unknown name.
    """
    found = read_local(environment, root)
    if found.platform is not None:
        return found.platform
    return find_cloud(found, probes, limit_seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalFindings:
    """Variables and files of this machine, read without a request.

    Attributes:
        environment: the variables.
        machine: the machine's files.
        platform: the platform that a variable names; None where none does.
        to_ask: clouds whose metadata servers may know more.
    """

    environment: Mapping[str, str]
    machine: Finding
    platform: Platform | None
    to_ask: tuple[str, ...]


def read_local(
    environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> LocalFindings:
    """Reads the variables and files that name a platform; takes milliseconds.

    Args:
        environment: the variables; by default the process's.
        root: the directory that holds `sys`.

    Raises:
        ConfigurationError: TFPREEMPT_PLATFORM is set to an unknown name.
    """
    environment = os.environ if environment is None else environment
    machine = read_machine(root)
    if machine.cloud is not None and probing.is_excluded(machine.cloud, environment):
        machine = dataclasses.replace(machine, cloud=None, evidence=())
    addressed = tuple(
        cloud
        for cloud, variables in probing.ADDRESS_VARIABLES.items()
        if any(environment.get(each) for each in variables)
    )
    platform, to_ask = None, addressed
    if chosen := environment.get(VARIABLE, "").strip():
        if chosen not in VARIANTS:
            raise ConfigurationError(
                f"the environment variable {VARIABLE} is {chosen!r}; expected one of "
                f"{', '.join(sorted(VARIANTS))}. Unset it to have the platform detected"
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
            variant=VARIANTS[name],
            evidence=(evidence, *machine.evidence),
            cloud=machine.cloud,
        )
    elif not (addressed or machine.is_identified):
        to_ask = tuple(probing.PROBES)
    if machine.cloud == "gce" and not addressed:
        to_ask = ("gce",)  # for the kind of machine; of other clouds nothing is open
    if environment.get(VARIABLE):  # a chosen platform leaves nothing open
        machine, to_ask = Finding(), ()
    return LocalFindings(
        environment=environment, machine=machine, platform=platform, to_ask=to_ask
    )


def find_cloud(
    found: LocalFindings, probes: Mapping[str, probing.Probe], limit_seconds: float
) -> Platform:
    """Asks metadata servers where the machine's files leave something open.

    Args:
        found: variables and files, as read.
        probes: asks the servers of clouds.
        limit_seconds: for all servers together.

    Returns:
        The cloud's platform, whatever variables name; "generic" for no cloud.
    """
    machine = found.machine
    asked = {name: probes[name] for name in found.to_ask if name in probes}
    answer = probing.probe_all(asked, found.environment, limit_seconds)
    answer = answer or Finding(cloud=machine.cloud)
    name, evidence = answer.cloud, machine.evidence + answer.evidence
    if name is None:
        name = "generic"
        evidence = ("no variable, no file and no metadata server names a platform",)
        if machine.is_identified:
            evidence = (f"the files in /{_DMI} name no cloud",)
    elif name == "gce":
        kinds = answer.kinds | machine.kinds
        # Spot also with a GPU: it is preempted, not maintained.
        kind = next((each for each in ("tpu", "spot", "gpu") if each in kinds), "cpu")
        if kind == "gpu" and "gpu" in machine.kinds:
            evidence = (*evidence, "a PCI device is a GPU of NVIDIA")
        name = f"gce-{kind}"
    return Platform(
        name=name, variant=VARIANTS[name], evidence=evidence, cloud=answer.cloud
    )


def read_machine(root: Path = Path("/")) -> Finding:
    """Reads /sys; what can't be read is not there.

    Args:
        root: the directory that holds `sys`; tests pass their own.
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
    for cloud, name, says_so in checks:
        text = _read(root / _DMI / name)
        if says_so(text):
            evidence = (f"/{_DMI}/{name} is {text!r}",)
            return Finding(
                cloud=cloud, evidence=evidence, kinds=kinds, is_identified=True
            )
    is_identified = any(_read(root / _DMI / name) for _, name, _ in checks)
    return Finding(kinds=kinds, is_identified=is_identified)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
