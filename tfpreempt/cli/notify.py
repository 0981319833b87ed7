"""`tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import click

from tfpreempt.cli._notify_follow import Follower
from tfpreempt.cli._notify_workers import signal_worker
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.notice.file import checked_path
from tfpreempt.notice.signals import parse_signal

_FILE_SECONDS = 5.0
_ASK_SECONDS = 30.0  # the slowest client looks every 5 s
_POLL_SECONDS = 0.1


@click.command()
@click.argument(
    "directory", required=False, type=click.Path(file_okay=False, path_type=Path)
)
@click.option(
    "--worker", "workers", type=click.IntRange(min=0), multiple=True,
    help="With DIRECTORY: the worker to signal (default 0); may be given many times.",
)  # fmt: skip
@click.option(
    "--signal", "signal_name", default="SIGTERM", show_default=True,
    help="With DIRECTORY: the signal to send.",
)  # fmt: skip
@click.option(
    "--follow", "follow_seconds", type=click.FloatRange(min=0), default=0.0,
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
    signal_name: str,
    follow_seconds: float,
    file: str | None,
    cloud: str | None,
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
    if [directory, file, cloud, url].count(None) != 3:
        raise click.UsageError(
            "Give one of DIRECTORY (with --worker), --file, --serve and --metadata: "
            "tfpreempt notify --worker 1 ckpt"
        )
    try:
        if file is not None:
            _give_file(file, _FILE_SECONDS if hold is None else hold)
        elif cloud is not None:
            _serve(cloud)
        elif url is not None:
            _give_metadata(url, topic, hold)
        elif directory is not None:
            code = _signal(directory, workers or (0,), signal_name, follow_seconds)
            raise SystemExit(code)
    except (TfpreemptError, OSError) as error:  # OSError: a journal of another user
        raise click.ClickException(str(error)) from error


def _signal(
    directory: Path, workers: tuple[int, ...], name: str, seconds: float
) -> int:
    """Signals each worker, tells what follows; returns the exit status."""
    number = parse_signal(name)
    follower = Follower(directory)
    for index in workers:
        worker = signal_worker(directory, index, number)
        click.echo(
            f"sent {number.name} to worker {index}, process {worker.pid} "
            f"({worker.origin})"
        )
    if not seconds:
        return 0
    was_committed = follower.follow(seconds, click.echo)
    if was_committed is None:
        click.echo(f"Nobody has left within {seconds:g} s.", err=True)
    return 0 if was_committed else 1


def _give_file(given: str, hold: float) -> None:
    """Creates a notice file, and takes it away again."""
    path = checked_path(given)
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
    if not hold:
        click.echo(f"created {path}; remove it before the job is started again")
        return
    click.echo(f"created {path}; it goes in {hold:g} s")
    try:
        _wait(hold)
    finally:
        os.remove(path)
        click.echo(f"removed {path}")


def _serve(cloud: str) -> None:
    """Is a metadata server until it is told to end."""
    from tfpreempt.cli._notify_server import SERVERS

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with SERVERS[cloud]() as server:
        click.echo(f"# The metadata server of {cloud}, faked. For the job's shell:")
        for name, value in server.environment().items():
            click.echo(f"export {name}={value}")
        click.echo("# In another terminal, while the job runs:")
        click.echo(f"#   tfpreempt notify --metadata {server.url}")
        over.wait()


def _give_metadata(url: str, topic: str | None, hold: float | None) -> None:
    """Has a server of `--serve` give a notice, and take it back."""
    from tfpreempt.cli._notify_server import tell

    said = tell(url, topic, is_up=True)
    if hold == 0:
        click.echo(f"{url} says {said}; it says so to the restarted job too")
        return
    how_long = "until the job has asked" if hold is None else f"for {hold:g} s"
    click.echo(f"{url} says {said}, {how_long}")
    try:
        if hold is None:
            _wait_heard(url, said)
        else:
            _wait(hold)
    finally:
        tell(url, topic, is_up=False)
        click.echo(f"{url} is quiet again")


def _wait_heard(url: str, topic: str) -> None:
    """Until somebody was told, so that a client which polls cannot miss it.

    Raises:
        ConfigurationError: nobody has asked.
    """
    from tfpreempt.cli._notify_server import is_heard

    deadline = time.monotonic() + _ASK_SECONDS
    while not is_heard(url):
        if time.monotonic() >= deadline:
            raise ConfigurationError(
                f"nobody has asked {url} for {topic} within {_ASK_SECONDS:g} s. Start "
                "the job with the variables that `tfpreempt notify --serve` printed, "
                "and with a config that watches this cloud"
            )
        _wait(_POLL_SECONDS)
    click.echo(f"the job was told {topic}")


def _wait(seconds: float) -> None:
    """Until Ctrl-C, or so long."""
    threading.Event().wait(seconds)
