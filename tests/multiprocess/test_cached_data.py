"""A run that is killed while it writes a cache, before its first commit."""

from __future__ import annotations

import signal

import pytest

from tests.multiprocess.harness import Place, Zygote, place, records

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("keras", (3, 2)),
        ("tf_keras", (3, 2)),
        ("loop", (3, 2)),
        ("keras", (-1, -1)),
        ("loop", (-1, -1)),
    ],
)
def test_a_run_killed_in_its_first_epoch_is_started_again(
    here: Place, zygote: Zygote, kind: str, kills: tuple[int, int]
) -> None:
    """TensorFlow fails at each start: the lock file of the killed run is there."""
    for steps in kills:
        killed = here.start("cached.py", kind, steps)
        killed.expect(-signal.SIGKILL)
        assert list(here.path.glob("cache/*.lockfile"))
    assert records(here.checkpoints, "commit") == []
    last = here.start("cached.py", kind, 0)
    last.expect(0)
    assert last[0].output.count("left files of an incomplete cache") == 1
    assert "is incomplete" not in last[0].output
    with place(zygote) as other:
        undisturbed = other.start("cached.py", kind, 0)
        undisturbed.expect(0)
        assert last[0].lines("result") == undisturbed[0].lines("result")
