"""The variants of Amazon EC2 and Azure, on their fake metadata servers."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.platforms.configs import left_with, notices, watched
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.metadata_session import readable
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.aws import AwsSpotTerminationConfig
from tfpreempt.platforms.azure import AzureTerminationConfig
from tfpreempt.testing.metadata import FakeAws, FakeAzure

# --- Amazon EC2 ----------------------------------------------------------------------


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    with FakeAws() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        yield fake


def test_aws_subtracts_the_poll_interval() -> None:
    config = AwsSpotTerminationConfig()
    assert watched(config) == {
        "signal:SIGTERM": 30.0,
        "aws:spot-interruption": 115.0,
        "aws:lifecycle": None,
    }
    assert left_with(config) == 143


def test_aws_with_rebalance_and_another_grace() -> None:
    config = AwsSpotTerminationConfig(rebalance=True, grace_period=10)
    assert watched(config) == {
        "signal:SIGTERM": 10.0,
        "aws:spot-interruption": 8.0,  # of a short grace a fifth at most
        "aws:lifecycle": None,
        "aws:rebalance": None,
    }


def test_aws_without_a_known_grace_period() -> None:
    assert set(watched(AwsSpotTerminationConfig(grace_period=None)).values()) == {None}


def test_aws_hears_of_an_interruption(aws: FakeAws) -> None:
    aws.interrupt()  # present from the start: saves a wait of 5 s for the next poll
    (notice,) = notices(AwsSpotTerminationConfig(), lambda: None)
    assert (notice.source, notice.grace_seconds) == ("aws:spot-interruption", 115.0)


def test_aws_uses_the_time_of_the_interruption(aws: FakeAws) -> None:
    """A job that starts within the notice."""
    ahead = datetime.timedelta(seconds=60)
    aws.interrupt(at=datetime.datetime.now(datetime.timezone.utc) + ahead)
    (notice,) = notices(AwsSpotTerminationConfig(), lambda: None)
    assert notice.grace_seconds is not None
    assert 0 < notice.grace_seconds <= 60


def test_aws_hears_of_a_rebalance_only_if_asked(aws: FakeAws) -> None:
    # Before the start of the watch: saves a wait of 5 s for the next poll.
    ahead = datetime.timedelta(seconds=60)
    aws.recommend_rebalance(datetime.datetime.now(datetime.timezone.utc) + ahead)
    config = AwsSpotTerminationConfig(rebalance=True)
    (notice,) = notices(config, lambda: None)
    assert (notice.source, notice.grace_seconds) == ("aws:rebalance", None)


# --- Azure ---------------------------------------------------------------------------


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAzure]:
    with FakeAzure() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        yield fake


def graces(config: AzureTerminationConfig) -> list[tuple[str, float | None]]:
    return [(each.source.name, each.grace_seconds) for each in config._notice_sources()]


SIGTERM = ("signal:SIGTERM", 30.0)


def test_azure_has_a_grace_for_preemptions_and_one_for_the_rest() -> None:
    assert graces(AzureTerminationConfig()) == [
        SIGTERM,
        ("azure:Preempt", 30.0),
        ("azure:Terminate", 300.0),
        ("azure:Reboot", 300.0),
        ("azure:Redeploy", 300.0),
    ]
    assert left_with(AzureTerminationConfig()) == 143


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"kinds": "Preempt"}, {"Preempt": 30.0}),
        ({"kinds": ["Preempt"]}, {"Preempt": 30.0}),
        ({"kinds": ["Reboot", "Freeze"]}, {"Reboot": 300.0, "Freeze": 300.0}),
        ({"kinds": ["Terminate"], "planned_grace_period": 900}, {"Terminate": 900.0}),
        ({"kinds": ["Reboot"], "planned_grace_period": 0}, {"Reboot": None}),
    ],
)
def test_azure_watches_the_given_kinds(
    arguments: Any, expected: dict[str, float | None]
) -> None:
    named = [(f"azure:{kind}", grace) for kind, grace in expected.items()]
    assert graces(AzureTerminationConfig(**arguments)) == [SIGTERM, *named]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ["Preemption"]}, "kinds="),
        ({"kinds": []}, "kinds="),
        ({"planned_grace_period": -1}, "planned_grace_period is -1"),
    ],
)
def test_azure_refuses_invalid_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AzureTerminationConfig(**arguments)


@pytest.mark.parametrize(("kind", "grace"), [("Preempt", 30.0), ("Reboot", 300.0)])
def test_azure_hears_of_an_event(kind: str, grace: float, azure: FakeAzure) -> None:
    azure.schedule(kind, not_before=readable(time.time() + 3600))
    (notice,) = notices(AzureTerminationConfig(), lambda: None)
    assert (notice.source, notice.grace_seconds) == (f"azure:{kind}", grace)
    assert kind in notice.detail


def test_azure_uses_the_time_of_the_event(azure: FakeAzure) -> None:
    azure.schedule("Reboot", not_before=readable(time.time() + 100))
    (notice,) = notices(AzureTerminationConfig(), lambda: None)
    assert notice.grace_seconds is not None
    assert 0 < notice.grace_seconds <= 100


def test_azure_leaves_nothing_of_an_event_that_has_started(azure: FakeAzure) -> None:
    azure.schedule("Reboot", not_before="", status="Started")
    (notice,) = notices(AzureTerminationConfig(), lambda: None)
    assert notice.grace_seconds == 0.0


def noticed(
    azure: FakeAzure, resources: Sequence[str] = ("trainer_0",), **options: Any
) -> tuple[AzureTerminationConfig, str]:
    """Returns a config that has an event, and the event's id."""
    config = AzureTerminationConfig(**options)
    event = azure.schedule("Preempt", resources=resources)
    notices(config, lambda: None)
    return config, event


def test_azure_acknowledges_after_the_commit(
    azure: FakeAzure, caplog: pytest.LogCaptureFixture
) -> None:
    config, event = noticed(azure, acknowledge=True)
    assert left_with(config, committed=False) == 143
    assert azure.status(event) == "Scheduled"
    assert left_with(config) == 143
    assert azure.status(event) == "Started"
    [line] = [each for each in caplog.records if event in each.getMessage()]
    assert line.levelname == "INFO"


def test_azure_gets_the_acknowledgement_of_one_of_two_handlers(
    azure: FakeAzure,
) -> None:
    """One of two handlers is closed, and the other handler exits."""
    config, event = noticed(azure, acknowledge=True)
    config._notice_sources()
    assert left_with(config) == 143
    assert azure.status(event) == "Started"


def test_the_events_of_azure_share_one_connection(azure: FakeAzure) -> None:
    watcher = Watcher(AzureTerminationConfig()._notice_sources(), 0, lambda _: None)
    watcher.start()
    started = [each.name for each in threading.enumerate()]
    watcher.close()
    assert started.count("tfpreempt-azure") == 1


def test_azure_events_are_acknowledged_only_on_request(azure: FakeAzure) -> None:
    config, event = noticed(azure)
    assert left_with(config) == 143
    assert azure.status(event) == "Scheduled"


def test_azure_gets_no_acknowledgement_if_training_continues(azure: FakeAzure) -> None:
    config, event = noticed(azure, acknowledge=True, exit_fn=lambda: None)
    config._exit(True)
    assert azure.status(event) == "Scheduled"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(
    ("resources", "status"),
    [
        (["trainer_0"], "Started"),
        (["trainer_0", "trainer_1"], "Started"),
        (["trainer_1", "trainer_0"], "Scheduled"),
    ],
)
def test_azure_gets_the_acknowledgement_of_the_first_machine(
    azure: FakeAzure, worker: int, resources: list[str], status: str
) -> None:
    """The chief's machine may not be in the event."""
    config, event = noticed(azure, resources, acknowledge=True)
    assert left_with(config, worker=worker) == 143
    assert azure.status(event) == status


def test_a_silent_azure_service_does_not_delay_the_exit(
    azure: FakeAzure, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = noticed(azure, acknowledge=True)
    azure.fail(100, status=500)
    assert left_with(config) == 143
    assert "Azure takes the VM away at the announced time" in caplog.text


def test_whatever_azure_s_client_raises_the_job_leaves_with_its_code(
    azure: FakeAzure,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def acknowledge(watch: AzureWatch) -> tuple[str, ...]:
        raise ValueError("nobody has thought of this")

    monkeypatch.setattr(AzureWatch, "acknowledge", acknowledge)
    assert left_with(AzureTerminationConfig(acknowledge=True)) == 143
    assert "Azure takes the VM away at the announced time" in caplog.text
    assert "nobody has thought of this" in caplog.text
