"""n samples of a prompt share one prefill and its full blocks; each has its own last block and its own tokens."""

import asyncio

import pytest

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from tests.thorough import thorough

VOCAB_SIZE = 151
NUM_SAMPLES = 8
NUM_TOKENS = 20
TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("fork") / "model", "qwen3", seed=7)


def params(seed: int, n: int = NUM_SAMPLES) -> SamplingParams:
    return SamplingParams(temperature=TEMPERATURE, seed=seed, n=n, max_tokens=NUM_TOKENS, ignore_eos=True)


def expected(path, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return a list of samples for each prompt; prompt i has seed i."""
    model = oracle.load(path)
    return [
        [
            oracle.sampled(model, prompt, NUM_TOKENS, temperature=TEMPERATURE, seed=seed, sample_index=index)
            for index in range(NUM_SAMPLES)
        ]
        for seed, prompt in enumerate(prompts)
    ]


async def samples_of(client: AsyncClient, prompt: list[int], sampling: SamplingParams) -> list[list[int]]:
    completion = await client.complete(None, sampling, prompt_token_ids=prompt)
    return [list(output.token_ids) for output in completion.outputs]


@pytest.fixture(scope="module")
def around_block_edges(model):
    """Return prompts, and the samples of each prompt."""
    lengths = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49)
    prompts = oracle.random_prompts(1, VOCAB_SIZE, lengths)
    return prompts, expected(model, prompts)


@pytest.mark.parametrize(("block_size", "caching"), [(4, False), *thorough((1, True), (4, True), (16, True))])
async def test_eight_samples_are_eight_draws_at_every_prompt_length(model, around_block_edges, block_size, caching):
    """Siblings share blocks by reference, not by lookup, so they share them without the prefix cache too."""
    prompts, samples = around_block_edges
    flags = {
        "worker": ["--dtype", "float32", "--block-size", block_size],
        "scheduler": [] if caching else ["--no-enable-prefix-caching"],
    }
    with running(model, **flags) as system:
        async with AsyncClient(system.url) as client:
            calls = (samples_of(client, prompt, params(seed)) for seed, prompt in enumerate(prompts))
            together = await asyncio.gather(*calls)
            loads = await client.loads()
    assert together == samples
    assert loads.num_held_blocks == 0


@pytest.mark.parametrize("length", [97, *thorough(95, 96, 300)])
async def test_eight_samples_cost_one_prefill(model, length):
    prompt = oracle.random_prompts(2, VOCAB_SIZE, [length])[0]
    with running(model, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            completion = await client.complete(None, params(0), prompt_token_ids=prompt)
            loads = await client.loads()
    assert completion.usage.prompt_tokens == length
    assert completion.usage.completion_tokens == NUM_SAMPLES * NUM_TOKENS
    # Each sibling recomputes the last token, to sample from its own logits.
    assert loads.num_prompt_tokens - loads.num_cached_prompt_tokens <= length + NUM_SAMPLES - 1


async def test_fewer_samples_are_the_first_of_more(model):
    prompts = oracle.random_prompts(3, VOCAB_SIZE, [40, 70])
    with running(model, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            for seed, prompt in enumerate(prompts):
                all_of_them = await samples_of(client, prompt, params(seed))
                assert await samples_of(client, prompt, params(seed, n=3)) == all_of_them[:3]
                assert await samples_of(client, prompt, params(seed, n=1)) == all_of_them[:1]


@pytest.fixture(scope="module")
def large_groups(model):
    """Return prompts, and the samples of each prompt."""
    prompts = oracle.random_prompts(4, VOCAB_SIZE, (40, 33, 64, 17, 90, 5))
    return prompts, expected(model, prompts)


@pytest.mark.parametrize("mode", ["swap", *thorough("recompute", "auto")])
async def test_groups_of_samples_under_pressure(model, large_groups, mode):
    """Each group alone, including its partial blocks, fills most of the pool. A group is preempted as a whole."""
    prompts, samples = large_groups
    flags = {
        "worker": ["--dtype", "float32", "--block-size", 8, "--num-device-blocks", 44, "--num-host-blocks", 200],
        "scheduler": ["--preemption", mode],
    }
    with running(model, **flags) as system:
        async with AsyncClient(system.url) as client:
            calls = (samples_of(client, prompt, params(seed)) for seed, prompt in enumerate(prompts))
            squeezed = await asyncio.gather(*calls)
            loads = await client.loads()
    assert squeezed == samples
    assert loads.num_preemptions > 0
    assert (loads.num_running, loads.num_held_blocks) == (0, 0)
