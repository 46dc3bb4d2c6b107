"""Embeddings through both services equal the pooled hidden states of transformers, whatever other requests run."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from pagewire import AsyncClient, InvalidRequest, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from tests.thorough import thorough

VOCAB_SIZE = 151
MEAN = "pooling_mode_mean_tokens"
LAST = "pooling_mode_lasttoken"
POOLINGS = (LAST, MEAN)
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 257, 500)
# Elements of vectors of length 1 differ by less than this between orders of summation in float32.
MARGIN = 2e-6


def write_pooling(path: Path, mode: str) -> Path:
    """Write the pooling configuration files of sentence-transformers; return `path`."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": where, "type": f"sentence_transformers.models.{kind}"} for where, kind in kinds.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({each: each == mode for each in POOLINGS}))
    return path


def expected_embedding(model: transformers.PreTrainedModel, prompt: Sequence[int], mode: str) -> list[float]:
    """Return the embedding computed by hand: pooled, and divided by its length."""
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = hidden[-1] if mode == LAST else hidden.sum(0) / len(prompt)
    return (pooled / pooled.square().sum().sqrt()).tolist()


@pytest.mark.parametrize(
    ("mode", "family"), [(MEAN, "qwen3"), *thorough((LAST, "qwen3"), (MEAN, "llama"), (LAST, "mistral"))]
)
async def test_embeddings_equal_transformers_and_are_bit_identical_in_batches(
    mode: str, family: str, tmp_path: Path
) -> None:
    """The prompts run in chunks of 64 tokens, with prefix cache hits, and beside streams in too small a pool."""
    path = write_pooling(make_checkpoint(tmp_path / "model", family, seed=4), mode)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    prompts = oracle.random_prompts(7, VOCAB_SIZE, LENGTHS)
    prompts += [prompts[-1][:300] + prompts[3], prompts[-2]]
    limits = ["--max-num-batched-tokens", 64, "--block-size", 8, "--num-device-blocks", 100]
    with running(path, worker=["--dtype", "float32", *limits]) as system:
        async with AsyncClient(system.url) as client:
            alone = [await client.embed(prompt_token_ids=prompt) for prompt in prompts]
            growing = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
            streams = asyncio.gather(
                *(client.complete(None, growing, prompt_token_ids=prompt, priority=-1) for prompt in prompts[:10])
            )
            together = await client.embed(prompts)
            await streams
            loads = await client.loads()
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert one.values == other.values
        assert math.hypot(*one.values) == pytest.approx(1, abs=1e-6)
        assert one.values == pytest.approx(expected_embedding(model, prompt, mode), abs=MARGIN)
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(prompt), 0)
    assert loads.num_preemptions > 0 or family == "mistral", "all fit"  # its window needs few blocks
    num_cached = [embedding.usage.cached_tokens for embedding in (*alone, *together)]
    assert (max(num_cached) > 0) == (mode == LAST)
    assert (loads.num_running, loads.num_waiting, loads.num_held_blocks) == (0, 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "settings", "num_ranks"),
    [
        ("qwen2", {"is_causal": False}, 1),
        ("qwen2", {"is_causal": False}, 2),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 20}, 1),
    ],
)
async def test_bidirectional_models_compute_prompts_whole(
    family: str, settings: dict[str, object], num_ranks: int, tmp_path: Path
) -> None:
    path = write_pooling(make_checkpoint(tmp_path / "model", family, seed=4), LAST)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    prompts = oracle.random_prompts(8, VOCAB_SIZE, LENGTHS)
    prompts += [prompts[-1][:300] + prompts[3], prompts[-1]]
    limits = ["--max-num-batched-tokens", 500, "--block-size", 8, "--num-device-blocks", 150]
    with running(path, num_ranks=num_ranks, worker=["--dtype", "float32", *limits]) as system:
        async with AsyncClient(system.url) as client:
            alone = [await client.embed(prompt_token_ids=prompt) for prompt in prompts]
            together = await client.embed(prompts)
            with pytest.raises(
                InvalidRequest, match=r"this server allows 501 .* shorten the prompt to 500 tokens or less"
            ):
                await client.embed(prompt_token_ids=[1] * 501)
            with pytest.raises(InvalidRequest, match="generates no text; ask for embeddings"):
                await client.complete(prompt_token_ids=[1], max_tokens=1)
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert one.values == other.values
        assert one.values == pytest.approx(expected_embedding(model, prompt, LAST), abs=MARGIN)
        assert one.usage.cached_tokens == other.usage.cached_tokens == 0


async def test_ranks_make_the_embeddings_of_one(tmp_path: Path) -> None:
    path = write_pooling(make_checkpoint(tmp_path / "model", "qwen3", seed=4), MEAN)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    prompts = oracle.random_prompts(7, VOCAB_SIZE, (1, 40, 100))
    with running(path, num_ranks=2, worker=["--dtype", "float32", "--max-num-batched-tokens", 64]) as system:
        async with AsyncClient(system.url) as client:
            found = await client.embed(prompts)
    for prompt, embedding in zip(prompts, found, strict=True):
        assert embedding.values == pytest.approx(expected_embedding(model, prompt, MEAN), abs=MARGIN)
