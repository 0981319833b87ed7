"""One client and remote workers, whose machines are taken away."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.multiprocess.harness import (
    RESTART,
    Cluster,
    Place,
    Worker,
    Zygote,
    place,
    records,
)
from tests.ports import free_ports

pytestmark = [pytest.mark.multiprocess, pytest.mark.tensorflow]

STEPS = 12


class Remote:
    """Two servers, which can be replaced at their addresses, and their client."""

    def __init__(self, here: Place) -> None:
        self.here = here
        ports = free_ports(3)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self._cluster = {"worker": addresses[:2], "coordinator": addresses[2:]}
        self.workers = [self._serve(0), self._serve(1)]

    def _serve(self, index: int) -> Worker:
        text = json.dumps(self._cluster)
        (worker,) = self.here.start("server.py", index, text)
        worker.wait_line("serving")
        return worker

    def replace(self, index: int) -> None:
        """Replaces the machine by another machine."""
        worker = self.workers[index]
        worker.send(signal.SIGKILL)
        Cluster([worker], self.here.checkpoints).wait()
        self.workers[index] = self._serve(index)

    def start(self, *more: object) -> Cluster:
        text = json.dumps(self._cluster)
        return self.here.start("coordinator.py", f"--cluster={text}", *more)

    def start_watcher(self) -> Cluster:
        return self.here.start("watcher.py", json.dumps(self._cluster))

    def notice(self, client: Worker, index: int, count: int = 1) -> None:
        """Sends SIGTERM to a worker, and waits until the client has the notice."""
        self.workers[index].send(signal.SIGTERM)
        client.wait_text("notice from tensorflow:preemption-notice")
        source = "tensorflow:preemption-notice"
        while len(records(self.here.checkpoints, "notice", source=source)) < count:
            client.wait_text(f"/job:worker/task:{index}")


@pytest.fixture
def remote(zygote: Zygote) -> Any:
    with place(zygote) as here:
        yield Remote(here)


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote) -> dict[str, Any]:
    with place(zygote) as here:
        client = Remote(here).start()
        client.expect(0)
        return client[0].result()


def trained(client: Cluster) -> list[int]:
    return [int(step) for (step,) in client[0].lines("trained")]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_preempted_and_the_client_restarted(
    remote: Remote, undisturbed: dict[str, Any], victim: int
) -> None:
    """Also where it is the host of the coordination service."""
    remote.here.hold("at-5")
    client = remote.start("--hold-at", 5)
    client[0].wait_line("holding")
    remote.notice(client[0], victim)
    remote.here.release("at-5")
    client.expect(RESTART)
    (commit,) = records(remote.here.checkpoints, "commit")
    remote.replace(victim)
    second = remote.start()
    second.expect(0)
    assert trained(client) + trained(second) == list(range(1, STEPS + 1))
    assert commit["step"] == trained(client)[-1]
    assert second[0].result() == undisturbed


def test_restarted_in_the_same_process_twice(
    remote: Remote, undisturbed: dict[str, Any]
) -> None:
    """TensorFlow's key outlives the worker, and is not taken for the next notice."""
    remote.here.hold("at-3", "at-7", "replaced")
    client = remote.start("--hold-at", 3, 7, "--exit=raise")
    for count, (step, victim) in enumerate([(3, 1), (7, 0)], start=1):
        client[0].wait_line("holding", 2 * count - 1)
        remote.notice(client[0], victim, count)
        remote.here.release(f"at-{step}")
        client[0].wait_line("holding", 2 * count)
        remote.replace(victim)
        remote.here.release("replaced")
        client[0].wait_line("connected", count + 1)
        remote.here.hold("replaced")
    client.expect(0)
    assert len(client[0].lines("ended")) == 2
    assert trained(client) == list(range(1, STEPS + 1))
    assert client[0].result() == undisturbed


def test_a_new_connection_before_the_worker_ends(
    remote: Remote, undisturbed: dict[str, Any]
) -> None:
    """The worker serves after its notice, and ends during the next connection.

    Steps were trained in this connection, and the end of the worker is still no error.
    """
    remote.here.hold("at-3", "at-7")
    client = remote.start("--hold-at", 3, 7, "--exit=raise")
    client[0].wait_line("holding")
    remote.notice(client[0], 1)
    remote.here.release("at-3")
    client[0].wait_line("connected", 2)
    client[0].wait_line("holding", 2)
    remote.replace(1)
    remote.here.release("at-7")
    client.expect(0)
    assert [len(client[0].lines(name)) for name in ("leaves", "connected")] == [2, 3]
    assert client[0].result() == undisturbed


@pytest.mark.parametrize("more", [(), ("--run",)])
def test_trains_until_the_worker_exits(
    remote: Remote, undisturbed: dict[str, Any], more: tuple[str, ...]
) -> None:
    """With an exit function that does nothing; then the scope ends normally."""
    remote.here.hold("at-3", "at-7")
    client = remote.start("--hold-at", 3, 7, "--exit=ignore", *more)
    client[0].wait_line("holding")
    remote.notice(client[0], 1)
    remote.here.release("at-3")
    client[0].wait_line("holding", 2)
    remote.replace(1)
    remote.here.release("at-7")
    client.expect(0)
    (commit,) = records(remote.here.checkpoints, "commit", because="preemption")
    again = [*range(1, 7), *range(commit["step"] + 1, STEPS + 1)]
    assert trained(client) == again
    assert [len(client[0].lines(name)) for name in ("leaves", "connected")] == [2, 2]
    assert client[0].result() == undisturbed


@pytest.mark.parametrize("moment", ["at", "read"])
def test_a_preempted_worker_is_terminated_within_a_step(
    remote: Remote, undisturbed: dict[str, Any], moment: str
) -> None:
    """The step is incomplete, so the last commit stays, and the exit is the same.

    Also if its calls have returned, and the error comes with the read of the result.
    """
    option = "--hold-at" if moment == "at" else "--read-at"
    remote.here.hold(f"{moment}-5")
    client = remote.start(option, 5, "--save-freq", 3)
    client[0].wait_line("holding")
    client.wait_record("commit", step=3)
    remote.notice(client[0], 1)
    remote.replace(1)
    remote.here.release(f"{moment}-5")
    client.expect(RESTART)
    assert "without a checkpoint: " in client[0].output
    second = remote.start()
    second.expect(0)
    assert trained(second) == list(range(4, STEPS + 1))
    assert second[0].result() == undisturbed


def test_a_worker_ends_after_the_first_commit_in_its_grace_period(
    remote: Remote, undisturbed: dict[str, Any]
) -> None:
    remote.here.hold("at-3", "at-7")
    client = remote.start("--hold-at", 3, 7, "--grace", 120)
    client[0].wait_line("holding")
    remote.notice(client[0], 1)
    remote.here.release("at-3")
    client[0].wait_line("holding", 2)
    (commit,) = records(remote.here.checkpoints, "commit")
    remote.replace(1)
    remote.here.release("at-7")
    client.expect(RESTART)
    second = remote.start()
    second.expect(0)
    assert trained(second) == list(range(commit["step"] + 1, STEPS + 1))
    assert second[0].result() == undisturbed


def test_a_crash_of_a_worker_without_a_notice_is_an_error(
    remote: Remote, undisturbed: dict[str, Any]
) -> None:
    remote.here.hold("at-5")
    client = remote.start("--hold-at", 5, "--save-freq", 3)
    client[0].wait_line("holding")
    client.wait_record("commit", step=3)
    remote.replace(1)
    remote.here.release("at-5")
    client.expect(1)
    assert "AbortedError" in client[0].output or "UnavailableError" in client[0].output
    second = remote.start()
    second.expect(0)
    assert second[0].result() == undisturbed


def test_a_watcher_alone(remote: Remote) -> None:
    """The worker still serves at the notice, and the client then waits for its end."""
    remote.here.hold("first", "second")
    client = remote.start_watcher()
    client[0].wait_line("holding")
    remote.workers[0].send(signal.SIGTERM)
    remote.here.release("first")
    client[0].wait_line("holding", 2)
    remote.workers[0].send(signal.SIGKILL)
    remote.here.release("second")
    client.expect(0)
    assert client[0].lines("message") == [["/job:worker/task:0"]]
    assert client[0].lines("still") == [["1.0"]]
    assert client[0].lines("gone") == [["False"], ["True"]]
