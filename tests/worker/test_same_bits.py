"""A token's logits are bit-identical whatever shares its step: rows, chunks of prompts, blocks or threads.

This covers every dtype and format, and ranks that share a model and communicate over gloo. Here the ranks are threads.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from testing.checkpoints.families import FAMILIES, FIRST_FAMILIES, make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.checkpoints.packed import make_mxfp4, make_quantized
from testing.checkpoints.quantized import BY_NAME
from testing.kernels.compiler import skip_without_compiler
from testing.models import load_model
from testing.seeds import seeded
from testing.worker.model_logits import packed_products
from testing.worker.shared_steps import CPU, VOCAB, alone, together
from tests.thorough import thorough
from worker_service.host import create_host_operations
from worker_service.models.communicator import RankGroup, SingleRank
from worker_service.startup.cpu_kernels import load_cpu_kernels

# Dtypes of computation and of the cache.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.int8),
]


# The first families are tested with all of these dtypes. The other families take turns with the cache dtypes, for both
# dtypes of computation.
FIRST_CASES = [(family, *dtypes) for family in FIRST_FAMILIES for dtypes in DTYPES]
OTHER_CASES = [
    (family, *DTYPES[index])
    for number, family in enumerate(FAMILIES[len(FIRST_FAMILIES) :])
    for index in ((0, 3), (5, 4), (1, 3))[number % 3]
]
# Families with operations or attention of their own.
UNLIKE_OTHERS = (
    "gemma2",
    "gemma3_text",
    "mpt",
    "gpt_oss",
    "qwen2_moe",
    "glm4_moe",
    "cohere2",
    "apertus",
    "phi3small",
    "afmoe",
    "lfm2",
    "qwen3_5_text",
)
CASES = [
    *((seed, *case) for seed, case in enumerate(FIRST_CASES)),
    *(
        pytest.param(seed, *case, marks=() if case[0] in UNLIKE_OTHERS else pytest.mark.thorough)
        for seed, case in enumerate(OTHER_CASES, len(FIRST_CASES))
    ),
]


@pytest.fixture(autouse=True)
def threads():
    skip_without_compiler()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(path, dtype, communicator):
    operations = create_host_operations(load_cpu_kernels())
    options = {"dtype": dtype, "device": CPU, "operations": operations, "communicator": communicator}
    return load_model(path, **options)


def assert_same_bits(model, dtype, cache_dtype, seed, *, num_rows=33) -> None:
    """Compare random prompts, each computed alone, with all of them in random steps."""
    rng = seeded(seed)
    lengths = [rng.choice([1, 2, 9, 40, 130]) for _ in range(num_rows)] + [rng.randint(500, 900)]
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    expected = alone(model, dtype, cache_dtype, prompts)
    assert not any(logits.isnan().any() for logits in expected)
    for num_threads, block_size in ((1, 1), (2, 8), (2, 32)):
        torch.set_num_threads(num_threads)
        actual = together(model, dtype, cache_dtype, prompts, block_size, rng)
        differing = [i for i, logits in enumerate(actual) if not torch.equal(logits, expected[i])]
        assert not differing, (num_threads, block_size, [lengths[i] for i in differing])


@pytest.mark.one_of_each("family", "dtype", "cache_dtype")
@pytest.mark.parametrize(("seed", "family", "dtype", "cache_dtype"), CASES)
def test_logits_are_the_same_bits(seed, family, dtype, cache_dtype, tmp_path):
    overrides = {"sliding_window": 50} if family == "mistral" else {}
    checkpoint = make_checkpoint(tmp_path, family, seed=3, dtype=str(dtype).removeprefix("torch."), **overrides)
    assert_same_bits(load(checkpoint, dtype, SingleRank()), dtype, cache_dtype, seed)


# With these sizes, no shard of a model splits a group.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "intermediate_size": 192}
WIDE = {"num_attention_heads": 8, "head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
# As in files of the kind Q4_K_M.
MIXTURE = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q5_K", "token_embd.weight": "Q6_K"}
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
SAFETENSORS = ("AWQ", "GPTQ", "GPTQ of 8 bits, v2, asymmetric", "W4A16 asymmetric", "W8A8", "FP8 block")
FORMATS = (*GGUF_TYPES, *SAFETENSORS, "experts, AWQ", "experts, FP8 block", "MXFP4")
SOME_FORMATS = ("Q8_0", "Q4_K", "AWQ", "W8A8", "FP8 block", "experts, AWQ", "MXFP4")
OTHER_FORMATS = [name for name in FORMATS if name not in SOME_FORMATS]


def make_weights(directory: Path, name: str) -> Path:
    """Return a model with weights of a format."""
    if name == "MXFP4":
        return make_mxfp4(directory, seed=4)[0]
    if name.startswith("experts"):
        return make_quantized(directory, "qwen3_moe", BY_NAME[name.removeprefix("experts, ")], seed=4, **SIZES)[0]
    if name in BY_NAME:
        return make_quantized(directory, "qwen3", BY_NAME[name], seed=4, **SIZES)[0]
    is_k = name.endswith("_K")
    sizes = {**(WIDE if is_k else SIZES), "tie_word_embeddings": True}
    source = make_checkpoint(directory / "source", "llama", seed=4, **sizes)
    return write_gguf(directory / "model.gguf", source, name, types=MIXTURE if name == "Q4_K" else None)


def num_quantized(model) -> int:
    return sum(packed.format.element == torch.int8 for packed in packed_products(model).values())


@pytest.mark.one_of_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*SOME_FORMATS, *thorough(*OTHER_FORMATS)])
def test_quantized_weights_give_the_same_bits(name, dtype, tmp_path):
    model = load(make_weights(tmp_path, name), dtype, SingleRank())
    assert "FP8" in name or num_quantized(model) >= 4 * len(model.network.layers)
    assert_same_bits(model, dtype, dtype, 5)


OTHERS_ON_RANKS = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "mpt", "qwen2_moe")


def on_two_ranks(directory: Path, compute) -> list:
    """Return the result of `compute(communicator)` on each of two ranks."""
    directory.mkdir()
    ranks = [RankGroup(rank, 2, f"file:{directory}", "127.0.0.1", CPU) for rank in range(2)]
    for rank in ranks:
        rank.begin(1)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compute, ranks))


@pytest.mark.one_of_each
@pytest.mark.parametrize("family", ["mistral", "gpt2", "bloom", "gpt_oss", *thorough(*OTHERS_ON_RANKS)])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [DTYPES[0], DTYPES[3]])
def test_ranks_give_the_same_bits(family, dtype, cache_dtype, tmp_path):
    overrides = {"sliding_window": 50} if family == "mistral" else {}
    checkpoint = make_checkpoint(
        tmp_path / "model", family, seed=6, dtype=str(dtype).removeprefix("torch."), **overrides
    )

    def compare(communicator):
        assert_same_bits(load(checkpoint, dtype, communicator), dtype, cache_dtype, 7, num_rows=8)

    on_two_ranks(tmp_path / "ranks", compare)


@pytest.mark.parametrize("name", ["Q4_K", "W8A8", "experts, AWQ", *thorough("Q8_0", "Q4_0", "AWQ", "GPTQ")])
def test_ranks_keep_codes_and_give_the_same_bits(name, tmp_path):
    path = make_weights(tmp_path / "model", name)
    whole = num_quantized(load(path, torch.bfloat16, SingleRank()))

    def compare(communicator):
        model = load(path, torch.bfloat16, communicator)
        assert num_quantized(model) == whole
        assert_same_bits(model, torch.bfloat16, torch.bfloat16, 8, num_rows=8)

    on_two_ranks(tmp_path / "ranks", compare)
