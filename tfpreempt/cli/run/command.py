"""`tfpreempt run`: parses and checks the options, then calls the supervisor."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shlex
import shutil
from pathlib import Path
from typing import Any

import click

from tfpreempt.checkpoint.mirror.store_selection import Scratch
from tfpreempt.cli.run import hang_detector
from tfpreempt.cli.run.options import RunOptions
from tfpreempt.cli.run.restart_policy import RestartLimits
from tfpreempt.cli.run.snapshot_space import AUTO
from tfpreempt.cli.run.supervisor import supervise
from tfpreempt.cli.sizes import Seconds, Size
from tfpreempt.cli.status.metrics import parse_address
from tfpreempt.core.cluster import cluster_from_environment, given_task
from tfpreempt.core.journal import journal_directory
from tfpreempt.core.record_validation import MOST_WORKERS
from tfpreempt.core.replay import read_replay
from tfpreempt.core.scratch import is_url
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage import paths
from tfpreempt.storage.files import LocalFiles, make_lasting_dirs
from tfpreempt.storage.open_store import check_apart, local_path, split


class AutoOr(click.ParamType[Any]):
    """Type of an option whose value is "auto", "off", or of a given type.

    Args:
        kind: type of a value other than "auto" and "off".
        auto: value that stands for "auto".
        off: value that stands for "off".
    """

    def __init__(self, kind: click.ParamType[Any], auto: Any, off: Any) -> None:
        kind.name = self.name = f"auto|off|{kind.name}"  # shown in errors
        self._kind = kind
        # Accept converted values, too: click may convert a default twice.
        self._words = {"auto": auto, "off": off, auto: auto, off: off}

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if value in self._words:
            return self._words[value]
        return self._kind.convert(value, param, ctx)


def _address(text: str) -> tuple[str, int]:
    """Parses the value of an option for an address: PORT or HOST:PORT."""
    found = parse_address(text)
    if found is None:
        raise click.BadParameter(
            f"{text!r} is not a port. Expected, for example, 9464, 127.0.0.1:9464 or "
            "[::1]:9464."
        )
    return found


_LIMITS = RestartLimits()
# Default of --max-preemptions-without-progress if --checkpoint-dir is given, so that
# the supervisor sees the commits.
_MAX_IDLE_PREEMPTIONS = 10


@click.command(
    context_settings={"allow_interspersed_args": False, "show_default": True}
)
@click.option(
    "--workers", type=click.IntRange(min=1, max=MOST_WORKERS),
    help="Number of workers on this machine (default 1). If TF_CONFIG is set, the "
    "supervisor has one worker, the task of this machine.",
)  # fmt: skip
@click.option(
    "--max-preemptions", type=click.IntRange(min=0),
    help="Largest number of preemptions after which the workers are restarted "
    "(default: no limit).",
)  # fmt: skip
@click.option(
    "--max-preemptions-without-progress", type=click.IntRange(min=0),
    help="Largest number of successive preemptions without progress. Progress is a "
    "newer commit in --checkpoint-dir, or a run of --backoff-reset seconds (default: "
    f"{_MAX_IDLE_PREEMPTIONS} with --checkpoint-dir; no limit without, as commits "
    "are not seen).",
)  # fmt: skip
@click.option(
    "--max-failures", type=click.IntRange(min=0), default=_LIMITS.max_failures,
    help="Largest number of successive failures without progress. Progress is a newer "
    "commit or, if commits are not seen, a run of --backoff-reset seconds. More than "
    "20 failures within an hour (or than this number, if larger) also end the run.",
)  # fmt: skip
@click.option(
    "--checkpoint-dir", type=click.Path(path_type=str),
    help="Checkpoint directory; passed to the workers as TFPREEMPT_CHECKPOINT_DIR. "
    "Also contains the journal, a record of the events of the run. With a URL such as "
    "gs://bucket/run the workers train in a scratch directory of this machine, and "
    "copy commits and journal to the URL.",
)  # fmt: skip
@click.option(
    "--mirror-dir", metavar="URI",
    help="Mirror: gs://bucket/run, s3://bucket/run or az://container/run, to which the "
    "workers copy their commits. Passed to the workers as TFPREEMPT_MIRROR_DIR.",
)  # fmt: skip
@click.option(
    "--log-dir", type=click.Path(path_type=Path),
    help="Directory for the workers' output (default: logs in the checkpoint "
    "directory, or ./tfpreempt-logs).",
)  # fmt: skip
@click.option(
    "--grace", type=Seconds(),
    help="Seconds for the workers to commit and exit after the supervisor received a "
    "signal to stop. A step that takes longer is lost (default: no limit, until the "
    "platform kills the supervisor, or a third Ctrl-C)."
)  # fmt: skip
@click.option(
    "--kill-after", type=Seconds(), default=_LIMITS.kill_after,
    help="Seconds for the workers to exit after another worker has failed."
)  # fmt: skip
@click.option(
    "--restart-code", "restart_codes", type=click.IntRange(1, 255), multiple=True,
    default=_LIMITS.restart_codes,
    help="Exit code that means a preemption; may be given several times. The first is "
    "also the supervisor's exit code if no worker has exited with a restart code.",
)  # fmt: skip
@click.option(
    "--backoff", type=Seconds(), default=_LIMITS.backoff,
    help="Seconds before the first restart after a failure; doubles with every failure "
    "in a row. Preemptions without a newer commit are delayed in the same way, from "
    "start to start."
)  # fmt: skip
@click.option(
    "--backoff-max", type=Seconds(), default=_LIMITS.backoff_max,
    help="Longest delay of a restart in seconds."
)  # fmt: skip
@click.option(
    "--backoff-reset", type=Seconds(), default=_LIMITS.backoff_reset,
    help="Seconds of running after which the delay of restarts is reset, as by a newer "
    "commit."
)  # fmt: skip
@click.option(
    "--log-size", type=Size(), default="64MiB",
    help="Size at which a worker's log is rotated to worker-<i>.log.1, that file to "
    ".2, and so on.",
)  # fmt: skip
@click.option(
    "--log-files", type=click.IntRange(min=1), default=5,
    help="Number of log files to keep for every worker; the oldest is deleted.",
)  # fmt: skip
@click.option(
    "--tail/--quiet", "has_echo", default=True,
    help="Copy worker 0's output to the console; --quiet copies nothing.",
)  # fmt: skip
@click.option(
    "--snapshots", metavar="auto|off|SIZE", type=AutoOr(Size(), AUTO, 0),
    default="auto",
    help="Memory of this machine for snapshots, from which workers resume after a "
    "crash without a notice; shared by the workers of this machine. A worker needs "
    "three times the size of its state. auto: a quarter of the free memory, or no "
    "snapshots if that is too little.",
)  # fmt: skip
@click.option(
    "--hang-timeout", metavar="auto|off|SECONDS",
    type=AutoOr(Seconds(hang_detector.SHORTEST), hang_detector.AUTO, None),
    default="off",
    help="Seconds without a new step after which the workers are hung (at least 2 s). "
    "The stacks of hung workers are written to the journal, and all workers are "
    "restarted, as after a failure. auto: 20 times the duration of a step, and at "
    "least 2 minutes. The start, saves and the evaluations of a fit may take longer.",
)  # fmt: skip
@click.option(
    "--metrics-port", "metrics_address", metavar="[HOST:]PORT", type=_address,
    help="Serve metrics for Prometheus at http://HOST:PORT/metrics. Without HOST only "
    "this machine can read the metrics; with 0.0.0.0:PORT every machine that reaches "
    "the port.",
)  # fmt: skip
@click.option(
    "--metrics-file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the metrics to FILE every 10 s, for node_exporter's textfile "
    "collector, which reads names that end in .prom. The file stays after the end of "
    "the run.",
)  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...],
    workers: int | None,
    checkpoint_dir: str | None,
    mirror_dir: str | None,
    log_dir: Path | None,
    **given: Any,
) -> None:
    """Run COMMAND as a cluster of local workers, through preemptions and failures.

    \b
        tfpreempt run --workers 2 --checkpoint-dir ckpt -- python train.py

    A worker that exits with a restart code was preempted: all workers are restarted.
    Any other exit code except 0 is a failure: the other workers are terminated, and all
    workers are restarted from the last commit. On SIGTERM or SIGINT the workers commit,
    and the supervisor exits with their restart code, so that the platform restarts the
    run.

    On a terminal the last line shows the progress of the run; elsewhere use `tfpreempt
    status`.
    """
    names = {each.name for each in dataclasses.fields(RestartLimits)} & given.keys()
    limits = {name: given.pop(name) for name in names}
    try:
        own = given_task(os.environ)
        task = f"{own.type}-{own.index}" if own else None
        if task is not None and workers not in (None, 1):
            raise ConfigurationError(
                f"--workers {workers} was given, and TF_CONFIG is set (task "
                f"{task}). With TF_CONFIG the supervisor of each machine has one "
                "worker: omit --workers, or unset TF_CONFIG to start a local cluster."
            )
        _check_command(command)
        for location in (checkpoint_dir, mirror_dir):
            paths.check_no_user_info(location or "")
        directory = _make_directory(checkpoint_dir)
        if directory is not None and limits["max_preemptions_without_progress"] is None:
            limits["max_preemptions_without_progress"] = _MAX_IDLE_PREEMPTIONS
        logs = Path("tfpreempt-logs")
        if directory is not None and not is_url(directory):
            logs = Path(directory, "logs")
        logs = (log_dir or logs).absolute()
        options = RunOptions(
            command=command,
            workers=workers or 1,
            limits=RestartLimits(**limits),
            checkpoint_dir=directory,
            mirror_dir=_checked_remote(mirror_dir, directory),
            log_dir=logs,
            journal_dir=journal_directory(directory or logs),
            task=task,
            environment=dict(os.environ),
            first_worker=_first_worker(),
            **given,  # the other options have the names of the fields
        )
        code = supervise(options)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise click.ClickException(
            f"{error.strerror}: the limit of {limit} open files is too low for "
            f"{workers or 1} worker(s). Raise the limit, for example: ulimit -n 1024"
        ) from error
    raise SystemExit(code)


def _first_worker() -> int | None:
    """Returns the index of the first worker on this machine.

    None if the task of this machine in TF_CONFIG does not train.
    """
    try:
        return cluster_from_environment(os.environ).worker
    except ConfigurationError:
        return None


def _check_command(command: tuple[str, ...]) -> None:
    if not command:
        raise ConfigurationError(
            "No command was given. Put the workers' program after the options: "
            "tfpreempt run --workers 2 -- python train.py"
        )
    if read_replay() is not None:
        raise ConfigurationError(
            "Got `tfpreempt run` as the command of a replay (`tfpreempt verify "
            "--replay`); expected the program itself, because the supervisor would "
            "write to the directory of the run, and restart the program. Pass the "
            f"program: tfpreempt verify --replay DIRECTORY -- {shlex.join(command)}"
        )
    if shutil.which(command[0]) is None:
        hint = "Check its spelling and PATH."
        if command[0].endswith(".py") and Path(command[0]).exists():
            hint = f"The file is not executable; use: python {command[0]}"
        raise ConfigurationError(f"The command {command[0]!r} was not found. {hint}")


def _checked_remote(given: str | None, checkpoint_dir: str | None) -> str | None:
    """Checks the URI of the mirror, without a request to the storage.

    Args:
        given: value of --mirror-dir; None if the option was not given.
        checkpoint_dir: path or URL of the checkpoint directory, or None.

    Returns:
        The URI for the workers; a path becomes a file:// URI.

    Raises:
        ConfigurationError: the URI is invalid, or conflicts with the checkpoint
            directory.
    """
    if given is None:
        return None
    if checkpoint_dir is not None and is_url(checkpoint_dir):
        raise ConfigurationError(
            f"--checkpoint-dir {checkpoint_dir} is already in object storage. Omit "
            "--mirror-dir, or name a local --checkpoint-dir."
        )
    if checkpoint_dir is not None:
        check_apart(given, checkpoint_dir)
    path = local_path(given)
    if path is not None:
        # Pass an absolute URI, because workers may have another working directory.
        return Path(path).as_uri()
    split(given)
    return given


def _make_directory(given: str | None) -> str | None:
    """Creates the local checkpoint directory, or the scratch directory of a URL.

    Args:
        given: value of --checkpoint-dir; None if the option was not given.

    Returns:
        The absolute path of the directory, or the URL, or None.

    Raises:
        ConfigurationError: the directory cannot be created.
    """
    if given is None:
        return None
    if is_url(given):
        return Scratch.of(given).url
    path = Path(given).absolute()
    paths.check_text(str(path))
    paths.check_restorable(str(path))
    try:
        make_lasting_dirs(LocalFiles(), str(path))
    except OSError as error:
        raise ConfigurationError(
            f"Cannot use --checkpoint-dir {given!r} ({error.strerror}). Expected a "
            "directory that exists or can be created."
        ) from error
    return str(path)
