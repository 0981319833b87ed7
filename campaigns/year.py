"""The preemptions of a year within minutes: two runs are preempted again and again.

The *disk* run uses `tfpreempt run`, one disk and a mirror, and JAX with an archive of
its compiled functions. The *machines* run is restarted by the campaign alone, each time
with an empty disk, and resumes from its mirror. After each preemption the campaign
measures leftovers and the cost of a start, and checks that `tfpreempt report` still
shows all preemptions.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from click.testing import CliRunner

from campaigns.campaign import Campaign, Facts, Trial
from campaigns.soak import Sample, held_by
from tests.multiprocess.harness import Place, Worker, Zygote, place, wait_until
from tests.multiprocess.supervised import Run, run
from tfpreempt.checkpoint.mirror.journal_mirror import MOST_SMALL
from tfpreempt.cli import main

STEPS = 30
"""Steps from a start until the process is measured and preempted: half a second."""
FOREVER = 1_000_000_000
KILLS = 0.2
"""Share of the preemptions without a notice."""
OPTIONS = ("--kill-after", "1", "--max-failures", "1000000", "--max-preemptions")
OPTIONS += ("1000000",)

# --- measurements --------------------------------------------------------------------

MOST: Mapping[str, tuple[float, float]] = {
    "files": (0, 4),
    "KiB": (0.1, 64),
    "RSS KiB": (0.05, 1024),
    "threads": (0, 3),
    "descriptors": (0, 3),
    "start ms": (0.5, 300),
    "report ms": (0, 1500),
    "journal files": (0, MOST_SMALL),
    "journal KiB": (0.5, 20),
}
"""Largest allowed growth from the first to the last quarter of the preemptions: a share
of the first value, plus a constant. For the journal, the growth for each preemption is
compared."""

ENOUGH = 40
"""Number of samples from which quarters are compared."""


def held_in(directory: Path, *left_out: str) -> Sample:
    """Returns the number and KiB of a directory's files, without some folders."""
    files, size = 0, 0
    for root, folders, names in os.walk(directory):
        if Path(root) == directory:
            folders[:] = [each for each in folders if each not in left_out]
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted by retention
                size += os.stat(os.path.join(root, name)).st_size
                files += 1
    return {"files": files, "KiB": size >> 10}


def held_by_journal(directory: Path) -> Sample:
    """Returns the number and KiB of a journal's files, see `held_in`."""
    found = held_in(directory)
    return {"journal files": found["files"], "journal KiB": found["KiB"]}


def median(samples: Sequence[Sample], unit: str) -> float:
    return statistics.median(each[unit] for each in samples)


def least(samples: Sequence[Sample], unit: str) -> float:
    return min(each[unit] for each in samples)


def check_bounded(what: str, taken: Sequence[Sample]) -> None:
    """Checks that the last quarter of the samples is not larger than the first."""
    quarter = len(taken) // 4
    if len(taken) < ENOUGH:
        return
    # The first samples do not count: caches fill, and retention has nothing to remove.
    first, last = taken[2 : 2 + quarter], taken[-quarter:]
    for unit in first[0]:
        # For times the minimum, because other work may slow down the machine.
        typical = least if unit.endswith("ms") else median
        if unit == "journal KiB":  # each preemption adds records
            typical = gain
        before, after = typical(first, unit), typical(last, unit)
        share, besides = MOST[unit]
        most = before * (1 + share) + besides
        assert after <= most, f"{what}: {after} {unit} after {before}, more than {most}"


def gain(samples: Sequence[Sample], unit: str) -> float:
    """Returns the mean difference between successive values."""
    return (samples[-1][unit] - samples[0][unit]) / (len(samples) - 1)


# --- the runs ------------------------------------------------------------------------


class Disk:
    """The supervised run, observed by the log of its worker.

    Args:
        made: the started run.
    """

    def __init__(self, made: Run) -> None:
        self._made = made
        self.directory = made.here.checkpoints
        self.mirror = made.here.path / "mirror"
        self.preemptions = 0
        self._log = made.here.path / "logs/worker-0.log"
        self._read = 0  # bytes of the log, up to the newest preemption
        self.wait(STEPS)

    def wait(self, steps: int) -> None:
        """Waits until the worker has restarted after the preemption, and made steps."""

        def has_gone_on() -> bool:
            if not self._log.exists():
                return False
            with self._log.open("rb") as file:
                file.seek(self._read)
                _, _, begun = file.read().partition(b"\nstarts ")
            return begun.count(b"\nstep ") >= steps

        try:
            wait_until(has_gone_on, f"{steps} steps")
        except AssertionError as error:
            story = self._made.supervisor.output[-3000:]
            raise AssertionError(f"{error}\n{story}") from None

    def preempt(self, number: signal.Signals) -> Sample:
        """Ends the worker, and measures its successor."""
        began, self._read = time.monotonic(), self._log.stat().st_size
        os.kill(self._made.pid(0), number)
        self.preemptions += 1
        self.wait(1)
        took = time.monotonic() - began
        self.wait(STEPS)
        return {"start ms": int(1000 * took)}

    def processes(self) -> dict[str, Sample]:
        """Returns the resources of the supervisor and of the worker."""
        return {
            "supervisor": renamed(held_by(self._made.supervisor.pid)),
            "worker": renamed(held_by(self._made.pid(0))),
        }


def renamed(sample: Sample) -> Sample:
    """Returns the sample of a process, with other names of the values."""
    return {{"KiB": "RSS KiB"}.get(unit, unit): value for unit, value in sample.items()}


class Machines:
    """The run that starts on an empty disk after each preemption.

    Args:
        here: directory of the run.
    """

    def __init__(self, here: Place) -> None:
        self._here = here
        self.mirror = here.path / "mirror"
        self.notices = 0
        """Number of notices. The mirrored journal lacks the seconds before a kill."""
        self._process = self._start()

    def _start(self) -> Worker:
        """Starts the program with an empty disk."""
        shutil.rmtree(self._here.checkpoints, ignore_errors=True)
        env = {"TFPREEMPT_MIRROR_DIR": str(self.mirror)}
        [process] = self._here.start("chain.py", FOREVER, env=env)
        return process

    def preempt(self, number: signal.Signals) -> Sample:
        """Ends the process; the next process resumes from the mirror."""
        before = self._process
        # The program waits for the first upload before the second note.
        [step], _ = (before.wait_line("noted", count) for count in (1, 2))
        before.send(number)
        wait_until(lambda: before.code is not None, "the end", say=before.output)
        began = time.monotonic()
        self._process = self._start()
        [restored] = self._process.wait_line("restored")
        took = time.monotonic() - began
        self.notices += number == signal.SIGTERM
        assert int(restored) >= int(step), f"{restored} after {step}\n{before.output}"
        return {"start ms": int(1000 * took)}


class Year:
    """Both runs, and their measured values.

    Args:
        disk: the run on one disk.
        machines: the run on many machines.
    """

    def __init__(self, disk: Disk, machines: Machines) -> None:
        self._disk, self._machines = disk, machines
        self._samples = defaultdict[str, list[Sample]](list)

    def trial(self, rng: random.Random) -> Facts:
        """Preempts each run once."""
        is_kill = rng.random() < KILLS
        number = signal.SIGKILL if is_kill else signal.SIGTERM
        starts = self._disk.preempt(number), self._machines.preempt(number)
        disk, machines = self._disk, self._machines
        local, of_disk, of_machines = (
            held_by_journal(each / name)
            for each, name in (
                (disk.directory, "journal"),
                (disk.mirror, "journals"),
                (machines.mirror, "journals"),
            )
        )
        now = {
            "disk: start": starts[0],
            "machines: start": starts[1],
            **{f"disk: {name}": each for name, each in disk.processes().items()},
            "disk: directory": held_in(disk.directory, "journal", "logs"),
            "disk: mirror": held_in(disk.mirror, "journals"),
            "machines: mirror": held_in(machines.mirror, "journals"),
            "disk: journal": local,
            "disk: journal in the mirror": of_disk,
            "machines: journal in the mirror": of_machines,
            "disk: report": report(str(disk.directory), disk.preemptions),
        }
        if machines.notices:
            where = f"file://{machines.mirror}"
            now["machines: report"] = report(where, machines.notices)
        more: Facts = {}
        for what, sample in now.items():
            taken = self._samples[what]
            taken.append(sample)
            check_bounded(what, taken)
            for unit, value in sample.items():
                more[f"{what}: {unit} more"] = value - taken[-2:][0][unit]
        return {"preemption": "kill" if is_kill else "notice", **more}


def report(location: str, preemptions: int) -> Sample:
    """Returns the time of `tfpreempt report`, which must show all preemptions."""
    began = time.process_time()
    done = CliRunner().invoke(main, ["report", location])
    took = time.process_time() - began
    assert done.exit_code == 0, done.output
    # A line below says how many of these are shown.
    found, *_ = re.findall(r"(\d+)\s+interruption", done.stdout)
    assert int(found) >= preemptions, f"{found} interruptions of {preemptions}"
    return {"report ms": int(1000 * took)}


@contextlib.contextmanager
def prepare() -> Iterator[Trial]:
    """Context manager: both runs train until the trials end."""
    with (
        contextlib.closing(Zygote("jax")) as zygote,
        place(zygote) as here,
        place(zygote) as other,
    ):
        mirror = ("--mirror-dir", f"file://{here.path}/mirror")
        program = ("jax_loop.py", f"steps={FOREVER}", "cached")
        with run(here, 1, *OPTIONS, *mirror, program=program) as made:
            yield Year(Disk(made), Machines(other)).trial


CAMPAIGN = Campaign(
    name="year",
    promise=(
        "Two runs are preempted 200 times, every few seconds: as often as a run of a "
        "year on Spot machines, with steps of 10 ms. One run is under `tfpreempt run` "
        "on one disk; the other run begins with an empty disk each time, and resumes "
        "from its mirror. Every fifth preemption is a kill. In the last quarter of the "
        "preemptions, compared with the first, the checkpoint directory and the mirror "
        "have no more files and bytes, the supervisor and a restarted worker have no "
        "more memory, threads and descriptors, and a start takes no longer; the table "
        "`MOST` in `campaigns/year.py` has the tolerances. "
        "`tfpreempt report` shows every preemption. The journal grows only by the "
        'lines of new events. (Among the sums, "more" is the last measurement minus '
        "the first.)"
    ),
    trials=200,
    short=6,
    mark="multiprocess",
    prepare=prepare,
    fixed=(
        "Each machine that began with an empty disk left journal files in the mirror "
        "for ever, and `tfpreempt report` made two requests for each of these files. "
        "Fixed "
        "(`handler/test_journal_mirror.py::test_small_files_of_many_machines_are_joined"
        "`, `handler/test_journal_mirror.py::test_a_crash_before_the_small_files_are_de"
        "leted_doubles_no_record`).",
    ),
    labels={"preemption": "kind"},
)
