"""`model.fit` in real processes: SIGTERM, new processes, and equal bytes.

Compared values: weights, optimizer, History, and a hash of the rows in the order in
which each replica trained. The tests cover some cells of the matrix {Keras 3, tf_keras}
x {kind of data} x {interruption}: with a cluster of two, each kind of data for each
Keras and each interruption; and some cells with one process. All cells of the cluster
are in tests/campaigns; those of one process are restarts inside of the process, in
tests/keras.
"""

from __future__ import annotations

import pytest

from tests.multiprocess.fits import Fit, assert_exact, trained, undisturbed
from tests.multiprocess.harness import Place, Zygote, records

pytestmark = [pytest.mark.multiprocess, pytest.mark.tensorflow]


@pytest.mark.parametrize(
    ("line", "data", "point"),
    [
        ("keras", "tfdata", "three"),
        ("keras", "arrays", "twice"),
        ("keras", "sequence", "validation"),
        ("keras", "generator", "last"),
        ("keras", "loader", "mid"),
        ("tf_keras", "tfdata", "twice"),
        ("tf_keras", "arrays", "validation"),
        ("tf_keras", "sequence", "first"),
        ("tf_keras", "generator", "mid"),
        ("tf_keras", "loader", "three"),
    ],
)
def test_two_workers(
    here: Place, zygote: Zygote, line: str, data: str, point: str
) -> None:
    assert_exact(here, zygote, Fit(line=line, data=data, world=2), point)


@pytest.mark.parametrize(
    ("line", "data", "point"),
    [
        ("keras", "repeated", "mid"),
        ("tf_keras", "tfdata", "validation"),
        ("tf_keras", "generator", "twice"),
    ],
)
def test_one_process(
    here: Place, zygote: Zygote, line: str, data: str, point: str
) -> None:
    assert_exact(here, zygote, Fit(line=line, data=data), point)


def test_callbacks_that_fail_on_all_workers_cost_no_epoch(
    here: Place, zygote: Zygote
) -> None:
    fit = Fit(line="keras", data="tfdata", world=2)  # undisturbed in `test_two_workers`
    failed = fit.start(here, "--fail-at=1")
    assert 0 not in failed.wait()
    assert all("no network" in worker.output for worker in failed)
    [newest] = [c for c in records(here.checkpoints, "commit") if c["step"] == 16]
    assert newest["because"] == "error"
    resumed = fit.start(here)
    resumed.expect(0, 0)
    for worker in range(fit.world):
        assert trained([failed[worker], resumed[worker]]) == fit.steps()
    assert resumed.results() == undisturbed(zygote, fit)


@pytest.mark.parametrize(
    ("data", "point"),
    [
        ("arrays", "first"),
        ("sequence", "three"),
        ("tfdata", "mid"),
        ("generator", "validation"),
        ("index", "twice"),
        ("loader", "ended"),
    ],
)
def test_each_kind_of_data(here: Place, zygote: Zygote, data: str, point: str) -> None:
    """One process with Keras 3; `make matrix` runs these tests on the newest Keras."""
    if data == "loader":
        pytest.importorskip("grain")
    assert_exact(here, zygote, Fit(line="keras", data=data), point)
