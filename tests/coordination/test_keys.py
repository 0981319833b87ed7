"""Names of keys, and values as text and back."""

from __future__ import annotations

import pytest

from tfpreempt.coordination import keys
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    DecidedStep,
    Key,
    NoticeKind,
    StepCount,
    Tombstone,
)
from tfpreempt.errors import CoordinationError

VALUES = [
    *((Key.NOTICE, kind) for kind in NoticeKind),
    *((Key.COMMIT, kind) for kind in CommitKind),
    (Key.COUNT, StepCount(0)),
    (Key.COUNT, StepCount(12, final=True)),
    (Key.COUNT, Tombstone()),
    (Key.DONE, Tombstone()),
    (Key.DECISION, DecidedStep(7)),
    (Key.DECISION, DecidedStep(0)),
    (Key.DECISION, DecidedStep(None)),
    (Key.DONE, True),
    (Key.DONE, False),
    (Key.BYE, True),
]


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_an_encoded_value_is_decoded(key, value):
    text = keys.encode(value, {"worker": 3, "reason": "ü"})
    decoded, extra = keys.decode(key, text)
    assert decoded == value
    assert type(decoded) is type(value)
    assert (extra["worker"], extra["reason"]) == (3, "ü")


def test_extra_fields_never_change_the_value():
    text = keys.encode(StepCount(5), {"count": 99, "final": True})
    assert keys.decode(Key.COUNT, text)[0] == StepCount(5)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Key.NOTICE, "not json"),
        (Key.NOTICE, '{"kind": "sometimes"}'),
        (Key.NOTICE, "[]"),
        (Key.NOTICE, "3"),
        (Key.COMMIT, "{}"),
        (Key.COUNT, '{"count": "many", "final": false}'),
        (Key.COUNT, '{"count": 3}'),
        (Key.DECISION, '{"boundary": {}}'),
        (Key.DONE, "{}"),
        (Key.COMMIT, '{"kind": "exit", "save_seconds": "x"}'),
        (Key.NOTICE, '{"kind": "final", "remaining": NaN}'),
        (Key.DECISION, '{"boundary": 1e999}'),
    ],
)
def test_text_of_another_version_is_refused(key, text):
    with pytest.raises(CoordinationError, match="same version") as caught:
        keys.decode(key, text)
    assert repr(key.value) in str(caught.value)
    assert text in str(caught.value)


def test_an_unknown_value_is_not_written():
    with pytest.raises(TypeError, match="no encoding"):
        keys.encode(object())


def test_names_differ_in_everything():
    names = {
        keys.name(incarnation, round, key, worker)
        for incarnation in ("a", "b")
        for round in (1, 2)
        for key in Key
        for worker in (None, 0, 1)
    }
    assert len(names) == 2 * 2 * len(Key) * 3
    assert keys.name("7", 2, Key.COUNT, 3) == "tfpreempt/7/2/count/3"
