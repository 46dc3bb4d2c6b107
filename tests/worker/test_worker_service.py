"""The worker's service over real gRPC: sessions, pipelining, takeover and errors; then the whole process."""

import asyncio
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
import torch
import transformers

from pagewire.common.grammars import version
from pagewire.common.wire.messages import (
    PROTOCOL_VERSION,
    AddedGrammar,
    GrammarKind,
    GrammarReport,
    RowOpening,
    StepPlan,
    StepResult,
    WorkerCapacity,
)
from pagewire.common.wire.transport.link_secret import LinkSecret
from pagewire.common.wire.transport.listening import create_server
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2 as pb
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2_grpc
from scheduler_service.config import SchedulerConfig
from testing.checkpoints.families import make_checkpoint
from testing.plans import GREEDY, PlannedStep, Row, plan_steps
from testing.serving.certificates import Authority
from worker_service.config import WorkerConfig
from worker_service.engine import Engine, LoadedWorker
from worker_service.rpc.servicer import BEGIN_TIMEOUT_S, WorkerServicer
from worker_service.rpc.session import Session
from worker_service.startup.loader import load_worker
from worker_service.step import FinishedStep

READY = WorkerCapacity("w", b"d", 100, 64, 16, 8, 1024, 4, 32, "cpu", "float32", "torch")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=7)


def encode_plan(plan: StepPlan) -> pb.ExecuteRequest:
    columns = {name: getattr(plan, name) for name in plan.__slots__}
    columns["added_grammars"] = [encode_grammar(grammar) for grammar in plan.added_grammars]
    columns["openings"] = [encode_opening(opening) for opening in plan.openings]
    return pb.ExecuteRequest(plan=pb.StepPlan(**columns))


def encode_grammar(grammar: AddedGrammar) -> pb.AddedGrammar:
    kind, ends = pb.GrammarKind.ValueType(grammar.kind.value), grammar.end_token_ids
    return pb.AddedGrammar(grammar_id=grammar.grammar_id, kind=kind, text=grammar.text, end_token_ids=ends)


def encode_opening(opening: RowOpening) -> pb.RowOpening:
    names = ("slot", "sequence_id", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "seed")
    sampling = {name: getattr(opening.sampling, name) for name in opening.sampling.__slots__}
    sampling["pooling"] = opening.sampling.pooling.value
    return pb.RowOpening(
        **{name: getattr(opening, name) for name in names},
        sample_index=opening.sample_index,
        grammar_id=opening.grammar_id,
        sampling=pb.SamplingParams(**{name: value for name, value in sampling.items() if value is not None}),
    )


def hello(epoch: int, *, version: int = PROTOCOL_VERSION, instance: str = "a", depth: int = 2) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(
        hello=pb.Hello(protocol_version=version, instance_id=instance, epoch=epoch, pipeline_depth=depth)
    )


class FakeRunner:
    """A fake runner that returns each step's number as its token.

    Steps in `blocked` wait for `released`, and steps in `failing` raise. If `num_moved` is set, it is the last moved
    step.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_moved: int | None = None
        self.blocked: set[int] = set()
        self.failing: set[int] = set()
        self.started = threading.Event()
        self.released = threading.Event()
        self.log: list[str] = []

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None]) -> None:
        self.log.append(f"reset {epoch}")
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> FinishedStep:
        self.log.append(f"{plan.epoch}:{plan.step}")
        if plan.step in self.blocked:
            self.started.set()
            assert self.released.wait(20)
        if plan.step in self.failing:
            raise RuntimeError("boom")
        self.num_steps = plan.step
        result = StepResult(plan.epoch, plan.step, token_ids=(plan.step,), last_moved_step=self.last_moved_step())
        return FinishedStep(result)

    def last_moved_step(self) -> int:
        return self.num_steps if self.num_moved is None else self.num_moved

    @property
    def is_moving(self) -> bool:
        return self.last_moved_step() < self.num_steps

    def is_fatal(self, error: Exception) -> bool:
        return False


class Stream:
    """A single Execute RPC, driven by hand."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceStub, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        self.call: Any = stub.Execute(metadata=metadata)

    async def open(self, epoch: int, **fields: Any) -> pb.WorkerCapacity:
        await self.call.write(hello(epoch, **fields))
        return await self.ready()

    async def ready(self) -> pb.WorkerCapacity:
        while (response := await self.read()).WhichOneof("body") == "starting":
            pass
        assert response.WhichOneof("body") == "ready"
        return response.ready

    async def send(self, plan: StepPlan) -> None:
        await self.call.write(encode_plan(plan))

    async def read(self) -> pb.ExecuteResponse:
        response = await asyncio.wait_for(self.call.read(), 20)
        assert response is not grpc.aio.EOF, await self.call.details()
        return response

    async def result(self) -> pb.StepResult:
        while (response := await self.read()).WhichOneof("body") != "result":
            pass
        return response.result

    async def heartbeat(self) -> pb.Heartbeat:
        while (response := await self.read()).WhichOneof("body") != "heartbeat":
            pass
        return response.heartbeat

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Return the RPC's final status code and details; remaining messages are dropped."""
        with suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), 20) is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def served(load: Callable[[], LoadedWorker], **options: Any) -> AsyncIterator[worker_pb2_grpc.WorkerServiceStub]:
    loop = asyncio.get_running_loop()
    engine = Engine(load)
    servicer = WorkerServicer(engine, **options)
    server = create_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine.start(lambda error: loop.call_soon_threadsafe(servicer.set_loaded))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)
    await servicer.close()
    assert await loop.run_in_executor(None, engine.stop, 20)
    await server.stop(0)


async def test_early_hello_gets_the_loading_progress() -> None:
    may_load = threading.Event()

    def load() -> LoadedWorker:
        assert may_load.wait(20)
        return LoadedWorker(FakeRunner(), READY)

    async with served(load, heartbeat_interval_s=1000) as stub:
        early = Stream(stub)
        await early.call.write(hello(1))
        assert (await early.read()).starting.doing == "importing torch", "at once"
        stream = Stream(stub)
        await stream.call.write(hello(2))
        assert (await early.status())[0] is grpc.StatusCode.ABORTED, "another scheduler takes it while it loads"
        assert (await stream.read()).starting.doing == "importing torch"
        may_load.set()
        assert (await stream.read()).WhichOneof("body") == "ready", "as soon as it is"


async def test_a_message_that_is_too_large_ends_its_session_alone() -> None:
    async with served(lambda: LoadedWorker(FakeRunner(), READY)) as stub:
        for epoch, is_first in ((1, True), (2, False)):
            stream = Stream(stub)
            if not is_first:
                await stream.open(epoch)
            await stream.send(StepPlan(epoch, 1, append_token_ids=(2**31,) * (1 << 20)))
            code, details = await stream.status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"this server accepts at most {MAX_MESSAGE_BYTES} in a message; shorten it" in details
        stream = Stream(stub)
        await stream.open(3)
        await stream.send(StepPlan(3, 1))
        assert (await stream.result()).step == 1


async def test_pipelined_generation_equals_transformers(checkpoint: Path) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(151) for _ in range(length)] for length in (1, 50, 23, 8)]
    rows = [Row(prompt, 10) for prompt in prompts]
    config = WorkerConfig(model=str(checkpoint), device="cpu", num_device_blocks=64, max_num_batched_tokens=20)
    async with served(lambda: load_worker(config, "w")) as stub:
        stream = Stream(stub)
        ready = await stream.open(5)
        assert (ready.vocab_size, ready.max_model_len, ready.num_device_blocks) == (151, 1024, 64)
        steps = plan_steps(rows, block_size=16, max_num_batched_tokens=20, epoch=5)
        outputs = await exchange(stream, steps)
        await stream.call.done_writing()
        assert await stream.status() == (grpc.StatusCode.OK, "")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, min_new_tokens=10)
        assert output == expected[0, len(prompt) :].tolist()


async def exchange(stream: Stream, steps: list[PlannedStep]) -> list[list[int]]:
    """Execute the steps with two plans in flight; return each slot's tokens."""
    outputs: dict[int, list[int]] = {}
    for planned in steps[:2]:
        await stream.send(planned.plan)
    for i, planned in enumerate(steps):
        result = await stream.result()
        assert (result.epoch, result.step) == (planned.plan.epoch, planned.plan.step)
        for slot, token_id in zip(planned.sampling_slots, result.token_ids, strict=True):
            outputs.setdefault(slot, []).append(token_id)
        if i + 2 < len(steps):
            await stream.send(steps[i + 2].plan)
    return [outputs[slot] for slot in sorted(outputs)]


async def test_grammars_are_told_of_in_the_session_that_added_them() -> None:
    config = WorkerConfig(model="models/storyteller", device="cpu", num_device_blocks=8)
    added = tuple(AddedGrammar(i + 1, GrammarKind.REGEX, text, (0,)) for i, text in enumerate(("a", "(")))
    async with served(lambda: load_worker(config, "w"), heartbeat_interval_s=1000) as stub:
        stream = Stream(stub)
        ready = await stream.open(5)
        assert (ready.grammar_version, ready.gates_grammars) == (version(), False)
        await stream.send(StepPlan(5, 1, added_grammars=added))
        told = [await stream.read() for _ in range(3)]
        assert {message.WhichOneof("body") for message in told} == {"result", "grammar"}
        reports = [message.grammar for message in told if message.WhichOneof("body") == "grammar"]
        assert [(report.epoch, report.grammar_id) for report in reports] == [(5, 1), (5, 2)]
        assert [bool(report.error) for report in reports] == [False, True]
        second = Stream(stub)
        await second.open(6)
        opening = RowOpening(0, 0, (1, 2), 2, 0, (1,), GREEDY, 0, 0, grammar_id=1)
        await second.send(StepPlan(6, 1, openings=(opening,)))
        status = "a row opens with grammar 1, but it was never added"
        assert await second.status() == (grpc.StatusCode.FAILED_PRECONDITION, status)


async def test_a_worker_without_a_tokenizer_serves_everything_but_grammars(checkpoint: Path) -> None:
    config = WorkerConfig(model=str(checkpoint), device="cpu", num_device_blocks=8)
    async with served(lambda: load_worker(config, "w")) as stub:
        stream = Stream(stub)
        assert (await stream.open(5)).grammar_version == ""
        steps = plan_steps([Row([1, 2], 3)], block_size=16, max_num_batched_tokens=20, epoch=5)
        assert [len(output) for output in await exchange(stream, steps)] == [3]
        await stream.send(StepPlan(5, 4, added_grammars=(AddedGrammar(1, GrammarKind.REGEX, "a", (0,)),)))
        code, message = await stream.status()
        assert (code, "no tokenizer" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_refusals_end_the_stream_with_ok() -> None:
    async with served(lambda: LoadedWorker(FakeRunner(), READY)) as stub:
        holder = Stream(stub)
        await holder.open(7, instance="holder")
        for epoch in (6, 7):
            late = Stream(stub)
            await late.call.write(hello(epoch))
            refusal = (await late.read()).refusal
            assert refusal.reason == pb.Refusal.REASON_STALE_EPOCH
            assert (refusal.epoch, refusal.instance_id) == (7, "holder")
            assert await late.status() == (grpc.StatusCode.OK, "")
        foreign = Stream(stub)
        await foreign.call.write(hello(8, version=PROTOCOL_VERSION + 1))
        assert (await foreign.read()).refusal.reason == pb.Refusal.REASON_PROTOCOL_VERSION
        await holder.send(StepPlan(7, 1))
        assert (await holder.result()).step == 1


async def test_far_future_epoch_does_not_take_over_the_worker() -> None:
    async with served(lambda: LoadedWorker(FakeRunner(), READY), clock=lambda: 1000.0) as stub:
        for epoch in (7, 9):  # before any scheduler has connected, and while one has the worker
            rogue = Stream(stub)
            await rogue.call.write(hello(2**64 - 1, instance="rogue"))
            assert (await rogue.read()).refusal.reason == pb.Refusal.REASON_FUTURE_EPOCH
            assert await rogue.status() == (grpc.StatusCode.OK, "")
            holder = Stream(stub)
            await holder.open(epoch, instance="holder")
        rogue = Stream(stub)
        await rogue.call.write(hello(2**64 - 1, instance="rogue"))
        refusal = (await rogue.read()).refusal
        assert (refusal.epoch, refusal.instance_id) == (9, "holder")
        await holder.send(StepPlan(9, 1))
        assert (await holder.result()).step == 1


async def test_higher_epoch_takes_over_after_the_running_step() -> None:
    runner = FakeRunner()
    runner.blocked = {1}
    async with served(lambda: LoadedWorker(runner, READY)) as stub:
        old, new = Stream(stub), Stream(stub)
        await old.open(1)
        await old.send(StepPlan(1, 1))
        await old.send(StepPlan(1, 2))
        await asyncio.to_thread(runner.started.wait, 20)
        await new.call.write(hello(2, instance="b"))
        code, details = await old.status()
        assert code is grpc.StatusCode.ABORTED
        assert "instance b took over" in details
        assert runner.log == ["reset 1", "1:1"]
        runner.released.set()
        assert (await new.read()).WhichOneof("body") == "ready"
        runner.blocked = set()
        await new.send(StepPlan(2, 1))
        result = await new.result()
        assert (result.epoch, result.step) == (2, 1)
        assert runner.log == ["reset 1", "1:1", "reset 2", "2:1"]
        await Stream(stub).open(3, instance="c")
        ended = await asyncio.wait_for(new.status(), 20)
        assert ended == (grpc.StatusCode.ABORTED, "instance c took over with epoch 3")


class SlowContext:
    """An RPC whose peer reads slowly. gRPC accepts no status while a write is in progress."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_writing = asyncio.Event()
        self.may_finish = asyncio.Event()

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return ()

    async def requests(self) -> AsyncIterator[pb.ExecuteRequest]:
        yield hello(1)
        await asyncio.Event().wait()

    async def write(self, response: pb.ExecuteResponse) -> None:
        self.is_writing.set()
        await self.may_finish.wait()
        self.log.append("written")

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.log.append(details)


@pytest.mark.parametrize("is_slow", [True, False])
async def test_the_scheduler_is_told_before_closing_ends(is_slow: bool) -> None:
    """The status waits for the write in progress."""
    engine = Engine(lambda: LoadedWorker(FakeRunner(), READY))
    servicer, context = WorkerServicer(engine), SlowContext()
    loop = asyncio.get_running_loop()
    engine.start(lambda error: loop.call_soon_threadsafe(servicer.set_loaded))
    call = asyncio.ensure_future(servicer.Execute(context.requests(), context))
    await asyncio.wait_for(context.is_writing.wait(), 20)
    closing = asyncio.ensure_future(servicer.close())
    if is_slow:
        await asyncio.wait([call], timeout=0.05)
        assert context.log == []
    context.may_finish.set()
    await asyncio.wait_for(closing, 20)
    assert context.log == ["written", "the worker is shutting down"]
    await call
    assert await loop.run_in_executor(None, engine.stop, 20)


def test_a_worker_that_is_stuck_has_time_to_start_again() -> None:
    """By default, requests wait longer for the worker than the worker waits for its own compute thread."""
    assert SchedulerConfig().worker_timeout >= BEGIN_TIMEOUT_S + 60


async def test_step_that_never_ends_ends_the_process() -> None:
    runner = FakeRunner()
    runner.blocked = {1}
    reasons: asyncio.Queue[str] = asyncio.Queue()

    def on_stuck(reason: str) -> NoReturn:
        reasons.put_nowait(reason)
        raise RuntimeError(reason)

    async with served(lambda: LoadedWorker(runner, READY), begin_timeout_s=0.1, on_stuck=on_stuck) as stub:
        old, new = Stream(stub), Stream(stub)
        await old.open(1)
        await old.send(StepPlan(1, 1))
        await asyncio.to_thread(runner.started.wait, 20)
        await new.call.write(hello(2))
        assert "has not finished" in await asyncio.wait_for(reasons.get(), 20)
        runner.released.set()


async def test_heartbeats_while_a_step_runs() -> None:
    runner = FakeRunner()
    runner.blocked = {2}
    async with served(lambda: LoadedWorker(runner, READY), heartbeat_interval_s=0.02) as stub:
        stream = Stream(stub)
        await stream.open(3)
        await stream.send(StepPlan(3, 1))
        assert (await stream.result()).step == 1
        await stream.send(StepPlan(3, 2))
        await asyncio.to_thread(runner.started.wait, 20)
        while (beat := await stream.heartbeat()).last_started_step < 2:
            pass
        assert (beat.epoch, beat.last_started_step, beat.last_finished_step) == (3, 2, 1)
        runner.released.set()
        assert (await stream.result()).step == 2


@pytest.mark.parametrize(
    ("num_leased_steps", "is_followed", "expected"),
    [
        (0, False, [[1]]),
        (1, False, [[1], [2]]),
        (2, False, [[1, 2], [3]]),
        (3, False, [[1, 2], [3], [4]]),
        (3, True, [[1, 2], [3, 4], [5]]),
        (4, True, [[1, 2], [3, 4], [5], [6]]),
    ],
)
async def test_results_of_a_lease_come_in_pairs(
    num_leased_steps: int, is_followed: bool, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last result of a lease comes alone, unless the worker has a further plan to compute meanwhile."""
    runner, arrived, plan_of_session = FakeRunner(), asyncio.Event(), Session.plan

    def plan(session: Session, epoch: int, step: int, num_leased_steps: int = 0) -> None:
        plan_of_session(session, epoch, step, num_leased_steps)
        if step > 1:
            arrived.set()

    monkeypatch.setattr(Session, "plan", plan)
    runner.blocked = {1}
    ready = replace(READY, max_leased_steps=4)
    async with served(lambda: LoadedWorker(runner, ready), heartbeat_interval_s=1000) as stub:
        stream = Stream(stub)
        await stream.open(3)
        await stream.send(StepPlan(3, 1, num_leased_steps=num_leased_steps))
        if is_followed:
            await stream.send(StepPlan(3, 2 + num_leased_steps))
            await asyncio.wait_for(arrived.wait(), 20)
        runner.released.set()
        for steps in expected:
            response = await stream.read()
            results = response.results.results if response.WhichOneof("body") == "results" else [response.result]
            assert [result.step for result in results] == steps


async def test_moves_are_told_of_in_results_and_when_idle() -> None:
    runner = FakeRunner()
    runner.num_moved = 0
    async with served(lambda: LoadedWorker(runner, READY), heartbeat_interval_s=1000) as stub:
        stream = Stream(stub)
        await stream.open(3)
        for step in (1, 2):
            await stream.send(StepPlan(3, step))
            assert (await stream.result()).last_moved_step == 0
        runner.num_moved = 1
        beat = (await stream.read()).heartbeat
        assert (beat.last_finished_step, beat.last_moved_step) == (2, 1)
        runner.num_moved = None
        assert (await stream.read()).heartbeat.last_moved_step == 2
        await stream.send(StepPlan(3, 3))
        assert (await stream.read()).result.last_moved_step == 3


async def test_hello_waits_for_the_model() -> None:
    may_load = threading.Event()

    def load() -> LoadedWorker:
        assert may_load.wait(20)
        return LoadedWorker(FakeRunner(), READY)

    async with served(load) as stub:
        stream = Stream(stub)
        await stream.call.write(hello(1))
        assert (await stream.read()).WhichOneof("body") == "starting"
        may_load.set()
        assert (await stream.ready()).worker_id == "w"


async def test_failed_step_ends_its_session_only(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    runner.failing = {2}
    async with served(lambda: LoadedWorker(runner, READY)) as stub:
        stream = Stream(stub)
        await stream.open(1)
        await stream.send(StepPlan(1, 1))
        await stream.send(StepPlan(1, 2))
        assert await stream.status() == (grpc.StatusCode.INTERNAL, "a step failed: boom")
        assert "step 2 of epoch 1 failed" in caplog.text
        assert "RuntimeError: boom" in caplog.text
        again = Stream(stub)
        await again.open(2)
        await again.send(StepPlan(2, 1))
        assert (await again.result()).step == 1


async def test_a_scheduler_that_dials_in_vain_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    secret = LinkSecret(str(tmp_path / "secret"))
    async with served(lambda: LoadedWorker(FakeRunner(), READY), link_secret=secret) as stub:
        for _ in range(2):
            for _ in range(5):
                assert (await Stream(stub).status())[0] is grpc.StatusCode.UNAUTHENTICATED
            good = Stream(stub, secret.metadata())
            await good.open(1 + len(caplog.records))
            await good.call.done_writing()
            assert (await good.status())[0] is grpc.StatusCode.OK
    assert ["sent no secret" in record.getMessage() for record in caplog.records] == [True, True]


UNKNOWN_FIELD = b"\x98\x06\x01"  # number 99, a varint


def with_unknown_field(where: str) -> pb.ExecuteRequest:
    """Return a good first plan with an unknown field at some depth."""
    request = encode_plan(plan_steps([Row([1, 2], 1)], block_size=16, max_num_batched_tokens=9)[0].plan)
    opening = request.plan.openings[0]
    target = {"request": request, "plan": request.plan, "opening": opening, "sampling": opening.sampling}[where]
    target.MergeFromString(UNKNOWN_FIELD)
    return request


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ([encode_plan(StepPlan(1, 1))], "the first message is a plan"),
        ([hello(1, depth=0)], "pipeline_depth is 0"),
        ([hello(1), hello(2)], "hello came twice"),
        ([hello(1), pb.ExecuteRequest()], "no body"),
        ([hello(1), encode_plan(StepPlan(2, 1))], "is of epoch 2, this session is epoch 1"),
        ([hello(1), encode_plan(StepPlan(1, 2))], "the next step is 1"),
        ([hello(1), with_unknown_field("request")], "ExecuteRequest has a field"),
        ([hello(1), with_unknown_field("plan")], "StepPlan has a field"),
        ([hello(1), with_unknown_field("opening")], "RowOpening has a field"),
        ([hello(1), with_unknown_field("sampling")], "SamplingParams has a field"),
        ([hello(1, depth=1), *(encode_plan(StepPlan(1, step)) for step in (1, 2))], "the pipeline depth is 1"),
    ],
)
async def test_protocol_errors(requests: list[pb.ExecuteRequest], text: str) -> None:
    runner = FakeRunner()
    runner.blocked = {1}
    async with served(lambda: LoadedWorker(runner, READY)) as stub:
        stream = Stream(stub)
        for request in requests:
            await stream.call.write(request)
        code, details = await stream.status()
        runner.released.set()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text in details


async def test_bad_plan_ends_the_session_and_the_next_one_works(checkpoint: Path) -> None:
    config = WorkerConfig(model=str(checkpoint), device="cpu", num_device_blocks=4)
    async with served(lambda: load_worker(config, "w")) as stub:
        stream = Stream(stub)
        await stream.open(1)
        await stream.send(StepPlan(1, 1, work_slots=(0,), work_num_tokens=(1,)))
        assert await stream.status() == (grpc.StatusCode.FAILED_PRECONDITION, "slot 0 is vacant")
        again = Stream(stub)
        await again.open(2)
        await again.send(plan_steps([Row([1, 2, 3], 1)], block_size=16, max_num_batched_tokens=9, epoch=2)[0].plan)
        assert len((await again.result()).token_ids) == 1


async def test_client_that_goes_away_frees_the_worker() -> None:
    runner = FakeRunner()
    async with served(lambda: LoadedWorker(runner, READY)) as stub:
        gone = Stream(stub)
        await gone.open(1)
        gone.call.cancel()
        stream = Stream(stub)
        await stream.open(2)
        await stream.send(StepPlan(2, 1))
        assert (await stream.result()).step == 1


# The process


class Process:
    def __init__(self, **options: Any) -> None:
        code = (
            "import logging, sys; logging.basicConfig(level='INFO')\n"
            "from worker_service.config import WorkerConfig; from worker_service.server import serve\n"
            f"sys.exit(serve(WorkerConfig(**{options!r}), lambda reason: print(reason) or 78))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready_url(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("ready on grpc://"), line + self.finish()[2]
        return line.removeprefix("ready on grpc://").strip()

    def finish(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(**options: Any) -> Process:
        processes.append(Process(**options))
        return processes[-1]

    yield start
    for process in processes:
        process.process.kill()
        process.process.wait()


def test_process_serves_and_stops(checkpoint: Path, start: Callable[..., Process]) -> None:
    worker = start(model=str(checkpoint), port=0, device="cpu", num_device_blocks=20)
    with grpc.insecure_channel(worker.ready_url()) as channel:
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in ("", "liveness", "pagewire.worker.v1.WorkerService"):
            assert health(bytes([10, len(name)]) + name.encode()) == b"\x08\x01"  # SERVING
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute(iter([hello(1)]))
        ready = next(call).ready
        assert (ready.num_device_blocks, ready.device, ready.dtype) == (20, "cpu", "float32")
    worker.process.send_signal(signal.SIGTERM)
    status, stdout, stderr = worker.finish()
    assert (status, stdout) == (0, "")
    assert "KV cache: 20 blocks of 16 tokens, enough for 0.31 sequences of max_model_len" in stderr


def test_process_ends_its_session_at_sigterm(checkpoint: Path, start: Callable[..., Process]) -> None:
    worker = start(model=str(checkpoint), port=0, device="cpu", num_device_blocks=20)
    with grpc.insecure_channel(worker.ready_url()) as channel:
        stop = threading.Event()

        def requests() -> Iterator[pb.ExecuteRequest]:
            yield hello(1)
            stop.wait(30)

        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute(requests())
        next(call)
        worker.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")
        stop.set()
    assert worker.finish()[0] == 0


def test_mutual_tls(checkpoint: Path, start: Callable[..., Process], tmp_path: Path) -> None:
    authority = Authority("ca")
    here = authority.issue("localhost")
    certificate, key = here.write(tmp_path, "here")
    files = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": authority.write(tmp_path)}
    worker = start(model=str(checkpoint), port=0, device="cpu", num_device_blocks=20, **files)
    target = "localhost:" + worker.ready_url().rpartition(":")[2]
    credentials = grpc.ssl_channel_credentials(authority.cert, here.key, here.cert)
    with grpc.secure_channel(target, credentials) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        told = threading.Event()

        def requests() -> Iterator[pb.ExecuteRequest]:
            yield hello(1)
            told.wait(30)

        call = stub.Execute(requests(), timeout=20)
        assert next(call).ready.block_size == 16
        lives = {life.flag: (life.end - life.begin) / 86400 for life in next(call).heartbeat.certificates}
        assert lives == {"--tls-cert": pytest.approx(2, abs=1.1), "--tls-client-ca": pytest.approx(2, abs=1.1)}
        told.set()
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(authority.cert)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            next(stub.Execute(iter([hello(2)]), timeout=20))


BAD_STARTS = [
    ({"model": "/nowhere"}, "--model is '/nowhere', but that is neither a directory nor a GGUF file"),
    ({"max_model_len": 100_000}, "--max-model-len is 100000; the checkpoint has 1024 positions"),
    ({"num_host_blocks": 1 << 30}, "--num-host-blocks is 1073741824, which takes"),
    ({"swap_space": "1KiB"}, "--swap-space is 1KiB; two blocks take"),
    ({"kv_cache_memory": "1KiB"}, "raise --kv-cache-memory"),
]


@pytest.fixture(scope="module")
def bad_starts(checkpoint: Path) -> list[tuple[str, str]]:
    """Return the reason and the standard error of each refused start.

    One process runs all starts, because importing torch takes long.
    """
    configs = [{"model": str(checkpoint), "port": 0, "device": "cpu", **options} for options, _ in BAD_STARTS]
    code = (
        "import logging, sys; logging.basicConfig(level='INFO')\n"
        "from worker_service.config import WorkerConfig; from worker_service.server import serve\n"
        f"for config in {configs!r}:\n"
        "    print('', serve(WorkerConfig(**config), lambda reason: print(reason, end='') or 78), end=chr(0))\n"
        "    print(end=chr(0), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return list(zip(done.stdout.split("\0")[:-1], done.stderr.split("\0")[:-1], strict=True))


@pytest.mark.parametrize("number", range(len(BAD_STARTS)))
def test_bad_start_is_one_clear_line(bad_starts: list[tuple[str, str]], number: int) -> None:
    refusal, stderr = bad_starts[number]
    assert BAD_STARTS[number][1] in refusal
    assert refusal.endswith(" 78")
    assert "\n" not in refusal
    assert "ERROR" not in stderr
    assert "Traceback" not in stderr


def test_taken_port_is_one_clear_line(checkpoint: Path, start: Callable[..., Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, stdout, stderr = start(model=str(checkpoint), port=port, device="cpu").finish()
    assert stdout == ""
    assert f"OSError: cannot listen on 127.0.0.1:{port}" in stderr


def test_process_dies_with_its_parent(checkpoint: Path) -> None:
    options = {"model": str(checkpoint), "port": 0, "device": "cpu", "num_device_blocks": 4}
    child = (
        "import sys; from worker_service.config import WorkerConfig; from worker_service.server import serve\n"
        f"serve(WorkerConfig(**{options!r}), sys.exit)"
    )
    parent = (
        "import os, subprocess, sys\n"
        "os.environ['PAGEWIRE_EXIT_WITH_PARENT'] = str(os.getpid())\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout
    assert any(line.startswith(b"ready on") for line in process.stdout)
    process.kill()
    # The pipe closes when the worker, the last process that has it open, has ended.
    assert process.stdout.read() == b""
    process.wait()
