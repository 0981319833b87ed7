"""An adapter is imported once the program has imported the framework."""

from __future__ import annotations

import json
import sys
import types

import pytest

from tfpreempt.core import frameworks


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework `acme`, whose adapter for one question is a module of Python."""
    monkeypatch.setattr(frameworks, "ADAPTERS", {"acme": {"errors": "json"}})


@pytest.mark.usefixtures("acme")
def test_a_framework_that_no_module_has_imported_has_no_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert frameworks.adapters("errors") == []
    monkeypatch.setitem(sys.modules, "acme", None)  # Python's mark of a missing module
    assert frameworks.adapters("errors") == []
    monkeypatch.setitem(sys.modules, "acme", types.ModuleType("acme"))
    assert frameworks.adapters("errors") == [json]
    assert frameworks.adapters("generators") == []


@pytest.mark.usefixtures("acme")
def test_one_that_is_requested_by_name_is_imported() -> None:
    assert frameworks.adapter("acme", "errors") is json
