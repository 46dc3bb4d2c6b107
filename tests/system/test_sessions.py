"""Sessions of the policy `agent` through both services: retention and reports."""

import asyncio

import pytest

from pagewire import AsyncClient, SamplingParams, Session
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running

VOCAB_SIZE = 151
SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
POOL = ["--dtype", "float32", "--num-device-blocks", 60]  # of 16 tokens each


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sessions") / "model", "llama", seed=11)


async def turn(client: AsyncClient, prompt: list[int], session: Session) -> tuple[list[int], int]:
    """Return the prompt with its output, and the number of prompt tokens found in the cache."""
    completion = await client.complete(None, SAMPLING, prompt_token_ids=prompt, session=session)
    return prompt + list(completion.outputs[0].token_ids), completion.usage.cached_tokens


async def test_what_will_return_outlives_what_will_not(model):
    """Either session uses most of half the pool; a third prompt needs a part of this."""
    kept, left, other = oracle.random_prompts(1, VOCAB_SIZE, (400, 400, 250))
    with running(model, worker=POOL, scheduler=["--policy", "agent"]) as system:
        async with AsyncClient(system.url) as client:
            history, _ = await turn(client, kept, Session("kept", will_return=True))
            await turn(client, left, Session("left", will_return=False))  # though it was used last
            await turn(client, other, Session("other"))
            prompt = [*history, 5, 6, 7]
            again, num_cached = await turn(client, prompt, Session("kept"))
            assert again == prompt + oracle.greedy(oracle.load(model), prompt, 12)
            assert num_cached == (len(history) - 1) // 16 * 16
            loads = await client.loads()
            assert sum(loads.num_kept_session_tokens) == num_cached
            assert sum(loads.num_lost_session_tokens) == 0
            assert (loads.num_admitted_requests, loads.num_overdue_requests) == (4, 0)


async def test_many_sessions_at_once_say_what_an_undisturbed_server_says(model):
    """Eight sessions of four turns each compete for a pool that can hold two of them."""
    reference = oracle.load(model)

    async def talk(client: AsyncClient, prompt: list[int], name: str) -> tuple[list[int], list[int]]:
        history, expected = prompt, prompt
        for number in range(4):
            history, _ = await turn(client, history, Session(name if number % 2 else "", will_return=True))
            expected = expected + oracle.greedy(reference, expected, 12)
            history, expected = [*history, number], [*expected, number]
        return history, expected

    with running(model, worker=POOL, scheduler=["--policy", "agent", "--max-wait", 2]) as system:
        async with AsyncClient(system.url) as client:
            prompts = oracle.random_prompts(2, VOCAB_SIZE, [300] * 8)
            talks = [talk(client, prompt, f"session {i}") for i, prompt in enumerate(prompts)]
            for history, expected in await asyncio.gather(*talks):
                assert history == expected
            loads = await client.loads()
            assert loads.num_admitted_requests == 32
            assert loads.num_held_blocks == 0
