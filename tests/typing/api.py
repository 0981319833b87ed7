"""Programs as users write them, for the type checker; nothing here is run."""

from __future__ import annotations

import datetime
import pathlib
from typing import Any

from typing_extensions import assert_type

import tfpreempt
from tfpreempt import (
    AwsSpotTerminationConfig,
    AzureTerminationConfig,
    BorgTerminationConfig,
    BorgTpuTerminationConfig,
    Checkpoint,
    GceGpuTerminationConfig,
    GceSpotTerminationConfig,
    GenericTerminationConfig,
    KubernetesTerminationConfig,
    MirrorStatus,
    Platform,
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    SlurmTerminationConfig,
    State,
    TerminationConfig,
    TfpreemptError,
    connect_to_cluster,
    detect_platform,
    errors,
    load_state,
    num_restarts,
    save_all_states,
    save_state,
)
from tfpreempt.notice import aws_source, azure_source, gce_source
from tfpreempt.states import ArrayDictState, JsonState, StepCounter

assert_type(tfpreempt.__version__, str)


def custom_loop(resolver: Any, checkpoint: Any, directory: str) -> int:
    def step(number: int, *, scale: float = 1.0) -> float:
        return number * scale

    handler = PreemptionCheckpointHandler(
        resolver, checkpoint, directory, save_freq=100, async_save=False,
        restore="partial", keep_every=1000, best_by=("loss", "min", 3),
        on_bad_step=tfpreempt.BadSteps(crashes=2, limit=3),
    )  # fmt: skip
    with handler:
        for number in range(handler.total_run_calls, 100):
            assert_type(handler.run(step, number, scale=2.0), float)
            handler.run(step, "one")  # type: ignore[arg-type]  # run() checks fn's
        handler.save_checkpoint_if_preempted()
        with handler.pause_hang_detection():
            pass
        status = assert_type(handler.mirror_status, MirrorStatus | None)
        if status is not None:
            assert_type(status.mirrored_step, int | None)
        assert_type(handler.wait_for_mirror(timeout=5), bool)
        saved = handler.save(wait=False, metrics={"loss": 0.5})
        assert_type(saved, Checkpoint | None)
        assert_type(handler.wait_for_save(timeout=5), bool)
        assert_type(handler.latest_checkpoint, str | None)
        for each in assert_type(handler.checkpoints(), list[Checkpoint]):
            assert_type(each.kept_because, str)
            handler.delete_checkpoint(each)
        handler.delete_checkpoint("ckpt/5")  # type: ignore[arg-type]  # a handle
    handler.close(timeout=5)
    return assert_type(handler.total_run_calls, int)


def fitted(model: Any, data: Any) -> None:
    callback = tfpreempt.keras.PreemptionCallback("ckpt", save_freq=100)
    assert_type(callback.latest_checkpoint, str | None)
    assert_type(callback.checkpoints(), list[Checkpoint])
    assert_type(callback.mirror_status, MirrorStatus | None)
    model.fit(data, callbacks=[callback])
    tfpreempt.keras.PreemptionCallback(1)  # type: ignore[arg-type]  # not a path
    tfpreempt.keras.PreemptionCallback(
        pathlib.Path("ckpt"),
        save_freq=datetime.timedelta(minutes=5),
        termination_config=TerminationConfig(),
        mirror_dir="gs://bucket/run",
        keep_every=datetime.timedelta(days=1),
    )
    with tfpreempt.keras.enable_multi_worker() as patch:
        assert_type(patch.is_active, bool)
    save_freq = "epochs"
    tfpreempt.keras.PreemptionCallback("ckpt", save_freq=save_freq)  # type: ignore[arg-type]
    tfpreempt.keras.PreemptionCallback("ckpt", mirror_dir=1)  # type: ignore[arg-type]
    low = ("loss", "low", 1)
    tfpreempt.keras.PreemptionCallback("ckpt", best_by=low)  # type: ignore[arg-type]


def tracked(model: Any, data: Any) -> None:
    tracker = tfpreempt.trackers.wandb(project="shapes", config={"rate": 0.1})
    model.fit(data, callbacks=[tracker])
    tracker = tfpreempt.trackers.tensorboard(pathlib.Path("logs"))
    tracker = tfpreempt.trackers.mlflow(experiment="shapes")
    tracker.log({"loss": 0.5})
    tracker.finish()
    assert_type(tracker.run_id, str | None)
    tfpreempt.trackers.tensorboard(1)  # type: ignore[arg-type]  # not a path


def configured(resolver: Any, manager: Any) -> None:
    def leave() -> None:
        raise SystemExit(143)

    def noticed() -> bool:
        return False

    config = TerminationConfig(
        termination_watcher_fn=noticed, exit_fn=leave, grace_period=30
    )
    PreemptionCheckpointHandler(resolver, manager, termination_config=config)
    variants: list[TerminationConfig] = [
        GenericTerminationConfig(),
        BorgTerminationConfig(),
        BorgTpuTerminationConfig(has_workers=noticed, grace_period=30),
        AwsSpotTerminationConfig(rebalance=True),
        AzureTerminationConfig(kinds=["Preempt"], acknowledge=True),
        GceGpuTerminationConfig(maintenance_grace_period=1800),
        GceSpotTerminationConfig(grace_period=120),
        SlurmTerminationConfig(early_signal="USR1", exit_fn=leave, signals=("TERM",)),
        KubernetesTerminationConfig(notice_file="/run/stop"),
        SlurmTerminationConfig(
            sources=[
                gce_source("preempted", grace_period=30),
                aws_source("spot-interruption", grace_period=120),
                azure_source("Preempt"),
            ]
        ),
    ]
    gce_source("preemption")  # type: ignore[arg-type]  # preempted
    KubernetesTerminationConfig(grace=30)  # type: ignore[call-arg]  # grace_period
    PreemptionCheckpointHandler(
        cluster_resolver=resolver,
        checkpoint_or_checkpoint_manager=manager,
        termination_config=variants[0],
        mirror_dir=pathlib.Path("mirror"),
    )
    PreemptionCheckpointHandler(resolver, manager, mirror_dir=1)  # type: ignore[arg-type]
    PreemptionCheckpointHandler(resolver, manager, save_freq="epoch")  # type: ignore[arg-type]


def detected() -> TerminationConfig:
    platform = assert_type(detect_platform(), Platform)
    return platform.termination_config(grace_period=30)


def scope(handler: PreemptionCheckpointHandler) -> None:
    with handler.watch_preemption_scope():
        pass


def remote(resolver: Any) -> bool:
    connect_to_cluster(resolver, protocol="grpc")
    watcher = PreemptionWatcher()
    assert_type(watcher.preemption_message, str | None)
    return assert_type(watcher.block_until_worker_exit(30), bool)


def references(path: str, filesystem: Any, checkpoint: Any) -> str:
    handle = assert_type(Checkpoint.from_directory(path), Checkpoint)
    assert_type(handle.step, int | None)
    assert_type(handle.prefix, str | None)
    with Checkpoint("gs://bucket/run/5").as_directory(timeout=60) as directory:
        assert_type(directory, str)
    handle.set_metadata({"loss": 0.5})
    handle.update_metadata({"loss": 0.25})
    assert_type(handle.get_metadata(), dict[str, Any])
    handle.restore(checkpoint).assert_consumed()
    handle.set_metadata("loss")  # type: ignore[arg-type]  # not a mapping
    assert_type(Checkpoint("run/5", filesystem).to_directory(), str)
    return assert_type(Checkpoint(path).path, str)


def caught() -> type[Exception]:
    try:
        raise errors.HandlerClosedError("closed")
    except TfpreemptError as error:
        return type(error)


def subclassed(states: list[State]) -> list[str]:
    return [state.name for state in states]


def saved_and_loaded(state: State, directory: str) -> str | None:
    counter = StepCounter()
    assert_type(load_state(state), bool)
    assert_type(counter.increment(), int)
    save_state(JsonState("settings", {"rate": 0.1}), directory, sync=False)
    save_state(ArrayDictState("arrays", per_worker=True), directory)
    save_state(state, None)
    save_state("arrays", directory)  # type: ignore[arg-type]  # a State
    assert_type(num_restarts(), int)
    return assert_type(save_all_states(), str | None)
