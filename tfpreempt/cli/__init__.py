"""The command `tfpreempt`: a group that imports a subcommand only when it is used.

inspect        `tfpreempt inspect`: which checkpoints lie here, there
verify         `tfpreempt verify`
checking       what `inspect` and `verify` share: find checkpoints, check them
demo/          `tfpreempt demo`: a small model survives real preemptions
doctor/        `tfpreempt doctor`: would a preemption lose work here?
findings_view  how checkpoints look: a table for people, objects for programs
notify/        `tfpreempt notify`: fakes a notice for a running job
run/           `tfpreempt run`: training under supervision, through preemptions
signals        signals that are waited for instead of handled
sizes          sizes and seconds: as people read them, and write them in an option
"""

from __future__ import annotations

import importlib

import click

import tfpreempt

# Command -> (module with a click command of the same name, line in `tfpreempt --help`).
# The line is repeated here so that the help imports no command.
_COMMANDS = {
    "run": (
        "tfpreempt.cli.run.command",
        "Run training under supervision, through preemptions.",
    ),
    "demo": (
        "tfpreempt.cli.demo.command",
        "Watch a small model survive real preemptions.",
    ),
    "doctor": (
        "tfpreempt.cli.doctor.command",
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
        "tfpreempt.cli.notify.command",
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
