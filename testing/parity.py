"""Checkpoints, prompts and pool sizes with which the services must generate the same tokens as transformers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from pagewire import AsyncClient, SamplingParams
from pagewire.client.completion import Completion
from pagewire.client.server_info import Loads
from testing import oracle

STORYTELLER = Path(__file__).parents[1] / "models" / "storyteller"
VOCAB_SIZE = 151  # of the random checkpoints
PROMPT_LENGTHS = (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 257, 700)
SAMPLED_PROMPTS = oracle.random_prompts(11, VOCAB_SIZE, (5, 40, 90, 17, 64, 200, 31, 128))
# Logits in float32 differ by less than this between machines and orders of summation.
FLOAT32_MARGIN = 1e-4


@dataclass(frozen=True)
class ParityCase:
    """A random checkpoint and the flags of its worker.

    In a small pool, the short prompts fit together, but not with their outputs.
    """

    family: str
    # changed fields of the configuration, under their names in transformers
    overrides: dict[str, Any] = field(default_factory=dict)
    block_size: int = 16
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def is_small_pool(self) -> bool:
        return "num_device_blocks" in self.limits

    @property
    def num_output_tokens(self) -> int:
        return 72 if self.is_small_pool else 24

    @property
    def worker_flags(self) -> list[object]:
        limits = [text for key, value in self.limits.items() for text in (f"--{key.replace('_', '-')}", value)]
        return ["--dtype", "float32", "--block-size", self.block_size, *limits]


CASES = {
    "llama, ratio 2": ParityCase("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama, ratio 1, untied, small pool": ParityCase(
        "llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}, 8, {"num_device_blocks": 140}
    ),
    "qwen2, ratio 7, tied, chunks of 64": ParityCase(
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
    "qwen3, head size 80, tied, small pool, chunks of 100": ParityCase(
        "qwen3",
        {"head_dim": 80, "tie_word_embeddings": True},
        16,
        {"num_device_blocks": 70, "max_num_batched_tokens": 100},
    ),
    "qwen3, untied, ratio 1, budget below the number of sequences": ParityCase(
        "qwen3",
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        32,
        {"max_num_batched_tokens": 5, "max_num_seqs": 8},
    ),
    "smollm3, tied, chunks of 64": ParityCase("smollm3", {}, 8, {"max_num_batched_tokens": 64}),
    "phi3, window of 20, chunks of 64": ParityCase("phi3", {}, 8, {"max_num_batched_tokens": 64}),
    "olmo3, two kinds of layers, small pool, chunks of 100": ParityCase(
        "olmo3", {}, 16, {"num_device_blocks": 70, "max_num_batched_tokens": 100}
    ),
    "gemma3, two kinds of layers, chunks of 64": ParityCase("gemma3_text", {}, 32, {"max_num_batched_tokens": 64}),
    "gpt_neox, parallel, small pool": ParityCase("gpt_neox", {}, 16, {"num_device_blocks": 70}),
    "starcoder2, window of 50, chunks of 100": ParityCase(
        "starcoder2", {"sliding_window": 50}, 8, {"max_num_batched_tokens": 100}
    ),
    "bloom, 7 heads, small pool": ParityCase("bloom", {"n_head": 7, "hidden_size": 56}, 8, {"num_device_blocks": 140}),
    "mpt, chunks of 64": ParityCase("mpt", {}, 16, {"max_num_batched_tokens": 64}),
    "mistral, window of 50, chunks of 64": ParityCase(
        "mistral", {"sliding_window": 50}, 16, {"max_num_batched_tokens": 64}
    ),
    "mistral, window of 200, small pool": ParityCase("mistral", {"sliding_window": 200}, 8, {"num_device_blocks": 100}),
    "mistral, no window": ParityCase("mistral", {"sliding_window": None, "num_key_value_heads": 4}, 32),
    "qwen2, window of 40 in every layer, chunks of 100": ParityCase(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0},
        8,
        {"max_num_batched_tokens": 100},
    ),
    "qwen2, window of 40 in the second layer": ParityCase(
        "qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    ),
    "gpt2, odd head size, chunks of 48": ParityCase("gpt2", {"n_embd": 76}, 8, {"max_num_batched_tokens": 48}),
    "qwen3_moe, some layers with experts, small pool, chunks of 100": ParityCase(
        "qwen3_moe", {}, 8, {"num_device_blocks": 140, "max_num_batched_tokens": 100}
    ),
    "mixtral, window of 50, chunks of 64": ParityCase(
        "mixtral", {"sliding_window": 50}, 16, {"max_num_batched_tokens": 64}
    ),
    "olmoe, norm over projections": ParityCase("olmoe", {}, 32),
    "qwen2_moe, shared expert, small pool": ParityCase("qwen2_moe", {}, 16, {"num_device_blocks": 70}),
    "gpt_oss, two kinds of layers, small pool, chunks of 100": ParityCase(
        "gpt_oss", {}, 8, {"num_device_blocks": 140, "max_num_batched_tokens": 100}
    ),
    "phi3small, sparse and dense layers, small pool, chunks of 100": ParityCase(
        "phi3small", {}, 16, {"num_device_blocks": 70, "max_num_batched_tokens": 100}
    ),
    "glm4_moe, groups of experts, chunks of 64": ParityCase("glm4_moe", {}, 8, {"max_num_batched_tokens": 64}),
}


def prompts_of(seed: int) -> list[list[int]]:
    """Return random prompts, followed by two prompts that hit the prefix cache after the others have run.

    The first of the two hits in part, the second is a whole earlier prompt.
    """
    prompts = oracle.random_prompts(seed, VOCAB_SIZE, PROMPT_LENGTHS)
    return [*prompts, prompts[-1][:500] + prompts[0], prompts[-2]]


async def generate_all(url: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Completion]:
    """Generate greedily from all prompts concurrently and return the completions in order."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    async with AsyncClient(url) as client:
        return await asyncio.gather(*(client.complete(None, sampling, prompt_token_ids=prompt) for prompt in prompts))


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.outputs[0].token_ids) for completion in completions]


@dataclass(frozen=True, slots=True)
class ServedTwice:
    """Completions of the same prompts in two rounds, and the server's counts after both rounds."""

    first: list[Completion]
    again: list[Completion]
    loads: Loads


async def serve_twice(url: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> ServedTwice:
    first = await generate_all(url, prompts, num_tokens)
    again = await generate_all(url, prompts, num_tokens)
    async with AsyncClient(url) as client:
        return ServedTwice(first, again, await client.loads())


def assert_the_cache_was_used(case: ParityCase, served: ServedTwice) -> None:
    """Assert that a small pool has preempted requests, and that in another pool prompts hit the prefix cache."""
    if case.is_small_pool:
        assert served.loads.num_preemptions > 0
    else:
        assert sum(completion.usage.cached_tokens for completion in served.again) > 1000
    assert served.loads.num_held_blocks == 0


def assert_logprobs(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> None:
    """Assert that the log probabilities of chosen tokens are within `FLOAT32_MARGIN` of those in transformers."""
    for prompt, completion in zip(prompts, completions, strict=True):
        output = completion.outputs[0]
        tokens = torch.tensor([[*prompt, *output.token_ids]])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        served = torch.tensor([entry.logprob for entry in output.logprobs])
        torch.testing.assert_close(served, expected, atol=FLOAT32_MARGIN, rtol=0)


async def sample_alone(client: AsyncClient) -> list[list[tuple[int, ...]]]:
    """Return two seeded samples for each of some prompts, from one request at a time."""
    return [await _sample(client, i) for i in range(len(SAMPLED_PROMPTS))]


async def sample_together(client: AsyncClient) -> list[list[tuple[int, ...]]]:
    """Return the same samples from concurrent requests."""
    return await asyncio.gather(*(_sample(client, i) for i in range(len(SAMPLED_PROMPTS))))


async def _sample(client: AsyncClient, i: int) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=i, n=2, max_tokens=32)
    completion = await client.complete(None, sampling, prompt_token_ids=SAMPLED_PROMPTS[i])
    return [output.token_ids for output in completion.outputs]
