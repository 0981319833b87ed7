"""Named States of two real workers with a handler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multiprocess.harness import Place

pytestmark = [pytest.mark.multiprocess, pytest.mark.tensorflow]


def test_states_of_two_workers(here: Place) -> None:
    """The order of sync is the same on both; a commit has the shards of both."""
    for start in range(2):
        cluster = here.start("named_states.py", world=2)
        cluster.expect(0, 0)
        paths = [str(here.checkpoints / str(2 * start + n)) for n in (1, 2)]
        assert cluster[0].lines("saved") == [[path] for path in paths]
        assert cluster[1].lines("saved") == [[str(here.checkpoints)]] * 2
        for index, worker in enumerate(cluster):
            value = f"of {index}" + "+" * 2 * start
            assert worker.lines("restored") == [[str(2 * start), *words(value)]]
            loaded = [words(value + "+" * n) for n in (1, 2)]
            assert worker.lines("loaded") == [["True", *each] for each in loaded]
            assert worker.lines("late") == [["False"]]
            assert "has no State 'late'" in worker.output
        newest = Path(paths[-1])
        assert [
            json.loads((newest / "states" / f"{name}.state").read_text())
            for name in "abc"
        ] == [4.0 * 8.0**start] * 3  # three saves of each start, with that of close()


def words(value: str) -> list[str]:
    """A JSON text as the harness splits it."""
    return json.dumps(value).split()
