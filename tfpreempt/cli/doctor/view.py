"""How the doctor's verdict looks: tables for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfpreempt.cli.doctor.facts import Facts, Finding, Level

_STYLES = {Level.OK: "green", Level.ADVICE: "yellow", Level.PROBLEM: "red"}


def show(console: Console, facts: Facts, findings: Sequence[Finding]) -> None:
    """Prints what was detected and why, and the findings."""
    platform = facts.platform
    console.print(f"platform: [bold]{platform.name}[/bold]", highlight=False)
    for evidence in platform.evidence:
        console.print(f"  because {evidence}", highlight=False, markup=False)
    console.print(f"config: {platform.variant.__name__}()", highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("what", overflow="fold")
    table.add_column("grace", justify="right")
    table.add_column("finding", overflow="fold")
    for finding in findings:
        table.add_row(
            f"[{_STYLES[finding.level]}]{finding.level.value}[/]",
            escape(finding.about),
            "" if finding.grace_seconds is None else f"{finding.grace_seconds:g} s",
            escape(finding.text),
        )
    console.print(table)
    for finding in findings:
        if finding.code:
            console.print(f"\nfor {finding.about}:", highlight=False, markup=False)
            console.out(finding.code, highlight=False)  # as it is, also where narrow


def to_json(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same as values that JSON has."""
    storage, slurm = facts.storage, facts.slurm
    return {
        "platform": facts.platform.name,
        "evidence": list(facts.platform.evidence),
        "cloud": facts.platform.cloud,
        "config": facts.platform.variant.__name__,
        "exit_code": facts.platform.variant.exit_code,
        "grace_seconds": facts.shortest_grace,
        "sources": [
            {
                "name": each.name,
                "grace_seconds": each.grace_seconds,
                "state": each.liveness.value,
                "detail": each.detail,
            }
            for each in facts.sources
        ],
        "directory": None
        if storage is None
        else {
            "path": str(storage.path),
            "filesystem": storage.filesystem,
            "mount": None if storage.mount is None else str(storage.mount),
            "is_there": storage.missing is None,
            "free_bytes": storage.free_bytes,
            "save_bytes": storage.save_bytes,
            "save_seconds": storage.save_seconds,
            "fault": storage.fault,
        },
        "slurm": None
        if slurm is None
        else {
            "requeue": slurm.requeue,
            "requeued_codes": sorted(slurm.requeued_codes),
            "held_codes": sorted(slurm.held_codes),
            "may_requeue": slurm.may_requeue,
            "is_batch": slurm.is_batch,
            "fault": slurm.fault,
        },
        "findings": [
            {
                "level": each.level.value,
                "about": each.about,
                "text": each.text,
                "code": each.code,
            }
            for each in findings
        ],
        "is_fine": not any(each.level is Level.PROBLEM for each in findings),
    }
