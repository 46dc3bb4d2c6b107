"""The link to the worker: loss and return of the worker, and the distinction between a slow and a dead worker."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.common.wire.messages import (
    PROTOCOL_VERSION,
    AddedGrammar,
    GrammarKind,
    StepPlan,
    StepResult,
    WorkerCapacity,
)
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service import server
from scheduler_service.config import SchedulerConfig
from scheduler_service.links.worker.liveness import Liveness
from scheduler_service.links.worker.worker_link import Epochs, EpochsExhausted, WorkerLink
from scheduler_service.links.worker.worker_session import Session
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import HEARTBEAT_INTERVAL, FakeWorker
from testing.scheduler_stack import Stack, expected_tokens, request, serve
from testing.serving.failures import failure_of
from tests.contract.worker_listener import SWAP_OUT, WORK, Listener, opening

PROMPT = [5, 6, 7, 8, 9]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(stack: Stack, name: str = "pagewire.scheduler.v1.SchedulerService") -> int:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_streams_go_on_where_they_were_when_the_worker_dies(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        streams = [asyncio.create_task(stack.generate(request([i, *PROMPT], max_tokens=100))) for i in range(8)]
        for num_tokens in (80, 300, 500):
            await stack.until(lambda loads, num_tokens=num_tokens: loads.num_generation_tokens > num_tokens)
            await stack.worker.kill()
            loads = await stack.until(lambda loads: not loads.worker_connected)
            assert loads.num_waiting == 8
            assert await health_of(stack) == SERVING
            await stack.worker.start()
        for index, result in enumerate(await asyncio.gather(*streams)):
            assert result.token_ids[0] == expected_tokens([index, *PROMPT], 100)
        assert len(stack.worker.epochs) == 4
        assert stack.worker.epochs == sorted(stack.worker.epochs)
        assert (await stack.until_idle()).num_worker_losses == 3


async def test_a_silent_worker_is_noticed(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        stream = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=100)))
        await stack.until(lambda loads: loads.num_generation_tokens > 20)
        stack.worker.is_silent = True
        await stack.until(lambda loads: not loads.worker_connected)
        stack.worker.is_silent = False
        assert "the worker has been silent for " in caplog.text
        assert (await stream).token_ids[0] == expected_tokens(PROMPT, 100)


async def test_a_slow_step_is_not_taken_for_a_dead_worker(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 5.0
        result = await stack.generate(request(PROMPT, max_tokens=1))
        assert result.token_ids[0] == expected_tokens(PROMPT, 1)
        assert len(stack.worker.epochs) == 1


async def test_an_unknown_field_ends_the_session(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.garbage = b"\x98\x06\x01"
        result = await stack.generate(request(PROMPT, max_tokens=20))
        assert result.token_ids[0] == expected_tokens(PROMPT, 20)
        assert len(stack.worker.epochs) == 2


NOW = 1.8e9  # seconds of Unix time
DAY = 24 * 3600


def epoch_at(time: float) -> int:
    """Return the first epoch of a scheduler that starts at `time`, in seconds of Unix time."""
    return int(time * 1000) << 20


async def test_a_stale_epoch_is_overtaken_by_a_scheduler_that_never_held_the_worker(checkpoint: Path) -> None:
    worker = FakeWorker(read_model_info(str(checkpoint)).digest)
    worker.last_epoch, worker.holder = epoch_at(time.time() + DAY / 2), "another before"
    told = worker.last_epoch
    await worker.start()
    async with serve(checkpoint, worker=worker) as stack:
        assert len(worker.refused_epochs) == 1
        assert worker.epochs == [told + 1]
        assert (await stack.generate(request(PROMPT, max_tokens=3))).token_ids[0] == expected_tokens(PROMPT, 3)


@pytest.mark.parametrize(
    ("reason", "epoch", "told"),
    [
        ("REASON_STALE_EPOCH", epoch_at(NOW + DAY + 0.001), "more than a day ahead of this scheduler's clock"),
        ("REASON_STALE_EPOCH", 2**64 - 1, "more than a day ahead of this scheduler's clock"),
        ("REASON_FUTURE_EPOCH", epoch_at(NOW + 1), "refused: of the fake worker"),
        ("REASON_FUTURE_EPOCH", 2**64 - 1, "refused: of the fake worker"),
    ],
)
async def test_implausible_epochs_are_ignored(reason: str, epoch: int, told: str) -> None:
    """An implausible epoch in a worker's refusal is ignored, also in later refusals by that worker.

    Otherwise a rogue worker could make the scheduler continue from that epoch, and every other worker would refuse it.
    """
    worker = FakeWorker(b"digest")
    refusal = worker_pb2.Refusal(
        reason=worker_pb2.Refusal.Reason.Value(reason), epoch=epoch, instance_id="rogue", message="of the fake worker"
    )
    worker.refusals = [refusal] * 2
    async with linking(worker, clock=lambda: NOW) as listener:
        for _ in range(2):
            kind, why = await listener.next()
            assert kind == "missing"
            assert told in str(why)
        assert (await listener.next())[0] == "ready"
        assert worker.epochs == [epoch_at(NOW) + 3]


async def test_a_scheduler_without_a_higher_epoch_says_so_in_a_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler that has no higher epoch exits with one line. Here the machine's clock shows the year 2527."""
    monkeypatch.setattr(server, "WorkerLink", partial(WorkerLink, clock=lambda: 2**44 / 1000))
    config = SchedulerConfig(model=str(checkpoint), worker="127.0.0.1:1", port=0, metrics_port=0)
    assert await server.run(config, stop=asyncio.Event(), ready=lambda url: None) == 78
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "there is no epoch above" in record.message
    assert "set this machine's clock" in record.message
    assert record.exc_info is None


def test_epochs_rise_to_the_last_one() -> None:
    epochs = Epochs(lambda: (2**44 - 1) / 1000)
    assert epochs.next() == 2**64 - 2**20 + 1
    assert epochs.raise_above(2**64 - 2)
    assert epochs.next() == 2**64 - 1
    with pytest.raises(EpochsExhausted):
        epochs.next()


async def test_a_fenced_scheduler_exits(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        stream = asyncio.create_task(stack.generate(request(PROMPT)))
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.worker.port}") as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Execute()
            hello = worker_pb2.Hello(
                protocol_version=PROTOCOL_VERSION, instance_id="usurper", epoch=2**63, pipeline_depth=1
            )
            await call.write(worker_pb2.ExecuteRequest(hello=hello))
            assert (await call.read()).WhichOneof("body") == "ready"
            assert await asyncio.wait_for(stack.running, 5) == 3
            await failure_of(stream, grpc.StatusCode.UNAVAILABLE)
            call.cancel()


async def test_a_worker_that_comes_back_with_another_model_is_refused(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        others = {"model_digest": b"another", "vocab_size": 301, "block_size": 8, "quantization": "int8"}
        others["tables_digest"] = "another"
        for name, value in others.items():
            good = stack.worker.capacity[name]
            await stack.worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)
            stack.worker.capacity[name] = value
            num_epochs = len(stack.worker.epochs)
            await stack.worker.start()
            while len(stack.worker.epochs) < num_epochs + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert not (await stack.loads()).worker_connected
            stack.worker.capacity[name] = good
            await stack.until(lambda loads: loads.worker_connected)


async def test_a_worker_that_comes_back_smaller_ends_what_no_longer_fits(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        big = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=200)))
        small = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=30)))
        await stack.until(lambda loads: loads.num_generation_tokens > 10)
        await stack.worker.kill()
        stack.worker.capacity["num_device_blocks"] = 20
        await stack.worker.start()
        await failure_of(big, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (await small).token_ids[0] == expected_tokens(PROMPT, 30)


async def test_requests_wait_for_a_missing_worker_and_then_fail(checkpoint: Path) -> None:
    async with serve(checkpoint, worker_timeout=1.0) as stack:
        stack.worker.step_seconds = 0.01
        running = asyncio.create_task(stack.generate(request(PROMPT)))
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        await stack.worker.kill()
        await stack.until(lambda loads: not loads.worker_connected)
        queued = asyncio.create_task(stack.generate(request(PROMPT)))
        for stream in (running, queued):
            await failure_of(stream, grpc.StatusCode.UNAVAILABLE)
        assert await health_of(stack) == NOT_SERVING
        assert await health_of(stack, "liveness") == SERVING
        await failure_of(stack.generate(request(PROMPT)), grpc.StatusCode.UNAVAILABLE)
        await stack.worker.start()
        await stack.until(lambda loads: loads.worker_connected)
        assert await health_of(stack) == SERVING
        assert (await stack.generate(request(PROMPT, max_tokens=3))).token_ids[0] == expected_tokens(PROMPT, 3)


async def test_server_info_knows_the_worker_only_while_it_is_there(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        info = await stack.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())
        assert info.worker.epoch == stack.worker.epochs[0]
        await stack.worker.kill()
        await stack.until(lambda loads: not loads.worker_connected)
        info = await stack.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())
        assert not info.HasField("worker")


async def test_limits_that_the_worker_lowers_are_told_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = await FakeWorker.started(checkpoint, max_num_seqs=3, max_model_len=256)
    told = "the worker has lower limits, which apply: --max-num-seqs 3, here 8; --max-num-batched-tokens 64, here 100; "
    async with serve(checkpoint, worker=worker, max_num_seqs=8, max_num_batched_tokens=100) as stack:
        for name, value in (("max_num_seqs", 3), ("max_num_seqs", 3), ("max_num_batched_tokens", 100)):
            await worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)
            worker.capacity[name] = value
            await worker.start()
            await stack.until(lambda loads: loads.worker_connected)
        info = await stack.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())
        assert (info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len) == (3, 100, 256)
    lines = [record.getMessage() for record in caplog.records if "lower limits" in record.getMessage()]
    assert lines == [
        f"{told}start both with the same limits",
        "the worker has lower limits, which apply: --max-num-seqs 3, here 8; start both with the same limits",
    ]


# Moves, with a listener that records its events


@asynccontextmanager
async def linking(worker: FakeWorker, **options: object) -> AsyncIterator[Listener]:
    """Start a link to the worker. Yield the listener that receives the link's events."""
    await worker.start()
    listener = Listener()
    dialler = Dialler(f"127.0.0.1:{worker.port}", ())
    link = WorkerLink([dialler], listener, instance_id="one", model_digest=b"digest", pipeline_depth=2, **options)
    running = asyncio.create_task(link.run())
    yield listener
    running.cancel()
    await dialler.close()
    await worker.kill()


@asynccontextmanager
async def linked(worker: FakeWorker) -> AsyncIterator[tuple[Listener, WorkerCapacity, Session]]:
    async with linking(worker) as listener:
        _, (capacity, session) = await listener.next()
        yield listener, capacity, session


class AnsweringCall:
    """A worker stream that answers hello at the moment when the link is stopped."""

    def __init__(self, stop: Callable[[], object]) -> None:
        self._stop = stop
        self._has_answered = False

    async def write(self, message: worker_pb2.ExecuteRequest) -> None:
        self._epoch = message.hello.epoch

    async def read(self) -> worker_pb2.ExecuteResponse:
        if self._has_answered:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            return worker_pb2.ExecuteResponse(heartbeat=worker_pb2.Heartbeat(epoch=self._epoch))
        self._has_answered = True
        asyncio.get_running_loop().call_soon(self._stop)
        capacity = FakeWorker(b"digest").capacity
        return worker_pb2.ExecuteResponse(ready=worker_pb2.WorkerCapacity(**capacity))

    def cancel(self) -> None:
        """Do nothing: the fake RPC has nothing to cancel."""


async def test_a_worker_that_joins_as_the_scheduler_stops_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dialler = Dialler("127.0.0.1:1", ())
    link = WorkerLink([dialler], Listener(), instance_id="one", model_digest=b"digest", pipeline_depth=2)
    running = asyncio.create_task(link.run())
    stub = SimpleNamespace(Execute=lambda **options: AnsweringCall(running.cancel))
    monkeypatch.setattr(worker_pb2_grpc, "WorkerServiceStub", lambda channel: stub)
    done, _ = await asyncio.wait({running}, timeout=10)
    await dialler.close()
    assert done == {running}
    assert running.cancelled()


class WrongEpochWorker(FakeWorker):
    """A fake worker that reports grammars of another epoch."""

    async def _report(self, epoch: int, grammar: AddedGrammar, context: grpc.aio.ServicerContext) -> None:
        await super()._report(epoch + 1, grammar, context)


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (FakeWorker(b"digest"), ("grammar", (1, ""))),
        (WrongEpochWorker(b"digest"), ("lost", "a GrammarReport of epoch {later} in epoch {epoch}")),
    ],
)
async def test_what_is_told_of_grammars_is_passed_on_if_it_is_of_the_epoch(
    worker: FakeWorker, expected: tuple[str, object]
) -> None:
    async with linked(worker) as (listener, _, session):
        added = (AddedGrammar(1, GrammarKind.REGEX, "a", (1,)),)
        session.send(StepPlan(session.epoch, 1, openings=(opening(),), **WORK, added_grammars=added))
        while (event := await listener.next())[0] not in ("grammar", "lost"):
            pass
        kind, told = expected
        if isinstance(told, str):
            told = told.format(later=session.epoch + 1, epoch=session.epoch)
        assert event == (kind, told)


async def test_moves_are_reported_once_before_the_result() -> None:
    async with linked(FakeWorker(b"digest", num_host_blocks=4)) as (listener, capacity, session):
        assert (capacity.num_host_blocks, capacity.swap_bandwidth) == (4, 1e9)
        session.send(StepPlan(session.epoch, 1, openings=(opening(),), work_slots=(0,), work_num_tokens=(8,)))
        assert [await listener.next() for _ in range(2)] == [("moved", 1), ("result", 1)]
        session.send(StepPlan(session.epoch, 2, (0,), **SWAP_OUT))  # moves only
        assert [await listener.next() for _ in range(2)] == [("moved", 2), ("result", 2)]
        await asyncio.sleep(3 * HEARTBEAT_INTERVAL)
        assert listener.events.empty()


async def test_moves_that_take_their_time_are_told_of_by_a_heartbeat() -> None:
    worker = FakeWorker(b"digest", num_host_blocks=4)
    worker.holds_moves = True
    async with linked(worker) as (listener, _, session):
        session.send(StepPlan(session.epoch, 1, openings=(opening(),), work_slots=(0,), work_num_tokens=(8,)))
        assert [await listener.next() for _ in range(2)] == [("moved", 1), ("result", 1)]
        session.send(StepPlan(session.epoch, 2, (0,), **SWAP_OUT))
        assert [await listener.next() for _ in range(2)] == [("result", 2), ("moved", 2)]


async def test_a_result_of_another_epoch_ends_the_session_before_it_is_heard() -> None:
    worker = FakeWorker(b"digest")
    worker.garbage = worker_pb2.ExecuteResponse(result=worker_pb2.StepResult(epoch=5)).SerializeToString()
    async with linked(worker) as (listener, _, session):
        session.send(StepPlan(session.epoch, 1, openings=(opening(),), **WORK))
        kind, reason = await listener.next()
        assert kind == "lost"
        assert f"of epoch 5 in epoch {session.epoch}" in str(reason)


# Liveness, with a fake clock


def judged(liveness: Liveness, start: float, end: float, *, heartbeats: bool = True) -> tuple[float, str]:
    """Judge every 0.1 s until a verdict, with a heartbeat every second. Return the time and the verdict.

    Returns `end` and an empty string if there is no verdict before `end`.
    """
    now, heard_at = start, start
    while now < end:
        now += 0.1
        if heartbeats and now - heard_at >= 1:
            liveness.heard(now)
            heard_at = now
        verdict = liveness.judge(now)
        if verdict:
            return now, verdict
    return end, ""


def test_silence_is_the_limit() -> None:
    at, verdict = judged(Liveness(0.0), 0, 10, heartbeats=False)
    assert 2.5 < at < 3.0
    assert "silent" in verdict


def test_an_idle_worker_lives_forever() -> None:
    assert judged(Liveness(0.0), 0, 500) == (500, "")


def test_a_step_has_30_seconds_and_a_bigger_shape_more() -> None:
    liveness = Liveness(0.0)
    liveness.sent(1, 8, 0.0)
    at, verdict = judged(liveness, 0, 500)
    assert 119 < at < 122
    assert "step 1" in verdict
    liveness = Liveness(0.0)
    liveness.sent(1, 8, 0.0)
    liveness.finished(1, 0.5, 1.0)
    liveness.sent(2, 7, 1.0)
    at, verdict = judged(liveness, 1, 500)
    assert 31 < at < 32


def test_long_steps_raise_the_limit() -> None:
    liveness = Liveness(0.0)
    liveness.sent(1, 8, 0.0)
    liveness.finished(1, 20.0, 20.0)
    liveness.sent(2, 8, 20.0)
    at, _ = judged(liveness, 20, 1000)
    assert 219 < at < 222


def test_moves_are_judged_once_their_step_has_finished() -> None:
    liveness = Liveness(0.0)
    liveness.sent(1, 8, 0.0)
    liveness.sent(2, 0, 0.0, has_moves=True)
    assert judged(liveness, 0, 100) == (100, "")  # step 1 has a new shape
    liveness.finished(1, 100.0, 100.0)
    liveness.sent(3, 1, 100.0, has_moves=True)
    assert judged(liveness, 100, 300) == (300, "")
    liveness.finished(2, 0.1, 300.0)
    liveness.finished(3, 0.1, 300.0)
    assert judged(liveness, 300, 1200) == (1200, "")
    liveness.moved(2, 1200.0)
    at, verdict = judged(liveness, 1200, 5000)
    assert 2199 < at < 2202
    assert "the moves of step 3" in verdict


def test_moves_that_are_done_are_not_judged() -> None:
    liveness = Liveness(0.0)
    liveness.sent(1, 0, 0.0, has_moves=True)
    liveness.moved(1, 1.0)
    liveness.finished(1, 0.1, 1.0)
    assert judged(liveness, 1, 500) == (500, "")


def test_a_gap_of_the_judge_restarts_the_timers() -> None:
    liveness = Liveness(0.0)
    liveness.sent(1, 8, 0.0)
    assert liveness.judge(0.1) == ""
    assert liveness.judge(300.0) == ""
    assert liveness.judge(300.1) == ""
    at, _ = judged(liveness, 300.1, 310, heartbeats=False)
    assert 302.5 < at < 303


class LateReader:
    """An RPC whose end a write detects first, because no received message has been read yet."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.write, self.code, self.details = call.write, call.code, call.details

    async def read(self) -> worker_pb2.ExecuteResponse:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")


class NoEvents:
    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: Session) -> None:
        link.send(StepPlan(epoch=epoch, step=1))

    def moved(self, step: int) -> None: ...

    def result(self, result: StepResult, age: float) -> None: ...

    def worker_lost(self, reason: str) -> None: ...


async def test_a_plan_for_a_worker_that_has_just_left_ends_the_session_only(checkpoint: Path) -> None:
    worker = await FakeWorker.started(checkpoint)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute()
        hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, instance_id="a", epoch=1, pipeline_depth=2)
        await call.write(worker_pb2.ExecuteRequest(hello=hello))
        await call.read()
        await worker.kill()
        await call.code()
        (session,) = Session(NoEvents(), 1, lambda num_bytes: None, 1).ranks
        with pytest.raises(Exception, match="the worker ended the stream") as error:
            await session.hold(LateReader(call), WorkerCapacity(**worker.capacity), lambda certificates: None)
    assert not isinstance(error.value, asyncio.InvalidStateError)
