"""The secret of the link between scheduler and worker: without it, an RPC is refused before anything else is read."""

import asyncio
import gc
import re
import subprocess
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pagewire.common.process.shutdown import cancel
from pagewire.common.wire.messages import PROTOCOL_VERSION, WorkerStarting
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.link_secret import LinkSecret
from pagewire.common.wire.transport.tls import server_files
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.links.worker.worker_link import WorkerLink
from testing.serving.certificates import Authority
from tests.contract.loading_worker import loading_worker
from tests.contract.worker_listener import Listener

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "storyteller")
SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"
LOADING = worker_pb2.ExecuteResponse(starting=worker_pb2.WorkerStarting(doing="importing torch"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    return path


def worker(secret: Path | None, credentials: grpc.ServerCredentials | None = None) -> AbstractAsyncContextManager[str]:
    """Start a worker that never finishes loading. Yield its address. A caller with the secret gets `LOADING`."""
    return loading_worker(credentials, link_secret=None if secret is None else LinkSecret(str(secret)))


async def answer(
    target: str,
    metadata: tuple[tuple[str, bytes], ...],
    epoch: int = 1,
    credentials: grpc.ChannelCredentials | None = None,
) -> tuple[grpc.StatusCode, str] | worker_pb2.ExecuteResponse:
    """Send a hello. Return the first message of the answer, or the status code and details.

    The test uses gRPC's blocking API: the asyncio API turns a status into INTERNAL if it arrives before the hello is
    sent.
    """
    hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, instance_id="a", epoch=epoch, pipeline_depth=1)

    def ask() -> tuple[grpc.StatusCode, str] | worker_pb2.ExecuteResponse:
        opened = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        with opened as channel:
            requests = iter([worker_pb2.ExecuteRequest(hello=hello)])
            call = worker_pb2_grpc.WorkerServiceStub(channel).Execute(requests, metadata=metadata, timeout=60)
            try:
                return next(call)
            except grpc.RpcError:
                return call.code(), call.details()

    return await asyncio.to_thread(ask)


def look(secret: LinkSecret) -> None:
    secret.file.look(secret.file.take)


def shown(*secrets: bytes) -> tuple[tuple[str, bytes], ...]:
    return tuple(("pagewire-link-secret-bin", secret) for secret in secrets)


BAD = [(), shown(b""), shown(OTHER), shown(SECRET[:-1]), shown(SECRET + b"\n"), shown(SECRET, OTHER)]


@pytest.mark.parametrize("metadata", BAD)
async def test_without_the_secret_no_epoch_begins(
    file: Path, metadata: tuple[tuple[str, bytes], ...], recwarn: pytest.WarningsRecorder
) -> None:
    gc.collect()  # collect the garbage of other tests
    recwarn.clear()
    async with worker(file) as target:
        code, _ = await answer(target, metadata, epoch=2)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert await answer(target, shown(SECRET), epoch=1) == LOADING
        refusal = (await answer(target, shown(SECRET), epoch=1)).refusal
        assert (refusal.reason, refusal.epoch) == (worker_pb2.Refusal.REASON_STALE_EPOCH, 1)
        code, _ = await answer(target, metadata, epoch=1)  # nor does it learn the current epoch
        assert code is grpc.StatusCode.UNAUTHENTICATED
    gc.collect()
    assert not [each for each in recwarn if "never awaited" in str(each.message)], "a stream that is not read was begun"


async def test_a_worker_that_would_not_look_at_it_says_so() -> None:
    async with worker(None) as target:
        told = "the scheduler sent a secret, but this worker has no --link-secret-file"
        assert await answer(target, shown(SECRET)) == (grpc.StatusCode.UNAUTHENTICATED, told)
        assert await answer(target, ()) == LOADING


async def test_a_certificate_does_not_stand_in_for_it(file: Path, tmp_path: Path) -> None:
    authority = Authority("pagewire")
    cert, key = authority.issue("localhost").write(tmp_path, "server")
    client = authority.issue("scheduler.test")
    credentials = grpc.ssl_channel_credentials(authority.cert, client.key, client.cert)
    served = server_files(cert, key, authority.write(tmp_path)).server_credentials()
    async with worker(file, served) as target:
        assert (await answer(target, (), credentials=credentials))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert await answer(target, shown(SECRET), credentials=credentials) == LOADING


def test_a_file_that_cannot_be_read_is_told_once_until_it_can(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = LinkSecret(str(file))
    for num_errors in (1, 2):
        file.unlink()
        for _ in range(3):
            look(secret)
            assert secret.metadata() == shown(SECRET)
        assert [record.levelname for record in caplog.records] == ["ERROR"] * num_errors
        file.write_bytes(SECRET)
        look(secret)
        assert secret.is_in(shown(SECRET))


async def test_a_scheduler_that_is_refused_says_why_and_joins_once_the_file_is_right(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(OTHER)
    listener, secret = Listener(), LinkSecret(str(mine))
    async with worker(file) as target, AsyncExitStack() as stack:
        dialler = Dialler(target, ())
        stack.push_async_callback(dialler.close)
        link = WorkerLink(
            [dialler],
            listener,
            instance_id="one",
            model_digest=b"",
            pipeline_depth=1,
            secret=secret,
        )
        running = asyncio.create_task(link.run())
        watching = asyncio.create_task(secret.file.watch())
        told = "refused: the scheduler's --link-secret-file and this worker's contain different secrets"
        while await listener.next() != ("missing", told):
            pass
        mine.write_bytes(SECRET)
        while await listener.next() != ("missing", WorkerStarting("importing torch")):
            pass
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [r.message for r in warnings if r.name == "scheduler_service.links.worker.worker_link"] == [
            f"no session with the worker: {told}"
        ]
        await cancel([running, watching])


def test_a_file_that_becomes_unreadable_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = LinkSecret(str(file))
    file.write_bytes(b"short")
    look(secret)
    assert secret.is_in(shown(SECRET))
    file.unlink()
    look(secret)
    assert secret.metadata() == shown(SECRET)
    assert [record.message.partition(";")[2] for record in caplog.records][1] == " the previous contents stay in use"


@pytest.mark.parametrize("verb", ["worker", "scheduler"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "--link-secret-file is {path}, which cannot be read: No such file or directory"),
        (b" 0123456789abcde\n", "--link-secret-file {path} holds 15 bytes, but a secret must have 16 to 4096"),
        (b"x" * 10_000, "--link-secret-file {path} holds more than 4096 bytes, but a secret must have 16 to 4096"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_78(tmp_path: Path, verb: str, content: bytes | None, told: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    flags = [MODEL, "--port=0", f"--link-secret-file={path}", "--log-level=warning"]
    flags += ["--metrics-port=0"] if verb == "scheduler" else []
    command = [sys.executable, "-m", "pagewire", verb, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 78
    assert re.fullmatch(r"\S+ \S+ CRITICAL \S+ " + re.escape(told.format(path=path)) + "\n", done.stderr), done.stderr
