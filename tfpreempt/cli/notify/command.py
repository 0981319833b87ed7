"""`tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

from tfpreempt.cli.notify.follow import Ending, Follower
from tfpreempt.cli.notify.workers import hold_worker
from tfpreempt.cli.signals import ENDS, held_signals
from tfpreempt.cli.sizes import Seconds
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.notice.file import checked_path
from tfpreempt.notice.signals import parse_signal

_FILE_SECONDS = 5.0
_ASK_SECONDS = 30.0  # the slowest client looks every 5 s
_POLL_SECONDS = 0.1
_WAYS = ("DIRECTORY", "--file", "--serve", "--metadata")
# Which way each option says more of.
_BELONGS = {
    "--worker": ("DIRECTORY",),
    "--signal": ("DIRECTORY",),
    "--follow": ("DIRECTORY",),
    "--port": ("--serve",),
    "--topic": ("--metadata",),
    "--hold": ("--file", "--metadata"),
}


@click.command()
@click.argument(
    "directory", required=False, type=click.Path(file_okay=False, path_type=Path)
)
@click.option(
    "--worker", "workers", type=click.IntRange(min=0), multiple=True, default=(0,),
    help="With DIRECTORY: the worker to signal (default 0); may be given many times.",
)  # fmt: skip
@click.option(
    "--signal", "signal_name", default="SIGTERM", show_default=True,
    help="With DIRECTORY: the signal to send.",
)  # fmt: skip
@click.option(
    "--follow", "follow_seconds", type=Seconds(), default=0.0,
    help="With DIRECTORY: tell for so many seconds what the job makes of it; exit "
    "status 1 unless the step was committed.",
)  # fmt: skip
@click.option(
    "--file", "file", help="Create this notice file, which the job must watch."
)
@click.option(
    "--serve", "cloud", type=click.Choice(["gce", "aws", "azure"]),
    help="Be this cloud's metadata server, until Ctrl-C; prints what the job's "
    "environment needs.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0,
    help="With --serve: listen there, so that what was exported still holds for a "
    "server that is started again; by default any free port.",
)  # fmt: skip
@click.option(
    "--metadata", "url",
    help="Have the server of --serve, at this address, give a notice.",
)  # fmt: skip
@click.option(
    "--topic",
    help="With --metadata: which notice; the first one by default. gce: preempted, "
    "maintenance-event, upcoming-maintenance, stop-state. aws: spot-interruption, "
    "rebalance, lifecycle. azure: Preempt, Terminate, Reboot, Redeploy, Freeze.",
)
@click.option(
    "--hold", type=Seconds(),
    help="With --file and --metadata: take it back after so many seconds, so that the "
    "restarted job does not find it; 0 leaves it there. By default a file goes after "
    f"{_FILE_SECONDS:g} s, and a metadata server is quiet again as soon as the job has "
    f"asked, or exit status 1 if it does not within {_ASK_SECONDS:g} s.",
)  # fmt: skip
@click.pass_context
def notify(
    ctx: click.Context,
    directory: Path | None,
    workers: tuple[int, ...],
    signal_name: str,
    follow_seconds: float,
    file: str | None,
    cloud: str | None,
    port: int,
    url: str | None,
    topic: str | None,
    hold: float | None,
) -> None:
    """Tell a running job that its machine goes away, although it doesn't.

    \b
        tfpreempt notify --worker 1 DIRECTORY     a signal, to a worker of the job
        tfpreempt notify --file /run/preempted    a notice file
        tfpreempt notify --serve gce              a metadata server, and in another
        tfpreempt notify --metadata URL           terminal, what it is to say

    DIRECTORY is the job's checkpoint directory. The job does what it would do on a
    real notice: all workers commit one step and leave, and `tfpreempt run` starts them
    again.
    """
    _check_options(ctx)
    try:
        if directory is not None:
            code = _signal(directory, workers, signal_name, follow_seconds)
        elif file is not None:
            code = _give_file(file, _FILE_SECONDS if hold is None else hold)
        elif cloud is not None:
            code = _serve(cloud, port)
        else:
            assert url is not None  # one of the four was given
            code = _give_metadata(url, topic, hold)
    except (TfpreemptError, OSError) as error:  # OSError: a journal of another user
        raise click.ClickException(str(error)) from error
    ctx.exit(code)


def _check_options(ctx: click.Context) -> None:
    """Refuses what would have no effect.

    Raises:
        UsageError: none or many ways were named, or an option of another one.
    """
    given = [
        "DIRECTORY" if isinstance(each, click.Argument) else each.opts[0]
        for each in ctx.command.params
        if ctx.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
    ]
    ways = [each for each in given if each in _WAYS]
    if len(ways) != 1:
        raise click.UsageError(
            "Give one of DIRECTORY (with --worker), --file, --serve and --metadata: "
            "tfpreempt notify --worker 1 ckpt"
        )
    for option, belongs in _BELONGS.items():
        if option in given and ways[0] not in belongs:
            raise click.UsageError(
                f"{option} means nothing with {ways[0]}; it belongs to "
                f"{' and '.join(belongs)}. Leave it out, or name that instead."
            )


def _signal(
    directory: Path, workers: tuple[int, ...], name: str, seconds: float
) -> int:
    """Signals each worker, or none; tells what follows; returns the exit status."""
    number = parse_signal(name)
    with contextlib.ExitStack() as ends:
        held = [
            ends.enter_context(hold_worker(directory, index))
            for index in dict.fromkeys(workers)
        ]
        follower = Follower(directory)
        for worker in held:
            worker.send(number)
            click.echo(
                f"sent {number.name} to worker {worker.index}, process {worker.pid}"
            )
        if not seconds:
            return 0
        ending = follower.follow(seconds, click.echo, held)
    if ending is Ending.NOBODY:
        click.echo(
            f"Nobody has left within {seconds:g} s. With a known grace period a job "
            "commits, trains on and leaves near its end: give --follow more than that.",
            err=True,
        )
    if ending is Ending.UNTOLD:
        click.echo(
            f"A worker has ended, and nothing of its exit is in {follower.journal}: "
            f"see its log. Perhaps its config does not watch {number.name}.",
            err=True,
        )
    return 0 if ending is Ending.COMMITTED else 1


def _give_file(given: str, hold: float) -> int:
    """Creates a notice file, and takes it away again however this is ended."""
    path = checked_path(given)
    with held_signals(*ENDS) as wait:
        _create(path)
        if not hold:
            click.echo(f"created {path}; remove it before the job is started again")
            return 0
        click.echo(f"created {path}; it goes in {hold:g} s")

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):  # somebody was first
                os.remove(path)

        return _take_back_after(lambda: wait(hold), remove, f"removed {path}")


def _create(path: str) -> None:
    """Makes a notice file.

    Raises:
        ConfigurationError: it is there already, or cannot be made.
    """
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write("tfpreempt notify\n")
    except FileExistsError as error:
        raise ConfigurationError(
            f"--file {path} is there already, so nobody would notice anything new. "
            "Remove it, or name another"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"--file {path} cannot be created ({error.strerror}). Name a file in a "
            "directory that exists and can be written to, the one that the job watches "
            "(notice_file=, or TFPREEMPT_NOTICE_FILE)"
        ) from error


def _serve(cloud: str, port: int) -> int:
    """Is a metadata server until it is told to end."""
    from tfpreempt.cli.notify.server import SERVERS

    with held_signals(*ENDS) as wait, SERVERS[cloud](port) as server:
        click.echo(f"# The metadata server of {cloud}, faked. For the job's shell:")
        for name, value in server.environment().items():
            click.echo(f"export {name}={value}")
        click.echo("# In another terminal, while the job runs:")
        click.echo(f"#   tfpreempt notify --metadata {server.url}")
        if not port:
            _, _, free = server.url.rpartition(":")
            click.echo(f"# The same address next time: --port {free}")
        wait(None)
    return 0


def _give_metadata(url: str, topic: str | None, hold: float | None) -> int:
    """Has a server of `--serve` give a notice, and take it back."""
    from tfpreempt.cli.notify.server import control

    with held_signals(*ENDS) as wait:
        said = control(url, topic=topic, is_up=1)
        if hold == 0:
            click.echo(f"{url} says {said}; it says so to the restarted job too")
            return 0
        how_long = "until the job has asked" if hold is None else f"for {hold:g} s"
        click.echo(f"{url} says {said}, {how_long}")

        def wait_heard() -> signal.Signals | None:
            """Until somebody was told, so that a client which polls cannot miss it."""
            deadline = time.monotonic() + _ASK_SECONDS
            while control(url) != "1":
                if time.monotonic() >= deadline:
                    raise ConfigurationError(
                        f"nobody has asked {url} for {said} within {_ASK_SECONDS:g} s. "
                        "Start the job with the variables that `tfpreempt notify "
                        "--serve` printed, and with a config that watches this cloud"
                    )
                if (told := wait(_POLL_SECONDS)) is not None:
                    return told
            click.echo(f"the job was told {said}")
            return None

        return _take_back_after(
            wait_heard if hold is None else lambda: wait(hold),
            lambda: control(url, topic=topic, is_up=0),
            f"{url} is quiet again",
        )


def _take_back_after(
    wait: Callable[[], signal.Signals | None],
    take_back: Callable[[], object],
    said: str,
) -> int:
    """Takes a notice back however the wait ends.

    Returns:
        The exit status: as a shell gives it of what a signal has ended.
    """
    told = None
    try:
        told = wait()
    finally:
        take_back()
        click.echo(said if told is None else f"ended by {told.name}: {said}")
    return 0 if told is None else 128 + told
