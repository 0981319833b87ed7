"""Cases of a review that failed before; see programs/edges.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Zygote

pytestmark = [pytest.mark.tensorflow]

PROGRAM = Path(__file__).with_name("programs") / "edges.py"


@pytest.fixture(scope="module")
def ended(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("edges")
    return zygote.run(PROGRAM, place, directory=place, limit=240)


@pytest.fixture
def told(ended: Any) -> dict[str, Any]:
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    records = [json.loads(line) for line in lines]
    return {record.pop("name"): record for record in records}


def test_metrics_with_many_values_are_kept(told: dict[str, Any]) -> None:
    assert told["left"] == {"code": 143}
    assert told["vector"] == {"epochs": [0, 1, 2], "shape": [3, 3]}


def test_fewer_epochs_than_trained_restore_and_train_nothing(
    told: dict[str, Any],
) -> None:
    assert told["fewer"]["epochs"] == [0]
    assert len(told["fewer"]["losses"]) == 1


def test_a_complete_fit_stays_complete_on_other_devices(told: dict[str, Any]) -> None:
    assert told["fewer devices"] == {"epochs": [0]}


def test_other_workers_may_have_other_devices(told: dict[str, Any]) -> None:
    assert told["other workers"] == {"epochs": [0, 1, 2]}


def test_a_plain_fit_after_a_complete_one_trains_all_its_epochs(
    told: dict[str, Any],
) -> None:
    assert told["complete"] == {"epochs": [0, 1, 2], "plain": [0, 1]}


def test_a_state_that_cannot_be_saved_is_named_before_training(
    told: dict[str, Any],
) -> None:
    assert "Bad" in told["bad"]["error"]
    assert "get_state()['x']" in told["bad"]["error"]
    assert told["bad"]["plain"] == [0, 1]


def test_a_failed_fit_leaves_nothing_behind(told: dict[str, Any], ended: Any) -> None:
    assert told["died"] == {"error": "died", "plain": [0, 1]}
    assert "deaf" not in told, "SIGTERM was swallowed"
    assert ended.returncode == 143, ended.stderr[-3000:]
