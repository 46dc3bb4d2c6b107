"""Prefixes that other requests evicted from the device are loaded from host blocks, with the same tokens."""

import pytest

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running

VOCAB_SIZE = 151
SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PREFIX_LENGTH = 320
POOLS = ["--dtype", "float32", "--num-device-blocks", 96, "--num-host-blocks", 400]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tier") / "model", "llama", seed=10)


async def tokens_of(client: AsyncClient, prompt: list[int], **options: object) -> tuple[list[int], int]:
    """Return the output tokens, and the number of prompt tokens found in the cache."""
    completion = await client.complete(None, SAMPLING, prompt_token_ids=prompt, **options)
    return list(completion.outputs[0].token_ids), completion.usage.cached_tokens


async def evict(client: AsyncClient, seed: int) -> None:
    """Evict everything with other prompts, whose blocks together exceed the device's.

    No prompt needs many blocks at once, because blocks that are evicted at once are dropped without a copy.
    """
    for prompt in oracle.random_prompts(seed, VOCAB_SIZE, [120] * 16):
        await tokens_of(client, prompt)


async def test_an_evicted_prefix_comes_back_from_the_host(model):
    prefix, first, second = oracle.random_prompts(1, VOCAB_SIZE, (PREFIX_LENGTH, 9, 21))
    reference = oracle.load(model)
    with running(model, worker=POOLS, scheduler=["--preemption", "swap"]) as system:
        async with AsyncClient(system.url) as client:
            assert await tokens_of(client, prefix + first) == (oracle.greedy(reference, prefix + first, 12), 0)
            await evict(client, 2)
            before = await client.loads()
            tokens, num_cached = await tokens_of(client, prefix + second)
            after = await client.loads()
            assert tokens == oracle.greedy(reference, prefix + second, 12)
            assert num_cached == PREFIX_LENGTH
            # Blocks that the eviction left on the device need not be loaded from the host.
            num_host_hits = after.num_host_cached_prompt_tokens - before.num_host_cached_prompt_tokens
            assert 0 < num_host_hits <= PREFIX_LENGTH
            assert after.num_moved_blocks_in > before.num_moved_blocks_in
            assert before.num_moved_blocks_out > 0
            # Now the prefix is on the device again.
            again, num_cached = await tokens_of(client, prefix + second)
            assert again == tokens
            assert num_cached >= PREFIX_LENGTH
            assert (await client.loads()).num_host_cached_prompt_tokens == after.num_host_cached_prompt_tokens
            assert (await client.loads()).num_held_host_blocks == 0


@pytest.mark.thorough
async def test_another_salt_or_tenant_finds_nothing_in_the_host(model):
    prompt = oracle.random_prompts(3, VOCAB_SIZE, [PREFIX_LENGTH])[0]
    expected = oracle.greedy(oracle.load(model), prompt, 12)
    with running(model, worker=POOLS, scheduler=["--preemption", "swap"]) as system:
        async with AsyncClient(system.url) as client:
            assert await tokens_of(client, prompt) == (expected, 0)
            await evict(client, 4)
            assert await tokens_of(client, prompt, cache_salt="other") == (expected, 0)
            assert await tokens_of(client, prompt, tenant="other") == (expected, 0)
            assert (await client.loads()).num_host_cached_prompt_tokens == 0


@pytest.mark.thorough
async def test_the_host_tier_dies_with_its_worker(model):
    """The host blocks were in the lost worker's memory, so their content must not be used."""
    prompt = oracle.random_prompts(5, VOCAB_SIZE, [PREFIX_LENGTH])[0]
    expected = oracle.greedy(oracle.load(model), prompt, 12)
    with running(model, worker=POOLS, scheduler=["--preemption", "swap"]) as system:
        async with AsyncClient(system.url) as client:
            assert await tokens_of(client, prompt) == (expected, 0)
            await evict(client, 6)
            system.worker.kill()
            system.restart_worker()
            assert await tokens_of(client, prompt) == (expected, 0)
            loads = await client.loads()
    assert loads.num_worker_losses == 1
    assert loads.num_host_cached_prompt_tokens == 0
