"""Certificates of both links that are renewed during streams, and the log lines about certificates that are refused."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import grpc
import grpc.aio
import pytest

from pagewire.common.process.child_process import EXIT_REFUSED
from pagewire.common.wire.transport.tls import server_files
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service import front_end, server
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from scheduler_service.links import reconnection
from scheduler_service.links.reconnection import Outage
from scheduler_service.links.worker import worker_link
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Result, expected_tokens, request, serve
from testing.serving.certificates import DAY, Authority, Certificate
from worker_service import server as worker_server
from worker_service.config import WorkerConfig

STORYTELLER = str(Path(__file__).parents[2] / "models" / "storyteller")
NUM_STREAMS = 20
NUM_TOKENS = 40


@dataclass
class Site:
    """The TLS files of every service, issued by one authority. Both sides show certificates."""

    folder: Path

    def renew(self, *names: str) -> Authority:
        """Replace the certificates of the named services and their trusted authority. Return the new authority."""
        authority = Authority("pagewire")
        for name in names:
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            authority.write(folder)
            authority.issue("localhost").write(folder, "own")
        return authority

    def served(self, name: str) -> dict[str, str]:
        return {f"tls_{kind}": path for kind, path in self._paths(name, "client_ca").items()}

    def dialled(self, name: str, other: str) -> dict[str, str]:
        files = {f"{other}_tls_{kind}": path for kind, path in self._paths(name, "ca").items()}
        return files | {f"{other}_tls_name": "localhost"}

    def _paths(self, name: str, ca: str) -> dict[str, str]:
        folder = self.folder / name
        return {"cert": str(folder / "own.crt"), "key": str(folder / "own.key"), ca: str(folder / "ca.crt")}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnection, "_EXPLAIN_INTERVAL", 0.01)


def lines_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith(logger)]


class WarningsOf(logging.Handler):
    """Collects the warnings of a logger inside a `with` block, for one event loop."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger(name)
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def __enter__(self) -> None:
        self._logger.addHandler(self)

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put_nowait(record.getMessage())

    async def next(self) -> str:
        return await asyncio.wait_for(self._lines.get(), 20)


async def stream(stub: scheduler_pb2_grpc.SchedulerServiceStub, i: int, begun: Callable[[], None]) -> None:
    """Run one request, and check all of its tokens."""
    result, prompt = Result(), [5, 6, 7, i]
    async for response in stub.Generate(request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)):
        result.add(response)
        begun()
    assert result.token_ids[0] == expected_tokens(prompt, NUM_TOKENS)


@asynccontextmanager
async def streams(stub: scheduler_pb2_grpc.SchedulerServiceStub) -> AsyncIterator[None]:
    """Start streams before the block, and wait for their ends after the block."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    running = [asyncio.create_task(stream(stub, i, begun[i].set)) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(event.wait() for event in begun))
    yield
    await asyncio.gather(*running)


async def until_serving(stub: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
    async with asyncio.timeout(20):
        info = await stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())
        while info.unavailable_reason:  # no event reports the availability
            await asyncio.sleep(0.01)
            info = await stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())


async def started_worker(checkpoint: Path, site: Site) -> tuple[FakeWorker, Callable[[], Awaitable[None]]]:
    """Start a worker with the site's files. Return the worker and a function that starts it again on its port."""
    worker = FakeWorker(read_model_info(str(checkpoint)).digest)
    worker.step_seconds = 0.005
    files = site.served("worker")
    tls = server_files(files["tls_cert"], files["tls_key"], files["tls_client_ca"])

    async def start() -> None:
        tls.watched.look(tls.watched.take)
        await worker.start(tls.server_credentials())

    await start()
    return worker, start


async def test_a_worker_and_a_scheduler_are_renewed_under_streams(
    site: Site, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker restarts with another authority, which the scheduler's next connection trusts."""
    site.renew("worker", "scheduler")
    worker, start = await started_worker(checkpoint, site)
    caplog.set_level("INFO")
    port = free_port("127.0.0.1")
    files = site.dialled("scheduler", "worker")
    tomorrow = int(time.time()) + 86400
    worker.certificates = [worker_pb2.CertificateLife(flag="--tls-cert", begin=tomorrow - 864000, end=tomorrow)]

    def certificates(unit: str) -> list[tuple[str, float]]:
        metrics = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        found = re.findall(rf'^pagewire:certificate_{unit}_left{{.*flag="(.*?)".*}} (.*)$', metrics, re.MULTILINE)
        return [(flag, round(float(value), 2)) for flag, value in found]

    async with serve(checkpoint, worker=worker, metrics_port=port, **files) as stack, streams(stack.stub):
        site.renew("worker", "scheduler")
        await worker.kill()
        await start()
        days = await asyncio.to_thread(certificates, "days")
        async with asyncio.timeout(20):
            while ("worker 0 --tls-cert", 1.0) not in days:  # no event reports the new metrics
                await asyncio.sleep(0.01)
                days = await asyncio.to_thread(certificates, "days")
        shares = await asyncio.to_thread(certificates, "share")
    assert days == [("--worker-tls-cert", 1.0), ("--worker-tls-ca", 1.0), ("worker 0 --tls-cert", 1.0)]
    assert dict(shares)["worker 0 --tls-cert"] == 0.1
    renewals = [
        line for line in lines_of(caplog, "pagewire.common.process.watched_files") if line[1].startswith("read --")
    ]
    assert [level for level, _ in lines_of(caplog, "pagewire.common.process.watched_files")] == ["INFO"] * 2
    assert {line[1].split(": ")[1].split()[0] for line in renewals} == {"--tls-cert", "--worker-tls-cert"}
    assert len(worker.epochs) == 2


async def test_a_scheduler_that_waits_for_a_worker_takes_renewed_files(
    site: Site, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.renew("worker", "scheduler")
    worker, start = await started_worker(checkpoint, site)
    told = WarningsOf("scheduler_service.links")
    async with serve(checkpoint, worker=worker, **site.dialled("scheduler", "worker")) as stack, streams(stack.stub):
        old = {path: path.read_bytes() for path in (site.folder / "scheduler").iterdir()}
        new = site.renew("worker", "scheduler")
        fresh = {path: path.read_bytes() for path in old}
        assert new.cert in fresh.values()
        for path, content in old.items():
            path.write_bytes(content)
        await worker.kill()
        await start()
        with told:
            while "is not from a CA that is trusted here" not in await told.next():
                pass
        for path, content in fresh.items():
            path.write_bytes(content)


@asynccontextmanager
async def fronted(
    checkpoint: Path, site: Site, scheduler: str
) -> AsyncIterator[scheduler_pb2_grpc.SchedulerServiceStub]:
    """Run a front end of the scheduler at the given address. Yield a stub for the front end."""
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    files = site.dialled("frontend", "scheduler")
    config = FrontEndConfig(model=str(checkpoint), scheduler=scheduler, port=0, metrics_port=0, **files)
    running = asyncio.create_task(front_end.run(config, stop=stop, stop_now=stop, ready=url.set_result))
    try:
        async with grpc.aio.insecure_channel((await asyncio.wait_for(url, 20)).removeprefix("grpc://")) as channel:
            yield scheduler_pb2_grpc.SchedulerServiceStub(channel)
    finally:
        stop.set()
        await running


async def test_a_scheduler_and_a_front_end_are_renewed_under_streams(
    site: Site, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The existing connection continues. The next connection is to a scheduler with another authority."""
    site.renew("scheduler", "frontend")
    worker = await FakeWorker.started(checkpoint)
    worker.step_seconds = 0.005
    options = {"worker": worker, "host": "localhost", "port": free_port("localhost"), **site.served("scheduler")}
    address = f"localhost:{options['port']}"
    caplog.set_level("INFO")
    async with serve(checkpoint, **options) as first, fronted(checkpoint, site, address) as stub:
        async with streams(stub):
            site.renew("scheduler", "frontend")
        first.stop.set()
        await first.running
        async with serve(checkpoint, **options):
            await until_serving(stub)
            async with streams(stub):
                pass
    # The first scheduler may have stopped before or after it read its files again.
    told = [
        line
        for line in lines_of(caplog, "pagewire.common.process.watched_files")
        if "--tls-cert is valid" not in line[1]
    ]
    ((level, line),) = told
    assert level == "INFO"
    flags = ", ".join(f"--scheduler-tls-{name}" for name in ("ca", "cert", "key"))
    assert line.startswith(f"read {flags} again: --scheduler-tls-cert is valid until ")


MINE, THEIRS = Authority("pagewire"), Authority("pagewire")
ENDED = "has expired or is not valid yet: renew it there"
REFUSED = "accepts connections and closes them: it looks like "
# The certificate of the other side, the authority that it trusts, and the warning on this side, which uses MINE.
OTHERS: dict[str, tuple[Certificate, bytes, str]] = {
    "has ended": (MINE.issue("localhost", ends_in=-DAY), MINE.cert, ENDED),
    "has not begun": (MINE.issue("localhost", began=-DAY, ends_in=2 * DAY), MINE.cert, ENDED),
    "another authority": (THEIRS.issue("localhost"), MINE.cert, "is not from a CA that is trusted here: give --"),
    "another name": (MINE.issue("elsewhere"), MINE.cert, "is for another name: give --"),
    "refuses mine": (MINE.issue("localhost"), THEIRS.cert, REFUSED),
}


@asynccontextmanager
async def secure_server(shown: Certificate, client_ca: bytes) -> AsyncIterator[str]:
    """Run a server that only performs handshakes. Yield its address."""
    refusing = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(shown.key, shown.cert)], client_ca, require_client_auth=True)
    port = refusing.add_secure_port("localhost:0", credentials)
    await refusing.start()
    yield f"localhost:{port}"
    await refusing.stop(0)


def run_linked(
    link: str, checkpoint: Path, address: str, files: dict[str, str], stop: asyncio.Event
) -> Coroutine[None, None, int]:
    """Return a coroutine that runs a service with a link to `address` until it is stopped."""
    options = {"model": str(checkpoint), "port": 0, "metrics_port": 0, link: address}
    options |= {f"{link}_tls_{name}": path for name, path in files.items()}
    run, config = (server.run, SchedulerConfig) if link == "worker" else (front_end.run, FrontEndConfig)
    return run(config(**options), stop=stop, stop_now=stop, ready=lambda url: None)


@pytest.mark.parametrize("link", ["worker", "scheduler"])
@pytest.mark.parametrize("name", OTHERS)
async def test_what_is_wrong_with_the_other_side_is_one_warning(
    name: str,
    link: str,
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, client_ca, text = OTHERS[name]
    cert, key = MINE.issue("localhost").write(tmp_path, "mine")
    tells: asyncio.Queue[str] = asyncio.Queue()

    def tell(self: Outage, reason: str, *, is_calm: bool) -> None:
        tells.put_nowait(reason)
        told(self, reason, is_calm=is_calm)

    told = Outage.tell
    monkeypatch.setattr(Outage, "tell", tell)
    caplog.set_level("INFO")
    async with secure_server(shown, client_ca) as address:
        files = {"ca": MINE.write(tmp_path), "cert": cert, "key": key}
        stop = asyncio.Event()
        running = asyncio.create_task(run_linked(link, checkpoint, address, files, stop))
        for _ in range(4):
            await asyncio.wait_for(tells.get(), 20)
        stop.set()
        await running
    ((level, line),) = lines_of(caplog, "scheduler_service.links")
    assert level == "WARNING"
    assert text in line


def test_a_refusal_is_one_warning_however_grpc_says_it(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC's message names any of the host's addresses and the last bytes that it read."""
    link = Outage("the worker", logging.getLogger("scheduler_service.links"), worker_link._PORT, lambda reason: None)
    for words in ("ipv4:127.0.0.1:5001: Socket closed", "ipv6:%5B::1%5D:5001: Socket closed", "Secure read failed"):
        link.tell(f"there is no connection ({words})", is_calm=True)
    link.tell("Secure read failed", is_calm=True)
    ((level, line),) = lines_of(caplog, "scheduler_service.links")
    assert level == "WARNING"
    assert REFUSED in line


# The options of each service in addition to its files, and the prefix of the file flags.
STARTS: dict[str, tuple[str, dict[str, object]]] = {
    "scheduler": ("--tls-", {}),
    "scheduler's link": ("--worker-tls-", {}),
    "front end": ("--tls-", {"scheduler": "localhost:1"}),
    "front end's link": ("--scheduler-tls-", {"scheduler": "localhost:1"}),
    "worker": ("--tls-", {"device": "cpu"}),
}


@pytest.mark.parametrize("name", STARTS)
async def test_a_service_refuses_to_start_with_a_key_of_another_certificate(
    name: str, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag, options = STARTS[name]
    cert, _ = MINE.issue("localhost").write(tmp_path, "one")
    _, key = MINE.issue("localhost").write(tmp_path, "other")
    prefix = flag.removeprefix("--").replace("-", "_")
    options = options | {f"{prefix}cert": cert, f"{prefix}key": key, "model": str(checkpoint), "port": 0}
    if "link" in name:
        options[f"{prefix}ca"] = MINE.write(tmp_path)
    refusals: list[str] = []
    if name == "worker":
        options["model"] = STORYTELLER
        code = worker_server.serve(WorkerConfig(**options), lambda reason: refusals.append(reason) or EXIT_REFUSED)
    else:
        run, config = (server.run, SchedulerConfig) if "scheduler" not in options else (front_end.run, FrontEndConfig)
        stop = asyncio.Event()
        code = await run(config(**options), stop=stop, ready=lambda url: stop.set())
        refusals = [message for level, message in lines_of(caplog, "scheduler_service") if level == "CRITICAL"]
    assert code == EXIT_REFUSED
    assert refusals == [f"{flag}key is {key}, which is not the key of the first certificate in {flag}cert {cert}"]
