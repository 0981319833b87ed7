"""`tfpreempt simulate`: simulates a preemption of a running job."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from pathlib import Path

import click

from tfpreempt.cli.signal_handling import ENDS, held_signals
from tfpreempt.cli.simulate.workers import RunningWorker, held_workers
from tfpreempt.cli.sizes import Seconds
from tfpreempt.cli.terminal import echo
from tfpreempt.core.log_output import plain
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.notice.file import checked_path
from tfpreempt.notice.metadata_session import checked_base_url
from tfpreempt.notice.signals import parse_signal

_FILE_SECONDS = 5.0  # longer than the poll interval of a job, shorter than a restart
_LINES = {
    "notice": "worker {worker} received a notice: {source}",
    "commit": "step {step} committed in {path}",
    "exit": "worker {worker} exits at step {step} with code {code}: {outcome}",
    "failed": "worker {worker} failed at step {step}: {detail}",
}


@click.command()
@click.argument(
    "directory", required=False, type=click.Path(file_okay=False, path_type=Path)
)
@click.option(
    "--worker", "workers", type=click.IntRange(min=0), multiple=True,
    help="With DIRECTORY: index of the worker to signal (default 0); may be given "
    "several times.",
)  # fmt: skip
@click.option(
    "--signal", "signal_name",
    help="With DIRECTORY: the signal to send (default SIGTERM). A signal that the "
    "job's config does not watch kills the worker.",
)  # fmt: skip
@click.option(
    "--follow", "follow_seconds", type=Seconds(),
    help="With DIRECTORY: seconds to wait for the exit of the worker. The records of "
    "the worker are shown during the wait. Exit status 1 unless the step was "
    "committed.",
)  # fmt: skip
@click.option(
    "--file",
    help="Notice file to create, which the job must watch. The file is removed after "
    f"{_FILE_SECONDS:g} s, so that the restarted job does not find the file.",
)
@click.option(
    "--serve", "cloud", type=click.Choice(["gce", "aws", "azure"]),
    help="Run a simulated metadata server of this cloud until Ctrl-C, and print the "
    "environment variables for the job.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535),
    help="With --serve: port to listen on, so that exported variables stay valid when "
    "the server is restarted (default: any free port).",
)  # fmt: skip
@click.option(
    "--metadata", "url",
    help="Address of a server started with --serve. The server announces a preemption "
    "until the job has read the notice, for at most 30 s. Exit status 1 if the job has "
    "not read the notice.",
)  # fmt: skip
def simulate(
    directory: Path | None,
    workers: tuple[int, ...],
    signal_name: str | None,
    follow_seconds: float | None,
    file: str | None,
    cloud: str | None,
    port: int | None,
    url: str | None,
) -> None:
    """Simulate a preemption of a running job.

    \b
        tfpreempt simulate --worker 1 DIRECTORY     a signal to a worker of the job
        tfpreempt simulate --file /run/preempted    a notice file
        tfpreempt simulate --serve gce              a metadata server, and in another
        tfpreempt simulate --metadata URL           terminal: announce a preemption

    DIRECTORY is the job's checkpoint directory. The job reacts as to a real notice: all
    workers commit one step and exit, and `tfpreempt run` restarts them.
    """
    if [directory, file, cloud, url].count(None) != 3:
        raise click.UsageError(
            "Give one of DIRECTORY (with --worker), --file, --serve and --metadata: "
            "tfpreempt simulate --worker 1 ckpt"
        )
    if directory is None and (workers, signal_name, follow_seconds) != ((), None, None):
        raise click.UsageError("--worker, --signal and --follow need DIRECTORY.")
    if cloud is None and port is not None:
        raise click.UsageError("--port needs --serve.")
    try:
        if directory is not None:
            _signal(directory, workers or (0,), signal_name or "TERM", follow_seconds)
        elif file is not None:
            _give_file(file)
        elif cloud is not None:
            _serve(cloud, port or 0)
        elif url is not None:
            from tfpreempt.cli.simulate.server import ASK_SECONDS, announce

            url = checked_base_url(url, "--metadata")
            echo(
                f"{url} announces a preemption until the job has read the notice "
                f"(at most {ASK_SECONDS:g} s)"
            )
            announce(url)
            echo(f"the job has read the notice; {url} has withdrawn the notice")
    except (TfpreemptError, OSError) as error:  # OSError: another user's journal
        raise click.ClickException(str(error)) from error


def _signal(
    directory: Path, workers: tuple[int, ...], name: str, seconds: float | None
) -> None:
    """Sends a signal to workers, and prints the records that they write.

    Args:
        directory: checkpoint directory of the job.
        workers: indices of the workers.
        name: name or number of the signal.
        seconds: maximum seconds to wait for the end of the workers; None: no wait.

    Raises:
        NothingRunsError: a worker does not run on this machine. If so, the signal was
            sent to no worker.
    """
    number = parse_signal(name)
    with held_workers(directory, workers) as held:
        began, limit = time.time(), time.monotonic() + (seconds or 0.0)
        for worker in held:
            worker.send(number)
            echo(f"sent {number.name} to worker {worker.index}, process {worker.pid}")
        for worker in held if seconds else ():
            has_ended = worker.wait_ended(max(0.0, limit - time.monotonic()))
            _report_exit(worker, began, has_ended)


def _report_exit(worker: RunningWorker, began: float, has_ended: bool) -> None:
    """Prints the records that a worker has written since the signal.

    Args:
        worker: the worker.
        began: time of the signal, in seconds since the epoch.
        has_ended: whether the worker has ended.

    Raises:
        ClickException: no record shows that the worker committed.
    """
    for record in worker.records():
        event = str(record.get("event"))
        kind = "failed" if record.get("outcome") == "failed" else event
        if kind in _LINES:
            line = _LINES[kind].format_map(collections.defaultdict(str, record))
            echo(f"{record['wall'] - began:6.2f} s  {plain(line)}")
        if event == "exit":
            if record.get("outcome") == "committed":
                return
            raise click.ClickException(f"worker {worker.index} exited without a commit")
    if not has_ended:
        raise click.ClickException(
            f"worker {worker.index} has not exited within the time of --follow. With a "
            "known grace period a job commits, continues to train, and exits near the "
            "end of the grace period: use a longer --follow. If no notice is shown "
            "above, the config of the job does not watch this signal"
        )
    raise click.ClickException(
        f"worker {worker.index} ended without a record of its exit: see its log. "
        "Possibly its config does not watch this signal."
    )


def _give_file(given: str) -> None:
    """Creates a notice file; removes the file after 5 s, or when a signal arrives.

    Args:
        given: path of the file.

    Raises:
        ConfigurationError: the file exists already, or cannot be created.
        SystemExit: a signal ended the command. The exit status is 128 + the number of
            the signal, as in a shell.
    """
    path = checked_path(given)
    with held_signals(*ENDS) as wait:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write("tfpreempt simulate\n")
        except FileExistsError as error:
            raise ConfigurationError(
                f"--file {path} exists already, so the job would see no new notice. "
                "Remove the file, or name another"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"--file {path} cannot be created ({error.strerror}). Name the file "
                "that the job watches (notice_file=, or TFPREEMPT_NOTICE_FILE), in an "
                "existing, writable directory"
            ) from error
        echo(f"created {path}, for {_FILE_SECONDS:g} s")
        received = wait(_FILE_SECONDS)
        # Another process may have removed the file.
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    echo(f"received {received.name}: removed {path}" if received else f"removed {path}")
    if received:
        raise SystemExit(128 + received)


def _serve(cloud: str, port: int) -> None:
    """Runs a metadata server until a signal ends the command."""
    from tfpreempt.cli.simulate.server import SERVERS

    with held_signals(*ENDS) as wait, SERVERS[cloud](port) as server:
        echo(f"# Simulated metadata server of {cloud}. Run in the shell of the job:")
        for name, value in server.environment().items():
            echo(f"export {name}={value}")
        echo("# Run in another terminal, while the job runs:")
        echo(f"#   tfpreempt simulate --metadata {server.url}")
        wait(None)
