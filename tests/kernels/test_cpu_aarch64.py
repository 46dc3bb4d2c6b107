"""The C kernels for AArch64, run by qemu, compared with this machine's kernels and with torch.

`make check-aarch64` runs more tests.
"""

import random
from dataclasses import replace

import pytest
import torch

from deploy.platform_wheel import variants_of
from pagewire.kernels import reference
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cache_rows import write_rows
from pagewire.kernels.cpu import BuildError, CpuKernels
from pagewire.kernels.cpu.library import VARIANTS, choose_variant, load_library
from pagewire.kernels.weight import StoredWeight
from testing.checkpoints.families import make_checkpoint
from testing.kernels.compiler import skip_without_compiler
from testing.kernels.emulated import aarch64
from testing.models import load_model
from testing.worker import shared_steps
from testing.worker.model_logits import TOLERANCE, transformers_logits
from testing.worker.shared_steps import CPU, VOCAB, Engine
from tests.kernels.paged import paged_attention
from tests.kernels.random_products import KINDS, random_activations, random_product, random_quantized
from worker_service.host import create_host_operations
from worker_service.startup.cpu_kernels import environment_build

NUM_ROWS = (1, 3, 8, 13)
# By variant: the processor that has just the features it needs.
EMULATED = {"portable": "cortex-a53", "dotprod": "neoverse-n1"}


@pytest.fixture(scope="module", params=EMULATED)
def emulated(request) -> CpuKernels:
    missing = aarch64.missing_tools()
    if missing:
        pytest.skip(missing)
    return aarch64.load_emulated(request.param, EMULATED[request.param])


@pytest.fixture(scope="module")
def ours() -> CpuKernels:
    """This machine's kernels in the avx2 variant, which fuse multiplication and addition as AArch64 does."""
    skip_without_compiler()
    try:
        variant = choose_variant("avx2")
    except BuildError as error:
        pytest.skip(str(error))
    return CpuKernels(load_library(replace(environment_build(), variant=variant)))


def check_same_products(emulated, emulated_packed, ours, packed, x):
    """Check for the same bits as on this machine, for rows alone and in batches."""
    alone = torch.cat([emulated.linear(row[None], emulated_packed) for row in x])
    for num_rows in NUM_ROWS:
        places = torch.randperm(len(x))[:num_rows]
        assert torch.equal(emulated.linear(x[places], emulated_packed), alone[places])
    assert torch.equal(alone, ours.linear(x, packed))


def test_every_architecture_has_its_variants():
    assert variants_of("x86_64") == ["portable", "avx2", "avx512", "avx512_bf16", "amx_int8"]
    assert variants_of("aarch64") == ["portable", "dotprod"]
    assert variants_of("riscv64") == ["portable"]
    assert set(EMULATED) == set(variants_of("aarch64"))
    assert set(VARIANTS) == {*variants_of("x86_64"), *variants_of("aarch64")}


@pytest.mark.parametrize(("dtype", "activation"), KINDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_products_are_those_of_avx2_bit_for_bit(emulated, ours, seed, dtype, activation):
    weight, bias, x = random_product(seed, dtype)
    packed = [each.pack_linear(StoredWeight(weight), bias, activation) for each in (emulated, ours)]
    check_same_products(emulated, packed[0], ours, packed[1], x[: max(NUM_ROWS)])


@pytest.mark.parametrize("seed", range(10))
def test_quantised_products_are_those_of_avx2_bit_for_bit(emulated, ours, seed):
    """Weights of 8 bits, 4 bits and tables, in groups of 16 and 32, with and without minima."""
    weight = random_quantized(seed)
    x = random_activations(seed, max(NUM_ROWS), weight.values.shape[1])
    packed = [each.pack_linear(weight) for each in (emulated, ours)]
    check_same_products(emulated, packed[0], ours, packed[1], x)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("seed", range(2))
def test_attention(emulated, cache_dtype, seed):
    """A chunk of a prompt and a decoded token, in one step."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads, head_dim, block_size = 2, 40, 16
    caches = torch.randn(2, 50, block_size, num_kv_heads, head_dim, generator=generator)
    key_cache, value_cache = write_rows(caches, cache_dtype)
    seq_lens, starts = [70, 1, 601], [0, 33, 34, 35]
    tables = torch.randperm(50, generator=generator)[:39].repeat(3, 1)
    query = torch.randn(starts[-1], 6, head_dim, generator=generator)
    scoring = Scoring(head_dim**-0.5)
    actual = paged_attention(emulated, query, key_cache, value_cache, tables, seq_lens, starts, scoring)
    expected = reference.paged_attention(query, key_cache, value_cache, tables, seq_lens, starts, scoring)
    torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6)
    alone = paged_attention(
        emulated, query[-1:], key_cache, value_cache, tables[-1:], seq_lens[-1:], [0, 1], scoring, num_threads=2
    )
    assert torch.equal(alone, actual[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_steps_of_a_decoder(emulated, family, dtype, tmp_path, monkeypatch):
    """Chunks of prompts side by side agree with the prompts alone bit for bit, and in float32 with transformers."""
    monkeypatch.setattr(shared_steps, "load_cpu_kernels", lambda: emulated)
    checkpoint = make_checkpoint(tmp_path, family, seed=3, dtype=str(dtype).removeprefix("torch."))
    model = load_model(checkpoint, dtype=dtype, device=CPU, operations=create_host_operations(emulated))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (5, 23)]
    engine = Engine(model, dtype, dtype, 8, random.Random(1))
    rows = [engine.row(tokens) for tokens in prompts]
    for nums in ((3, 20), (1, 1), (1, 2)):
        engine.step(list(zip(rows, nums, strict=True)))
    for row, alone in zip(rows, shared_steps.alone(model, dtype, dtype, prompts), strict=True):
        assert torch.equal(torch.cat(row.logits), alone)
        if dtype == torch.float32:
            expected = transformers_logits(checkpoint, row.tokens)
            torch.testing.assert_close(alone, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
