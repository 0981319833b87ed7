"""The bench of notices measures the latency that its rows name."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks import notice_quiet
from benchmarks.notice_latency import (
    HANG_BAR,
    Case,
    Flag,
    cases,
    measure,
    moments,
    polled,
    row,
)
from benchmarks.notice_world import World
from benchmarks.row import percentile
from tfpreempt.core.events import Notice
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.file import FileSource
from tfpreempt.testing.metadata import FakeAws, FakeAzure, FakeGce

pytestmark = pytest.mark.slow  # waits for notices

URLS = dict.fromkeys(("gce", "aws", "azure"), "http://127.0.0.1:9")
SHORT = 0.05


def case(place: str) -> Case:
    """Returns the first case of a place, without starting a source."""
    return next(c for c in cases(URLS, Path("/nowhere")) if c.place == place)


def test_95_of_100_are_at_or_below_the_percentile() -> None:
    assert percentile(range(101), 95) == 95
    assert percentile([0.0] * 96 + [9.0] * 4, 95) == 0.0
    assert percentile([0.0] * 90 + [9.0] * 10, 95) == 9.0
    assert percentile([7.0], 95) == 7.0


def test_a_row_has_the_figure_the_bar_and_whether_it_is_met() -> None:
    met = row(case("gce"), [0.001, 0.002, HANG_BAR], seed=7)
    assert (met["bar"], met["ok"]) == (HANG_BAR, True)
    assert (met["ours"], met["longest"]) == (0.002, HANG_BAR)
    assert (met["bar_of"], met["seed"]) == ("ours_p95", 7)
    assert met["ours_all"] == [0.001, 0.002, HANG_BAR]
    missed = row(case("gce"), [0.3] * 3, seed=7)
    assert (missed["ours_p95"], missed["ok"]) == (0.3, False)


def test_a_polled_source_may_be_late_by_its_interval() -> None:
    listed = [c for c in cases(URLS, Path("/nowhere")) if c.interval is not None]
    assert [(c.place, c.interval) for c in listed] == [
        ("file", 1.0),
        ("azure", 1.0),
        ("aws", 0.5),
        ("aws", 5.0),
    ]
    assert all(c.bar == pytest.approx(c.window + 0.1) for c in listed)


def test_a_seed_gives_the_same_moments_again() -> None:
    first, again = (moments(random.Random(3), 40, 5.0) for _ in range(2))
    assert first == again == sorted(first)
    assert 0.0 <= first[0] < first[-1] <= 5.0


def test_a_flag_keeps_the_first_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = Notice(source="file:x", worker=0, grace_seconds=None, received_at=1.0)
    flag = Flag()
    flag.receive(notice)
    first = flag.wait("file")
    flag.receive(notice)
    assert flag.wait("file") == first > 0
    monkeypatch.setattr("benchmarks.notice_latency.LOST_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="file: no notice within"):
        Flag().wait("file")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("world") / "preempted"
    with World(path) as made:
        yield made


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "place", ["signal", "gce", "gce-maintenance", "file", "azure", "aws"]
)
def test_each_source_is_triggered_and_reset(
    world: World, place: str, rng: random.Random
) -> None:
    shortened = {
        "file": lambda: FileSource(world.path, SHORT),
        "azure": lambda: AzureWatch(url=world.urls["azure"], interval=SHORT).source(
            "Preempt"
        ),
        "aws": lambda: AwsWatch(url=world.urls["aws"], interval=SHORT).source(
            "spot-interruption"
        ),
    }
    if place in shortened:
        measured = polled(place, shortened[place], SHORT, together=2)
    else:
        listed = cases(world.urls, world.path)
        measured = next(c for c in listed if c.place == place)
    found = measure(world, measured, 3, rng)
    assert len(found) == 3
    assert all(0.0 < seconds < 30.0 for seconds in found)


@pytest.fixture
def urls() -> Iterator[Mapping[str, str]]:
    with FakeGce() as gce, FakeAws() as aws, FakeAzure() as azure:
        yield {"gce": gce.url, "aws": aws.url, "azure": azure.url}


def test_a_quiet_process_counts_its_own_time_and_must_be_quiet(
    urls: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice_quiet, "WARM_SECONDS", 0.1)
    path = tmp_path / "preempted"
    found = notice_quiet.listen(urls, path, 0.1)
    assert found["elapsed"] >= 0.1
    assert found["processor"] >= 0.0
    names = {"gce", "aws", "azure", "file", "signals"}
    assert found["threads"].keys() >= {f"tfpreempt-{name}" for name in names}
    assert min(found["threads"].values()) >= 0.0
    path.touch()
    with pytest.raises(RuntimeError, match=r"it was not quiet.*file:"):
        notice_quiet.listen(urls, path, 0.1)
