"""A running `fit` as other threads see it, without a Keras."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
pytest.importorskip("tensorflow")

from tfpreempt.keras.fit.frame_lookup import is_running  # noqa: E402


class Model:
    def fit(self) -> Any:
        epoch_iterator, newest = object(), "before"
        frame = sys._getframe()
        found = {"variables": frame.f_locals, "fit": types.SimpleNamespace()}
        newest = "after"
        vars(found["fit"]).update(model=self, loop=epoch_iterator, frame=frame)
        note(found)
        del newest
        return found


def note(found: dict[str, Any]) -> None:
    def look() -> None:
        found["runs"] = is_running(found["fit"])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    found["newest"] = dict(found["variables"])["newest"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="variables are no copy there")
def test_to_know_whether_a_fit_runs_does_not_renew_its_variables() -> None:
    """Where a watcher's thread did, workers ended by SIGSEGV."""
    found = Model().fit()
    assert found["runs"]
    assert found["newest"] == "before"
    assert not is_running(found["fit"])


def test_another_fit_of_the_model_is_another_one() -> None:
    model = Model()
    first, second = model.fit(), model.fit()
    assert second["runs"]
    assert first["fit"].frame is not second["fit"].frame
    assert not is_running(first["fit"])
