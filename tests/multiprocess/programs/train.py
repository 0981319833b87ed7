"""A training script as users write it: strategy, model, handler, loop."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import os
import time
from typing import IO, Any

from toy_model import (
    INDEX,
    Model,
    before_asynchronous_writes,
    hold,
    log_to_stdout,
    make_strategy,
    say,
)

from tfpreempt import PreemptionCheckpointHandler, State, TerminationConfig
from tfpreempt.checkpoint.bundles import bundle_writer
from tfpreempt.handler import status_file


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint_dir")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--form", default="checkpoint")
    parser.add_argument("--style", default="run")
    parser.add_argument("--grace", type=float)
    parser.add_argument("--hold-at", type=int, nargs="*", default=(), help="in steps")
    parser.add_argument("--hold-worker", type=int, help="only this one holds")
    parser.add_argument("--save-freq", type=int)
    parser.add_argument("--save-each", type=float, help="seconds")
    parser.add_argument("--sync-saves", action="store_true", help="training waits")
    parser.add_argument("--peer-timeout", type=float, default=30.0)
    parser.add_argument("--hold-in-save", type=int, help="only this worker holds")
    parser.add_argument("--hold-in-write", action="store_true", help="of a thread")
    parser.add_argument("--shares", action="store_true", help="though it is small")
    parser.add_argument("--hold-in-share", type=int, help="only this worker holds")
    parser.add_argument("--fail-at", type=int, help="on worker 1")
    parser.add_argument("--fail-with", choices=("tensorflow", "python"))
    parser.add_argument("--config", default="ours")
    parser.add_argument("--in-scope", default="nothing")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, each step")
    parser.add_argument("--slow", type=float, default=0.0, help="more, on worker 1")
    parser.add_argument("--measure-often", action="store_true", help="step times")
    parser.add_argument("--mebibytes", type=int, help="of weights that change, more")
    parser.add_argument("--soak", action="store_true", help="steps say their digest")
    parser.add_argument("--own-disk", action="store_true", help="not a shared one")
    options = parser.parse_args()
    if options.own_disk and "://" in options.checkpoint_dir:
        os.environ["TFPREEMPT_SCRATCH_DIR"] += f"-{INDEX}"
    elif options.own_disk:
        mount_own_disk(options.checkpoint_dir)
    return options


def mount_own_disk(path: str) -> None:
    """Mounts a directory of this worker over the common path, as without a shared disk.

    No other process sees the mount, which ends with the process.
    """
    own, new_mounts, private, bind = f"{path}-{INDEX}", 0x20000, 0x44000, 0x1000
    for each in (path, own):
        os.makedirs(each, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = (
        libc.unshare(new_mounts)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(own.encode(), path.encode(), None, bind, None)
    )
    if failed:
        say("unmountable", os.strerror(ctypes.get_errno()))
        raise SystemExit(77)


def write_shares(holder: int | None) -> None:
    """Each worker writes a share of the state; the holder when the test lets it."""
    bundle_writer.SMALL_BYTES = bundle_writer.WORTH_BYTES = 1
    write = bundle_writer.write

    def held(*args: Any, **more: Any) -> Any:
        if holder == INDEX:
            hold("share")
        return write(*args, **more)

    bundle_writer.write = held


class SlowState(State):
    """Takes as long to save as the test wants; with a `sync` it is not tried before."""

    def sync(self) -> None:
        pass

    def save(self, fileobj: IO[bytes]) -> None:
        hold("save")

    def load(self, fileobj: IO[bytes]) -> None:
        pass


def fail(kind: str) -> None:
    if kind == "python":
        raise ValueError("a bad batch")
    import tensorflow as tf

    raise tf.errors.ResourceExhaustedError(None, None, "no room for the batch")


def make_config(options: argparse.Namespace) -> Any:
    if options.config == "tensorflow":
        import tensorflow as tf

        return tf.distribute.experimental.TerminationConfig(
            grace_period=options.grace or 0
        )
    return TerminationConfig(grace_period=options.grace)


def make_handler(options: argparse.Namespace, model: Model) -> Any:
    resolver = model.strategy.cluster_resolver if options.strategy == "mwms" else None
    every: Any = options.save_freq
    if options.save_each is not None:
        every = datetime.timedelta(seconds=options.save_each)
    more = {
        "save_freq": every,
        "async_save": not options.sync_saves,
        "peer_timeout": options.peer_timeout,
    }
    config = make_config(options)
    if options.form == "manager":
        import tensorflow as tf

        manager = tf.train.CheckpointManager(
            model.checkpoint, options.checkpoint_dir, max_to_keep=2
        )
        return PreemptionCheckpointHandler(
            resolver, manager, termination_config=config, **more
        )
    return PreemptionCheckpointHandler(
        resolver, model.checkpoint, options.checkpoint_dir, config, **more
    )


def in_scope(options: argparse.Namespace, model: Model, *parts: str) -> Any:
    """The strategy's scope, for the parts of the program that are to be in it."""
    if options.in_scope in parts:
        return model.strategy.scope()
    return contextlib.nullcontext()


def main() -> None:
    options = parse()
    log_to_stdout()
    model = Model(make_strategy(options.strategy), options.mebibytes or 0)
    if options.hold_in_write:
        before_asynchronous_writes(lambda: hold("write"))
    if options.measure_often:
        status_file._MEMORY_SECONDS, status_file._MEMORY_STEPS = 2.0, 10
        status_file.REPORT_INTERVAL = 1.0
    if options.shares:
        write_shares(options.hold_in_share)
    with in_scope(options, model, "handler", "loop"):
        handler = make_handler(options, model)
    slow = SlowState("slow", per_worker=True) if options.hold_in_save == INDEX else None
    say("pid", os.getpid())
    say("restored", handler.total_run_calls, model.steps)
    say("weights", model.weights_text())

    def train_step() -> None:
        began = time.monotonic()
        is_mine = options.hold_worker in (None, INDEX)
        if is_mine and model.steps in options.hold_at:
            hold()
        if INDEX == 1 and model.steps == options.fail_at:
            fail(options.fail_with)
        model.step()
        time.sleep(options.pause * (1 + options.slow * (INDEX == 1)))
        if options.mebibytes:
            say("took", time.monotonic() - began)

    def digest() -> list[str]:
        if not options.soak:
            return []
        if handler.total_run_calls % 20 == 0:
            model.forget_kernels()  # memory would grow with every step
        return [model.digest()]

    with handler, in_scope(options, model, "loop"):
        while model.steps < options.steps:
            if options.style == "run":
                handler.run(train_step)
            else:
                handler.save_checkpoint_if_preempted()
                train_step()
            say("step", handler.total_run_calls, *digest())
    del slow
    model.report(runs=handler.total_run_calls, worker=INDEX)


main()
