"""A large commit on its way by a bad network takes no more memory than its pieces."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from campaigns import clouds, stores
from campaigns.clouds import Cloud
from tests.conftest import SEED

pytestmark = pytest.mark.slow  # imports campaigns and their servers


@pytest.mark.slow  # two processes, 128 MiB each way
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "service",
    [clouds.Gcs, pytest.param(clouds.S3, marks=pytest.mark.campaign)],  # moto is slow
)
def test_a_large_commit_is_transferred_in_bounded_memory(
    service: Callable[[], Cloud],
) -> None:
    with clouds.small(), contextlib.closing(service()) as cloud:
        assert stores.large(random.Random(SEED), cloud)["large moves"] == 2
