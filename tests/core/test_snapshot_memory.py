"""The available memory of this machine and of its control groups."""

from __future__ import annotations

from pathlib import Path

from tfpreempt.core.snapshot_memory import available_bytes

GIB = 1 << 30


def test_a_control_group_leaves_less_than_the_machine(tmp_path: Path) -> None:
    root = make_machine(tmp_path, group="/pod/container")
    group = root / "sys/fs/cgroup/pod"
    (group / "container").mkdir(parents=True)
    assert available_bytes(root) == 8 * GIB
    (group / "container/memory.max").write_text("max\n")
    assert available_bytes(root) == 8 * GIB
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {GIB}\n")
    assert available_bytes(root) == 2 * GIB


def test_so_does_one_of_the_older_kind(tmp_path: Path) -> None:
    root = make_machine(tmp_path, group="/")
    groups = "9:cpu,cpuacct:/pod\n4:memory:/pod/container\n0::/\n"
    (root / "proc/self/cgroup").write_text(groups)
    group = root / "sys/fs/cgroup/memory/pod"
    (group / "container").mkdir(parents=True)
    assert available_bytes(root) == 8 * GIB
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    assert available_bytes(root) == 2 * GIB


def make_machine(root: Path, group: str) -> Path:
    """Makes a machine with 8 GiB of available memory."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    (root / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable:  8388608 kB\n")
    return root


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 0
