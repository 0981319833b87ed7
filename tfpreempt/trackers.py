"""Trackers: log a run, over all restarts, to one run of W&B, MLflow or TensorBoard.

A commit includes the key of the tracker's run, the newest step of each metric, and the
rows that the tracker may not have stored: no step is missing, or logged twice.
TensorBoard drops the steps after the restored commit; W&B and MLflow cannot drop steps.
A call of a server has a deadline. Rows that cannot be sent are kept, and sent later.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import logging
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import IO, Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory.layout import check_state_name
from tfpreempt.checkpoint.restore.handle import checkpoints_in
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report.run_report import build_report
from tfpreempt.core.arguments import check_metrics
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.journal import journal_directory
from tfpreempt.core.replay import read_replay
from tfpreempt.core.scratch import is_url
from tfpreempt.core.threads import call_within
from tfpreempt.handler import current_session
from tfpreempt.handler.run import Run
from tfpreempt.states.api import save_state
from tfpreempt.states.values import JsonState

Config = Mapping[str, Any] | None
Row = dict[str, float]
_log = logging.getLogger(__name__)
_KEPT_ROWS = 1000  # newest rows that a tracker keeps, if it cannot send them
_SECONDS = 5.0  # deadline of a call of a server
_END_SECONDS = 30.0  # more time at the end, after the last commit


def wandb(*, config: Config = None, **init: Any) -> Tracker:
    """Returns a tracker that logs to one run of Weights & Biases.

    Args:
        config: settings of the run, by name.
        **init: arguments of `wandb.init`, such as `project`.

    Raises:
        ConfigurationError: the package wandb is not installed.
    """
    return _WandbTracker("wandb", config, **init)


def mlflow(*, config: Config = None, experiment: str | None = None) -> Tracker:
    """Returns a tracker that logs to one run of MLflow.

    Args:
        config: settings of the run, by name; MLflow keeps those of the first start.
        experiment: name of MLflow's experiment, created if missing; None: the
            experiment of `mlflow.set_experiment`, or of MLflow's environment variables.

    Raises:
        ConfigurationError: the package mlflow (or mlflow-skinny) is not installed.
    """
    return _MlflowTracker("mlflow", config, experiment=experiment)


def tensorboard(logdir: str | os.PathLike[str], *, config: Config = None) -> Tracker:
    """Returns a tracker that logs to one folder of TensorBoard, without TensorFlow.

    Args:
        logdir: local or mounted log directory, in which the folder is created.
        config: settings of the run, by name; shown as a text.

    Raises:
        ConfigurationError: the package tensorboardX is not installed, or `logdir` is a
            URL.
    """
    if is_url(folder := os.fspath(logdir)):
        raise errors.ConfigurationError(
            f"logdir is {folder!r}; expected a local or mounted folder: tensorboardX "
            "would upload the complete file at each commit. Mount the bucket."
        )
    return _TensorBoardTracker("tensorboardX", config, logdir=folder)


class Tracker(JsonState):
    """A callback for `model.fit` with a `PreemptionCallback`, and a logger for loops.

    The step of a value is the number of completed steps over all restarts. Create the
    tracker on every worker; the chief logs. For use on the main thread. `run_id` is the
    id of the tracker's run (TensorBoard: the folder); None before the first `log`.
    Another checkpoint directory begins another run.
    """

    run_id: str | None = None
    _is_reserved = _is_optional = True
    _has_server = False  # whether a call may wait for a server
    _loses_seconds = 0.0  # age in seconds of the values that the tracker may lose

    def __init__(self, package: str, config: Config, **options: Any) -> None:
        try:
            self._api: Any = importlib.import_module(package)
        except ImportError as error:
            raise errors.ConfigurationError(
                f"the tracker got {error}; expected {package}: pip install {package}"
            ) from error
        super().__init__(f"tfpreempt.tracker.{package}")
        self._config, self._options = dict(config or {}), options
        self._before = collections.defaultdict[str, int](lambda: -1)  # newest steps
        self._directory, self._base = "", 0  # of the run of `value`; "": not known
        self._calls = threading.Lock()  # held during a call of the package
        self._retries_at = -math.inf
        self._is_warned = False

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Logs metrics of the current step; after training, of the last logged step.

        Args:
            metrics: numbers by name; all metrics of a step in one call. A metric that
                is logged already for the step is ignored.

        Raises:
            ConfigurationError: a metric is not a number.
            UsageError: no handler is open, and no fit with a `PreemptionCallback` runs.
        """
        row = check_metrics(metrics)
        if _is_silent():
            return
        run = self._follow()
        if run is None and self.value is None:
            raise errors.UsageError(
                f"{self!r} got metrics before the steps are counted; expected a "
                "PreemptionCheckpointHandler, or a fit with a PreemptionCallback."
            )
        if self.value is None:
            key = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            self.value = {"key": key, "step": 0, "newest": {}, "rows": []}
            self.value["directory"] = directory = self._directory
            # Found by a start after a kill.
            self._try(lambda: save_state(self, directory, sync=False))
        self.value["step"] = run.step if run else self.value["step"]
        self._add(row)
        self._send(_no_hook if run else self._flush)  # without a run: no commit follows

    def finish(self) -> None:
        """Logs `tfpreempt/goodput` (see `tfpreempt report`), and finishes the run.

        Call the method after `handler.close()`; a fit calls the method after its last
        commit. Waits for a server for at most a minute.
        """
        if self.value is not None and not _is_silent():
            self._try(self._add_goodput)
            if not self._send(self._end, _END_SECONDS):
                text = "%r is not complete; start the program again, to send %d rows"
                rows = [each for each in self.value["rows"] if each[2] is None]
                _log.warning(text, self, len(rows))

    _fit_is_committed = finish

    def save(self, fileobj: IO[bytes]) -> None:
        if not _is_silent():
            self._follow()  # so that the commit has no value of another directory
            if self.value and (session := current_session.current()):
                paths = (each.directory.path for each in session.runs)
                self.value["open"] = [each for each in paths if each != self._directory]
        if self.run_id is not None and self._send(self._flush):
            stored = SystemClock.monotonic() - self._loses_seconds
            rows = self.value["rows"]
            rows[:] = [each for each in rows if each[2] is None or each[2] > stored]
        super().save(fileobj)

    def load(self, fileobj: IO[bytes]) -> None:
        super().load(fileobj)
        self._directory = ""
        if self.value is not None:
            self._base = self.value["step"]
            for row in self.value["rows"]:
                row[2:] = [None]  # the tracker may have lost the row

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the metrics of an epoch; Keras calls the method."""
        row = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, Real)}
        self.log({"epoch": epoch, **row})

    def __getattr__(self, name: str) -> Any:
        """Returns a function without effect for the other hooks of Keras."""
        if name.startswith(("on_", "set_model", "set_params", "_implements_")):
            return _no_hook
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _follow(self) -> Run | None:
        """Returns the open run; a run in another directory has a value of its own."""
        session = current_session.current()
        run = next(iter(session.runs), None) if session else None
        if run is not None and run.directory.path != self._directory:
            directory, was_open = run.directory.path, self.run_id
            self.run_id = self.value = None
            self._before.clear()
            # Created after the handler, or killed before a commit; not restore=False.
            if run.candidate or not checkpoints_in(directory):
                self._try(lambda: run.states.load(self))
            if value := self.value:
                # The run of a directory that was open too when the commit was made?
                is_other = was_open and value["directory"] != directory
                if is_other or directory in value.get("open", ()):
                    self.value = None
            if self.value:
                self.value["directory"] = directory
            self._directory, self._base = directory, run.base
        return run

    def _add(self, row: Row) -> None:
        """Adds the metrics that are not logged yet for the step to the rows."""
        step, newest, rows = (self.value[each] for each in ("step", "newest", "rows"))
        if new := {k: v for k, v in row.items() if step > newest.get(k, -1)}:
            newest.update(dict.fromkeys(new, step))
            rows.append([step, new, None])  # None: not sent
            del rows[:-_KEPT_ROWS]

    def _add_goodput(self) -> None:
        folder = journal_directory(self.value["directory"])
        journals = JournalTailer(folder, keeps_all=True)
        with contextlib.suppress(OSError):
            journals.read_on(SystemClock.wall())
        report = build_report(journals.workers, journals.supervisors)
        if report is not None and report.goodput is not None:
            self._add({"tfpreempt/goodput": report.goodput})

    def _try(self, call: Callable[[], object]) -> bool:
        """Returns whether a call succeeds; logs an error once, and never raises."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - also of the tracker's package
            if not self._is_warned:
                text = "%r cannot log now, and keeps the newest %d rows for later: %r"
                _log.warning(text, self, _KEPT_ROWS, error)
            self._is_warned = True
            return False
        return True

    def _send(self, then: Callable[[], None], patience: float = 0.0) -> bool:
        """Sends the rows, and calls a function; returns whether all is done.

        A call of a server that is not over at the deadline continues in its thread.
        """
        began = SystemClock.monotonic()
        is_due = patience > 0 or began >= self._retries_at
        if not (is_due and self._calls.acquire(timeout=patience)):
            return False
        work = functools.partial(self._work, then)
        # Each call of a server has a timeout, and each call within a commit.
        if self._has_server or self.run_id is None or then == self._flush:
            work = functools.partial(call_within, _SECONDS + patience, work)
        if is_done := self._try(work):
            self._is_warned = self._is_warned and then is _no_hook
        else:  # a server that does not answer costs a tenth of the time
            self._retries_at = 11 * SystemClock.monotonic() - 10 * began
        return is_done

    def _work(self, then: Callable[[], None]) -> None:
        """Creates or continues the run, and sends the rows; may run on any thread."""
        value, failures = self.value, list[Exception]()
        try:
            if self.run_id is None:
                self._start(check_state_name(value["key"]), self._base)
            for each in [row for row in value["rows"] if row[2] is None]:
                new = {k: v for k, v in each[1].items() if each[0] > self._before[k]}
                try:
                    if new and value is self.value:
                        self._write(new, each[0])
                    each[2] = SystemClock.monotonic()
                except Exception as error:  # noqa: BLE001 - one row may be refused
                    failures.append(error)
            then()
        finally:
            self._calls.release()
        if failures:
            raise failures[0]

    def _start(self, key: str, base: int) -> None:
        """Creates or continues the run, restored to step `base`; sets `run_id`."""

    def _write(self, row: Row, step: int) -> None:
        """Logs metrics of a step."""

    def _flush(self) -> None:
        """Stores the values logged so far."""

    def _end(self) -> None:
        """Stores the values, and finishes the run."""
        self._flush()


class _WandbTracker(Tracker):
    _loses_seconds = 20.0  # W&B writes its file every 15 s or 32 KiB, and has no flush
    _run: Any = None

    def _start(self, key: str, base: int) -> None:
        if self._run is not None:
            self._run.finish()  # `init` would return the run of another directory
        init = {"id": key, "resume": "allow", **self._options}
        run = self._run = self._api.init(config=self._config, **init)
        newest = run.step - 1  # online, the server knows the next step
        if run.offline:
            make = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
            files = Path(run.dir).parents[1].glob(f"offline-run-*-{run.id}/*.wandb")
            made = (make.FromString(r) for f in files for r in _records(f.read_bytes()))
            steps = (each.history.step for each in made if each.HasField("history"))
            newest = max((step.num for step in steps), default=-1)
        self._before.default_factory = lambda: newest
        self.run_id = run.id

    def _write(self, row: Row, step: int) -> None:
        self._run.log(row, step=step)


class _MlflowTracker(Tracker):
    _has_server = True

    def _start(self, key: str, base: int) -> None:
        client = self._client = self._api.MlflowClient()
        name, given = self._options["experiment"], os.environ.get
        experiment = given("MLFLOW_EXPERIMENT_ID")  # also set by `set_experiment`
        if name or not experiment:
            name = name or given("MLFLOW_EXPERIMENT_NAME") or "Default"
            old = client.get_experiment_by_name(name)
            experiment = old.experiment_id if old else client.create_experiment(name)
        # Searched by our key, because a kill may come before MLflow's id is saved.
        runs = client.search_runs([experiment], f"tags.tfpreempt = '{key}'")
        tags = {"tfpreempt": key}
        run = runs[0] if runs else client.create_run(experiment, tags=tags)
        run_id, data = run.info.run_id, run.data
        client.update_run(run_id, status="RUNNING")
        for setting in self._config.keys() - data.params.keys():
            client.log_param(run_id, setting, self._config[setting])
        # `data.metrics` lacks the steps; a history would be a request for each metric.
        self._before.update((each.key, each.step) for each in data.to_proto().metrics)
        self.run_id = run_id

    def _write(self, row: Row, step: int) -> None:
        make, at = self._api.entities.Metric, int(SystemClock.wall() * 1000)
        values = [make(name, value, at, step) for name, value in row.items()]
        self._client.log_batch(self.run_id, values, synchronous=True)

    def _end(self) -> None:
        self._client.set_terminated(self.run_id)


class _TensorBoardTracker(Tracker):
    def _start(self, key: str, base: int) -> None:
        api, folder = self._api, f"{self._options['logdir']}/{key}"
        api.record_writer.directory_check(folder)
        make, now = api.event_file_writer.EventsWriter, SystemClock.wall()
        self._writer = make(f"{folder}/events", f".{now:.6f}")  # a name of its own
        log = api.proto.event_pb2.SessionLog(status="START")
        self._add_event(base + 1, session_log=log)  # drops this step and later steps
        if self._config:
            text = api.summary.text("config", str(self._config))
            self._add_event(base, summary=text)
        self.run_id = folder

    def _write(self, row: Row, step: int) -> None:
        for name, value in row.items():
            self._add_event(step, summary=self._api.summary.scalar(name, value))

    def _add_event(self, step: int, **what: Any) -> None:
        make, now = self._api.proto.event_pb2.Event, SystemClock.wall()
        self._writer.write_event(make(wall_time=now, step=step, **what))

    def _flush(self) -> None:
        self._writer.flush()


def _is_silent() -> bool:
    """Returns whether nothing is logged: the tracker has the steps of a replay."""
    return not current_session.current_cluster().is_chief or read_replay() is not None


def _no_hook(*_: Any, **__: Any) -> None:
    """Does nothing, in place of a hook of Keras or of a call after the rows."""


_no_hook._is_default = True  # type: ignore[attr-defined]  # as Keras marks its own


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records in a file of W&B's offline mode, a log in LevelDB's format."""
    record = b""
    for block in range(0, len(data), 32768):
        at, end = max(block, 7), min(block + 32768, len(data))
        while at + 7 <= end:  # a part of a record, after a header of 7 bytes
            length, kind = struct.unpack_from("<HB", data, at + 4)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if at <= end and kind in (1, 4):  # the only part, or the last part
                yield record
                record = b""
