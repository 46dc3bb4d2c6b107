"""GGUF files through both services, compared with the same weights in safetensors."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_dequantized, write_gguf
from testing.forked import running
from tests.thorough import thorough

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
EXIT_REFUSED = 78
TEXTS = ["Once upon a time", "The little fox", "Mia was a clever", "  two spaces\n\nand 123 numbers"]
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 512}
# Our matrix multiplications would round their inputs for quantised weights.
WIDENED = ["--dtype", "float32", "--cpu-products", "onednn"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


async def tell(url: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the greedy continuations of the texts, and then the answer to a chat message, in sequence."""
    async with AsyncClient(url) as client:
        answers = [await client.complete(text, GREEDY) for text in TEXTS]
        answers.append(await client.chat([{"role": "user", "content": TEXTS[0]}], GREEDY))
        return [(answer.outputs[0].text, tuple(answer.outputs[0].token_ids)) for answer in answers]


async def continue_tokens(url: str, vocab_size: int) -> list[tuple[int, ...]]:
    async with AsyncClient(url) as client:
        prompts = oracle.random_prompts(5, vocab_size, (1, 7, 33, 90))
        answers = [await client.complete(sampling=GREEDY, prompt_token_ids=prompt) for prompt in prompts]
        return [tuple(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize(("type_name", "dtype"), [("BF16", "bfloat16"), *thorough(("BF16", "float32"))])
async def test_the_bundled_model_tells_the_same_stories(type_name: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "storyteller.gguf", STORYTELLER, type_name)
    with running(path, worker=["--dtype", dtype]) as system:
        ours = await tell(system.url)
    with running(STORYTELLER, worker=["--dtype", dtype]) as system:
        assert ours == await tell(system.url)
    assert all(text for text, _ in ours)


@pytest.mark.parametrize("type_name", ["Q8_0", *thorough("F16", "Q4_0")])
async def test_quantized_stories_are_those_of_the_same_weights(type_name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "storyteller.gguf", STORYTELLER, type_name)
    with running(path, worker=WIDENED) as system:
        ours = await tell(system.url)
    plain = write_dequantized(tmp_path / "plain", path, STORYTELLER)
    with running(plain, worker=WIDENED) as system:
        assert ours == await tell(system.url)
    assert all(text for text, _ in ours)
    with running(path) as system:
        codes = await tell(system.url)
        together = await asyncio.gather(*(tell(system.url) for _ in range(4)))
    assert together == [codes] * 4, "the same bits in any company"
    assert all(text for text, _ in codes)


@pytest.mark.thorough
async def test_a_model_in_parts_tells_the_same_stories(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "storyteller.gguf", STORYTELLER, "Q8_0", tensors_per_part=15)
    with running(first) as system:
        ours = await tell(system.url)
    with running(write_gguf(tmp_path / "whole.gguf", STORYTELLER, "Q8_0")) as system:
        assert ours == await tell(system.url)


@pytest.mark.parametrize("family", ["llama", *thorough("qwen2", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss")])
async def test_a_mixture_of_k_quants_is_the_same_weights(family: str, tmp_path: Path) -> None:
    """A mixture of types as in files of the kinds Q4_K_M and Q5_K_M."""
    usual = {"query_pre_attn_scalar": 64} if family.startswith("gemma") else {}
    usual |= {"mlp_only_layers": [], "moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    usual |= {"swiglu_limit": 7.0} if family == "gpt_oss" else {}
    source = make_checkpoint(tmp_path / "source", family, seed=9, num_key_value_heads=2, **WIDE, **usual)
    types = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q5_K", "token_embd.weight": "Q8_0", "output.weight": "Q6_K"}
    types["ffn_down_exps.weight"] = "Q5_K"
    types |= {"ffn_gate_exps.weight": "MXFP4", "ffn_up_exps.weight": "MXFP4"} if family == "gpt_oss" else {}
    path = write_gguf(tmp_path / "model.gguf", source, "Q4_K", types=types)
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds >= {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "F32"}
    with running(path, worker=WIDENED) as system:
        ours = await continue_tokens(system.url, 151)
    plain = write_dequantized(tmp_path / "plain", path, source)
    with running(plain, worker=WIDENED) as system:
        assert ours == await continue_tokens(system.url, 151)


DELTA_NET = {"linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


@pytest.mark.parametrize(("family", "changes"), thorough(("llama", {}), ("qwen3_5_text", DELTA_NET), ("lfm2", {})))
async def test_ranks_share_a_file(family: str, changes: dict[str, int], tmp_path: Path) -> None:
    sizes = {**WIDE, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False, **changes}
    source = make_checkpoint(tmp_path / "source", family, seed=9, **sizes)
    path = write_gguf(tmp_path / "model.gguf", source, "Q8_0")
    with running(path, worker=WIDENED) as system:
        alone = await continue_tokens(system.url, 151)
    with running(path, worker=WIDENED, num_ranks=2) as system:
        assert await continue_tokens(system.url, 151) == alone


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def spoil_scale(path: Path) -> None:
    [tensor] = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.2.ffn_up.weight"]
    with path.open("r+b") as stream:
        stream.seek(tensor.data_offset)
        stream.write(b"\x00\x7c")


REFUSED = {
    "cut off": ({}, cut, "bytes, but tensor blk.3.attn_v.weight ends at byte "),
    "not GGUF": ({}, lambda path: path.write_bytes(b"{}"), "model.gguf is not a GGUF file: it begins with b'{}'"),
    "architecture": (
        {"general.architecture": "mamba"},
        None,
        "general.architecture is 'mamba', which is not supported",
    ),
    "tokenizer": ({"tokenizer.ggml.model": "t5"}, None, "tokenizer.ggml.model is 't5', but must be gpt2"),
    "pre": ({"tokenizer.ggml.pre": "gpt-9"}, None, "tokenizer.ggml.pre is 'gpt-9', but must be one of default, gpt-2"),
    "scale": ({}, spoil_scale, "tensor blk.2.ffn_up.weight in "),
}


@pytest.mark.parametrize("name", ["cut off", *thorough(*[name for name in REFUSED if name != "cut off"])])
def test_what_cannot_be_served_is_one_line(name: str, tmp_path: Path) -> None:
    settings, change, expected = REFUSED[name]
    path = write_gguf(tmp_path / "model.gguf", STORYTELLER, "Q8_0", settings=settings)
    if change is not None:
        change(path)
    flags = ["--port=0", "--metrics-port=0", "--device=cpu", "--num-threads=1", "--log-level=info"]
    ended = subprocess.run(
        [sys.executable, "-m", "pagewire", "serve", str(path), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=dict(os.environ),
    )
    assert (ended.returncode, ended.stdout) == (EXIT_REFUSED, "")
    ignored = (" INFO ", " WARNING worker_service.startup.progress: ")  # a start that takes long reports progress
    [line] = [line for line in ended.stderr.splitlines() if not any(text in line for text in ignored)]
    assert " CRITICAL " in line
    assert expected in line
    assert str(path) in line
    if name != "scale":
        assert "is process" not in ended.stderr, "no worker was started"
