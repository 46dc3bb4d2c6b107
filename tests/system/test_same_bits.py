"""Tokens and log-probabilities are bit-identical under all conditions.

The conditions are: alone, in a batch, with prefix cache hits, after preemption, and after a crash.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.client.completion import TokenLogprobs
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.checkpoints.packed import make_mxfp4, make_quantized
from testing.checkpoints.quantized import BY_NAME
from testing.forked import running
from testing.kernels.compiler import skip_without_compiler
from testing.seeds import seeded
from testing.streams import Progress, Request, run_while_ending

pytestmark = pytest.mark.thorough

VOCAB_SIZE = 151
NUM_REQUESTS = 32
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 512}
# As in files of the kind Q4_K_M.
MIXTURE = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q5_K", "token_embd.weight": "Q6_K"}
Served = list[list[tuple[int, bytes]]]  # for each request its tokens, each with the bits of its log-probabilities


def from_gguf(type_name: str, **types: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        source = make_checkpoint(path / "source", "llama", seed=12, tie_word_embeddings=True, **WIDE)
        return write_gguf(path / "model.gguf", source, type_name, types=types)

    return write


def floats(family: str, dtype: str, **overrides: Any) -> Callable[[Path], Path]:
    return lambda path: make_checkpoint(path / "model", family, seed=12, dtype=dtype, **overrides)


@dataclass(frozen=True)
class Case:
    """A model and the way it is served.

    `preemption`: "recompute" tests the matrix multiplications of a weight format, and "swap" tests a dtype of the
    cache.
    """

    write: Callable[[Path], Path]
    flags: tuple[object, ...]
    num_ranks: int = 1
    preemption: str = "recompute"


CASES = {
    "float32": Case(floats("qwen3", "float32"), ("--dtype", "float32")),
    "float32 over bfloat16, window": Case(
        floats("mistral", "bfloat16", sliding_window=50),
        ("--dtype", "float32", "--kv-cache-dtype", "bfloat16"),
        preemption="swap",
    ),
    "bfloat16": Case(floats("qwen2", "bfloat16"), ("--dtype", "bfloat16"), preemption="swap"),
    "bfloat16, gpt2": Case(floats("gpt2", "bfloat16"), ("--dtype", "bfloat16")),
    "bfloat16, cache fp8": Case(
        floats("qwen3", "bfloat16"), ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8"), preemption="swap"
    ),
    "bfloat16, experts": Case(floats("qwen2_moe", "bfloat16"), ("--dtype", "bfloat16")),
    "MXFP4": Case(lambda path: make_mxfp4(path, seed=12, dtype="bfloat16")[0], ("--dtype", "bfloat16")),
    "Q8_0": Case(from_gguf("Q8_0"), ("--dtype", "bfloat16")),
    "Q4_0, cache int8": Case(from_gguf("Q4_0"), ("--dtype", "float32", "--kv-cache-dtype", "int8"), preemption="swap"),
    "Q4_K_M": Case(from_gguf("Q4_K", **MIXTURE), ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")),
    "bfloat16, gpt2, 2 ranks": Case(
        floats("gpt2", "bfloat16"), ("--dtype", "bfloat16"), num_ranks=2, preemption="swap"
    ),
    "Q8_0, 2 ranks": Case(from_gguf("Q8_0"), ("--dtype", "bfloat16"), num_ranks=2),
    "AWQ": Case(lambda path: make_quantized(path, "qwen3", BY_NAME["AWQ"], seed=12)[0], ("--dtype", "bfloat16")),
}


def requests_of(seed: int) -> list[Request]:
    """Return requests, half of them greedy and half seeded, with and without penalties.

    Many share a prefix, and two ask for prompt log-probabilities. Some report listed tokens, and some the whole
    vocabulary.
    """
    rng = seeded(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(128)]
    requests = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 60, 150)))]
        sampling = SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            top_p=rng.choice((1.0, 0.9)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            seed=i,
            max_tokens=rng.randint(20, 40),
            ignore_eos=True,
            logprobs=-1 if i in (8, 9) else 5,
            prompt_logprobs=2 if i in (6, 7) else None,
            logprob_token_ids=[VOCAB_SIZE - 1, 0, i] if i in (4, 5, 6) else None,
        )
        requests.append((shared[: rng.choice((0, 0, 33, 64, 128))] + own, sampling))
    return requests


def bits_of(entries: Sequence[TokenLogprobs]) -> list[tuple[int, bytes]]:
    told = [(entry.token_id, [entry.logprob, *(value for _, value in entry.top)]) for entry in entries]
    assert all(float(np.float32(value)) == value for _, values in told for value in values), "more than float32"
    return [(token_id, np.array(values, np.float32).tobytes()) for token_id, values in told]


async def serve(client: AsyncClient, request: Request, progress: Progress | None = None) -> list[tuple[int, bytes]]:
    """Return the bits of a request's prompt log-probabilities, if requested, followed by the bits of its tokens."""
    prompt, sampling = request
    of_prompt: list[TokenLogprobs] = []
    of_tokens: list[TokenLogprobs] = []
    async for output in client.stream(None, sampling, prompt_token_ids=prompt):
        of_prompt += output.prompt_logprobs or ()
        of_tokens += output.logprobs or ()
        if progress is not None:
            progress.add(len(output.token_ids))
    assert len(of_tokens) == sampling.max_tokens
    assert len(of_prompt) == (len(prompt) - 1 if sampling.prompt_logprobs else 0)
    return bits_of(of_prompt) + bits_of(of_tokens)


async def serve_all(client: AsyncClient, requests: Sequence[Request], progress: Progress | None = None) -> Served:
    return await asyncio.gather(*(serve(client, request, progress) for request in requests))


def assert_same(actual: Served, expected: Served) -> None:
    """Check that all requests agree.

    The error reports the number of differing tokens and the first of them, for each differing request.
    """
    found = []
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        differing = [at for at, (ours, theirs) in enumerate(zip(one, other, strict=True)) if ours != theirs]
        if differing:
            found.append(f"request {i}: {len(differing)} of {len(one)} tokens, from {differing[0]} on")
    assert not found, "; ".join(found)


@pytest.fixture(scope="module", params=CASES)
def alone(request, tmp_path_factory):
    """Return a case, its model, requests, and the output of each request alone, with an empty cache."""
    skip_without_compiler()
    case = CASES[request.param]
    model, requests = case.write(tmp_path_factory.mktemp("bits")), requests_of(31)

    async def one_by_one() -> Served:
        async with AsyncClient(system.url) as client:
            return [await serve(client, each) for each in requests]

    scheduler = ["--no-enable-prefix-caching", "--pipeline-depth", 1]
    flags = {"worker": [*case.flags, "--num-threads", 1], "scheduler": scheduler, "num_ranks": case.num_ranks}
    with running(model, **flags) as system:
        return case, model, requests, asyncio.run(one_by_one())


async def test_same_bits_in_batches_and_from_the_cache(alone):
    case, model, requests, expected = alone
    worker = [*case.flags, "--block-size", 8, "--num-threads", 2]
    scheduler = ["--max-num-batched-tokens", 100]
    with running(model, worker=worker, scheduler=scheduler, num_ranks=case.num_ranks) as system:
        async with AsyncClient(system.url) as client:
            assert_same(await serve_all(client, requests), expected)
            before = (await client.loads()).num_cached_prompt_tokens
            assert_same(await serve_all(client, requests), expected)
            assert (await client.loads()).num_cached_prompt_tokens > before


async def test_preempted_and_after_crashes(alone):
    """The pool is far too small, and the worker is killed repeatedly."""
    case, model, requests, expected = alone
    mode = case.preemption
    pool = ["--num-device-blocks", 40, "--num-host-blocks", 300, "--num-threads", 2]
    ranks = [0, case.num_ranks - 1]
    scheduler = ["--preemption", mode, "--max-num-batched-tokens", 48 if mode == "swap" else 333]
    with running(model, worker=[*case.flags, *pool], scheduler=scheduler, num_ranks=case.num_ranks) as system:
        async with AsyncClient(system.url) as client:
            for served in (await run_while_ending(system, client, requests, ranks, serve_all))[0]:
                assert_same(served, expected)
            loads = await client.loads()
    assert loads.num_worker_losses == len(ranks)
    assert loads.num_preemptions > 0
    assert (loads.num_swap_preemptions > 0) == (mode == "swap")
