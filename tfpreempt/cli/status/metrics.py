"""Exports the state of a run as metrics for Prometheus.

prometheus_client is an optional dependency, so it is imported only if metrics are
requested.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
import socketserver
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
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

# Metric -> (attribute of the worker's state, description).
_OF_WORKERS = {
    "step": ("step", "Steps completed by the worker, over all restarts."),
    "steps_per_second": ("steps_per_second", "Mean rate of the last minute."),
    "step_seconds": ("step_seconds", "Mean seconds of the newest steps."),
    "step_deviation_seconds": ("step_deviation", "Standard deviation of step_seconds."),
    "last_step_timestamp_seconds": ("stepped_at", "Time of the newest step."),
    "last_report_timestamp_seconds": ("since", "Time of the last report, or the end."),
    "notice_timestamp_seconds": ("noticed_at", "Time of the notice being handled."),
    "notice_deadline_timestamp_seconds": ("deadline", "End of the grace period."),
}
# Metric -> (attribute of the mirror's state, description).
_OF_UPLOADS = {
    "uploaded_step": ("mirrored_step", "Step of the newest commit in the mirror."),
    "upload_pending_commits": ("pending", "Commits waiting or being uploaded."),
    "upload_sent_bytes": ("sent_bytes", "Bytes sent of the commit being uploaded."),
    "upload_size_bytes": ("total_bytes", "Size of the commit being uploaded."),
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

        def family(
            kind: type[CounterMetricFamily | GaugeMetricFamily],
            name: str,
            text: str,
            values: Mapping[Any, float | None],  # by the values of the labels
            *labels: str,
        ) -> Metric:
            made = kind(f"tfpreempt_{name}", text, labels=["run", *labels])
            for key, value in values.items():
                if value is not None:
                    made.add_metric([self._name, *key], value)
            return made

        gauge = functools.partial(family, GaugeMetricFamily)
        counter = functools.partial(family, CounterMetricFamily)
        status = self._look()
        workers = {(str(each.worker),): each for each in status.workers}
        for name, (attribute, text) in _OF_WORKERS.items():
            values = {key: getattr(each, attribute) for key, each in workers.items()}
            yield gauge(name, text, values, "worker")
        slowdowns = {(str(index),): x for index, x in status.slowdowns.items()}
        text = "Step time relative to other workers."
        yield gauge("slowdown", text, slowdowns, "worker")
        states = {
            (*key, state.value): float(each.state is state)
            for key, each in workers.items()
            for state in ReportedState
        }
        text = "1 for the present state of the worker, else 0."
        yield gauge("worker_state", text, states, "worker", "state")
        yield counter("commits", "Number of commits of the run.", {(): status.commits})
        at, step = {(): status.committed_at}, {(): status.commit_step}
        text = "Time of the newest commit."
        yield gauge("last_commit_timestamp_seconds", text, at)
        yield gauge("last_commit_step", "Step of the newest commit.", step)
        # Include reasons with 0 restarts: rate() needs them.
        reasons = sorted({*RESTARTS, *status.restarts})
        restarts = {(reason,): status.restarts.get(reason, 0) for reason in reasons}
        yield counter("restarts", "Number of restarts, by reason.", restarts, "reason")
        bad_steps = {(): status.bad_steps}
        yield counter("bad_steps", "Number of bad steps that were found.", bad_steps)
        if (upload := status.upload) is not None:
            for name, (attribute, text) in _OF_UPLOADS.items():
                yield gauge(name, text, {(): getattr(upload, attribute)})
            errors = {(): upload.error_count}
            yield counter("upload_errors", "Number of failed uploads.", errors)
        if (report := status.report) is not None:
            good = {(): report.account.good}
            yield gauge("goodput_seconds", "Seconds on kept steps.", good)
            bad = {(kind.value,): s for kind, s in report.account.bad.items()}
            yield gauge("badput_seconds", "Other seconds of all workers.", bad, "class")
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
