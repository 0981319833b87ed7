"""A running `fit` seen from other threads, without Keras."""

from __future__ import annotations

import sys
import threading
import types
import weakref
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
pytest.importorskip("tensorflow")

from tfpreempt.keras.fit import frame_lookup  # noqa: E402
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
    """When a watcher thread did so, workers ended by SIGSEGV."""
    found = Model().fit()
    assert found["runs"]
    assert found["newest"] == "before"
    assert not is_running(found["fit"])


class Iterator:
    """The iterator of an epoch."""


class ModelWithLogs:
    def fit(self) -> bool:
        """Whether the iterator of the first epoch is kept in the second."""
        data_handler, iterator = None, Iterator()
        epoch_logs, first = {"loss": 1.0}, weakref.ref(iterator)
        assert frame_lookup.epoch_logs(self) == epoch_logs
        iterator = Iterator()
        return iterator is not data_handler and first() is not None


def test_to_read_the_logs_of_an_epoch_keeps_no_iterator() -> None:
    """An iterator with a shuffle buffer may need as much memory as the data."""
    assert not ModelWithLogs().fit()


def test_another_fit_of_the_model_is_another_one() -> None:
    model = Model()
    first, second = model.fit(), model.fit()
    assert second["runs"]
    assert first["fit"].frame is not second["fit"].frame
    assert not is_running(first["fit"])
