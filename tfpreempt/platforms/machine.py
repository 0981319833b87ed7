"""What the machine itself says, without a network: firmware names, PCI devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

_DMI = Path("sys/class/dmi/id")
_PCI = Path("sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # display and 3D controllers
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where this program runs, as far as files tell.

    Attributes:
        cloud: "gce", "aws", "azure", or None where no file names one of them.
        evidence: what named it, for people.
        has_gpu: whether a PCI device is a GPU of NVIDIA.
    """

    cloud: str | None
    evidence: tuple[str, ...]
    has_gpu: bool


def read_machine(root: Path = Path("/")) -> Machine:
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
    has_gpu = _has_gpu(root / _PCI)
    for cloud, name, says_so in checks:
        text = _read(root / _DMI / name)
        if says_so(text):
            evidence = (f"/{_DMI}/{name} is {text!r}",)
            return Machine(cloud=cloud, evidence=evidence, has_gpu=has_gpu)
    return Machine(cloud=None, evidence=(), has_gpu=has_gpu)


def _has_gpu(devices: Path) -> bool:
    try:
        found = sorted(devices.iterdir())
    except OSError:
        return False
    return any(
        _read(device / "vendor") == _NVIDIA
        and _read(device / "class").startswith(_DISPLAY_CLASSES)
        for device in found
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
