"""Batches are copied to the devices early; the position is that of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]
pytest.importorskip("tensorflow")

from tests.multiprocess.harness import Zygote  # noqa: E402

PROGRAM = Path(__file__).with_name("read_ahead_program.py")


@pytest.fixture(scope="module")
def found(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of the program."""
    done = zygote.run(PROGRAM, directory=tmp_path_factory.mktemp("ahead"), limit=200)
    assert done.returncode == 0, done.stderr
    whole: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return whole


def test_each_slice_is_on_the_device_of_its_replica(found: dict[str, Any]) -> None:
    assert found["devices"] == ["CPU:0", "CPU:1"]


def test_slices_are_copied_ahead_only_on_request(found: dict[str, Any]) -> None:
    assert found["devices_of_what_nobody_asked_for"] == ["CPU:0", "CPU:0"]


def test_the_position_is_that_of_training_despite_reads_ahead(
    found: dict[str, Any],
) -> None:
    place = found["place_behind_what_was_read"]
    assert place == {"taken": [[n, n] for n in range(4)], "again": [3, 3]}


def test_a_function_traced_before_a_restore_uses_the_restored_position(
    found: dict[str, Any],
) -> None:
    by = found["function_that_holds_the_iterator"]
    assert [*by["taken"], *by["first"]] == found["expected"]
    assert by["second"] == by["first"]


def test_places_are_the_same_with_a_copy_ahead_and_without(
    found: dict[str, Any],
) -> None:
    assert found["places_by_any_iterator"] == found["expected"][:4]


def test_an_error_is_raised_by_the_step_that_needs_the_batch(
    found: dict[str, Any],
) -> None:
    error = found["error"]
    assert error["taken"] == [[*range(8)], [*range(8, 16)]]
    assert "a broken record" in error["raised"]


def test_steps_by_optional_several_in_a_call_and_the_end(found: dict[str, Any]) -> None:
    first, second, *others = map(sum, found["expected"])
    assert found["optional_and_loop"] == [first, second, sum(others), False]


def test_a_new_iterator_needs_no_new_trace(found: dict[str, Any]) -> None:
    assert found["traces"] == 1


def test_deleted_iterators_leave_no_thread(found: dict[str, Any]) -> None:
    assert found["threads_left"] < 3, "three iterators, and one thread of each or more"
