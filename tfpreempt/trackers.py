"""Trackers: log a run, over all restarts, to one run of W&B, MLflow or TensorBoard.

A commit includes the key of the tracker's run and the newest step of each metric, and
the tracker stores its values before a commit: no step is missing, or logged twice.
TensorBoard drops the steps after the restored commit; W&B and MLflow cannot drop steps.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import logging
import os
import secrets
import struct
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
from tfpreempt.core.replay import read_replay
from tfpreempt.handler import current_session
from tfpreempt.handler.run import Run
from tfpreempt.states.api import save_state
from tfpreempt.states.values import JsonState

Config = Mapping[str, Any] | None
Row = dict[str, float]
_log = logging.getLogger(__name__)


def wandb(*, config: Config = None, **init: Any) -> Tracker:
    """Returns a tracker that logs to one run of Weights & Biases.

    Args:
        config: settings of the run, by name.
        **init: arguments of `wandb.init`, such as `project`.

    Raises:
        ConfigurationError: the package wandb is not installed.
    """
    return _WandbTracker("wandb", config, **init)


def mlflow(*, config: Config = None, experiment: str = "Default") -> Tracker:
    """Returns a tracker that logs to one run of MLflow.

    Args:
        config: settings of the run, by name; MLflow keeps those of the first start.
        experiment: name of MLflow's experiment, created if missing.

    Raises:
        ConfigurationError: the package mlflow (or mlflow-skinny) is not installed.
    """
    return _MlflowTracker("mlflow", config, experiment=experiment)


def tensorboard(logdir: str | os.PathLike[str], *, config: Config = None) -> Tracker:
    """Returns a tracker that logs to one folder of TensorBoard, without TensorFlow.

    Args:
        logdir: TensorBoard's log directory, in which the folder is created.
        config: settings of the run, by name; shown as a text.

    Raises:
        ConfigurationError: the package tensorboardX is not installed.
    """
    return _TensorBoardTracker("tensorboardX", config, logdir=os.fspath(logdir))


class Tracker(JsonState):
    """A callback for `model.fit` with a `PreemptionCallback`, and a logger for loops.

    The step of a value is the number of completed steps over all restarts. Create the
    tracker on every worker; the chief logs. For use on the main thread. `run_id` is the
    id of the tracker's run (TensorBoard: the folder); None before the first `log`.
    """

    run_id: str | None = None
    _is_reserved = _is_optional = True
    _kept_rows = 0  # newest rows that a commit includes, as the tracker may lose them
    _journal = Path()

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
        # The steps of a replay are in the tracker already.
        if not current_session.current_cluster().is_chief or read_replay():
            return
        session = current_session.current()
        run = next(iter(session.runs), None) if session else None
        if run is None and self.value is None:
            raise errors.UsageError(
                f"{self!r} got metrics before the steps are counted; expected a "
                "PreemptionCheckpointHandler, or a fit with a PreemptionCallback."
            )
        if self.run_id is None:
            self._open(run)
        self.value["step"] = run.step if run else self.value["step"]
        self._log_once(row, self.value["step"], self.value["newest"])
        if run is None:
            self._flush()  # no commit follows

    def finish(self) -> None:
        """Logs `tfpreempt/goodput` (see `tfpreempt report`), and finishes the run.

        Call the method after `handler.close()`; a fit calls the method at its end.
        """
        if self.run_id is None:
            return
        journals = JournalTailer(self._journal, keeps_all=True)
        with contextlib.suppress(OSError):
            journals.read_on(SystemClock.wall())
        report = build_report(journals.workers, journals.supervisors)
        if report is not None and report.goodput is not None:
            row, value = {"tfpreempt/goodput": report.goodput}, self.value
            self._log_once(row, value["step"], value["newest"])
        self._flush()

    def save(self, fileobj: IO[bytes]) -> None:
        if self.run_id is not None:
            self._try(self._flush)
        super().save(fileobj)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the metrics of an epoch; Keras calls the method."""
        row = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, Real)}
        self.log({"epoch": epoch, **row})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Calls `finish`; Keras calls the method."""
        self._try(self.finish)

    def _try(self, call: Callable[[], None]) -> None:
        """Calls a method, and logs an error, which must not prevent the next commit."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of the tracker's package
            _log.warning("%r may lack steps before the next commit: %s", self, error)

    def __getattr__(self, name: str) -> Any:
        """Returns a function without effect for the other hooks of Keras."""
        if name.startswith(("on_", "set_model", "set_params", "_implements_")):
            return _no_hook
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _open(self, run: Run | None) -> None:
        if run is not None:
            self._journal, directory = run.journal.path.parent, run.directory.path
            # Created after the handler, or killed before a commit; not restore=False.
            if self.value is None and (run.candidate or not checkpoints_in(directory)):
                run.load_state(self)
            if self.value is None:
                key = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
                self.value = {"key": key, "step": 0, "newest": {}, "rows": []}
                save_state(self, directory, sync=False)  # found by a start after a kill
        self._start(check_state_name(self.value["key"]), run.base if run else None)
        rows, self.value["rows"] = self.value["rows"], []
        for step, row in rows:
            self._log_once(row, step, {})

    def _log_once(self, row: Row, step: int, newest: dict[str, int]) -> None:
        """Logs the metrics that are newer than in `newest` and in the tracker."""
        old = {n for n in row if step <= max(newest.get(n, -1), self._before[n])}
        if new := {name: row[name] for name in row if name not in old}:
            self._write(new, step)
            newest.update(dict.fromkeys(new, step))
            self.value["rows"].append([step, new])
            del self.value["rows"][: -self._kept_rows or None]

    def _start(self, key: str, base: int | None) -> None:
        """Creates or continues the run, restored to step `base`; sets `run_id`."""

    def _write(self, row: Row, step: int) -> None:
        """Logs metrics of a step."""

    def _flush(self) -> None:
        """Stores the values logged so far."""


class _WandbTracker(Tracker):
    _kept_rows = 1000  # W&B writes its file every 15 s or 32 KiB, and has no flush

    def _start(self, key: str, base: int | None) -> None:
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
    def _start(self, key: str, base: int | None) -> None:
        client = self._client = self._api.MlflowClient()
        place = self._api.set_experiment(self._options["experiment"]).experiment_id
        # Searched by our key, because a kill may come before MLflow's id is saved.
        runs = client.search_runs([place], f"tags.tfpreempt = '{key}'")
        run = runs[0] if runs else client.create_run(place, tags={"tfpreempt": key})
        run_id, data = run.info.run_id, run.data
        client.update_run(run_id, status="RUNNING")
        for setting in self._config.keys() - data.params.keys():
            client.log_param(run_id, setting, self._config[setting])
        for name in data.metrics:
            history = client.get_metric_history(run_id, name)
            self._before[name] = max(each.step for each in history)
        self.run_id = run_id

    def _write(self, row: Row, step: int) -> None:
        make, at = self._api.entities.Metric, int(SystemClock.wall() * 1000)
        values = [make(name, value, at, step) for name, value in row.items()]
        self._client.log_batch(self.run_id, values, synchronous=True)

    def finish(self) -> None:
        super().finish()
        if self.run_id is not None:
            self._client.set_terminated(self.run_id)


class _TensorBoardTracker(Tracker):
    def _start(self, key: str, base: int | None) -> None:
        api, folder = self._api, f"{self._options['logdir']}/{key}"
        api.record_writer.directory_check(folder)
        make, now = api.event_file_writer.EventsWriter, SystemClock.wall()
        self._writer = make(f"{folder}/events", f".{now:.6f}")  # a name of its own
        if base is not None:
            log = api.proto.event_pb2.SessionLog(status="START")
            self._add(base + 1, session_log=log)  # drops this step and later steps
        if self._config:
            self._add(base or 0, summary=api.summary.text("config", str(self._config)))
        self.run_id = folder

    def _write(self, row: Row, step: int) -> None:
        for name, value in row.items():
            self._add(step, summary=self._api.summary.scalar(name, value))

    def _add(self, step: int, **what: Any) -> None:
        make, now = self._api.proto.event_pb2.Event, SystemClock.wall()
        self._writer.write_event(make(wall_time=now, step=step, **what))

    def _flush(self) -> None:
        self._writer.flush()


def _no_hook(*_: Any, **__: Any) -> None:
    """Does nothing, in place of a hook of Keras."""


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
