"""The command `tfpreempt`: a group that imports a subcommand only when it is used.

demo/      `tfpreempt demo`: a small model survives real preemptions
doctor/    `tfpreempt doctor`: would a preemption lose work here?
inspect/   `tfpreempt inspect` and `verify`: which checkpoints are intact?
journals/  reads the journals of a run, for the commands that show runs
notify/    `tfpreempt notify`: fakes a notice for a running job
report/    `tfpreempt report`: what happened to a run, by its journals
run/       `tfpreempt run`: training under supervision, through preemptions
status/    `tfpreempt status`: the present state of a running job
signals    signals that are waited for instead of handled
sizes      sizes and seconds: as people read them, and write them in an option
tables     a rich console whose texts cannot steer the terminal
terminal   printing: no text that a command prints can steer a terminal

Imported by cli/demo, cli/doctor, cli/inspect, cli/journals, cli/notify, cli/report,
cli/run, cli/status, tfpreempt.
"""

from __future__ import annotations

import importlib
import logging

import click

import tfpreempt
from tfpreempt.cli.terminal import LogHandler, plain_lines

# Command -> (folder with a click command of that name, line in `tfpreempt --help`).
# The line is repeated here so that the help imports no command.
_COMMANDS = {
    "run": ("run", "Run training under supervision, through preemptions."),
    "status": ("status", "Show what a running job is at, from anywhere."),
    "demo": ("demo", "Watch a small model survive real preemptions."),
    "doctor": ("doctor", "Look whether a preemption would lose work here."),
    "inspect": ("inspect", "List the checkpoints in a directory or a bucket."),
    "verify": ("inspect", "Read every byte of the checkpoints, and compare."),
    "report": ("report", "Report on a run: where the time went."),
    "notify": ("notify", "Fake a notice for a running job, to rehearse one."),
}


class _LazyGroup(click.Group):
    """A group whose commands are imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        folder, _ = _COMMANDS[cmd_name]
        module = importlib.import_module(f"tfpreempt.cli.{folder}.command")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Runs a command; errors and log records are printed as all output is."""
        log, handler = logging.getLogger("tfpreempt"), LogHandler(logging.WARNING)
        log.addHandler(handler)
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            text = plain_lines(error.message)
            error.message = text  # type: ignore[misc]  # click shows it after this
            raise
        finally:
            log.removeHandler(handler)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(tfpreempt.__version__, prog_name="tfpreempt")
def main() -> None:
    """Keep TensorFlow training safe on machines that can be taken away."""
