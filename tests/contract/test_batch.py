"""Lists of prompts: results are in order, the server's queue limits the parallelism, and one failure ends the list."""

import asyncio
import gc
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import pagewire
from pagewire import AsyncClient, Client, SamplingParams
from pagewire.client import wire
from pagewire.client.batch import RequestBatch
from pagewire.client.retry import Attempts
from testing.scheduler_stack import VOCAB_SIZE, expected_tokens, serve
from testing.seeds import seeded
from tests.contract.cut_proxy import proxied

SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=20, ignore_eos=True)


def prompts_of(rng: random.Random, num_prompts: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB_SIZE - 2) for _ in range(rng.randrange(1, 20))] for _ in range(num_prompts)]


def tokens_of(completions: list[pagewire.Completion]) -> list[list[int]]:
    return [list(completion.outputs[0].token_ids) for completion in completions]


def described(completions: list[pagewire.Completion]) -> list[list[tuple[object, ...]]]:
    return [[(each.token_ids, each.text, each.finish_reason) for each in whole.outputs] for whole in completions]


async def test_results_come_in_order(checkpoint: Path) -> None:
    prompts = prompts_of(random.Random(1), 50)
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        completions = await asyncio.to_thread(Client(stack.url).complete, prompts, SAMPLING)
        assert tokens_of(completions) == [expected_tokens(prompt, 20) for prompt in prompts]
        assert [completion.usage.prompt_tokens for completion in completions] == list(map(len, prompts))
        assert tokens_of(await client.complete(prompts, SAMPLING)) == tokens_of(completions)
        assert await client.complete([]) == []
        await stack.until_idle()


async def test_tokens_are_told_as_they_come(checkpoint: Path) -> None:
    """Tokens are reported before the first request has ended, and each token is reported once."""
    prompts = prompts_of(random.Random(4), 5)
    requests = [wire.encode_request(None, replace(SAMPLING, n=2), prompt_token_ids=prompt) for prompt in prompts]
    news: list[tuple[int, bool]] = []
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        batch = RequestBatch(requests, client._channels, Attempts(0.0))
        async for more in batch.news():
            news += more
        completions = batch.completions
    assert sum(num_tokens for num_tokens, _ in news) == sum(each.usage.completion_tokens for each in completions) == 200
    assert sum(has_ended for _, has_ended in news) == 5
    first_end = [has_ended for _, has_ended in news].index(True)
    assert sum(num_tokens for num_tokens, _ in news[:first_end]) > 20


async def test_texts_and_tokens_each_with_parameters_of_its_own(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        samplings = [SamplingParams(n=3, seed=0, max_tokens=5), SamplingParams(seed=4, max_tokens=9), None]
        prompts = ["once upon", [1, 2, 3], "a"]
        together = await asyncio.to_thread(Client(stack.url).complete, prompts, samplings, ignore_eos=True, seed=7)
        alone = [
            await client.complete("once upon", samplings[0], ignore_eos=True, seed=7),
            await client.complete(None, samplings[1], prompt_token_ids=[1, 2, 3], ignore_eos=True, seed=7),
            await client.complete("a", ignore_eos=True, seed=7),
        ]
        assert described(together) == described(alone)
        with pytest.raises(ValueError, match="there are 3 prompts and 2 sampling parameters"):
            await client.complete(prompts, samplings[:2])


async def test_a_full_queue_gets_fewer_at_a_time(checkpoint: Path) -> None:
    prompts = prompts_of(random.Random(2), 80)
    async with serve(checkpoint, max_num_seqs=2, max_waiting_requests=3) as stack:
        completions = await asyncio.to_thread(Client(stack.url).complete, prompts, SAMPLING)
        assert tokens_of(completions) == [expected_tokens(prompt, 20) for prompt in prompts]
        await stack.until_idle()


async def test_a_queue_that_others_fill_is_an_error(checkpoint: Path) -> None:
    """A queue that other clients fill is an error for a list of prompts.

    With `retry`, the list waits until the queue has room.
    """
    async with serve(checkpoint, max_num_seqs=1, max_waiting_requests=1) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.01
        others = [
            asyncio.create_task(client.complete(prompt_token_ids=[7], max_tokens=100, ignore_eos=True))
            for _ in range(2)
        ]
        await stack.until(lambda loads: loads.num_running + loads.num_waiting == 2)
        with pytest.raises(pagewire.ResourceExhausted):
            await client.complete([[1], [2]], SAMPLING)
        patient = AsyncClient(stack.url, retry=60)
        waiting = asyncio.create_task(patient.complete([[1], [2]], SAMPLING))
        assert tokens_of(await waiting) == [expected_tokens([1], 20), expected_tokens([2], 20)]
        await asyncio.gather(*others)
        await patient.aclose()


async def test_a_refused_prompt_is_named_and_ends_all(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.01
        prompts = [[1, 2], [3, VOCAB_SIZE], [4]]
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        with pytest.raises(pagewire.InvalidRequest, match=r"^prompt 1: token_ids.ids\[0\] is -1, but must be 0 to"):
            await client.complete([[1], [-1]], SAMPLING)
        with pytest.raises(pagewire.InvalidRequest, match=rf"^prompt 1: .*{VOCAB_SIZE}"):
            await asyncio.to_thread(Client(stack.url).complete, prompts, long)
        await stack.until_idle()


async def test_cancelling_ends_all(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.01
        running = asyncio.create_task(client.complete([[1], [2]], SamplingParams(max_tokens=200, ignore_eos=True)))
        await stack.until(lambda loads: loads.num_running == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await stack.until_idle()


@pytest.mark.parametrize("seed", range(2))
async def test_cancelling_at_any_time_leaves_no_unhandled_exception(checkpoint: Path, seed: int) -> None:
    """Cancel once or twice: before, while, or after the server answers. Asyncio must report no unhandled exception."""
    rng = seeded(seed)
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.001
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        calls = [
            lambda: client.complete([[1], [2]], long),
            lambda: client.complete([[1], [-1]][: rng.randrange(1, 3)], long),
            lambda: client.complete([[1], [VOCAB_SIZE]], long),
            lambda: client.complete(None, long, prompt_token_ids=[1]),
            lambda: client.embed([[1], [2]]),
            lambda: client.embed(None, prompt_token_ids=[1]),
            lambda: client.embed([[1], [VOCAB_SIZE]]),
        ]
        for _ in range(4):
            for call in calls:
                running = asyncio.create_task(call())
                for _ in range(rng.randrange(1, 3)):
                    for _ in range(rng.choice([0, 1, 3, 30])):
                        await asyncio.sleep(0)
                    if rng.random() < 0.5:
                        await stack.loads()
                    running.cancel()
                await asyncio.wait({running})
                if not running.cancelled():
                    running.exception()
                del running
        await stack.until_idle()
        gc.collect()
    assert complaints == []


async def test_the_timeout_covers_the_whole_list(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.01
        with pytest.raises(pagewire.DeadlineExceeded, match="the timeout passed"):
            await client.complete([[1], [2]], max_tokens=200, ignore_eos=True, timeout=0.3)
        await stack.until_idle()


@pytest.mark.parametrize("seed", range(3))
async def test_a_connection_that_breaks_is_made_again(checkpoint: Path, seed: int) -> None:
    """A list of prompts survives broken connections.

    Completed results are kept, and only unfinished requests are sent again.
    """
    rng = random.Random(seed)
    prompts = prompts_of(rng, 30)
    async with proxied(checkpoint, max_num_seqs=4) as (stack, proxy):
        stack.worker.step_seconds = 0.002
        with Client(proxy.url, retry=30) as client:
            running = asyncio.create_task(asyncio.to_thread(client.complete, prompts, SAMPLING))
            for _ in range(3):
                before = (await stack.loads()).num_generation_tokens
                num_more = rng.randrange(20, 150)
                goal = before + num_more
                await stack.until(lambda loads, goal=goal: loads.num_generation_tokens > goal or running.done())
                proxy.cut()
            assert tokens_of(await running) == [expected_tokens(prompt, 20) for prompt in prompts]
        assert proxy.num_connections > 1
        impatient = Client(proxy.url)
        failing = asyncio.create_task(asyncio.to_thread(impatient.complete, prompts, SAMPLING))
        await stack.until(lambda loads: loads.num_running > 0)
        proxy.cut()
        with pytest.raises(pagewire.Unavailable):
            await failing
        impatient.close()


async def test_threads_share_a_client(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        client = Client(stack.url)
        lists = [prompts_of(random.Random(seed), 20) for seed in range(4)]
        begin = threading.Barrier(len(lists))

        def complete(prompts: list[list[int]]) -> list[pagewire.Completion]:
            begin.wait()
            return client.complete(prompts, SAMPLING)

        results = await asyncio.gather(*(asyncio.to_thread(complete, prompts) for prompts in lists))
        for prompts, completions in zip(lists, results, strict=True):
            assert tokens_of(completions) == [expected_tokens(prompt, 20) for prompt in prompts]
