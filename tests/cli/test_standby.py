"""Where there can be a standby: which commands, and how much memory."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tfpreempt.cli.run.become import is_read_at_import, open_device
from tfpreempt.cli.run.standby import (
    Standbys,
    UnsuitableError,
    check_memory,
    interpreter_words,
)
from tfpreempt.core.memory import available_bytes

GIB = 1 << 30


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "train.pyc").write_text("")
    (tmp_path / "package").mkdir()
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("__main__.py", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py", 1),
        ("/usr/bin/python3.11 train.py -c x", 1),
        ("python -u train.py", 2),
        ("python -u -W error -Xfaulthandler -Wd -X dev train.py -u", 8),
        ("python -OOu -m package.train", 2),
        ("python -I train.py", 2),
        ("python -m package --help", 1),
    ],
)
def test_what_runs_python_is_split_at_its_program(command: str, words: int) -> None:
    assert interpreter_words(command.split()) == words


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh train.sh", "'sh' is no Python interpreter"),
        ("torchrun train.py", "'torchrun' is no Python interpreter"),
        ("python", "names no program"),
        ("python -u", "names no program"),
        ("python -W", "names no program"),
        ("python -m", "'-m' stands before"),
        ("python -mpackage", "'-mpackage' stands before"),
        ("python -c pass", "'-c' stands before"),
        ("python -i train.py", "'-i' stands before"),
        ("python -x train.py", "'-x' stands before"),
        ("python - train.py", "'-' stands before"),
        ("python --check-hash-based-pycs always train.py", "'--check-hash-based-pycs'"),
        ("python missing.py", "'missing.py' is no file"),
        ("python package", "'package' is no file"),
        ("python train.zip", "'train.zip' is no file"),
        ("python train.pyc", "'train.pyc' is compiled"),
    ],
)
def test_what_could_not_be_repeated_is_refused(command: str, why: str) -> None:
    with pytest.raises(UnsuitableError, match=why):
        interpreter_words(command.split())


def test_twice_the_memory_of_the_workers_is_asked_for() -> None:
    check_memory([GIB, GIB], available=4 * GIB)
    with pytest.raises(UnsuitableError) as raised:
        check_memory([GIB, GIB], available=4 * GIB - 1)
    assert str(raised.value) == (
        "4 GiB of memory are available, and 4 GiB are asked for: twice what 2 "
        "worker(s) take, 2 GiB each at most"
    )


class LargeFleet:
    """A thousand workers that take more than any machine has."""

    running = tuple(range(1000))

    def memory(self, worker: int) -> int:
        return 1 << 50


class Told:
    """What a reporter was told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def no_standby(self, why: str) -> None:
        self.reasons.append(why)


def test_where_memory_is_short_none_is_started_until_the_next_start() -> None:
    options: Any = SimpleNamespace(
        command=("python", "train.py"), standby_after=5.0, standby_imports=("heavy",)
    )
    fleet, told = LargeFleet(), Told()
    standbys = Standbys(options, cast(Any, fleet), range(1000), cast(Any, told))
    for start, count in ((100.0, 1), (200.0, 2)):
        standbys.begin(start, [{}] * 1000)
        assert standbys.next_look(start + 2) == 3
        standbys.attend(start + 4.9, fleet.running)
        assert len(told.reasons) == count - 1
        standbys.attend(start + 5, fleet.running)
        assert len(told.reasons) == count
        assert standbys.next_look(start + 6) is None
    assert "of memory are available, and 3.91 TiB are asked for" in told.reasons[0]
    assert standbys.take(0, {}) is None


def test_none_is_started_once_a_worker_has_ended() -> None:
    options: Any = SimpleNamespace(command=("python", "train.py"), standby_after=5.0)
    told = Told()
    standbys = Standbys(options, cast(Any, LargeFleet()), (1, 2), cast(Any, told))
    standbys.begin(100.0, [{}, {}])
    standbys.attend(106.0, [1])
    assert told.reasons == []
    assert standbys.next_look(107.0) is None


def test_a_large_worker_has_no_larger_standby() -> None:
    check_memory([64 * GIB], available=4 * GIB)


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
    """With 8 GiB to be had."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    (root / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable:  8388608 kB\n")
    return root


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 0


def test_a_device_that_is_open_is_seen() -> None:
    assert open_device(("/dev/full", "/dev/zero")) is None
    with open("/dev/full", "rb"):
        assert open_device(("/dev/full", "/dev/zero")) == "/dev/full"


def test_variables_that_imports_read() -> None:
    read = ["TF_ENABLE_ONEDNN_OPTS", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES"]
    assert all(map(is_read_at_import, [*read, "KERAS_BACKEND", "OMP_NUM_THREADS"]))
    assert not any(map(is_read_at_import, ["TF_CONFIG", "TFPREEMPT_CHECKPOINT_DIR"]))
