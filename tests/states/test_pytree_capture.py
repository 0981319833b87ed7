"""Periodic saves of a PyTreeState: copied at once, written while training continues."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # imports JAX
jax = pytest.importorskip("jax")
jnp = jax.numpy

from tests.checkpoint.fakes import capture_part, open_directory  # noqa: E402
from tests.fakes.storage import FaultyFiles  # noqa: E402
from tests.states.test_pytree_state import LEAVES  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.directory.commit import CancellationToken  # noqa: E402
from tfpreempt.checkpoint.state import state as states  # noqa: E402
from tfpreempt.checkpoint.state.state import StateRegistry  # noqa: E402
from tfpreempt.jax import shards  # noqa: E402
from tfpreempt.states import PyTreeState  # noqa: E402

SIZE = 1 << 16


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU copies to pinned memory, as an accelerator does."""
    kinds = [each.kind for each in jax.devices()[0].addressable_memories()]
    if "pinned_host" not in kinds:
        pytest.skip("this version of JAX has no pinned memory on a CPU")
    monkeypatch.setattr(shards, "_VIEWED", ())


@pytest.fixture(params=["pinned", "NumPy"])
def memory(request: pytest.FixtureRequest) -> None:
    """The two kinds of memory for copies."""
    if request.param == "pinned":
        request.getfixturevalue("pinned")


def tree() -> dict[str, Any]:
    kinds = [each.kind for each in jax.devices()[0].addressable_memories()]
    pinned = "pinned_host" if "pinned_host" in kinds else kinds[-1]
    return {
        "weights": [jnp.full(SIZE, float(number)) for number in range(4)],
        "key": jax.random.key(3),
        "on the host": jax.device_put(
            jnp.arange(4.0), jnp.zeros(1).sharding.with_memory_kind(pinned)
        ),
        "numpy": np.arange(5),
        "step": 7,
    }


def saved(state: PyTreeState) -> bytes:
    file = io.BytesIO()
    state.save(file)
    return file.getvalue()


def captured(state: PyTreeState) -> Callable[[], bytes]:
    """Captures a State; the result writes what was captured."""
    found = state._capture()
    assert found is not None
    return lambda: b"".join(found.pieces)


def live_weights() -> int:
    return sum(each.shape == (SIZE,) for each in jax.live_arrays())


def overwrite(state: PyTreeState) -> None:
    """A step that donates its arrays, so its results get their memory."""
    step = jax.jit(
        lambda value: jax.tree.map(lambda leaf: leaf * 0 - 9, value), donate_argnums=0
    )
    value = dict(state.value)
    before = [each.unsafe_buffer_pointer() for each in value["weights"]]
    value["weights"] = jax.block_until_ready(step(value["weights"]))
    value["on the host"].delete()
    value["key"].delete()
    value["numpy"][:] = -9
    value["step"] = -9
    after = [each.unsafe_buffer_pointer() for each in value["weights"]]
    assert sorted(before) == sorted(after)  # otherwise the test proves nothing
    state.value = value


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kind", LEAVES)
def test_a_capture_has_the_bytes_of_a_save(kind: str) -> None:
    state = PyTreeState("model", {"leaf": LEAVES[kind]()[0]}, registry=None)
    expected = saved(state)
    write = captured(state)
    assert write() == expected


@pytest.mark.usefixtures("memory")
def test_a_step_that_overwrites_its_arguments_does_not_change_a_capture() -> None:
    state = PyTreeState("model", tree(), registry=None)
    expected = saved(state)
    write = captured(state)
    overwrite(state)
    assert write() == expected


@pytest.mark.usefixtures("memory")
def test_an_array_that_is_on_the_host_is_copied() -> None:
    """`jax.device_put` to the memory of the array would return the array itself."""
    array = tree()["on the host"]
    [copy] = shards._copied([array])
    assert not np.shares_memory(np.asarray(copy), np.asarray(array))


@pytest.mark.usefixtures("pinned")
def test_the_memory_of_a_copy_is_free_once_the_copy_is_written() -> None:
    state = PyTreeState("model", tree(), registry=None)
    found = state._capture()
    assert found is not None
    assert 4 * SIZE * 4 <= found.size <= 4 * SIZE * 4 + 1000
    del state
    assert live_weights() == 4
    for number, _ in enumerate(found.pieces):
        first = 4  # piece with the first of the weights
        assert live_weights() == 4 - max(0, number - first)
    del _
    assert live_weights() == 0


def test_without_memory_for_a_copy_the_state_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    state = PyTreeState("model", tree(), registry=None)
    monkeypatch.setattr(shards, "available_bytes", lambda: SIZE)
    assert state._capture() is None
    assert f"and {SIZE} are available" in caplog.text


def test_a_subclass_with_a_save_of_its_own_is_written_by_that_save() -> None:
    class Wrapped(PyTreeState):
        def save(self, fileobj: Any) -> None:
            fileobj.write(b"mine")

        def load(self, fileobj: Any) -> None:
            pass

    assert Wrapped("model", tree(), registry=None)._capture() is None


# --- in a save -----------------------------------------------------------------------


def opened(path: Path, **more: Any) -> tuple[Any, PyTreeState]:
    registry = StateRegistry()
    state = PyTreeState("model", tree(), registry=registry)
    return open_directory(path, registry=registry, **more), state


def test_an_asynchronous_save_writes_the_captured_step(tmp_path: Path) -> None:
    directory, state = opened(tmp_path)
    expected = saved(state)
    save = capture_part(directory, 5, "a-5", CancellationToken())
    assert not list(tmp_path.rglob("model.state"))
    assert save.captured_bytes > 4 * SIZE * 4
    overwrite(state)
    save.write()
    assert save.captured_bytes == 0
    save.publish("periodic", [0])
    assert (tmp_path / "5" / "states" / "model.state").read_bytes() == expected
    assert directory.newest().step == 5


def test_a_save_that_training_waits_for_writes_at_once(tmp_path: Path) -> None:
    directory, state = opened(tmp_path)
    capture_part(directory, 5, "a-5")
    [path] = tmp_path.rglob("model.state")
    assert path.read_bytes() == saved(state)


def test_a_cancelled_save_stops_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_PIECE_BYTES", 1 << 10)
    directory, _ = opened(tmp_path)
    token = CancellationToken()
    written = []

    class Watched(FaultyFiles):
        def write(self, path: str, data: Any) -> None:
            def counted() -> Any:
                for piece in data:
                    written.append(len(piece))
                    if len(written) == 20:
                        token.cancel()
                    yield piece

            super().write(path, counted())

    directory.files = Watched()
    save = capture_part(directory, 5, "a-5", token)
    with pytest.raises(errors.SaveError, match="was cancelled"):
        save.write()
    assert len(written) == 20
    assert directory.newest() is None
    assert not list(tmp_path.rglob("model.state"))


def test_a_full_disk_is_an_error_that_names_the_state(tmp_path: Path) -> None:
    directory, _ = opened(tmp_path)
    save = capture_part(directory, 5, "a-5", CancellationToken())
    full = OSError(errno.ENOSPC, "No space left on device")
    directory.files = FaultyFiles(fail_at=0, error=full, when="torn")
    with pytest.raises(errors.SaveError, match="No space left") as caught:
        save.write()
    noted = getattr(caught.value.__cause__, "__notes__", [])
    assert any("'model'" in note for note in noted)
    assert directory.newest() is None
