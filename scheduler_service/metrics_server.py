"""The HTTP server of /metrics, for Prometheus.

It always responds in the text format 0.0.4. Prometheus 2 and 3 also accept OpenMetrics, for which the client library
would replace colons in names: `vllm:num_requests_waiting` would become `vllm_num_requests_waiting`, and dashboards,
rules and autoscalers built for vLLM's names would find no data.
"""

import errno
import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from pagewire.common.wire.transport.addresses import join
from pagewire.common.wire.transport.host_names import HostNames
from pagewire.common.wire.transport.listening import check_port, passive_host, refusal
from scheduler_service.config import FrontEndConfig, SchedulerConfig

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9090
# The limit on concurrent connections. Further connections are closed immediately. Each connection has a thread, and
# only a few scrapers are expected.
MAX_CONNECTIONS = 16
# The timeout in seconds for receiving a request or sending a response.
TIMEOUT = 5.0


class MetricsServer:
    """An HTTP server for Prometheus scrapes of /metrics. It runs on its own threads."""

    def __init__(self, collector: Collector, host: str, port: int | None) -> None:
        """Bind the port and start the HTTP server on a thread. Without `port`, use the default port, or a free port if
        the default port is in use. Raise OSError if a given `port` cannot be bound, for example because it is in
        use."""
        registry = CollectorRegistry()
        registry.register(collector)
        check_port(host, port or 0, "--metrics-port")
        try:
            self._server = _HttpServer(registry, host, DEFAULT_PORT if port is None else port)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise refusal(error, host, port or DEFAULT_PORT, "--metrics-port") from None
            self._server = _HttpServer(registry, host, 0)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port
        logger.info("metrics on http://%s/metrics", join(host, self.port))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposition(collector: Collector) -> bytes:
    """Return the metrics of a collector as bytes in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def serve_metrics(collector: Collector, config: SchedulerConfig | FrontEndConfig) -> MetricsServer | None:
    """Start the HTTP server of /metrics with the configured port and options, and return it. Return None if the
    configuration turns it off. Raise OSError if the configured port is in use."""
    return None if config.metrics_port == 0 else MetricsServer(collector, config.metrics_host, config.metrics_port)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # an idle connection does not delay the shutdown

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.registry = registry
        self.names = HostNames(host)
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        found = socket.getaddrinfo(passive_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection to the metrics port broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = TIMEOUT

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", ["localhost"] if self.request_version == "HTTP/1.0" else [])
        if len(hosts) != 1:
            self.send_error(HTTPStatus.BAD_REQUEST, explain="send exactly one Host header")
            return
        if why := self.server.names.refusal(hosts[0]):
            self.send_error(HTTPStatus.FORBIDDEN, explain=why)
            return
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, explain="the metrics are at /metrics")
            return
        body = generate_latest(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log line of an HTTP request, because scrapes arrive every few seconds."""
