"""Exports the state of a run as metrics for Prometheus.

prometheus_client is an optional dependency, so it is imported only if metrics are
requested.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import socketserver
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tfpreempt.cli.status.run_status import RESTARTS, ReportedState, RunStatus
from tfpreempt.core.lazy_import import to_install
from tfpreempt.core.threads import ManagedThread
from tfpreempt.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?:(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):)?(?P<port>\d{1,5})")
_MOST_CONNECTIONS = 16
_END_SECONDS = 1.0  # time for a thread to close its connection

_OF_WORKERS: dict[str, tuple[str, Callable[[Any], float | None]]] = {
    "step": ("Steps completed by the worker, over all restarts.", lambda w: w.step),
    "steps_per_second": (
        "Steps per second, mean of the last minute.",
        lambda w: w.steps_per_second,
    ),
    "step_seconds": ("Mean seconds of the newest steps.", lambda w: w.step_seconds),
    "step_deviation_seconds": (
        "Standard deviation of the seconds of the newest steps.",
        lambda w: w.step_deviation,
    ),
    "last_step_timestamp_seconds": (
        "Time of the newest step of the worker.",
        lambda w: w.stepped_at,
    ),
    "last_report_timestamp_seconds": (
        "Time of the last report of the worker, or of its end.",
        lambda w: w.since,
    ),
    "notice_timestamp_seconds": (
        "Time of the notice being handled by the worker.",
        lambda w: w.noticed_at,
    ),
    "notice_deadline_timestamp_seconds": (
        "Time at which the machine of the worker is taken away.",
        lambda w: w.deadline,
    ),
}
_OF_UPLOADS: dict[str, tuple[str, Callable[[Any], float | None]]] = {
    "uploaded_step": (
        "Step of the newest commit in the mirror.",
        lambda u: u.mirrored_step,
    ),
    "upload_pending_commits": (
        "Commits waiting for upload, or being uploaded.",
        lambda u: u.pending,
    ),
    "upload_sent_bytes": (
        "Bytes sent of the commit being uploaded.",
        lambda u: u.sent_bytes,
    ),
    "upload_size_bytes": (
        "Size of the commit being uploaded.",
        lambda u: u.total_bytes,
    ),
}

_DURATIONS = {
    "save": "Seconds of a save, until its commit.",
    "restore": "Seconds of a start to restore a commit.",
    "notice to commit": "Seconds from a notice to its commit.",
}
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _Run:
    """A collector of prometheus_client: reads the state of a run at every scrape.

    Args:
        name: name of the run, for the label `run`.
        look: function that returns the current state of the run.
    """

    def __init__(self, name: str, look: Callable[[], RunStatus]) -> None:
        self._name = name
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics."""
        from prometheus_client import core
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"tfpreempt_{name}", text, labels=["run", *labels])

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            labels = ("run", *labels)
            return CounterMetricFamily(f"tfpreempt_{name}", text, labels=labels)

        status = self._look()
        for name, (text, value) in _OF_WORKERS.items():
            family = gauge(name, text, "worker")
            for worker in status.workers:
                if (number := value(worker)) is not None:
                    family.add_metric([self._name, str(worker.worker)], number)
            yield family
        slow = gauge("slowdown", "Step time relative to other workers.", "worker")
        for index, factor in status.slowdowns.items():
            slow.add_metric([self._name, str(index)], factor)
        yield slow
        states = gauge(
            "worker_state",
            "1 for the present state of the worker, else 0.",
            "worker",
            "state",
        )
        for worker in status.workers:
            for state in ReportedState:
                labels = [self._name, str(worker.worker), state.value]
                states.add_metric(labels, float(worker.state is state))
        yield states
        commits = counter("commits", "Number of commits of the run.")
        commits.add_metric([self._name], status.commits)
        yield commits
        if status.committed_at is not None and status.commit_step is not None:
            newest = gauge(
                "last_commit_timestamp_seconds", "Time of the newest commit."
            )
            newest.add_metric([self._name], status.committed_at)
            yield newest
            step = gauge("last_commit_step", "Step of the newest commit.")
            step.add_metric([self._name], status.commit_step)
            yield step
        restarts = counter("restarts", "Number of restarts, by reason.", "reason")
        # Include reasons with 0 restarts: rate() needs them.
        for reason in sorted({*RESTARTS, *status.restarts}):
            count = status.restarts.get(reason, 0)
            restarts.add_metric([self._name, reason], count)
        yield restarts
        if (upload := status.upload) is not None:
            for name, (text, value) in _OF_UPLOADS.items():
                if (number := value(upload)) is not None:
                    family = gauge(name, text)
                    family.add_metric([self._name], number)
                    yield family
            faults = counter("upload_errors", "Number of failed attempts to upload.")
            faults.add_metric([self._name], upload.error_count)
            yield faults
        if (report := status.report) is not None:
            good = gauge("goodput_seconds", "Seconds on kept steps, of all workers.")
            good.add_metric([self._name], report.account.good)
            yield good
            bad = gauge("badput_seconds", "Other seconds of all workers.", "class")
            for kind, seconds in report.account.bad.items():
                bad.add_metric([self._name, kind.value], seconds)
            yield bad
            for name, text in _DURATIONS.items():
                row = sorted(report.durations[name])
                name = f"tfpreempt_{name.replace(' ', '_')}_seconds"
                histogram = core.HistogramMetricFamily(name, text, labels=["run"])
                counts = [(str(b), bisect_right(row, b)) for b in _BUCKETS]
                counts.append(("+Inf", len(row)))
                histogram.add_metric([self._name], counts, sum(row))
                yield histogram


def registry(name: str, look: Callable[[], RunStatus]) -> CollectorRegistry:
    """Returns a prometheus_client registry with the metrics of a run.

    Args:
        name: name of the run: the value of the label `run`.
        look: function that returns the current state of the run; may be called on any
            thread.

    Raises:
        ConfigurationError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ConfigurationError(
            "--metrics-port and --metrics-file need prometheus_client, which is not "
            f"installed: {to_install('metrics')}"
        ) from error
    made = CollectorRegistry()
    made.register(_Run(name, look))
    return made


def parse_address(text: str) -> tuple[str, int] | None:
    """Parses `PORT`, `HOST:PORT` or `[IPv6]:PORT`.

    Returns:
        (host, port); None if the text has another form. The default host is 127.0.0.1,
        so that only this machine can connect, because no password protects metrics.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        return None
    return match["v6"] or match["host"] or "127.0.0.1", int(match["port"])


class _Server(socketserver.ThreadingTCPServer):
    """HTTP server with a maximum number of connections.

    If the maximum is reached, a new connection ends the oldest one. Every connection
    needs a file descriptor of this process. Because of the maximum, clients that keep
    connections open neither use up the descriptors nor block further clients.
    """

    allow_reuse_address = True
    daemon_threads = True
    # A large queue, because a client that does not fit into the queue waits a second.
    request_queue_size = 128

    def __init__(
        self,
        family: int,
        address: tuple[str, int],
        handler: type[socketserver.BaseRequestHandler],
    ) -> None:
        self.address_family = family
        self._connections: dict[Any, None] = {}  # oldest first
        self._changed = threading.Condition()
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns whether to serve a new connection.

        If there are too many connections, ends the oldest one; returns False if it does
        not end in time.
        """
        with self._changed:
            if len(self._connections) >= _MOST_CONNECTIONS:
                with contextlib.suppress(OSError):  # closed by the client
                    next(iter(self._connections)).shutdown(socket.SHUT_RDWR)
            return self._changed.wait_for(
                lambda: len(self._connections) < _MOST_CONNECTIONS, _END_SECONDS
            )

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            super().shutdown_request(request)
            self._connections.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error; ignores that a client has closed its connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            _logger.exception("metrics cannot be served")


@contextlib.contextmanager
def served(
    host: str, port: int, metrics: CollectorRegistry, *, timeout: float = 5.0
) -> Iterator[None]:
    """Context manager: serves the metrics at http://host:port/metrics.

    Args:
        host: name or address to listen on.
        port: number of the port.
        metrics: metrics of a run.
        timeout: seconds after which a connection without a request is closed.

    Raises:
        ConfigurationError: the port cannot be used.
    """
    from prometheus_client import MetricsHandler

    handler = MetricsHandler.factory(metrics)
    handler.timeout = timeout  # type: ignore[attr-defined]  # of StreamRequestHandler
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        server = _Server(found[0][0], (host, port), handler)
    except OSError as error:
        raise ConfigurationError(
            f"--metrics-port cannot listen on {host}, port {port} ({error.strerror}). "
            "Choose another port, or stop the process that uses the port."
        ) from error
    thread = ManagedThread("tfpreempt-metrics-server", server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
