"""Derives the findings of `tfpreempt doctor` from the results of the checks; no I/O."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfpreempt.cli.doctor.slurm_settings import SlurmState
from tfpreempt.cli.doctor.sources import SourceHealth, SourceState
from tfpreempt.cli.doctor.storage_check import Storage
from tfpreempt.cli.sizes import size_text
from tfpreempt.core import private_api
from tfpreempt.core.compat import StrEnum
from tfpreempt.core.deadline import needed_seconds, until_end
from tfpreempt.platforms.detect import Platform

WAIT_SECONDS = 30.0  # a handler's default peer_timeout; used without a grace period
# Files on these file systems are lost with the machine, or with the container.
VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})
# Platforms on which a job does not receive the notices of the cloud's machines.
MANAGED = frozenset({"vertex-ai", "sagemaker"})
_CLOUD_NOTICES = {
    "gce": ("preempted", 30),
    "aws": ("spot-interruption", 120),
    "azure": ("Preempt", 30),
}
"""For every cloud: the topic or kind of a preemption notice, and its grace period in
seconds."""


_SETTINGS = {"jax": "JAX_ENABLE_PREEMPTION_SERVICE", "keras": "KERAS_BACKEND"}
"""For some frameworks, the environment variable with an important setting."""
_NOTES = {
    "jax": "; a SIGTERM between jax.distributed.initialize() and the handler is "
    "handled about 1 s later, or ends the process if the variable "
    "JAX_ENABLE_PREEMPTION_SERVICE is off"
}


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    ADVICE = "advice"  # a setting could be better
    PROBLEM = "problem"  # a preemption would lose work, or end the job


# Level and text of a finding. For the text "", the detail of the source is shown.
_TEXTS = {
    SourceHealth.WORKING: (Level.OK, ""),
    SourceHealth.NOTICE: (Level.PROBLEM, "announces a preemption of this machine now"),
    SourceHealth.FAILED: (
        Level.PROBLEM,
        "does not work here; notices would be missed",
    ),
    SourceHealth.NO_ANSWER: (Level.ADVICE, ""),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFindings:
    """The results of the checks, from which the findings are derived.

    Attributes:
        platform: platform of this machine.
        sources: result of the check of every source of the platform's config.
        storage: result of the trial save; None if the user has named no directory.
        slurm: settings of Slurm; None on another platform.
        step_seconds: mean step time of the run in the directory; None if unknown.
        versions: versions of the installed frameworks, by package name.
        environment: environment variables, for settings of the frameworks.
    """

    platform: Platform
    sources: tuple[SourceState, ...]
    storage: Storage | None
    slurm: SlurmState | None = None
    step_seconds: float | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shortest_grace(self) -> float | None:
        """The shortest known grace period in seconds; None if unknown."""
        known = [s.grace_seconds for s in self.sources if s.grace_seconds is not None]
        return min(known, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A line of the table that `tfpreempt doctor` prints.

    Attributes:
        level: severity of the finding.
        about: subject of the finding, such as "save" or the name of a source.
        text: result of the check, and advice.
        grace_seconds: grace period of a source's notices; None for other subjects.
        code: Python code that solves the problem; "" if there is none.
    """

    level: Level
    about: str
    text: str
    grace_seconds: float | None = None
    code: str = ""


def assess(facts: DoctorFindings) -> tuple[DoctorFinding, ...]:
    """Returns the findings: passed checks, advice, and problems."""
    found = [*_assess_sources(facts), *_assess_cloud(facts), _assess_grace(facts)]
    if facts.slurm is not None:
        level, text = _assess_requeue(
            facts.slurm, facts.platform.config_class.exit_code
        )
        found.append(DoctorFinding(level, "requeue", text))
    if facts.storage is None:
        text = "no directory given, so no save was tested: tfpreempt doctor DIR"
        found.append(DoctorFinding(Level.ADVICE, "directory", text))
    else:
        found += _assess_storage(facts, facts.storage)
    if facts.step_seconds is not None:
        save = None if facts.storage is None else facts.storage.save_seconds
        found.append(_assess_steps(facts.step_seconds, save, facts.shortest_grace))
    found += _assess_frameworks(facts)
    return tuple(found)


def _assess_sources(facts: DoctorFindings) -> Iterator[DoctorFinding]:
    count = collections.Counter(each.name for each in facts.sources)
    for source in facts.sources:
        level, summary = _TEXTS[source.state]
        text = ": ".join(filter(None, (summary, source.detail)))
        if count[source.name] > 1 and source.grace_seconds is not None:
            text += f" (notices with a grace period of {source.grace_seconds:g} s)"
        yield DoctorFinding(
            level, source.name, text, grace_seconds=source.grace_seconds
        )


def _assess_cloud(facts: DoctorFindings) -> Iterator[DoctorFinding]:
    """Yields advice if the config does not watch the notices of the machine's cloud."""
    platform, cloud = facts.platform, facts.platform.cloud
    is_watched = any(each.name.startswith(f"{cloud}:") for each in facts.sources)
    if cloud is None or is_watched or platform.name in MANAGED:
        return
    topic, seconds = _CLOUD_NOTICES[cloud]
    yield DoctorFinding(
        Level.ADVICE,
        f"cloud {cloud}",
        f"this machine is on {cloud}, but the config does not watch the notices of "
        f"{cloud}; if the machine can be preempted, omit the config (the notices are "
        "then detected), or add the source to the config",
        code="import tfpreempt\n"
        f"from tfpreempt.notice import {cloud}_source\n\n"
        f"config = tfpreempt.{platform.config_class.__name__}(\n"
        f'    sources=[{cloud}_source("{topic}", grace_period={seconds})]\n'
        ")",
    )


def _assess_grace(facts: DoctorFindings) -> DoctorFinding:
    grace = facts.shortest_grace
    if grace is not None:
        text = f"shortest grace period: {grace:g} s"
        return DoctorFinding(Level.OK, "grace period", text)
    how = "pass grace_period= to the config"
    if facts.platform.name == "kubernetes":
        how = "set TFPREEMPT_GRACE_PERIOD to the pod's terminationGracePeriodSeconds"
    text = f"unknown, so the step is committed at once after a notice; {how}"
    return DoctorFinding(Level.ADVICE, "grace period", text)


def _assess_steps(
    seconds: float, save: float | None, grace: float | None
) -> DoctorFinding:
    """Checks whether a step and a save fit into the grace period."""
    text = f"a step of the run in the directory takes {seconds:.2f} s"
    if grace is None:
        return DoctorFinding(Level.OK, "steps", text)
    needed, left = needed_seconds(save or 0.0, grace), until_end(grace)
    if seconds > left:
        text += f", more than the grace period of {grace:g} s: the process would be "
        text += "killed during a step"
    elif seconds + needed > left:
        text += (
            f" and a save needs {needed:.1f} s with margins, together more than the "
            f"grace period of {grace:g} s: the process may be killed during the save"
        )
    else:
        return DoctorFinding(Level.OK, "steps", text)
    text += (
        ", and the steps since the last commit would be lost; do less in each run(), "
        "or commit more often (save_freq=)"
    )
    return DoctorFinding(Level.PROBLEM, "steps", text)


def _assess_frameworks(facts: DoctorFindings) -> Iterator[DoctorFinding]:
    """Yields a finding for every installed framework, with its important settings."""
    for library, version in facts.versions.items():
        level, text = Level.OK, f"version {version}"
        if not private_api.was_seen(library, version):
            level = Level.ADVICE
            text += (
                f" is not yet tested; tested: {', '.join(private_api.SEEN[library])}"
            )
        if value := facts.environment.get(_SETTINGS.get(library, "")):
            text += f"; {_SETTINGS[library]} is {value}"
        yield DoctorFinding(level, library, text + _NOTES.get(library, ""))


def _assess_requeue(slurm: SlurmState, code: int) -> tuple[Level, str]:
    """Checks whether Slurm requeues a job that exits with `code`.

    Args:
        slurm: settings of Slurm.
        code: restart code of the config.

    Returns:
        The level and the text of the finding.
    """
    by_scontrol = slurm.requeue == "scontrol"
    if slurm.fault:
        text = f"not checked, because scontrol does not answer here: {slurm.fault}"
        if by_scontrol:
            return Level.PROBLEM, f"{text}; make scontrol work, or use requeue='exit'"
        return Level.ADVICE, f"{text}; RequeueExit in slurm.conf must list {code}"
    if not by_scontrol and code not in slurm.requeued_codes:
        return Level.PROBLEM, _not_listed(slurm, code)
    if slurm.is_batch is False:
        text = "not a batch job, and Slurm requeues only batch jobs; use sbatch"
        return Level.ADVICE, text
    if slurm.may_requeue is False:
        text = "the job has --no-requeue (or JobRequeue=0 in slurm.conf)"
        how = "submit the job with `sbatch --requeue`"
        if by_scontrol:
            return Level.PROBLEM, f"{text}: scontrol refuses the requeue; {how}"
        # Only advice: RequeueExit still works, as tests/cli/test_doctor_slurm.py shows
        # with a real Slurm.
        return Level.ADVICE, f"{text}: only exit code {code} requeues the job; {how}"
    if by_scontrol:
        return Level.OK, "scontrol answers, and may requeue the job"
    return Level.OK, f"exit code {code} requeues the job (listed in RequeueExit)"


def _not_listed(slurm: SlurmState, code: int) -> str:
    mend = (
        f"set RequeueExit={code} in slurm.conf, or pass requeue='scontrol' to the "
        "config (and --requeue scontrol here)"
    )
    if code in slurm.held_codes:
        why = f"RequeueExitHold lists {code}, so the job waits for `scontrol release`"
    else:
        why = f"RequeueExit does not list {code}, so the job is not restarted"
    return f"{why}; {mend}"


def _assess_missing(storage: Storage, missing: Path) -> DoctorFinding:
    """Returns a finding about a missing directory, such as a mistyped mount point."""
    where = f"{storage.mount} ({storage.filesystem or 'of unknown type'})"
    text = f"{storage.path} does not exist; it would be created on {where}"
    is_at_root = storage.mount == Path("/") == missing.parent
    if is_at_root:
        text += (
            f", the root file system, because {missing} does not exist; mount a file "
            f"system at {missing}, or check the path"
        )
    level = Level.ADVICE if is_at_root else Level.OK
    return DoctorFinding(level, "directory", text)


def _assess_storage(facts: DoctorFindings, storage: Storage) -> Iterator[DoctorFinding]:
    if storage.missing is not None and storage.mount is not None:
        yield _assess_missing(storage, storage.missing)
    if storage.filesystem in VOLATILE:
        yield DoctorFinding(
            Level.PROBLEM,
            "directory",
            f"{storage.path} is on {storage.filesystem}, which is lost with the "
            "machine or the container; use a persistent disk or a network file system",
        )
    if storage.save_seconds is None:
        text = f"a save of {size_text(storage.save_bytes)} fails: {storage.fault}"
        yield DoctorFinding(Level.PROBLEM, "save", text)
        return
    took = f"{size_text(storage.save_bytes)} saved in {storage.save_seconds:.2f} s"
    grace = facts.shortest_grace
    limit = grace or WAIT_SECONDS
    needed = needed_seconds(storage.save_seconds, limit)
    text = f"{took}; needed grace period with margins: {needed:.1f} s"
    mend = "use faster storage, save less, or extend the grace period"
    if needed <= limit:
        fits = "" if grace is None else f", available: {grace:g} s"
        yield DoctorFinding(Level.OK, "save", text + fits)
    elif grace is None:
        yield DoctorFinding(
            Level.ADVICE, "save", f"{text}; pass peer_timeout=, or {mend}"
        )
    else:
        text += f", available: {grace:g} s; {mend}"
        yield DoctorFinding(Level.PROBLEM, "save", text)
