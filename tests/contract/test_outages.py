"""Log lines while the other side of a link is unavailable: calm during startup, a warning if something is wrong."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pagewire.common.wire.messages import WorkerCapacity
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc
from scheduler_service import front_end, server
from scheduler_service.config import FrontEndConfig
from scheduler_service.links.reconnection import Outage
from scheduler_service.links.worker.worker_link import _PORT
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import config_of, make_checkpoint
from testing.starting_worker import StartingWorker

LOOPBACK = "127.0.0.1"


class Lines(logging.Handler):
    """The log lines of a logger. A test can wait for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self._more.set()

    async def next(self, part: str) -> logging.LogRecord:
        """Wait for a line that contains `part`. Return the first such record."""
        async with asyncio.timeout(20):
            while True:
                for record in self.records:
                    if part in record.getMessage():
                        return record
                self._more.clear()
                await self._more.wait()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Lines]:
    caplog.set_level(logging.INFO)
    handler = Lines()
    logger = logging.getLogger("scheduler_service")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@asynccontextmanager
async def scheduling(checkpoint: Path, worker_port: int, **options: object) -> AsyncIterator[asyncio.Event]:
    """Run a scheduler. Yield an event that is set when it serves requests."""
    worker = f"{LOOPBACK}:{worker_port}"
    own = {"model": str(checkpoint), "worker": worker, "port": 0, "metrics_port": 0}
    config = config_of(own | options)
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(server.run(config, stop=stop, ready=lambda url: ready.set()))
    try:
        yield ready
    finally:
        stop.set()
        assert await running == 0


def warnings(lines: Lines) -> list[str]:
    return [record.getMessage() for record in lines.records if record.levelno >= logging.WARNING]


async def test_a_worker_that_is_not_up_and_then_loads_is_waited_for_calmly(tmp_path: Path, lines: Lines) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", eos_token_id=0)  # an end token that its tokenizer has
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}  # the scheduler's own limits
    fake = FakeWorker(read_model_info(str(checkpoint)).digest, **limits)
    worker = StartingWorker(WorkerCapacity(**fake.capacity), free_port(LOOPBACK))
    async with scheduling(checkpoint, worker.port, worker_timeout=0.5) as ready:
        told = await lines.next("waiting for the worker: there is no connection")
        assert f"{LOOPBACK}:{worker.port}" in told.getMessage()
        assert "Connection refused" in told.getMessage()
        await lines.next("no worker for 0.5 s: requests fail until a worker joins")
        await worker.start()
        for doing in ("importing torch", "compiling the kernels"):
            worker.come_further(doing)
            await lines.next(f"waiting for the worker: the worker is still starting, {doing}")
        worker.be_ready()
        await asyncio.wait_for(ready.wait(), 20)
        assert warnings(lines) == []
        assert len([record for record in lines.records if "still starting" in record.getMessage()]) == 2
        await worker.stop()
        lost = await lines.next("lost the worker in epoch")
        assert lost.levelno == logging.WARNING


async def test_a_worker_of_another_model_is_a_warning(checkpoint: Path, lines: Lines) -> None:
    worker = FakeWorker(b"another")
    await worker.start()
    async with scheduling(checkpoint, worker.port):
        told = await lines.next("no session with the worker: the worker serves another model")
        assert told.levelno == logging.WARNING
        here = read_model_info(str(checkpoint)).digest.hex()[:16]
        assert f" (digest {b'another'.hex()}, here {here}); start both with the same --model" in told.getMessage()
    await worker.kill()


async def test_a_front_end_waits_calmly_too(checkpoint: Path, lines: Lines) -> None:
    port = free_port(LOOPBACK)
    config = FrontEndConfig(model=str(checkpoint), scheduler=f"{LOOPBACK}:{port}", port=0, metrics_port=0)
    stop = asyncio.Event()
    running = asyncio.create_task(front_end.run(config, stop=stop, ready=lambda url: None))
    told = await lines.next(f"waiting for the scheduler at {LOOPBACK}:{port}: there is no connection")
    assert "Connection refused" in told.getMessage()
    assert warnings(lines) == []
    stop.set()
    assert await running == 0


@pytest.mark.parametrize(
    ("code", "level", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, logging.INFO, "waiting for the scheduler at "),
        (grpc.StatusCode.INTERNAL, logging.WARNING, "no session with the scheduler at "),
    ],
)
async def test_only_an_unavailable_scheduler_is_waited_for_calmly(
    checkpoint: Path, lines: Lines, code: grpc.StatusCode, level: int, expected: str
) -> None:
    class Refusing(scheduler_pb2_grpc.SchedulerServiceServicer):
        async def GenerateMany(self, requests: object, context: grpc.aio.ServicerContext) -> None:
            await context.abort(code, "not now")

    refusing = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(Refusing(), refusing)
    port = refusing.add_insecure_port(f"{LOOPBACK}:0")
    await refusing.start()
    config = FrontEndConfig(model=str(checkpoint), scheduler=f"{LOOPBACK}:{port}", port=0, metrics_port=0)
    stop = asyncio.Event()
    running = asyncio.create_task(front_end.run(config, stop=stop, ready=lambda url: None))
    line = await lines.next(f"{expected}{LOOPBACK}:{port}: {code.name}: not now")
    assert line.levelno == level
    stop.set()
    assert await running == 0
    await refusing.stop(None)


def test_what_differs_in_numbers_alone_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now, told = 0.0, []
    outage = Outage("the worker", logging.getLogger("scheduler_service.test"), _PORT, told.append, clock=lambda: now)
    for second in range(180):
        now = float(second)
        outage.tell(f"loading: {second // 2} %", is_calm=True)
    outage.tell("another model", is_calm=False)
    outage.tell("another model", is_calm=False)
    outage.end()
    outage.tell("loading: 1 %", is_calm=True)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "waiting for the worker: loading: 0 %"),
        ("INFO", "waiting for the worker: loading: 30 %"),
        ("INFO", "waiting for the worker: loading: 60 %"),
        ("WARNING", "no session with the worker: another model"),
        ("INFO", "waiting for the worker: loading: 1 %"),
    ]
    assert len(told) == 183, "who needs the reason hears it each time"
