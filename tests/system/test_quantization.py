"""Weights that are quantised during loading, through both services: outputs as with a quantised file, and crashes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.kernels.compiler import skip_without_compiler
from testing.services import ENVIRON, System, running
from testing.streams import until_lost
from testing.worker.model_logits import compute_logits
from testing.worker.model_logits import load as load_here
from worker_service.startup.cpu_kernels import cache_folder, load_cpu_kernels

pytestmark = pytest.mark.thorough

GREEDY = SamplingParams(max_tokens=60, temperature=0.0, logprobs=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user cache of the test's own, which contains the built kernels."""
    skip_without_compiler()
    load_cpu_kernels()
    built, folder = cache_folder("kernels"), tmp_path / "cache"
    folder.mkdir()
    assert built is not None
    (folder / "kernels").symlink_to(built)
    monkeypatch.setitem(ENVIRON, "PAGEWIRE_CACHE", str(folder))
    return folder


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[System]:
    with running(model, worker=["--device", "cpu", "--num-threads", 1, *flags]) as system:
        yield system


async def answers(url: str) -> list[tuple[object, ...]]:
    """Return tokens and their log-probabilities."""
    async with AsyncClient(url) as client:
        prompts = oracle.random_prompts(11, 151, (1, 9, 40))
        sent = [client.complete(sampling=GREEDY, prompt_token_ids=prompt) for prompt in prompts]
        outputs = [answer.outputs[0] for answer in await asyncio.gather(*sent)]
        return [(tuple(output.token_ids), repr(output.logprobs)) for output in outputs]


async def test_answers_in_8_bits_are_those_of_the_quantised_file(tmp_path: Path, cache: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "qwen3", seed=41, dtype="bfloat16")
    types = {"attn_output.weight": "Q8_0", "token_embd.weight": "Q8_0", "output.weight": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", source, "Q8_0", types=types)
    with serving(path, "--dtype", "bfloat16") as system:
        expected = await answers(system.url)
    with serving(source, "--quantization", "int8", "--dtype", "bfloat16") as system:
        assert await answers(system.url) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_what_was_packed_at_the_first_start_gives_the_same_answers(
    tmp_path: Path, cache: Path, quantization: str
) -> None:
    source, found = make_checkpoint(tmp_path / "model", "qwen3", seed=41, dtype="bfloat16"), []
    for _ in range(2):
        with serving(source, "--quantization", quantization, "--dtype", "bfloat16") as system:
            found.append(await answers(system.url))
        assert len(list((cache / "quantized").iterdir())) == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
async def test_tokens_of_experts_are_the_best_where_rounding_leaves_no_doubt(
    tmp_path: Path, cache: Path, family: str
) -> None:
    """A token is certain if the reference's best logit leads by more than twice the rounding error of a logit."""
    source = make_checkpoint(tmp_path / "model", family, seed=43)
    reference, ours = oracle.load(source), load_here(source, "int8")
    prompts = oracle.random_prompts(13, 151, (1, 9, 40, 90))
    with serving(source, "--quantization", "int8", "--dtype", "float32") as system:
        async with AsyncClient(system.url) as client:
            sent = [client.complete(sampling=GREEDY, prompt_token_ids=prompt) for prompt in prompts]
            served = [list(answer.outputs[0].token_ids) for answer in await asyncio.gather(*sent)]
    num_checked = 0
    for prompt, tokens in zip(prompts, served, strict=True):
        sequence = torch.tensor(prompt + tokens)
        with torch.inference_mode():
            exact = reference(sequence[None]).logits[0, len(prompt) - 1 : -1].float()
        error = (compute_logits(ours, sequence, (len(sequence),))[len(prompt) - 1 : -1] - exact).abs().amax(1)
        best = exact.topk(2)
        is_plain = best.values[:, 0] - best.values[:, 1] > 2 * error
        assert torch.equal(torch.tensor(tokens)[is_plain], best.indices[is_plain, 0])
        num_checked += int(is_plain.sum())
    print(f"{num_checked} of {sum(map(len, served))} tokens are beyond doubt")
    assert num_checked > sum(map(len, served)) / 3, "an error this large leaves little to compare"


async def test_stream_continues_bit_identically_after_a_crash(tmp_path: Path, cache: Path) -> None:
    """The second worker loads its weights from the cache."""
    source = make_checkpoint(tmp_path / "model", "llama", seed=42)
    prompt = oracle.random_prompts(12, 151, (30,))[0]
    sampling = SamplingParams(max_tokens=900, temperature=0.8, seed=5)
    with serving(source, "--quantization", "int4") as system:
        async with AsyncClient(system.url) as client:
            calm = await client.complete(sampling=sampling, prompt_token_ids=prompt)
            (kept,) = (cache / "quantized").iterdir()
            tokens: list[int] = []
            async for output in client.stream(None, sampling, prompt_token_ids=prompt):
                if not tokens:
                    system.worker.kill()
                    await until_lost(client, 1)
                    system.restart_worker()
                tokens += output.token_ids
        system.worker.wait_until_ready()
    assert tokens == list(calm.outputs[0].token_ids)
    assert list((cache / "quantized").iterdir()) == [kept]
