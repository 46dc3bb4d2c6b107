"""Mutual TLS of scheduler and worker: six invalid peers are refused, and a valid peer is accepted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.common.process.watched_files import WatchedFiles
from pagewire.common.wire.transport.tls import Credentials, server_files
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service import front_end
from scheduler_service.config import FrontEndConfig
from scheduler_service.links.worker.worker_link import CHANNEL_OPTIONS
from testing import scheduler_stack
from testing.serving.certificates import DAY, Authority, Certificate, self_signed
from testing.serving.failures import failure_of
from tests.contract.loading_worker import loading_worker

REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
CLIENT_NAME = "scheduler.test"


@dataclass(frozen=True)
class Site:
    """A certificate authority, a folder for the server's files, and a valid client certificate."""

    authority: Authority
    folder: Path
    client: Certificate

    def server_files(self) -> dict[str, str]:
        cert, key = self.authority.issue("localhost").write(self.folder, "server")
        return {"tls_cert": cert, "tls_key": key, "tls_client_ca": self.authority.write(self.folder)}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    authority = Authority("pagewire")
    return Site(authority, tmp_path, authority.issue(CLIENT_NAME))


def credentials(ca: bytes, client: Certificate | None) -> grpc.ChannelCredentials:
    pair = {} if client is None else {"private_key": client.key, "certificate_chain": client.cert}
    return grpc.ssl_channel_credentials(ca, **pair)


def channel(target: str, ca: bytes, client: Certificate | None) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(target, credentials(ca, client))


BAD_PEERS: dict[str, Callable[[Site], Certificate | None]] = {
    "no certificate": lambda site: None,
    "self-signed": lambda site: self_signed(CLIENT_NAME),
    "expired": lambda site: site.authority.issue(CLIENT_NAME, ends_in=-DAY),
    "wrong authority": lambda site: Authority("pagewire").issue(CLIENT_NAME),
    "wrong name": lambda site: site.authority.issue("gateway.test"),
}

# Makes an RPC to a target with the given credentials, or in plaintext if they are None.
Ask = Callable[[str, grpc.ChannelCredentials | None], Awaitable[object]]


async def answers_to_bad_peers(site: Site, target: str, ask: Ask) -> dict[str, grpc.StatusCode | None]:
    """Return the status code that each of the six invalid peers gets, or None if its RPC succeeded."""
    peers: dict[str, grpc.ChannelCredentials | None] = {
        name: credentials(site.authority.cert, make(site)) for name, make in BAD_PEERS.items()
    }
    peers["plaintext"] = None

    async def answer(peer: grpc.ChannelCredentials | None) -> grpc.StatusCode | None:
        try:
            await ask(target, peer)
        except grpc.RpcError as error:
            return error.code()
        return None

    codes = await asyncio.gather(*map(answer, peers.values()))
    return dict(zip(peers, codes, strict=True))


def worker(site: Site) -> AbstractAsyncContextManager[str]:
    files = site.server_files()
    credentials = server_files(files["tls_cert"], files["tls_key"], files["tls_client_ca"]).server_credentials()
    return loading_worker(credentials, client_names=frozenset({CLIENT_NAME}))


async def ask_worker(
    target: str, peer: grpc.ChannelCredentials | None, options: Sequence[tuple[str, object]] = ()
) -> object:
    """Send a plan before hello. A peer that passes TLS gets a protocol error.

    The test uses gRPC's blocking API: the asyncio API turns a status into INTERNAL if it arrives before the plan is
    sent.
    """
    requests = iter([worker_pb2.ExecuteRequest(plan=worker_pb2.StepPlan(epoch=1, step=1))])

    def ask() -> object:
        with grpc.insecure_channel(target) if peer is None else grpc.secure_channel(target, peer, options) as opened:
            return next(worker_pb2_grpc.WorkerServiceStub(opened).Execute(requests, timeout=30))

    return await asyncio.to_thread(ask)


async def test_worker_refuses_six_bad_peers_and_takes_the_good_one(site: Site) -> None:
    async with worker(site) as target:
        codes = await answers_to_bad_peers(site, target, ask_worker)
        assert {name for name, code in codes.items() if code in REFUSED} == {*BAD_PEERS, "plaintext"}, codes
        assert codes["wrong name"] is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.RpcError) as error:
            await ask_worker(target, credentials(site.authority.cert, site.client))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "first message is a plan" in error.value.details()


async def ask_scheduler(peer: grpc.aio.Channel) -> object:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(peer)
    return await stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest(), timeout=10)


async def ask_as(target: str, peer: grpc.ChannelCredentials | None) -> object:
    opened = grpc.aio.insecure_channel(target) if peer is None else grpc.aio.secure_channel(target, peer)
    async with opened:
        return await ask_scheduler(opened)


@asynccontextmanager
async def scheduler(site: Site, checkpoint: Path, **options: object) -> AsyncIterator[str]:
    files = {**site.server_files(), **options}
    async with scheduler_stack.serve(checkpoint, host="localhost", **files) as stack:
        yield stack.url.removeprefix("grpc://")


async def test_scheduler_refuses_six_bad_peers_and_takes_the_good_one(site: Site, checkpoint: Path) -> None:
    tenants = site.folder / "tenants.yaml"
    tenants.write_text(f"tenants: {{tester: {{certificates: [{CLIENT_NAME}]}}}}")
    async with scheduler(site, checkpoint, tenants=str(tenants)) as target:
        codes = await answers_to_bad_peers(site, target, ask_as)
        assert {name for name, code in codes.items() if code in REFUSED} == {*BAD_PEERS, "plaintext"}, codes
        assert codes["wrong name"] is grpc.StatusCode.UNAUTHENTICATED
        async with channel(target, site.authority.cert, site.client) as peer:
            assert (await ask_scheduler(peer)).served_model_name


async def test_without_tenants_any_name_of_the_authority_is_served(site: Site, checkpoint: Path) -> None:
    client = site.authority.issue("client.test")
    async with scheduler(site, checkpoint) as target, channel(target, site.authority.cert, client) as peer:
        assert (await ask_scheduler(peer)).served_model_name


async def test_clients_refuse_a_server_of_another_name_or_authority(site: Site, checkpoint: Path) -> None:
    async with scheduler(site, checkpoint) as target:
        other_name = target.replace("localhost", "127.0.0.1")
        for address, ca in ((other_name, site.authority.cert), (target, Authority("pagewire").cert)):
            async with channel(address, ca, site.client) as peer:
                await failure_of(ask_scheduler(peer), grpc.StatusCode.UNAVAILABLE)


async def test_a_renewed_certificate_is_shown_without_a_restart(
    site: Site, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_renewed, take = asyncio.Event(), WatchedFiles.take

    def note(files: WatchedFiles[Credentials], credentials: Credentials) -> None:
        take(files, credentials)
        was_renewed.set()

    monkeypatch.setattr(WatchedFiles, "take", note)
    async with scheduler(site, checkpoint) as target:
        # The authority is replaced too, as after a leak of its key.
        renewed = Site(Authority("renewed"), site.folder, site.client)
        renewed.server_files()
        await asyncio.wait_for(was_renewed.wait(), 20)
        client = renewed.authority.issue(CLIENT_NAME)
        async with channel(target, renewed.authority.cert, client) as peer:
            assert (await ask_scheduler(peer)).served_model_name
        async with channel(target, site.authority.cert, site.client) as peer:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask_scheduler(peer)


async def test_probes_need_no_certificate_on_the_health_port(site: Site, checkpoint: Path) -> None:
    port = free_port("localhost")
    async with (
        scheduler(site, checkpoint, health_host="localhost", health_port=port),
        grpc.aio.insecure_channel(f"localhost:{port}") as probe,
    ):
        health = health_pb2_grpc.HealthStub(probe)
        for service in ("liveness", "pagewire.scheduler.v1.SchedulerService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await failure_of(ask_scheduler(probe), grpc.StatusCode.UNIMPLEMENTED)


async def test_scheduler_refuses_a_worker_of_another_name(site: Site) -> None:
    """A worker of another name is refused even with the scheduler's own channel options."""
    async with worker(site) as target:
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "worker.test"))
        with pytest.raises(grpc.RpcError) as error:
            await ask_worker(target, credentials(site.authority.cert, site.client), options)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_front_end_under_mutual_tls_reaches_the_scheduler_and_answers_probes_in_plaintext(
    site: Site, checkpoint: Path
) -> None:
    async with scheduler(site, checkpoint) as target:
        files = site.server_files()
        shown = site.client.write(site.folder, "frontend")
        config = FrontEndConfig(
            model=str(checkpoint),
            scheduler=target,
            host="localhost",
            port=free_port("localhost"),
            health_host="localhost",
            health_port=free_port("localhost"),
            metrics_port=0,
            scheduler_tls_ca=files["tls_client_ca"],
            scheduler_tls_cert=shown[0],
            scheduler_tls_key=shown[1],
            **files,
        )
        stop = asyncio.Event()
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(front_end.run(config, stop=stop, ready=url.set_result, stop_now=stop))
        try:
            await asyncio.wait({running, url}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            async with grpc.aio.insecure_channel(f"localhost:{config.health_port}") as probe:
                service = "pagewire.scheduler.v1.SchedulerService"
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await health_pb2_grpc.HealthStub(probe).Check(request, timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            async with channel(f"localhost:{config.port}", site.authority.cert, site.client) as peer:
                assert (await ask_scheduler(peer)).served_model_name
        finally:
            stop.set()
            await running
