"""Limits on the memory that clients can make the scheduler use, and the gauges that report the use."""

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service import request_service
from scheduler_service.api.grpc import shared_call
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from testing.scheduler_stack import Stack, details, make_checkpoint, request, serve, status_of
from testing.serving.failures import failure_of
from tests.contract.held_checks import held_checks

PROMPT = [1, 2, 3, 4, 5]


class Gauges:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    async def read(self, name: str, label: str = "") -> float:
        def get() -> str:
            with urllib.request.urlopen(self._url, timeout=20) as response:
                return response.read().decode()

        text = await asyncio.to_thread(get)
        (value,) = re.findall(rf"^pagewire:{name}\{{.*{label}.*\}} (.*)$", text, re.MULTILINE)
        return float(value)

    async def until(self, name: str, holds: Callable[[float], bool]) -> float:
        async with asyncio.timeout(60):
            while not holds(value := await self.read(name)):  # noqa: ASYNC110 -- a gauge has no event to wait for
                await asyncio.sleep(0.01)
            return value


@contextlib.asynccontextmanager
async def measured(checkpoint: Path, **options: object) -> AsyncIterator[tuple[Stack, Gauges]]:
    port = free_port("127.0.0.1")
    async with serve(checkpoint, metrics_port=port, **options) as stack:
        yield stack, Gauges(port)


async def test_texts_that_wait(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = asyncio.Event()

    class HeldTokenizer(Tokenizer):
        async def encode(self, *args: object, **options: object) -> list[int] | int:
            await released.wait()
            return await super().encode(*args, **options)

    monkeypatch.setattr(request_service, "Tokenizer", HeldTokenizer)
    async with measured(checkpoint, max_prompt_bytes=60, max_waiting_text_bytes=100) as (stack, gauges):
        assert await gauges.read("waiting_text_bytes") == 0

        def generate(tenant: str, size: int) -> asyncio.Task[object]:
            message = request("x" * size, max_tokens=1)
            message.tenant = tenant
            return asyncio.create_task(stack.generate(message))

        waiting = [generate("acme", 50), generate("globex", 45)]
        await gauges.until("waiting_text_bytes", lambda held: held == 95)
        for tenant, size, whose, limit in (("acme", 11, "this tenant", 60), ("globex", 6, "all tenants", 100)):
            error = await failure_of(
                generate(tenant, size),
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"texts of {whose}",
                f"the limit is {limit}; try again later",
            )
            assert details(error)[1].retry_delay.seconds > 0
        released.set()
        await asyncio.gather(*waiting)
        assert await gauges.read("waiting_text_bytes") == 0


async def test_grammars_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path / "with_end", eos_token_id=0)
    with held_checks(monkeypatch) as (begun, go_on):
        async with measured(path) as (stack, gauges):
            texts = ("[a-z]{3}", "[a-z]{4}", "[a-z")
            checking = [
                asyncio.create_task(status_of(stack, request(PROMPT, max_tokens=5, regex=text))) for text in texts
            ]
            assert await asyncio.to_thread(begun.wait, 30)
            await gauges.until("waiting_grammar_bytes", lambda held: held == sum(map(len, texts)))
            assert await gauges.read("grammar_verdicts") == 0
            go_on.set()
            for error in await asyncio.gather(
                *checking, status_of(stack, request(PROMPT, max_tokens=5, json_object=True))
            ):
                assert error is None or error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await gauges.read("waiting_grammar_bytes") == 0
            assert await gauges.read("grammar_verdicts") == 4
            assert await gauges.read("grammar_check_seconds_count") == 4
            for name, label, number in (
                ("checks", 'result="accepted"', 3),
                ("checks", 'result="refused"', 1),
                ("requests", 'kind="regex"', 2),
                ("requests", 'kind="json_object"', 1),
                ("requests", 'kind="grammar"', 0),
            ):
                assert await gauges.read(f"grammar_{name}_total", label) == number, (name, label)


async def test_detached_results(checkpoint: Path) -> None:
    async with measured(checkpoint, max_detached_bytes=20_000) as (stack, gauges):
        assert await gauges.read("detached_bytes") == 0
        for index in range(6):
            submitted = pb.SubmitRequest(request=request([index, *PROMPT], max_tokens=50))
            name = (await stack.stub.Submit(submitted)).request_id
            async for _ in stack.stub.Attach(pb.AttachRequest(request_id=name)):
                pass
            held = await gauges.read("detached_bytes")
            assert 0 < held <= 20_000
        assert held > 10_000


async def test_kv_events(checkpoint: Path) -> None:
    async with measured(checkpoint, max_kv_event_bytes=5_000) as (stack, gauges):
        await stack.generate(request(PROMPT, max_tokens=50))
        assert await gauges.read("kv_event_bytes") == 0, "no client follows"
        call = stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        await call.read()
        for index in range(10):
            await stack.generate(request([index, *PROMPT], max_tokens=50))
            held = await gauges.read("kv_event_bytes")
            assert 0 < held <= 5_000
        call.cancel()
        late = stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=1))
        with pytest.raises(grpc.aio.AioRpcError, match="are not available"):
            await late.read()


async def test_failures_of_a_client_that_does_not_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_call, "_MAX_UNREAD_FAILURES", 50)
    num_submissions = 5_000
    # Keep the client's receive buffer from growing.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        measured(checkpoint) as (stack, gauges),
        grpc.aio.insecure_channel(stack.url.removeprefix("grpc://"), options=options) as channel,
    ):
        call = type(stack.stub)(channel).GenerateMany()

        async def submit_all() -> None:
            for stream_id in range(num_submissions):
                bad = pb.Submission(stream_id=stream_id, request=request([], max_tokens=1))
                await call.write(pb.GenerateManyRequest(submit=bad))
            await call.done_writing()

        submitting = asyncio.create_task(submit_all())
        await gauges.until("unread_failures", lambda held: held >= 50)
        assert await gauges.read("unread_failures") < 100, "the next submissions wait on the wire"
        num_failures = 0
        while (message := await call.read()) is not grpc.aio.EOF:
            num_failures += len(message.failures)
        assert num_failures == num_submissions
        await submitting
        assert await gauges.read("unread_failures") == 0
