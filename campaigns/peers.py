"""One of two or three workers crashes, freezes or is disconnected, in any phase.

The worker stays in the phase (see programs/peer.py) until the fault is injected. So
there is no race: a message that the other workers have not received before the fault is
never received.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from campaigns.campaign import Campaign, Facts, Trial
from tests.multiprocess.harness import (
    RESTART,
    Cluster,
    Place,
    Worker,
    Zygote,
    place,
    records,
    wait_until,
)

ALL = "of all"
CHIEF = "of the chief"
OTHERS = "of the others"

UNTOLD = {
    "start": ALL,
    "restore": ALL,
    "periodic save": ALL,
    "periodic done": OTHERS,
    "periodic marker": CHIEF,
    "periodic commit": CHIEF,
    "step": ALL,
    "final count": ALL,
    "after final count": ALL,
    "finished": CHIEF,
    "final done": OTHERS,
    "final marker": CHIEF,
    "final commit": CHIEF,
}
"""Phases of a run without a notice, in order, and the workers that have the phase."""

BEFORE_FINISHED = ("final count", "after final count", "finished")
"""All workers have trained the last step, and wait in close() for each other."""

IN_THE_FINAL_SAVE = ("final done", "final marker", "final commit")
"""All workers have finished, and wait until the chief has committed the end."""

TOLD = {
    "notice": ALL,
    "count": ALL,
    "decision": CHIEF,
    "after decision": CHIEF,
    "step": ALL,
    "save": ALL,
    "share": ALL,
    "done": OTHERS,
    "after done": OTHERS,
    "marker": CHIEF,
    "commit": CHIEF,
    "after commit": CHIEF,
    "bye": OTHERS,
    "exit": ALL,
}
"""Phases of a run with a notice, in order."""

WITHIN_THE_STEP = ("notice", "count", "decision", "after decision")
"""Phases in which all workers are in the step during which the notice came."""

WORDS = ("start", "step", "agreement", "save", "final save", "exit")
"""Names of phases in the message of a worker that misses another worker."""

PASSING = ("stopped for 5 s", "slow by 10 s")
FAULTS = ("killed", "stopped for good", "cut off", "no memory", "hangs", *PASSING)
SILENT = ("stopped for good", "cut off")
NAMELESS = ("no memory", "hangs")
"""Faults of a worker that may still answer. Only a deadline detects such a worker."""

GRACES = (None, None, 20)
PAUSE = 2.5
"""Seconds of a step, in runs that train until the grace period is almost over."""
LIMIT = 30.0
"""Seconds in which the other workers end, unless the grace period is longer."""
BUSY = 10.0
"""Additional seconds on a busy machine, and for the end of TensorFlow."""
LATE = 2.0
"""Additional seconds after a known grace period, which ends with the machine."""

LEFT_OUT = "has no part of worker"
"""Text of a restart about a commit without the part of a worker."""

SAVED_AT = 4
OPTIONS = (f"--save-freq={SAVED_AT}", "--shares")

WORDS_ON_JAX = ("whole", "asynchronous")
"""Words for programs on JAX, each with probability 1/2; see programs/jax_model.py."""
ABORTED = -signal.SIGABRT

networks = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault, the worker that has the fault, and its phase.

    Attributes:
        fault: name in FAULTS.
        phase: name in TOLD or UNTOLD.
        victim: the worker that has the fault.
        world: number of workers.
        told: worker that receives the notice; None: no notice.
        grace: grace period of the notice in seconds; None: unknown.
        is_async: whether training continues while a periodic save is written.
        framework: framework of the workers.
        words: more words of the strategy, on JAX.
    """

    fault: str
    phase: str
    victim: int
    world: int
    told: int | None
    grace: int | None
    is_async: bool
    framework: str = "tensorflow"
    words: tuple[str, ...] = ()

    @property
    def saves(self) -> list[str]:
        """Options of every run."""
        words = ["mwms", *self.words]
        if self.framework == "jax" and self.needs_heartbeats:
            words.append("heartbeats")  # only heartbeats end a collective
        saves = [] if self.is_async else ["--sync-saves"]
        return [f"--strategy={','.join(words)}", *saves]

    @property
    def is_silent(self) -> bool:
        """Whether the victim still exists, but sends no message."""
        return self.fault in SILENT

    @property
    def needs_heartbeats(self) -> bool:
        """Whether the other workers may learn only by heartbeats that the victim has
        ended: a victim that hangs before the others know of its notice ends at its
        deadline, and the others may have trained their last step before."""
        is_unknown = (self.fault, self.phase) == ("hangs", "notice")
        return self.told is None or self.is_silent or is_unknown

    @property
    def options(self) -> list[str]:
        """Options of the run with the fault."""
        if self.grace is None:
            return self.saves
        return [*self.saves, f"--grace={self.grace}", f"--pause={PAUSE}"]

    def limit(self, worker: int, fault: float, notice: float) -> tuple[float, float]:
        """Returns the latest end of a worker, and a margin for a busy machine.

        Args:
            worker: a surviving worker.
            fault: time of the fault, in wall seconds.
            notice: time of the notice, in wall seconds; 0 without a notice.
        """
        has_heard = self.phase != "notice" or worker == self.victim
        is_stopped = self.fault == "stopped for 5 s" and worker == self.victim
        if self.grace is not None and has_heard and not is_stopped:
            return notice + self.grace, LATE
        if self.grace is not None and self.fault in NAMELESS:
            # Only the deadline ends the victim, and so lets the other workers' step
            # fail.
            return notice + self.grace + LIMIT, BUSY
        if self.fault not in PASSING:
            return fault + LIMIT, BUSY
        return fault + 2 * LIMIT, BUSY  # training continues to its end

    def codes(self, worker: int) -> set[int]:
        """Returns the allowed exit codes of a surviving worker."""
        is_aborted = self.victim == 0 or self.needs_heartbeats
        if self.framework == "jax" and is_aborted and self.fault not in PASSING:
            return {*self._codes(worker), ABORTED}
        return self._codes(worker)

    def _codes(self, worker: int) -> set[int]:
        """Returns the allowed exit codes, without the code of an aborted process."""
        if self.fault in PASSING:
            return {0 if self.told is None else RESTART}
        if self.told is None and self.phase in IN_THE_FINAL_SAVE:
            return {RESTART}  # all finish, or all restart
        if self.told is None and self.phase in BEFORE_FINISHED:
            # Without the chief the store is lost. Without another worker all restart,
            # with the final state, unless that state needs a part of the lost worker.
            has_lost_the_store = (self.victim == 0) != (worker == self.victim)
            return {RESTART} if has_lost_the_store else {RESTART, 1}
        if self.told is None:
            return {1}
        if self.phase == "notice" and worker != self.victim:
            return {1, RESTART}  # only the victim had the notice
        if self.fault == "no memory":
            return {1, RESTART}  # all workers raise the victim's error
        return {RESTART}


def draw(rng: random.Random, framework: str) -> Case:
    """Returns a random case."""
    is_told = rng.random() < 0.8
    phases = TOLD if is_told else UNTOLD
    has_shares = framework != "jax"  # on JAX no worker writes a part for another worker
    phase = rng.choice([each for each in phases if has_shares or each != "share"])
    world = rng.choice((2, 2, 3))
    others = rng.randrange(1, world)
    victim = {CHIEF: 0, OTHERS: others, ALL: rng.choice((0, others))}[phases[phase]]
    told = victim if phase == "notice" else rng.randrange(world)
    faults = [each for each in FAULTS if has_limit(each, phase, victim, is_told)]
    fault = rng.choice(faults)
    graces = GRACES[-1:] if fault in NAMELESS else GRACES
    words = WORDS_ON_JAX if framework == "jax" else ()
    return Case(
        fault=fault,
        phase=phase,
        victim=victim,
        world=world,
        told=told if is_told else None,
        grace=rng.choice(graces) if is_told else None,
        is_async=rng.random() < 0.3,
        framework=framework,
        words=tuple(word for word in words if rng.random() < 0.5),
    )


def has_limit(fault: str, phase: str, victim: int, is_told: bool) -> bool:
    """Returns whether the other workers end soon, without an operator."""
    if fault in NAMELESS:
        return is_told  # the deadline ends the victim
    return not (phase == "start" and victim == 0 and fault in SILENT)


@functools.cache
def has_networks() -> bool:
    """Returns whether each process can have a separate network on this machine."""
    tried = "unshare --net ip link add to0 type veth peer name to1"
    return subprocess.run(tried, shell=True, capture_output=True).returncode == 0


class Run:
    """A cluster and its fault.

    Args:
        here: directory of the run.
        case: the fault, its worker and its phase.
    """

    def __init__(self, here: Place, case: Case) -> None:
        self._here = here
        self._case = case
        self._network = Network(case.world) if case.fault == "cut off" else None
        plan = {"worker": case.victim, "phase": case.phase}
        self.cluster = start(
            here, case.world, *case.options, plan=plan, network=self._network
        )
        self._victim = self.cluster[case.victim]
        self._noticed = 0.0

    def come_to_the_phase(self) -> None:
        """Waits until the victim is in its phase; the other workers continue."""
        case, here, cluster = self._case, self._here, self.cluster
        if case.told is not None:
            for worker in cluster:
                worker.wait_line("holding notice")
            self._noticed = cluster[case.told].send(signal.SIGTERM)
            if case.phase not in WITHIN_THE_STEP:
                for index in range(case.world):
                    cluster.wait_record("decision", worker=index)
                here.release("notice")
        self._victim.wait_line("holding peer")

    def make_the_fault(self) -> float:
        """Injects the fault; returns the time of the fault, in wall seconds."""
        case, victim, now = self._case, self._victim, time.time()
        match case.fault:
            case "killed":
                victim.send(signal.SIGKILL)
                wait_until(lambda: victim.code is not None, "it is gone")
            case "stopped for good":
                victim.send(signal.SIGSTOP)
            case "stopped for 5 s":
                victim.send(signal.SIGSTOP)
                time.sleep(5)
                victim.send(signal.SIGCONT)
            case "slow by 10 s":
                if case.phase in WITHIN_THE_STEP:
                    self._here.release("notice")
                time.sleep(10)
            case "no memory":
                has_now = memory_of(victim)
                resource.prlimit(victim.pid, resource.RLIMIT_AS, (has_now, has_now))
            case "cut off":
                assert self._network is not None
                self._network.cut_off(self.cluster, case.victim)
            case "hangs":
                pass  # the victim is already blocked
        if case.fault != "slow by 10 s" and case.phase in WITHIN_THE_STEP:
            self._here.release("notice")
        if case.fault != "hangs":
            self._here.release("peer")
        return now

    def judge(self, began: float) -> dict[str, Any]:
        """Checks that each surviving worker ends in time, with the right code and
        message.

        Returns:
            Outcomes, and seconds since the fault.
        """
        case, cluster = self._case, self.cluster
        is_cut_off_early = case.fault == "cut off" and case.phase == "start"
        may_live_on = case.fault in (*PASSING, "cut off", "hangs")
        lives_on = may_live_on and not is_cut_off_early
        judged = {
            index: worker
            for index, worker in enumerate(cluster)
            if lives_on or index != case.victim
        }
        limits = {i: case.limit(i, began, self._noticed) for i in judged}
        last = max(sum(limit) for limit in limits.values())
        waited_for = Cluster(list(judged.values()), cluster.checkpoints)
        waited_for.wait(last - time.time() + 1.0)
        ends = {index: worker.ended_at for index, worker in judged.items()}
        for index, worker in judged.items():
            by, more = limits[index]
            assert ends[index] < by + more, (
                f"worker {index} ended {ends[index] - by:.1f} s late\n{cluster.story()}"
            )
            assert worker.code in case.codes(index), (
                f"worker {index} ended with {worker.code}\n{cluster.story()}"
            )
        outcomes = {
            int(record["worker"]): str(record["outcome"])
            for record in records(cluster.checkpoints, "exit")
            if record["worker"] in judged
        }
        if case.fault in PASSING and case.told is not None:
            assert set(outcomes.values()) == {"committed"}, cluster.story()
        for index, worker in judged.items():
            if case.fault in NAMELESS or case.framework == "jax":
                continue  # the victim cannot be named, as in collectives of JAX
            if worker.code == 1 or outcomes.get(index) == "lost":
                self._check_told(index, worker)
        return {
            "seconds": max(ends.values()) - began,
            "outcomes": outcomes,
            "is busy": any(ends[index] > limits[index][0] for index in judged),
        }

    def _check_told(self, index: int, worker: Worker) -> None:
        """Checks that a message names the missing worker and the phase."""
        case = self._case
        gone = [case.victim]
        if index == case.victim:  # cut off: the victim misses all others
            gone = [j for j in range(case.world) if j != index]
        whom = "|".join(map(str, gone))
        line = rf"workers? ([\d, ]*, )?({whom})\b.*\bin (the |a )?({'|'.join(WORDS)})"
        assert re.search(line, worker.output), (
            f"worker {index} does not say that {gone} is gone, and when\n"
            f"{self.cluster.story()}"
        )

    def end(self) -> None:
        """Kills the remaining workers, as a platform does."""
        for worker in self.cluster:
            if worker.code is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.send(signal.SIGKILL)
        self.cluster.wait()


def start(
    here: Place,
    world: int,
    *options: str,
    plan: dict[str, Any] | None = None,
    network: Network | None = None,
) -> Cluster:
    """Starts train.py; a worker stays in a phase if there is a plan."""
    env = {"PEER_AT": json.dumps(plan)}
    if network is not None:
        here.hold("network")
        env["PEER_NETWORK"] = network.prefix
    cluster = here.start("peer.py", *OPTIONS, *options, world=world, env=env)
    if network is not None:
        for worker in cluster:
            worker.wait_line("holding network")
        network.connect(cluster)
        here.release("network")
    return cluster


def memory_of(worker: Worker) -> int:
    """Returns the size of the address space of a worker, in bytes."""
    with open(f"/proc/{worker.pid}/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


class Network:
    """A virtual wire between each two workers, which have separate network namespaces.

    The wires disappear with the processes.

    Args:
        world: number of workers.
    """

    NOBODY = "02:00:00:00:00:01"

    def __init__(self, world: int) -> None:
        self.prefix = f"10.77.{next(networks) % 256}."
        self._world = world

    def connect(self, cluster: Cluster) -> None:
        for i, j in itertools.combinations(range(self._world), 2):
            ends = [f"to{j}", "netns", cluster[i].pid]
            ends += ["type", "veth", "peer", "name", f"to{i}", "netns", cluster[j].pid]
            execute("ip", "link", "add", *ends)
        for i, worker in enumerate(cluster):
            lines = ["link set lo up", f"address add {self.prefix}{i}/32 dev lo"]
            for j in self._others(i):
                there = f"{self.prefix}{i} peer {self.prefix}{j}"
                lines += [f"address add {there} dev to{j}", f"link set to{j} up"]
            self._do(worker, lines)

    def cut_off(self, cluster: Cluster, victim: int) -> None:
        """Drops all packets from and to the victim; senders see no error."""
        for i, worker in enumerate(cluster):
            lost = self._others(victim) if i == victim else [victim]
            entries = [f"{self.prefix}{j} dev to{j}" for j in lost if j != i]
            nobody = f"lladdr {self.NOBODY} nud permanent"
            self._do(worker, [f"neighbour replace {each} {nobody}" for each in entries])

    def _others(self, index: int) -> list[int]:
        return [j for j in range(self._world) if j != index]

    def _do(self, worker: Worker, lines: list[str]) -> None:
        inside = ("nsenter", f"--net=/proc/{worker.pid}/ns/net")
        execute(*inside, "ip", "-batch", "-", text="\n".join(lines) + "\n")


def execute(*command: object, text: str = "") -> None:
    subprocess.run(
        [str(each) for each in command], input=text, text=True, check=True, timeout=30
    )


def run_undisturbed(
    zygote: Zygote, world: int, words: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Returns the results of the workers without a fault."""
    with place(zygote) as here:
        cluster = start(here, world, f"--strategy={','.join(['mwms', *words])}")
        cluster.expect(*[0] * world)
        return cluster.results()


@contextlib.contextmanager
def prepare(framework: str) -> Iterator[Trial]:
    """Context manager: runs the zygote process that forks workers.

    Args:
        framework: framework of the workers.
    """
    zygote = Zygote(framework)
    undisturbed = functools.cache(functools.partial(run_undisturbed, zygote))

    def trial(rng: random.Random) -> Facts:
        case = draw(rng, framework)
        if case.fault == "cut off" and not has_networks():
            return {"fault": "cut off: not tried, no networks can be made here"}
        try:
            with place(zygote) as here:
                return try_case(here, case, undisturbed(case.world, case.words))
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error

    with contextlib.closing(zygote):
        yield trial


def try_case(here: Place, case: Case, undisturbed: list[dict[str, Any]]) -> Facts:
    """The fault, and the same command again."""
    if case.phase in ("start", "restore"):
        before = start(here, case.world, *case.saves, f"--steps={SAVED_AT}")
        before.expect(*[0] * case.world)
    here.hold("peer")
    if case.told is not None:
        here.hold("notice")
    run = Run(here, case)
    run.come_to_the_phase()
    ended = run.judge(run.make_the_fault())
    run.end()
    commits = records(here.checkpoints, "commit")
    committed = max((int(record["step"]) for record in commits), default=0)
    again = start(here, case.world, *case.saves)
    again.expect(*[0] * case.world)
    for worker in again:
        [[step, _]] = worker.lines("restored")
        assert int(step) >= committed, f"{committed} is lost\n{again.story()}"
    if not any(LEFT_OUT in worker.output for worker in again):
        assert again.results() == undisturbed, again.story()
    return {
        "fault": case.fault,
        "phase": case.phase if case.told is not None else f"{case.phase}, untold",
        "victim": "the chief" if case.victim == 0 else "another one",
        "workers": f"{case.world}",
        **({"words": ", ".join(case.words) or "none"} if case.words else {}),
        "saves": "asynchronous" if case.is_async else "waited for",
        "others": ", ".join(sorted(set(ended["outcomes"].values()))) or "raised",
        "ended within": f"{(ended['seconds'] // 10 + 1) * 10:.0f} s",
        "ended later, as the machine was busy": int(ended["is busy"]),
    }


CAMPAIGN = Campaign(
    name="peers",
    promise=(
        "One worker of two or three of TensorFlow's multi-worker training fails, "
        "either the chief or another worker. The faults: killed (as by the kernel's "
        "out-of-memory killer), stopped for good, cut off in its own network "
        "namespace, no more memory (RLIMIT_AS), hung, stopped for 5 s, or slow by "
        "10 s.\n\n"
        "The phases without a notice: the start, the restore, a step, a periodic "
        "save (asynchronous or not) before the part, the marker and the commit, "
        "before and after the worker reports its last step, before the chief "
        "reports that all workers have made their last step, and the final save. The "
        "phases after a notice: before each key that the worker inserts, the "
        "following step, the save or the share, before the marker, before and after "
        "the commit, and the exit.\n\n"
        "- If a grace period is known, the other workers have exited by its end, or "
        "2 s later on a busy machine. Otherwise they exit within 30 s, or 10 s "
        "later.\n"
        "- The other workers exit with the restart code. The code is 1 if no worker "
        "got a notice, or if the lack of memory raised an error.\n"
        "- Without a notice, after the last step of all workers, either all workers "
        "end normally or none does. The code is 1 if the final save needed the "
        "failed worker, and the restart code otherwise.\n"
        "- A worker that exits without a commit names the lost worker and the "
        "phase.\n"
        "- If the worker was only slow or stopped for 5 s, no worker exits because of "
        "it, and a notice ends in a commit.\n"
        "- The same command resumes from the newest reported commit and ends with "
        "the same bytes, or names the worker whose part the commit lacks.\n\n"
        "Not tried, because no limit applies: a chief that is silent at the start, "
        "where it may wait for its lease; and a hang or a lack of memory without a "
        "known deadline. No worker can name a worker that only hangs. `model.fit` "
        "has the campaign `fits`."
    ),
    trials=300,
    short=0,  # test_peers.py tries each fault
    mark="multiprocess",
    prepare=functools.partial(prepare, "tensorflow"),
    fixed=(
        "At the start, the workers waited five minutes for a worker that had crashed. "
        "Fixed (`coordination/test_rendezvous.py`).",
        "In a periodic save, a worker had too little memory for its part of a "
        "collective read, and continued training. The collective of its next step was "
        "then matched with the read of the other workers. Fixed "
        "(`checkpoint/test_writer_faults.py`, `handler/test_session.py`).",
        "If no deadline was known, the workers waited five minutes in a collective "
        "save that the chief had already given up. Fixed "
        "(`coordination/test_coordinator.py`).",
        "If a machine disappeared during the final save, as its notice had announced, "
        "the run ended as failed, not as preempted. Fixed (`handler/test_session.py`).",
        "The alarm for a deadline rang just after the main thread had given up its "
        "wait, and ended the process at once, although the process was already "
        "exiting. Fixed (`coordination/test_coordinator.py`).",
        "If a worker exited because another worker was lost, the error did not name "
        "the phase of the run in which the other worker was lost. After a failed "
        "collective, the error did not name the lost worker either. Fixed "
        "(`coordination/test_coordinator.py`, `handler/test_lost_peers.py`).",
        "A worker that lost the network during its exit was still running after its "
        "grace period, because TensorFlow was waiting to disconnect from the chief. "
        "Fixed (`handler/test_session.py`, `campaigns/test_peers.py`).",
        "If the chief was suspended or unreachable, a worker waited in `close()` for "
        "ever. Fixed (`coordination/test_store_executor.py`, "
        "`campaigns/test_peers.py`).",
        "A worker exited with code 0 as soon as it had reported its part of the final "
        "save. If the chief crashed or failed later, only the chief restarted. In the "
        "same way, if a worker crashed after its last step, the other workers exited "
        "with code 0, and only this worker restarted. The first fix treated a late "
        "reply of the chief as a missing reply. Fixed (`handler/test_final_vote.py`).",
        "If a worker detected the loss of another worker only by a closed connection, "
        "the error did not name the lost worker. Fixed "
        "(`handler/test_lost_peers.py`).",
        "A worker hung after the first commit of a long grace period. The other "
        "workers had forgotten the deadline, and waited for the hung worker for ever. "
        "Fixed (`coordination/test_coordinator.py`).",
        "The chief asked TensorFlow every second for the states of the workers. For "
        "each crashed worker, TensorFlow releases the class of an error once too "
        "often, so the chief crashed (SIGSEGV) after up to 19 calls, for example in "
        "the save after a notice. Fixed (`contracts/test_stores.py`).",
    ),
    again=((20261129, 73), (20261129, 75), (20261201, 97)),
    labels={
        "ended later, as the machine was busy": (
            "trials in which a worker ended after the limit, on a busy machine"
        ),
        "phase": "phase of the fault (untold: without a notice)",
        "victim": "worker with the fault",
        "workers": "number of workers",
        "saves": "kind of periodic save",
        "others": "outcome of the other workers",
        "ended within": "time until the last worker ended",
    },
)

JAX_CAMPAIGN = dataclasses.replace(
    CAMPAIGN,
    name="jax-peers",
    promise=(
        "The same as `peers`, for loops on JAX with a `PyTreeState` in two or three "
        "processes of `jax.distributed`. The differences: JAX may abort the other "
        "processes (SIGABRT) if process 0 fails, if no process got a notice, or if a "
        "process is stopped or cut off. In the last two cases the time is that of "
        "JAX's heartbeats, here 10 s. Collectives of JAX do not name the lost process."
    ),
    trials=120,
    prepare=functools.partial(prepare, "jax"),
    fixed=(
        "A worker of three was killed in its part of the save. After the commit, "
        "process 0 ended while the third worker still waited for all processes to "
        "disconnect, so JAX aborted the third worker: code 134 instead of 143. Fixed "
        "(`campaigns/test_peers.py"
        "::test_a_killed_worker_does_not_make_jax_abort_another_worker`).",
        "A worker of three was killed after its part of the save, and the grace period "
        "was unknown. Process 0 ended 40 s after the commit instead of 30 s. Fixed "
        "(`campaigns/test_peers.py"
        "::test_a_killed_worker_does_not_make_jax_abort_another_worker`).",
    ),
    labels=CAMPAIGN.labels | {"words": "kind of program"},
)
