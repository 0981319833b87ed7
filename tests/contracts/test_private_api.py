"""The private names of TensorFlow and Keras, on the installed versions.

`make matrix` runs this in each of its cells.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterator

import pytest

from tfpreempt import errors
from tfpreempt.core import private_api

pytestmark = pytest.mark.tensorflow

LIBRARIES = ("tf_keras", "keras", "tensorflow")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    private_api.check_available.cache_clear()
    yield
    private_api.check_available.cache_clear()


def is_here(feature: str) -> bool:
    """Whether the libraries that a feature is about are installed."""
    modules = (
        private_api.MODULES[name] for name in private_api.FEATURES[feature].names
    )
    roots = {module.partition(".")[0] for module in modules}
    backends = dict.fromkeys(("keras_fit_jax", "keras_fit_distribution"), "jax")
    backends |= dict.fromkeys(("keras_fit", "keras_workers"), "tensorflow")
    roots |= {backends.get(feature, "sys")}
    return all(importlib.util.find_spec(root) is not None for root in roots)


@pytest.mark.parametrize("feature", private_api.FEATURES)
def test_every_name_is_there(feature: str) -> None:
    if not is_here(feature):
        pytest.skip("not installed")
    assert list(private_api.missing(feature)) == []
    private_api.check_available(feature)


def test_a_missing_module_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        private_api.MODULES, "eager_context", "tensorflow.no_such_module"
    )
    missing = list(private_api.missing("coordination"))
    assert missing.count("tensorflow.no_such_module") == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_version_was_seen(library: str) -> None:
    """Otherwise run the matrix with this version first."""
    pytest.importorskip(library)
    assert private_api.was_seen(library)


def test_an_unseen_minor_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start of a fit, and of each handler and callback."""
    pytest.importorskip("tf_keras")
    from tests.keras import small_fit

    for library in ("keras", "tensorflow"):
        monkeypatch.setitem(private_api.SEEN, library, ("2.0.0", "2.1.0rc0"))
    private_api.name_if_unseen.cache_clear()
    with small_fit.machine("keras") as on:
        on.run(on.fit, ("begin", 0, 1))
    private_api.name_if_unseen.cache_clear()
    named = [
        each.getMessage()
        for each in caplog.records
        if each.name == private_api.__name__
    ]
    assert sorted(named) == [
        f"not yet tested with {library} {private_api.version(library)}; "
        "tested with 2.0.0, 2.1.0rc0. A resumed run may differ from an uninterrupted "
        "run: compare the two before you rely on the resume, or install "
        f"{library}==2.0.0"
        for library in ("keras", "tensorflow")
    ]


def test_each_listed_name_is_searched() -> None:
    """A name that is nowhere is missing, in each of the forms of a name."""
    module = types.SimpleNamespace(Sample=Sample, function=print)
    there = ("function", "Sample", "Sample.method", "Sample.set_in_method")
    for name in (*there, "Sample.method:local", "Sample.method:argument"):
        assert private_api._is_there(module, name), name
    absent = ("other", "Other", "Other.method", "Sample.other", "Sample.method:other")
    for name in (*absent, "Sample.other:local", "Sample.only_read"):
        assert not private_api._is_there(module, name), name


class Sample:
    def method(self, argument: int) -> int:
        local = argument
        self.set_in_method = local
        return self.only_read  # type: ignore[attr-defined]  # it is nowhere


def test_a_missing_name_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.data.ops import concatenate_op

    monkeypatch.delattr(concatenate_op, "_ConcatenateDataset")
    with pytest.raises(errors.UnsupportedVersionError) as caught:
        private_api.check_available("pipelines")
    message = str(caught.value)
    name = "tensorflow.python.data.ops.concatenate_op._ConcatenateDataset"
    assert f"tensorflow {private_api.version('tensorflow')} lacks {name}" in message
    assert "for this feature: saving the position in the data of model" in message
    private_api.check_available("checkpoints")  # another feature


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_version_that_is_recommended_is_a_final_one(library: str) -> None:
    """pip takes candidates and nightly builds only where they are named."""
    pytest.importorskip(library)
    root = {"tensorflow": "tensorflow.python"}.get(library, f"{library}.src")
    message = private_api._advice(private_api.FEATURES["pipelines"], [f"{root}.gone"])
    [recommended] = re.findall(rf"such as {library}==(\S+),", message)
    assert re.fullmatch(r"\d+\.\d+\.\d+", recommended)
    assert recommended in private_api.SEEN[library]


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        private_api.MODULES, "shuffle_op", "tensorflow.python.data.moved"
    )
    with pytest.raises(errors.UnsupportedVersionError, match=r"lacks .*data\.moved,"):
        private_api.check_available("pipelines")


@pytest.mark.parametrize(
    ("module", "name"),
    [("checkpoint.checkpoint", "object_metadata"), ("trackable.base", "Trackable")],
)
def test_missing_names_for_saves_are_reported_before_a_handler(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """One of the names is a base class, and needed at the import of tfpreempt."""
    private = importlib.import_module(f"tensorflow.python.{module}")
    monkeypatch.delattr(private, name)
    imported = "tfpreempt.checkpoint.tensors.variables"
    monkeypatch.delitem(sys.modules, imported, raising=False)
    with pytest.raises(errors.UnsupportedVersionError, match=rf"{module}\.{name}"):
        importlib.import_module(imported)
