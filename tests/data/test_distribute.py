"""`distribute` yields the batches of TensorFlow's strategies, and can resume."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]
tf = pytest.importorskip("tensorflow")

from tests.multiprocess.harness import Zygote, place  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.data import distribute  # noqa: E402

PROGRAM = str(Path(__file__).with_name("distribute_program.py"))
STRATEGIES = [
    *(("one", 1, 1), ("mirrored", 1, 1), ("mirrored", 2, 1), ("mirrored", 3, 1)),
    pytest.param("mirrored", 4, 1, marks=pytest.mark.campaign),
    ("mwms", 1, 2),
    # Three replicas of one worker have the same shares of a batch.
    pytest.param("mwms", 1, 3, marks=pytest.mark.campaign),
]
# Data without files, which several workers cannot share by files.
NO_FILES = {"plain_FILE", "shuffled_FILE"}


@pytest.mark.parametrize(("strategy", "devices", "world"), STRATEGIES)
def test_every_replica_gets_its_batches_and_resumes_at_a_position(
    zygote: Zygote, strategy: str, devices: int, world: int
) -> None:
    with place(zygote) as made:
        cluster = made.start(
            PROGRAM, strategy, devices, world=world, tf_config=strategy == "mwms"
        )
        cluster.expect(*[0] * world, limit=270.0)
        for facts in cluster.results():
            for case, found in facts.items():
                assert found["same"], (case, found)
                if world > 1 and case in NO_FILES:
                    assert "shard" in found["refused"], found
                else:
                    assert found.get("continued"), (case, found)


def test_bad_arguments_are_refused() -> None:
    numbers = tf.data.Dataset.range(8).batch(4)
    with pytest.raises(errors.ConfigurationError, match="Got strategy='mirrored'"):
        distribute(numbers, "mirrored")  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match="Got a dataset of type list"):
        distribute([1, 2], tf.distribute.get_strategy())  # type: ignore[arg-type]
