"""The metrics port, with requests of Prometheus and with malformed requests."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import metadata

import pytest
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.parser import text_string_to_metric_families

from scheduler_service import metrics_server
from scheduler_service.core import explain
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.metrics import Metrics, MetricsCollector, ServiceStats
from scheduler_service.metrics_server import MAX_CONNECTIONS, MetricsServer

# The default headers of these versions: recorded from 2.42, and derived from the source of 3.0.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;escaping=allow-utf-8;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;escaping=allow-utf-8;version=1.0.0;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    scheduler = Scheduler(SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64))
    collector = MetricsCollector(Metrics(), lambda: explain.stats(scheduler.state), "tiny", ServiceStats)
    server = MetricsServer(collector, "127.0.0.1", 0)
    yield server
    server.close()


def get(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    found = response.status, response.headers["Content-Type"], response.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize("accept", ["", PROMETHEUS_2, PROMETHEUS_3], ids=["curl", "Prometheus 2", "Prometheus 3"])
def test_names_keep_their_colons_for_any_client(server: MetricsServer, accept: str) -> None:
    status, content_type, text = get(server, Accept=accept)
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "pagewire:device_blocks"} <= names
    assert not {name for name in names if name.startswith(("vllm_", "pagewire_"))}


@pytest.mark.parametrize("host", ["no such name", "a" * 70])
def test_a_host_that_is_no_address_is_one_line_that_names_its_flag(host: str) -> None:
    with pytest.raises(
        OSError, match=r"^--metrics-host is '.*', which is no valid address \(.*choose another --metrics-host$"
    ):
        MetricsServer(CollectorRegistry(), host, None)


def test_the_client_library_would_answer_otherwise() -> None:
    """prometheus_client would choose OpenMetrics for Prometheus.

    So the metrics port ignores the Accept header, see `metrics_server`.
    """
    _, content_type = exposition.choose_encoder(PROMETHEUS_2)
    assert "openmetrics" in content_type, metadata.version("prometheus-client")


def test_other_paths_are_not_found(server: MetricsServer) -> None:
    assert get(server, "/secret")[0] == 404


def test_another_hosts_name_is_refused_on_loopback(server: MetricsServer) -> None:
    """Requests with another host name are refused on loopback.

    Otherwise a web page could read the metrics through a DNS name that was rebound to this machine.
    """
    hosts = {"localhost:1": 200, "LOCALHOST": 200, "[::1]": 200, "evil.example": 403, "evil.example:9090": 403, "": 403}
    assert {host: get(server, Host=host)[0] for host in hosts} == hosts
    host = b"host: localhost\r\n"
    for version, sent, status in ((b"1.1", b"", b"400"), (b"1.1", host * 2, b"400"), (b"1.0", b"", b"200")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /metrics HTTP/%b\r\n%b\r\n" % (version, sent))
            assert client.makefile("rb").readline().split()[1] == status


def test_any_name_is_served_where_others_reach_the_port() -> None:
    server = MetricsServer(CollectorRegistry(), "0.0.0.0", 0)
    try:
        assert get(server, Host="metrics.example")[0] == 200
    finally:
        server.close()


def test_silent_connections_are_closed_and_bounded(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.5)
    num_threads = threading.active_count()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)) for _ in range(100)
        ]
        for connection in silent:
            assert connection.recv(1) == b"", "the server closes it"
        assert threading.active_count() <= num_threads + MAX_CONNECTIONS
        assert get(server)[0] == 200
