"""docs/recipes/trackers: a run that is preempted and killed is one run, each step once.

Each program is sent SIGTERM before step 6, and SIGKILL, in its next start, before step
11, when the steps from 8 on are in no commit; what is asked then is the tracker's own
reader.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]

from tests.multiprocess.harness import RESTART, Cluster, Place, wait_until  # noqa: E402

HERE = Path(__file__).parent
PROGRAM = str(HERE / "trackers_program.py")
FIT = str(HERE / "tracked_fit_program.py")
RECIPES = Path(__file__).parents[2] / "docs" / "recipes" / "trackers"
STEPS, EPOCHS = 16, 6
Losses = list[tuple[int, float]]


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test, before anything is started for it, where a tracker is not there."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"no {package}: pip install '.[trackers]'",
    )


def trained(cluster: Cluster) -> Losses:
    """What a start trained: each step and its loss."""
    said = cluster[0].lines("trained")
    return [(int(step), float.fromhex(loss)) for step, loss in said]


def logged(cluster: Cluster) -> Losses:
    """What a start of a fit logged: each epoch and its loss."""
    said = cluster[0].lines("logged")
    return [(int(epoch), float.fromhex(loss)) for epoch, loss in said]


def preempt(here: Place, program: str, *argv: object, env: dict[str, str]) -> Cluster:
    """A start that is sent SIGTERM where it holds."""
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


def train_with_losses(
    here: Place, file: str, *argv: object, env: dict[str, str]
) -> Losses:
    """Trains in three starts, the first two of which are cut off; each step's loss."""
    first = preempt(here, PROGRAM, file, 6, *argv, env=env)
    second = kill(here, PROGRAM, file, 11, *argv, commit=8, env=env)
    third = here.start(PROGRAM, file, STEPS, *argv, env=env)
    third.expect(0)
    preempted, killed, last = map(trained, (first, second, third))
    again = [step for step, _ in last if step <= killed[-1][0]]
    assert again == [8, 9, 10]
    assert last[:3] == killed[-3:]  # the same numbers, bit for bit
    return preempted + killed + last[3:]


@needs("tensorboard")
def test_tensorboard_shows_each_step_once(here: Place) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray

    logs = here.path / "logs"
    losses = train_with_losses(here, "with_tensorboard.py", logs, env={})
    [folder] = logs.iterdir()
    everything = {"tensors": 0}  # it shows ten of them by default
    found = EventAccumulator(str(folder), everything).Reload().Tensors("loss")
    assert [each.step for each in found] == list(range(STEPS))
    shown = [float(make_ndarray(each.tensor_proto)) for each in found]
    assert list(zip(range(STEPS), shown, strict=True)) == losses


def write_events(folder: Path, tag: str, steps: range) -> None:
    """One start's event file."""
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
    """As the callback of Keras does after SIGKILL: epochs and batches in one folder."""
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
def test_wandb_has_each_step_once(here: Place) -> None:
    env = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(here.path),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    losses = train_with_losses(here, "with_wandb.py", env=env)
    folders = list(here.path.glob("wandb/offline-run-*"))
    [run_id] = {folder.name.split("-")[-1] for folder in folders}
    assert len(folders) == 3
    read = runpy.run_path(str(RECIPES / "offline_runs.py"))["steps"]
    assert read(here.path / "wandb", run_id) == [step for step, _ in losses]


@pytest.fixture
def mlflow_runs(here: Place, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the environment of a program has, so that it logs into a folder."""
    found = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (here.path / "runs").as_uri(),
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def the_run() -> tuple[str, Losses]:
    """The one run that MLflow has: its status, and each loss that it has of it."""
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    [run] = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "loss")
    return run.info.status, [(each.step, each.value) for each in history]


@needs("mlflow")
def test_mlflow_has_each_step_once(here: Place, mlflow_runs: dict[str, str]) -> None:
    losses = train_with_losses(here, "with_mlflow.py", env=mlflow_runs)
    assert the_run() == ("FINISHED", losses)


@needs("mlflow")
def test_mlflow_has_each_epoch_of_a_fit_once(
    here: Place, mlflow_runs: dict[str, str]
) -> None:
    """Of ten steps each: commits are at step 25 and 50, and at the notice."""
    env = mlflow_runs | {"TFPREEMPT_CHECKPOINT_DIR": str(here.checkpoints)}
    first = preempt(here, FIT, 0, env=env)
    second = kill(here, FIT, 3, commit=25, env=env)
    third = here.start(FIT, EPOCHS, env=env)
    third.expect(0)
    said = [logged(each) for each in (first, second, third)]
    assert all(said)
    once = [*said[0], *said[1], *said[2]]
    assert [epoch for epoch, _ in once] == list(range(EPOCHS))
    assert the_run() == ("FINISHED", once)
