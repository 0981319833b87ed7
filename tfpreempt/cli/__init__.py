"""The command `tfpreempt`: a group that imports a subcommand only when it is used.

__main__            lets `python -m tfpreempt.cli` do what the command `tfpreempt` does
_checking           what `inspect` and `verify` share: find checkpoints, check them
_cluster            who the workers are: the local cluster's ports and TF_CONFIG
_demo_data          the demo's data: scikit-learn's handwritten digits
_demo_job           one training job of the demo: the supervisor as a process
_demo_keras_worker  the program that `tfpreempt demo --keras` trains with: `model.fit`
_demo_plan          when the demo strikes, and whom
_demo_result        what the demo's two jobs left behind, counted and compared
_demo_view          what the demo shows: a progress bar while it trains
_demo_worker        the program that the demo trains with: an ordinary custom loop
_doctor_facts       what `tfpreempt doctor` finds out, and the lines of its verdict
_doctor_slurm       asks scontrol whether Slurm would start this job again
_doctor_sources     asks each source of a config once whether it works here
_doctor_storage     tries a save in a directory: down to the disk, timed
_doctor_verdict     what follows from what `tfpreempt doctor` has found out; no I/O
_doctor_view        how the doctor's verdict looks: tables for people
_echo               what goes to the console, by threads that hold up nobody else
_findings_view      how checkpoints look: a table for people, objects for programs
_guard              ends the workers that a supervisor leaves behind when it is killed
_incarnation        one start of all workers, followed to the end of the last one
_launch             becomes a worker's command
_logs               the workers' log files: one per worker over all restarts
_notify_follow      what a running job makes of a notice
_notify_hold        a wait that ends by a signal too
_notify_server      a cloud's metadata server on this machine
_notify_workers     finds the running worker of a directory
_policy             what a supervisor does next, decided from what it has seen
_processes          worker processes: started in groups of their own, seen to end
_progress           what a run has gained: the step of its newest commit
_record             what a supervisor tells: its journal, its lines on the console
_settings           what `tfpreempt run` was asked to do
_signals            signals as values that a select can wait for
_sizes              sizes in bytes: as people read them
_supervisor         the supervisor: one incarnation of the workers after the other
demo                `tfpreempt demo`
doctor              `tfpreempt doctor`: would a preemption lose work here?
inspect             `tfpreempt inspect`: which checkpoints lie here, there
notify              `tfpreempt notify`: fakes a notice for a running job
run                 `tfpreempt run`: the options, read and checked
verify              `tfpreempt verify`
"""

from __future__ import annotations

import importlib

import click

import tfpreempt

# Command -> (module with a click command of the same name, line in `tfpreempt --help`).
# The line is repeated here so that the help imports no command.
_COMMANDS = {
    "run": (
        "tfpreempt.cli.run",
        "Run training under supervision, through preemptions.",
    ),
    "demo": ("tfpreempt.cli.demo", "Watch a small model survive real preemptions."),
    "doctor": (
        "tfpreempt.cli.doctor",
        "Look whether a preemption would lose work on this machine.",
    ),
    "inspect": (
        "tfpreempt.cli.inspect",
        "List the checkpoints in a directory or a bucket, whole or not.",
    ),
    "verify": (
        "tfpreempt.cli.verify",
        "Read every byte of the checkpoints and compare the checksums.",
    ),
    "notify": (
        "tfpreempt.cli.notify",
        "Fake a notice for a running job, to rehearse a preemption.",
    ),
}


class _LazyGroup(click.Group):
    """A group whose commands are imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(tfpreempt.__version__, prog_name="tfpreempt")
def main() -> None:
    """Make TensorFlow training on machines that can be taken away safe."""
