"""Heartbeats of a fit for its supervisor: only steps can hang."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.handler.program import Program
from tests.keras.small_fit import BATCHES, machine
from tfpreempt.core.heartbeat import WorkerPhase
from tfpreempt.handler import current_session

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("line", ["keras", "tf_keras"])
def test_validation_and_callbacks_take_as_long_as_they_take(line: str) -> None:
    seen: dict[str, list[WorkerPhase]] = {}

    def note(where: str) -> None:
        here = current_session.current()
        assert here is not None
        seen.setdefault(where, []).append(here.activity.heartbeat().stage)

    with machine(line) as made:

        class Watched(made.keras.Model):  # type: ignore[misc, name-defined]
            def train_step(self, data: object) -> dict[str, object]:
                note("step")
                return {"loss": tf.constant(0.0)}

            def test_step(self, data: object) -> dict[str, object]:
                note("validation")
                return {"loss": tf.constant(0.0)}

        model = Watched()
        model.compile("sgd", "mse", run_eagerly=True)
        arrays = made.arrays()
        callback = made.callback(
            on_train_batch_end=lambda *_, **__: note("callback"),
            on_test_end=lambda *_, **__: note("callback"),
            on_epoch_end=lambda *_, **__: note("callback"),
        )
        data = (arrays["x"], arrays["y"])
        made.fit(model, callback, epochs=2, validation_data=data)
    steps = [WorkerPhase.FIRST] * 2 + [WorkerPhase.STEPS] * (2 * BATCHES - 2)
    assert seen["step"] == steps
    assert set(seen["validation"]) == set(seen["callback"]) == {WorkerPhase.APART}


def test_the_beginning_of_a_fit_has_no_hang_timeout() -> None:
    seen = []

    def note(epoch: int, logs: object = None) -> None:
        here = current_session.current()
        assert here is not None
        seen.append(here.activity.heartbeat().stage)

    with machine("keras") as made:
        loop = Program(made.directory / "loop")
        with loop.handler() as handler:
            for _ in range(3):
                handler.run(loop.step)
            made.fit(None, made.callback(on_epoch_begin=note), epochs=1)
    assert seen == [WorkerPhase.APART]
