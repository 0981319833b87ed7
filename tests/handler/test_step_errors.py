"""Classification of TensorFlow's errors."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tfpreempt.handler.tensorflow_adapter import is_lost_worker  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "message", "is_lost"),
    [
        ("UnavailableError", "Socket closed", True),
        ("AbortedError", "Unable to find a context_id matching 17", True),
        ("CancelledError", "RPC was cancelled", True),
        (
            "InternalError",
            "Remote address looked up from remote data found to be poisoned",
            True,
        ),
        ("InternalError", "Blas GEMM launch failed", False),
        ("InvalidArgumentError", "Incompatible shapes: [2] vs. [3]", False),
    ],
)
def test_the_loss_of_a_remote_worker(kind: str, message: str, is_lost: bool) -> None:
    error = getattr(tf.errors, kind)(None, None, message)
    assert is_lost_worker(error) is is_lost


def test_errors_of_python_are_no_loss() -> None:
    assert not is_lost_worker(ConnectionError("connection reset"))
