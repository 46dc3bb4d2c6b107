"""Token for token what transformers generates, through both services over gRPC."""

import asyncio
import random

import pytest
import torch
import transformers

from pagewire import Client, SamplingParams
from tests.system.services import running
from tests.worker.checkpoints import make_checkpoint

NUM_OUTPUT_TOKENS = 24
# Positions for 700 + 24 tokens, and about one and a half of the longest prompt in the small pools.
CASES = {
    "llama, ratio 2": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, 16, {}),
    "llama, ratio 1, untied, small pool": (
        "llama",
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        8,
        {"num_device_blocks": 140},
    ),
    "qwen2, ratio 7, tied, chunks of 64": (
        "qwen2",
        {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "hidden_size": 56,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
        32,
        {"max_num_batched_tokens": 64},
    ),
    "qwen3, head size 80, tied, small pool, chunks of 100": (
        "qwen3",
        {"head_dim": 80, "tie_word_embeddings": True},
        16,
        {"num_device_blocks": 70, "max_num_batched_tokens": 100},
    ),
    "qwen3, untied, ratio 1, budget below the number of sequences": (
        "qwen3",
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        32,
        {"max_num_batched_tokens": 5, "max_num_seqs": 8},
    ),
    "gpt2, odd head size, chunks of 48": ("gpt2", {"n_embd": 76}, 8, {"max_num_batched_tokens": 48}),
}


def random_prompts(seed: int, vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def reference(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
        )
    return output[0, len(prompt) :].tolist()


async def generate_all(url: str, prompts: list[list[int]], num_tokens: int) -> list:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    async with Client(url) as client:
        return await asyncio.gather(*(client.acomplete(None, sampling, prompt_token_ids=prompt) for prompt in prompts))


@pytest.mark.parametrize("name", CASES)
async def test_greedy_float32_is_what_transformers_generates(name, tmp_path):
    family, overrides, block_size, limits = CASES[name]
    seed = list(CASES).index(name)
    path = make_checkpoint(tmp_path / "model", family, seed=seed, **overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = random_prompts(seed, 151, (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 257, 700))
    prompts += [prompts[-1][:500] + prompts[0], prompts[-2]]  # found in the cache, in part and whole
    expected = [reference(model, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    flags = [text for key, value in limits.items() for text in (f"--{key.replace('_', '-')}", value)]
    with running(path, worker=["--dtype", "float32", "--block-size", block_size, *flags]) as system:
        first = await generate_all(system.url, prompts, NUM_OUTPUT_TOKENS)
        again = await generate_all(system.url, prompts, NUM_OUTPUT_TOKENS)
        async with Client(system.url) as client:
            loads = await client.loads()
    for completions in (first, again):
        assert [list(completion.outputs[0].token_ids) for completion in completions] == expected
    if "pool" in name:
        assert loads.num_preemptions > 0
    else:
        assert sum(completion.usage.cached_tokens for completion in again) > 1000
    assert loads.num_held_blocks == 0
    assert_logprobs(model, prompts, first)


def assert_logprobs(model: transformers.PreTrainedModel, prompts: list[list[int]], completions: list) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        output = completion.outputs[0]
        tokens = torch.tensor([prompt + list(output.token_ids)])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        served = torch.tensor([entry.logprob for entry in output.logprobs])
        torch.testing.assert_close(served, expected, atol=1e-4, rtol=0)


async def test_seeded_samples_are_equal_alone_in_a_batch_and_under_preemption(tmp_path):
    """Noise is a pure function of seed, sample index and position."""
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=5)
    prompts = random_prompts(11, 151, (5, 40, 90, 17, 64, 200, 31, 128))

    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=i, n=2, max_tokens=32)

    async def one(client, i):
        completion = await client.acomplete(None, params(i), prompt_token_ids=prompts[i])
        return [output.token_ids for output in completion.outputs]

    with running(path, worker=["--dtype", "float32"]) as system:
        async with Client(system.url) as client:
            alone = [await one(client, i) for i in range(len(prompts))]
            batch = await asyncio.gather(*(one(client, i) for i in range(len(prompts))))
    with running(path, worker=["--dtype", "float32", "--num-device-blocks", 24]) as system:
        async with Client(system.url) as client:
            squeezed = await asyncio.gather(*(one(client, i) for i in range(len(prompts))))
            assert (await client.loads()).num_preemptions > 0
    assert batch == alone
    assert squeezed == alone
    assert all(first != second for first, second in alone)
