"""If every layer has a sliding window, requests far longer than the pool are served with transformers' tokens."""

import asyncio
import itertools

import pytest

from pagewire import AsyncClient, PagewireError, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from tests.thorough import thorough

VOCAB_SIZE = 151
NUM_TOKENS = 200
# 160 positions, in which two of the requests below can start at a time. The window touches at most 3 blocks.
WORKER = ["--dtype", "float32", "--block-size", 16, "--num-device-blocks", 10]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Return a checkpoint, prompts, and the greedy tokens of each prompt."""
    path = make_checkpoint(tmp_path_factory.mktemp("windows") / "model", "mistral", seed=4, sliding_window=32)
    prompts = oracle.random_prompts(6, VOCAB_SIZE, (10, 161, 400, 31, 250, 1, 90))
    prompts.append(prompts[2][:330] + prompts[0])  # longer than the pool, and so is the shared prefix
    model = oracle.load(path)
    return path, prompts, [oracle.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


async def complete(client: AsyncClient, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    completion = await client.complete(None, sampling, prompt_token_ids=prompt)
    return list(completion.outputs[0].token_ids)


@pytest.mark.parametrize(("mode", "budget"), [("swap", 24), *thorough(("recompute", 512))])
async def test_requests_longer_than_the_pool_get_what_transformers_generates(windowed, mode, budget):
    """Requests run alone; all at once, until some have been preempted; and again from the cache."""
    path, prompts, expected = windowed
    scheduler = ["--preemption", mode, "--max-num-batched-tokens", budget]
    with running(path, worker=[*WORKER, "--num-host-blocks", 60], scheduler=scheduler) as system:
        async with AsyncClient(system.url) as client:
            assert await complete(client, prompts[0]) == expected[0]
            assert await complete(client, prompts[2]) == expected[2]
            for num_rounds in itertools.count(1):
                found = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
                assert found == expected
                loads = await client.loads()
                if num_rounds >= 2 and loads.num_preemptions:
                    break
    assert (loads.num_held_blocks, loads.num_held_host_blocks) == (0, 0)


@pytest.mark.thorough
async def test_a_worker_killed_under_them_changes_nothing(windowed):
    path, prompts, expected = windowed
    with running(path, worker=WORKER) as system:
        async with AsyncClient(system.url) as client:
            calls = [asyncio.create_task(complete(client, prompt)) for prompt in prompts]
            for kill in range(2):
                most = (await client.loads()).num_generation_tokens + 150
                is_done = asyncio.gather(*calls)
                while not is_done.done() and (await client.loads()).num_generation_tokens < most:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                system.worker.kill()
                system.restart_worker()
                while (await client.loads()).num_worker_losses == kill:  # noqa: ASYNC110 - in another process
                    await asyncio.sleep(0.02)
            assert await asyncio.gather(*calls) == expected


async def test_a_pool_smaller_than_the_window_is_named(windowed):
    path, prompts, _ = windowed
    worker = ["--dtype", "float32", "--block-size", 16, "--num-device-blocks", 2]
    with running(path, worker=worker) as system:
        async with AsyncClient(system.url) as client:
            assert (await client.info()).max_sequence_tokens == 33
            with pytest.raises(PagewireError, match="this server allows 33"):
                await complete(client, prompts[0])
