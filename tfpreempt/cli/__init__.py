"""The command `tfpreempt`, whose subcommands are imported only when they are used.

demo/            `tfpreempt demo`: a small model survives real preemptions
doctor/          `tfpreempt doctor`: checks that this machine is ready for preemptions
inspect/         `tfpreempt inspect` and `verify`: list and check checkpoints
journals/        reads the journals of a run, for the commands that show runs
probe/           `tfpreempt probe`: the probes of a pod, and progress
report/          `tfpreempt report`: summarizes a run from its journals
run/             `tfpreempt run`: training under supervision, through preemptions
signal_handling  waits for signals in one thread, without signal handlers
simulate/        `tfpreempt simulate`: simulates a preemption of a running job
sizes            formats sizes and durations, and parses them in options
status/          `tfpreempt status`: the live status of a job
tables           a console (of the package rich) that escapes control characters
terminal         prints text with control characters escaped

Imported by cli/demo, cli/doctor, cli/inspect, cli/probe, cli/report,
cli/run, cli/simulate, cli/status, tfpreempt.
"""

from __future__ import annotations

import importlib
import logging

import click

import tfpreempt
from tfpreempt.cli.terminal import LogHandler
from tfpreempt.core.log_output import LineFormatter, plain_lines

# Command -> (folder of the command, its line in `tfpreempt --help`). The lines repeat
# the commands' docstrings, so that `tfpreempt --help` need not import the commands.
_COMMANDS = {
    "run": ("run", "Run training under supervision, through preemptions."),
    "status": ("status", "Show the live status of a job."),
    "probe": ("probe", "Answer the probes of a pod, and report progress."),
    "demo": ("demo", "Watch a small model survive real preemptions."),
    "doctor": ("doctor", "Check that this machine is ready for preemptions."),
    "inspect": ("inspect", "List the checkpoints in a directory or a bucket."),
    "verify": ("inspect", "Verify the checksums of the checkpoints."),
    "report": ("report", "Summarize a run: interruptions, lost work, goodput."),
    "simulate": ("simulate", "Simulate a preemption of a running job."),
}


class _LazyGroup(click.Group):
    """A group of commands that imports a command only when it is used."""

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
        """Runs a command; escapes control characters in its errors and log records."""
        log, handler = logging.getLogger("tfpreempt"), LogHandler(logging.WARNING)
        handler.setFormatter(LineFormatter())
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
    """Keep training with TensorFlow, Keras or JAX safe on preemptible machines."""
