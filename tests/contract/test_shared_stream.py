"""Client requests that share one RPC have the same results and errors as requests with separate RPCs."""

import asyncio
import contextlib
import gc
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import pagewire
from pagewire import AsyncClient, SamplingParams
from pagewire.client import channels
from pagewire.client.channels import Connection
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import VOCAB_SIZE, expected_tokens, serve
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, serving
from tests.thorough import thorough

PROMPT = [1, 2, 3, 4, 5]
DEADLINE = 30


@pytest.fixture(autouse=True)
def _shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.client.client.MIN_SHARED", 1)


@contextlib.contextmanager
def calls_of_their_own() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewire.client.client.MIN_SHARED", math.inf)
        yield


async def complete(client: AsyncClient, options: dict[str, Any]) -> pagewire.Completion:
    arguments = {"prompt_token_ids": PROMPT, "request_id": "same"} | options
    sampling = SamplingParams(**({"max_tokens": 20, "seed": 3} | arguments.pop("sampling", {})))
    return await client.complete(arguments.pop("prompt", None), sampling, **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt": "once upon", "prompt_token_ids": None},
        {"sampling": {"n": 3}},
        {"sampling": {"logprobs": 2, "prompt_logprobs": 1, "n": 2}},
        {"sampling": {"beam_width": 3, "n": 2}},
        {"sampling": {"max_tokens": 200, "stop": [" ", "q"]}},
    ],
)
async def test_results_are_the_same(checkpoint: Path, options: dict[str, Any]) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        together = await complete(client, options | {"cache_salt": "together"})
        await stack.until_idle()
        with calls_of_their_own():
            alone = await complete(client, options | {"cache_salt": "alone"})
        assert together.request_id == alone.request_id == "same"
        assert together.outputs == alone.outputs
        assert together.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": {"temperature": -1.0}},
        {"sampling": {"n": 17}},
        {"sampling": {"max_tokens": 5000}},
        {"prompt_token_ids": [VOCAB_SIZE]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1, VOCAB_SIZE - 1, 2]},
        {"request_id": "x" * 200},
        {"timeout": 0.0},
        {"timeout": 0.2, "sampling": {"max_tokens": 240}},
    ],
)
async def test_errors_are_the_same(checkpoint: Path, options: dict[str, Any]) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.01
        # The ids differ, because a request that timed out here may not have reached the server yet.
        with pytest.raises(pagewire.PagewireError) as together:
            await complete(client, {"request_id": "together"} | options)
        with calls_of_their_own(), pytest.raises(pagewire.PagewireError) as alone:
            await complete(client, {"request_id": "alone"} | options)
        for name in ("code", "field_violations", "retry_delay"):
            assert getattr(together.value, name) == getattr(alone.value, name)
        assert type(together.value) is type(alone.value)
        assert str(together.value) == str(alone.value)
        await stack.until_idle()


async def test_duplicates_and_full_queues(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1, max_waiting_requests=1) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.02
        running = asyncio.create_task(complete(client, {"sampling": {"max_tokens": 200}}))
        await stack.until(lambda loads: loads.num_running == 1)
        with pytest.raises(pagewire.AlreadyExists):
            await complete(client, {})
        waiting = asyncio.create_task(complete(client, {"request_id": "other"}))
        await stack.until(lambda loads: loads.num_waiting == 1)
        with pytest.raises(pagewire.ResourceExhausted) as refused:
            await complete(client, {"request_id": "third"})
        assert refused.value.retry_delay == 1
        await client.abort("same")
        assert (await running).outputs[0].finish_reason == "abort"
        assert (await waiting).outputs[0].finish_reason == "length"


async def test_leaving_early_aborts(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.01
        sampling = SamplingParams(max_tokens=240)
        async with contextlib.aclosing(client.stream(None, sampling, prompt_token_ids=PROMPT)) as outputs:
            async for _ in outputs:
                break
        loads = await stack.until_idle()
        assert loads.num_generation_tokens < 240
        task = asyncio.create_task(complete(client, {"sampling": {"max_tokens": 240}}))
        await stack.until(lambda loads: loads.num_running == 1)
        task.cancel()
        await stack.until_idle()
        assert (await complete(client, {})).outputs[0].token_ids == tuple(expected_tokens(PROMPT, 20, seed=3))


@pytest.mark.parametrize("seed", [0, *thorough(1, 2)])
async def test_many_at_once(checkpoint: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr("pagewire.client.client.MIN_SHARED", 4)
    rng = random.Random(seed)
    cases = [(rng.randrange(1, 40), rng.randrange(1, 3), i) for i in range(80)]
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        completions = await asyncio.gather(
            *(
                complete(client, {"request_id": None, "sampling": {"max_tokens": length, "n": n, "seed": number}})
                for length, n, number in cases
            )
        )
        for (length, n, number), completion in zip(cases, completions, strict=True):
            for index in range(n):
                tokens = expected_tokens(PROMPT, length, seed=number, sample_index=index)
                assert completion.outputs[index].token_ids == tuple(tokens)
        await stack.until_idle()


async def test_a_request_too_large_for_the_server_fails_alone(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        fine = asyncio.create_task(complete(client, {"request_id": None, "sampling": {"max_tokens": 200}}))
        await stack.until(lambda loads: loads.num_running == 1)
        too_large = {"prompt": "x" * (5 << 20), "prompt_token_ids": None, "request_id": "large"}
        with pytest.raises(
            pagewire.InvalidRequest, match=r"has 52\d+ bytes, but .* accepts at most 4194304 in a message; shorten"
        ):
            await complete(client, too_large)
        assert (await fine).outputs[0].token_ids == tuple(expected_tokens(PROMPT, 200, seed=3))


async def test_a_server_that_goes_is_unavailable_and_its_successor_is_used(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        port = int(stack.url.rpartition(":")[2])
        async with AsyncClient(stack.url) as client:
            stack.worker.step_seconds = 0.02
            running = [
                asyncio.create_task(complete(client, {"request_id": f"{i}", "sampling": {"max_tokens": 240}}))
                for i in range(10)
            ]
            await stack.until(lambda loads: loads.num_running == 10)
            stack.stop.set()
            stack.stop_now.set()
            results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), DEADLINE)
            assert all(isinstance(result, pagewire.Unavailable) for result in results), results
            await stack.running
            with pytest.raises(pagewire.Unavailable):
                await complete(client, {})
            async with serve(checkpoint, port=port), asyncio.timeout(DEADLINE):
                while True:  # the channel waits a second before it reconnects
                    try:
                        completion = await complete(client, {})
                        break
                    except pagewire.Unavailable:
                        await asyncio.sleep(0.05)
                assert completion.outputs[0].token_ids == tuple(expected_tokens(PROMPT, 20, seed=3))


async def test_ended_requests_are_released_before_their_timeout(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        before = set(map(id, readers()))
        await complete(client, {"timeout": 3600.0})
        assert [reader for reader in readers() if id(reader) not in before] == []


def readers() -> list[object]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is channels._Request]


async def test_servers_without_generate_many_get_separate_rpcs() -> None:
    scheduler = ScriptedScheduler()
    with serving(scheduler) as url:
        async with AsyncClient(url) as client:
            completions = await asyncio.gather(*(client.complete("Once") for _ in range(20)))
    assert all(completion.outputs[0].text == "".join(scripted_scheduler.WORDS) for completion in completions)
    assert len(scheduler.requests) == 20
    assert all(isinstance(request, pb.GenerateRequest) for request in scheduler.requests)


class CountingScheduler(ScriptedScheduler):
    """A server that answers each request of GenerateMany with the whole story at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_shared_calls = self.num_shared_requests = 0

    def GenerateMany(self, requests: Iterator[pb.GenerateManyRequest], context: Any) -> Iterator[Any]:
        self.num_shared_calls += 1
        yield pb.GenerateManyResponse(server_info=self.info)
        for message in requests:
            self.num_shared_requests += 1
            story = scripted_scheduler.tell_story(message.submit.request, context)
            stream_id = message.submit.stream_id
            yield pb.GenerateManyResponse(deltas=[pb.StreamDelta(stream_id=stream_id, delta=delta) for delta in story])


def tasks_of_calls() -> list[asyncio.Task[Any]]:
    """Return the tasks of shared RPCs. gRPC may have tasks of its own that end later."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__.startswith("GenerateMany")]


async def test_nothing_runs_of_a_shared_call_that_was_closed() -> None:
    with serving(CountingScheduler()) as url:
        connection = Connection(grpc.aio.insecure_channel(url), url, ())
        async with contextlib.aclosing(connection.responses(pb.GenerateRequest(), None)) as responses:
            await anext(responses)
        assert len(tasks_of_calls()) == 2
        await connection.close()
        assert tasks_of_calls() == []


async def test_nothing_runs_of_a_shared_call_that_has_ended() -> None:
    with serving(ScriptedScheduler()) as url:
        connection = Connection(grpc.aio.insecure_channel(url), url, ())
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(channels.NotShared):
                await anext(connection.responses(pb.GenerateRequest(), None))
            await asyncio.gather(*tasks_of_calls(), return_exceptions=True)
        await connection.close()


async def test_what_is_aborted_before_it_is_sent_is_not_sent() -> None:
    scheduler = CountingScheduler()
    with serving(scheduler) as url:
        connection = Connection(grpc.aio.insecure_channel(url), url, ())
        abort = connection.submit(pb.GenerateRequest(), lambda response: None, None)
        abort()
        async with contextlib.aclosing(connection.responses(pb.GenerateRequest(), None)) as responses:
            await anext(responses)
        await connection.close()
    assert scheduler.num_shared_requests == 1


async def test_a_request_alone_has_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scheduler = CountingScheduler()
    with serving(scheduler) as url:
        async with AsyncClient(url) as client:
            for _ in range(10):
                await client.complete("Once")
            assert scheduler.num_shared_calls == 0
            completions = await asyncio.gather(*(client.complete("Once") for _ in range(20)))
    assert all(completion.outputs[0].text == "".join(scripted_scheduler.WORDS) for completion in completions)
    assert scheduler.num_shared_calls == 1
    assert scheduler.num_shared_requests == 19
    assert len(scheduler.requests) == 11
