"""Plain Python values that training changes, without a fit."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
pytest.importorskip("tensorflow")

import keras  # noqa: E402

from tfpreempt.core import reach  # noqa: E402
from tfpreempt.keras.fit.attributes import Attributes  # noqa: E402

LARGE = [np.zeros(1 << 20) for _ in range(4)]  # 8 MiB each
MANY = [0] * (reach.MANY + 1)


class Helper:
    """A user's object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Stats(NamedTuple):
    seen: int = 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Stats(), Stats(1)),
        (None, Stats(1)),
        ([Stats()], [Stats(1)]),
        (collections.Counter(), collections.Counter("a")),
        (collections.defaultdict(int), collections.defaultdict(int, a=1)),
        (collections.OrderedDict(), collections.OrderedDict(a=1)),
    ],
)
def test_a_kind_that_would_come_back_as_another_is_named(
    before: Any, after: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that calls `_replace` of a plain tuple would fail in each start."""
    model = Helper(stats=before)
    attributes = Attributes(model)
    model.stats = after
    [entry] = attributes.capture().header
    assert entry[-1] == "lost"
    [text] = caplog.messages
    assert "the change of model.stats will not be restored" in text
    assert "would come back as another kind" in text


def test_with_several_workers_a_value_that_a_trace_lacks_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """tf_keras traces before the restore, and workers must trace equally often."""
    factors = [2, 1]  # set by a callback, and by the program
    saved = None
    for factor in factors:
        model = Helper(factor=1)
        attributes = Attributes(model)
        model.factor = factor
        attributes.traced_by(lambda: None)
        if saved is not None:
            attributes.restore(saved)
        saved = attributes.capture()
    assert not attributes.must_trace_again("train", only_for_settings=True)
    [text] = caplog.messages
    assert "'factor' of model was 2" in text
    assert attributes.must_trace_again("train", only_for_settings=False)


@pytest.mark.parametrize("data", [MANY, LARGE])
def test_data_are_not_kept(data: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Helper(data=[*data], steps=0)
    attributes = Attributes(model)
    model.data[0], model.steps = 1, 1
    [entry] = attributes.capture().header
    assert "steps" in entry
    assert caplog.messages == []


@pytest.mark.parametrize("data", [MANY, LARGE])
def test_what_grows_to_data_is_named(
    data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Helper(seen=[])
    attributes = Attributes(model)
    model.seen += data
    [entry] = attributes.capture().header
    assert entry[-1] == "lost"
    [text] = caplog.messages
    assert "the change of model.seen will not be restored" in text


def test_an_object_in_place_of_a_number_is_put_back() -> None:
    """A setting was a number in the first step, and is an object in the restart."""
    layer, objects = keras.layers.Dropout(0.5), [Helper(), Helper()]
    attributes = Attributes(Helper(layer=layer))
    layer.rate = 0.3
    attributes.traced_by(lambda: None)
    saved = attributes.capture()
    layer = keras.layers.Dropout(0.5)
    layer.rate = objects[0]
    attributes = Attributes(Helper(layer=layer))
    with attributes.as_first(saved):
        assert layer.rate == 0.3
    assert layer.rate is objects[0]
    attributes.restore(saved)
    layer.rate = objects[1]
    seen: list[Any] = []
    attributes.traced_by(lambda: seen.append(layer.rate))
    assert seen == [0.3]
    assert layer.rate is objects[1]
