"""docs/recipes/trackers: a preempted and killed run is one run, with each step once.

Each program gets SIGTERM before step 6, and its next start SIGKILL before step 11, when
the steps from 8 on are in no commit. Then the tracker's own reader is asked for the
run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]

from tests.multiprocess.harness import RESTART, Cluster, Place, wait_until  # noqa: E402
from tests.test_trackers import start  # noqa: E402
from tfpreempt import trackers  # noqa: E402

HERE = Path(__file__).parent
LOOP = str(HERE / "trackers_program.py")
FIT = str(HERE / "tracked_fit_program.py")
STEPS, EPOCHS, BATCHES = 16, 6, 10
Losses = list[tuple[int, float]]


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test, before anything is started for it, where a tracker is not there."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"no {package}: pip install '.[trackers]'",
    )


def told(cluster: Cluster, word: str) -> Losses:
    """Returns the steps or epochs that a start has logged, with their losses."""
    said = cluster[0].lines(word)
    return [(int(step), float.fromhex(loss)) for step, loss in said]


def preempt(here: Place, program: str, *argv: object, env: dict[str, str]) -> Cluster:
    """Starts a program, and sends SIGTERM where it blocks."""
    here.hold()
    start = here.start(program, *argv, env=env)
    start[0].wait_line("holding")
    start[0].send(signal.SIGTERM)
    start.wait_record("notice")
    here.release()
    start.expect(RESTART)
    return start


def kill(
    here: Place, program: str, *argv: object, commit: int, env: dict[str, str]
) -> Cluster:
    """A start that is sent SIGKILL where it holds, after the commit of a step."""
    here.hold()
    start = here.start(program, *argv, env=env)
    start[0].wait_line("holding")
    start.wait_record("commit", step=commit)
    start[0].send(signal.SIGKILL)
    start.expect(-signal.SIGKILL)
    here.release()
    return start


def train(here: Place, *argv: object, env: dict[str, str]) -> Losses:
    """Trains the loop in three starts, two of which are cut off; each step's loss."""
    first = preempt(here, LOOP, 6, *argv, env=env)
    second = kill(here, LOOP, 11, *argv, commit=8, env=env)
    third = here.start(LOOP, STEPS, *argv, env=env)
    third.expect(0)
    preempted, killed, last = (told(each, "trained") for each in (first, second, third))
    assert [step for step, _ in last if step <= killed[-1][0]] == [9, 10, 11]
    assert last[:3] == killed[-3:]  # the same numbers, bit for bit
    return preempted + killed + last[3:]


def fit(here: Place, *argv: object, env: dict[str, str]) -> Losses:
    """The same for the fit, whose epochs have ten steps: commits at the notice, and at
    step 25; the loss by the step at the end of the epoch."""
    first = preempt(here, FIT, 0, *argv, env=env)
    second = kill(here, FIT, 3, *argv, commit=25, env=env)
    third = here.start(FIT, EPOCHS, *argv, env=env)
    third.expect(0)
    preempted, killed, last = (told(each, "logged") for each in (first, second, third))
    assert last[0] == killed[-1]  # epoch 2 ended after the commit
    losses = preempted + killed + last[1:]
    assert [epoch for epoch, _ in losses] == list(range(EPOCHS))
    return [(BATCHES * (epoch + 1), loss) for epoch, loss in losses]


PROGRAMS = pytest.mark.parametrize("run", [train, fit])


def scalars(folder: Path) -> dict[str, Losses]:
    """Returns the values that TensorBoard's reader finds, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    found = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {
        tag: [(each.step, each.value) for each in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def check_tensorboard(here: Place, run: Callable[..., Losses]) -> None:
    """Trains, and checks the one folder, which has a file for each start."""
    losses = run(
        here, "tensorboard", here.path / "logs", env={"KERAS_BACKEND": here.framework}
    )
    [folder] = (here.path / "logs").iterdir()
    assert len(list(folder.iterdir())) == 3
    found = scalars(folder)
    assert found["loss"] == [(step, pytest.approx(loss)) for step, loss in losses]
    [(last, goodput)] = found["tfpreempt/goodput"]
    assert last == losses[-1][0]
    assert 0 < goodput < 1


@needs("tensorboard")
@PROGRAMS
def test_tensorboard_has_each_step_once(
    here: Place, run: Callable[..., Losses]
) -> None:
    check_tensorboard(here, run)


@needs("tensorboard")
@pytest.mark.parametrize("framework", ["jax"])
def test_tensorboard_has_each_epoch_of_a_fit_on_jax_once(here: Place) -> None:
    check_tensorboard(here, fit)


def write_events(folder: Path, tag: str, steps: range) -> None:
    """Writes the event file of one start."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    metadata = create_summary_metadata(display_name="", description="")
    writer = EventFileWriter(str(folder))
    for step in steps:
        value = Summary.Value(
            tag=tag, metadata=metadata, tensor=make_tensor_proto(float(step))
        )
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
    writer.close()


@needs("tensorboard_data_server")
def test_tensorboard_shows_a_step_that_is_written_twice_once(tmp_path: Path) -> None:
    """As Keras' callback writes after SIGKILL: epochs and batches in one folder."""
    from tensorboard.context import RequestContext
    from tensorboard.data import server_ingester
    from tensorboard.util.grpc_util import ChannelCredsType

    write_events(tmp_path, "batch_loss", range(41))
    write_events(tmp_path, "epoch_loss", range(4))
    write_events(tmp_path, "epoch_loss", range(2, 6))
    write_events(tmp_path, "batch_loss", range(25, 60))
    server = server_ingester.SubprocessServerDataIngester(
        server_ingester.get_server_binary(),
        str(tmp_path),
        reload_interval=0,
        channel_creds_type=ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": 0},
    )
    server.start()  # it ends when the object goes

    def shown() -> dict[str, list[int]]:
        found = server.data_provider.read_scalars(
            RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000
        )
        return {
            tag: [point.step for point in points]
            for run in found.values()
            for tag, points in run.items()
        }

    expected = {"batch_loss": list(range(60)), "epoch_loss": list(range(6))}
    wait_until(lambda: shown() == expected, "each step once", 60)


@needs("wandb")
@PROGRAMS
def test_wandb_has_each_step_once(here: Place, run: Callable[..., Losses]) -> None:
    env = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(here.path),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    losses = run(here, "wandb", env=env)
    folders = sorted(here.path.glob("wandb/offline-run-*"))
    assert len(folders) == 3
    assert len({folder.name.split("-", 3)[-1] for folder in folders}) == 1
    rows = [row for each in folders for row in history(next(each.glob("*.wandb")))]
    assert [(row["_step"], row["loss"]) for row in rows] == losses
    assert 0 < rows[-1]["tfpreempt/goodput"] < 1


def history(file: Path) -> list[dict[str, Any]]:
    """The rows in a file of W&B's offline mode."""
    from wandb.proto.wandb_internal_pb2 import Record

    from tfpreempt.trackers import _records

    rows = []
    for record in map(Record.FromString, _records(file.read_bytes())):
        if record.HasField("history"):
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({"_step": record.history.step.num} | items)
    return rows


@needs("mlflow")
@PROGRAMS
def test_mlflow_has_each_step_once(
    here: Place, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Losses]
) -> None:
    env = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (here.path / "runs").as_uri(),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    losses = run(here, "mlflow", env=env)
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    [found] = client.search_runs(["0"])
    assert found.info.status == "FINISHED"
    assert len(found.data.params) == 1
    metrics = client.get_metric_history(found.info.run_id, "loss")
    assert [(each.step, each.value) for each in metrics] == losses
    [goodput] = client.get_metric_history(found.info.run_id, "tfpreempt/goodput")
    assert goodput.step == losses[-1][0]
    assert 0 < goodput.value < 1


@needs("mlflow")
def test_mlflow_uses_its_own_experiment_and_drops_no_row_for_a_refused_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "shapes")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    for upto in (6, 7):
        tracker = trackers.mlflow()
        with start(tmp_path / "ckpt", save_freq=4) as (handler, make_step):
            while handler.total_run_calls < upto:
                make_step()
                step = handler.total_run_calls
                tracker.log({"loss": step})
                if step == 2:
                    tracker.log({"loss (refused)": step})
            if upto == 7:
                handler.close()
                tracker.finish()
        tracker.unregister()
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("shapes")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    metrics = client.get_metric_history(found.info.run_id, "loss")
    assert [each.step for each in metrics] == [1, 2, 3, 4, 5, 6, 7]
    other = trackers.mlflow(experiment="other")
    with start(tmp_path / "more") as (_, make_step):
        make_step()
        other.log({"loss": 1})
    other.unregister()
    other_id = client.get_experiment_by_name("other").experiment_id
    assert len(client.search_runs([other_id])) == 1
    assert "MLFLOW_EXPERIMENT_ID" not in os.environ  # no active experiment is set
