"""`tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import click

from tfpreempt.cli.notify.follow import Ending, Follower
from tfpreempt.cli.notify.hold import Wait, held_signals
from tfpreempt.cli.notify.workers import HeldWorker, Worker, hold_worker
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.notice.file import checked_path
from tfpreempt.notice.signals import parse_signal

_SIGNAL = "SIGTERM"
_FILE_SECONDS = 5.0
_ASK_SECONDS = 30.0  # the slowest client looks every 5 s
_POLL_SECONDS = 0.1
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
    "--worker", "workers", type=click.IntRange(min=0), multiple=True,
    help="With DIRECTORY: the worker to signal (default 0); may be given many times.",
)  # fmt: skip
@click.option(
    "--signal", "signal_name",
    help=f"With DIRECTORY: the signal to send (default {_SIGNAL}).",
)  # fmt: skip
@click.option(
    "--follow", "follow_seconds", type=click.FloatRange(min=0),
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
    "--port", type=click.IntRange(0, 65535),
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
    "--hold", type=click.FloatRange(min=0),
    help="With --file and --metadata: take it back after so many seconds, so that the "
    "restarted job does not find it; 0 leaves it there. By default a file goes after "
    f"{_FILE_SECONDS:g} s, and a metadata server is quiet again as soon as the job has "
    f"asked, or exit status 1 if it does not within {_ASK_SECONDS:g} s.",
)  # fmt: skip
def notify(
    directory: Path | None,
    workers: tuple[int, ...],
    signal_name: str | None,
    follow_seconds: float | None,
    file: str | None,
    cloud: str | None,
    port: int | None,
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
    ways = {
        "DIRECTORY": directory, "--file": file, "--serve": cloud, "--metadata": url
    }  # fmt: skip
    options = {
        "--worker": workers or None, "--signal": signal_name,
        "--follow": follow_seconds, "--port": port, "--topic": topic, "--hold": hold,
    }  # fmt: skip
    _check_options(
        [name for name, value in ways.items() if value is not None],
        [name for name, value in options.items() if value is not None],
    )
    try:
        if directory is not None:
            code = _signal(
                directory, workers or (0,), signal_name or _SIGNAL, follow_seconds or 0
            )
        elif file is not None:
            code = _give_file(file, _FILE_SECONDS if hold is None else hold)
        elif cloud is not None:
            code = _serve(cloud, port or 0)
        else:
            assert url is not None  # one of the four was given
            code = _give_metadata(url, topic, hold)
    except (TfpreemptError, OSError) as error:  # OSError: a journal of another user
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


def _check_options(ways: list[str], options: list[str]) -> None:
    """Refuses what would have no effect.

    Raises:
        UsageError: none or many ways were named, or an option of another one.
    """
    if len(ways) != 1:
        raise click.UsageError(
            "Give one of DIRECTORY (with --worker), --file, --serve and --metadata: "
            "tfpreempt notify --worker 1 ckpt"
        )
    for option in options:
        if ways[0] not in _BELONGS[option]:
            raise click.UsageError(
                f"{option} means nothing with {ways[0]}; it belongs to "
                f"{' and '.join(_BELONGS[option])}. Leave it out, or name that instead."
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
        for each in held:
            each.send(number)
            worker = each.worker
            click.echo(
                f"sent {number.name} to worker {worker.index}, process {worker.pid} "
                f"({worker.origin})"
            )
        if not seconds:
            return 0
        return _follow(follower, held, number, seconds)


def _follow(
    follower: Follower, held: list[HeldWorker], number: signal.Signals, seconds: float
) -> int:
    ending = follower.follow(
        seconds, click.echo, lambda: any(each.has_ended() for each in held)
    )
    if ending is Ending.NOBODY:
        click.echo(
            f"Nobody has left within {seconds:g} s. With a known grace period a job "
            "commits, trains on and leaves near its end: give --follow more than that.",
            err=True,
        )
    for each in held:
        if ending is Ending.UNTOLD and each.has_ended():
            click.echo(_untold_text(follower, each.worker, number), err=True)
    return 0 if ending is Ending.COMMITTED else 1


def _untold_text(follower: Follower, worker: Worker, number: signal.Signals) -> str:
    """Of a worker that has ended, and whose journal does not say how."""
    who = f"worker {worker.index} (process {worker.pid}) has ended"
    if worker.index in follower.noticed:
        return (
            f"{who} after its notice, and nothing of its exit is in {follower.journal}:"
            " see its log."
        )
    watches = "" if number == signal.SIGTERM else f", does not watch {number.name}"
    return (
        f"{who}, and nothing of a notice or an exit is in {follower.journal}: see its "
        "log. Perhaps the program keeps its checkpoints in another directory than this "
        f"one{watches}, or was still starting (wait for its first step)."
    )


def _give_file(given: str, hold: float) -> int:
    """Creates a notice file, and takes it away again however this is ended."""
    path = checked_path(given)
    with held_signals() as wait:
        _create(path)
        if not hold:
            click.echo(f"created {path}; remove it before the job is started again")
            return 0
        told = None
        try:
            click.echo(f"created {path}; it goes in {hold:g} s")
            told = wait(hold)
        finally:
            with contextlib.suppress(FileNotFoundError):  # somebody was first
                os.remove(path)
        click.echo(f"{_because(told)}removed {path}")
    return _status(told)


def _create(path: str) -> None:
    """Makes a notice file.

    Raises:
        ConfigurationError: it is there already, or cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
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
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write("tfpreempt notify\n")


def _serve(cloud: str, port: int) -> int:
    """Is a metadata server until it is told to end."""
    from tfpreempt.cli.notify.server import SERVERS

    with held_signals() as wait, SERVERS[cloud](port) as server:
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
    from tfpreempt.cli.notify.server import tell

    with held_signals() as wait:
        said = tell(url, topic, is_up=True)
        if hold == 0:
            click.echo(f"{url} says {said}; it says so to the restarted job too")
            return 0
        how_long = "until the job has asked" if hold is None else f"for {hold:g} s"
        told = None
        try:
            click.echo(f"{url} says {said}, {how_long}")
            told = _wait_heard(url, said, wait) if hold is None else wait(hold)
        finally:
            tell(url, topic, is_up=False)
            click.echo(f"{_because(told)}{url} is quiet again")
    return _status(told)


def _wait_heard(url: str, topic: str, wait: Wait) -> signal.Signals | None:
    """Until somebody was told, so that a client which polls cannot miss it.

    Returns:
        The signal that has ended it before.

    Raises:
        ConfigurationError: nobody has asked.
    """
    from tfpreempt.cli.notify.server import is_heard

    deadline = time.monotonic() + _ASK_SECONDS
    while not is_heard(url):
        if time.monotonic() >= deadline:
            raise ConfigurationError(
                f"nobody has asked {url} for {topic} within {_ASK_SECONDS:g} s. Start "
                "the job with the variables that `tfpreempt notify --serve` printed, "
                "and with a config that watches this cloud"
            )
        if (told := wait(_POLL_SECONDS)) is not None:
            return told
    click.echo(f"the job was told {topic}")
    return None


def _because(told: signal.Signals | None) -> str:
    return "" if told is None else f"ended by {told.name}: "


def _status(told: signal.Signals | None) -> int:
    """As a shell gives it of what a signal has ended."""
    return 0 if told is None else 128 + told
