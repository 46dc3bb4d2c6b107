"""Checkpoints in FP8: the model's weights, and the fused decoder over them."""

import random

import pytest
import torch

from testing.checkpoints.packed import make_quantized
from testing.checkpoints.quantized import BY_NAME
from testing.kernels.compiler import skip_without_compiler
from testing.models import load_model
from testing.worker.shared_steps import VOCAB, alone, together
from worker_service.host import create_host_operations
from worker_service.models.linear import Linear
from worker_service.models.loading import prepare_model
from worker_service.startup.cpu_kernels import load_cpu_kernels

CPU = torch.device("cpu")


@pytest.fixture
def num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["FP8 block", "FP8 by channel", "FP8 tensor"])
def test_the_decoder_gives_the_same_bits_over_float8(tmp_path, num_threads, name, dtype):
    skip_without_compiler()
    path, _ = make_quantized(tmp_path, "qwen3", BY_NAME[name], seed=31)
    model = load_model(path, dtype=dtype, device=CPU, operations=create_host_operations(load_cpu_kernels()))
    products = [module.product for name, module in model.named_modules() if name.endswith("q_proj")]
    assert products
    assert all(product.packed.format.element == torch.float8_e4m3fn for product in products)
    rng, generator = random.Random(31), torch.Generator().manual_seed(31)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (1, 2, 9, 40, 130)]
    expected = alone(model, dtype, dtype, prompts)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        actual = together(model, dtype, dtype, prompts, 8, rng)
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", ["FP8 block, powers of two", "FP8 by channel"])
def test_a_weight_takes_a_byte_and_its_scales(tmp_path, name):
    """The footprint equals the size of the packed panels."""
    skip_without_compiler()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes["vocab_size"] = 160  # whole packed panels
    path, _ = make_quantized(tmp_path, "llama", BY_NAME[name], seed=32, **sizes)
    unloaded = prepare_model(
        path, dtype=torch.bfloat16, device=CPU, operations=create_host_operations(load_cpu_kernels())
    )
    footprint = unloaded.footprint()
    model = unloaded.load()
    products = [module for module in model.modules() if isinstance(module, Linear)]
    packed = [module.product.packed for module in products if module.format.group_size]
    assert len(packed) == len(products) - 1
    unit = 32 if "powers" in name else 128
    for each in packed:
        assert each.panels.nbytes == each.in_size * each.out_size * (1 + 4 / unit)
    others = [*model.parameters(), *model.buffers(), model.head.product.packed.panels]
    assert footprint.held == sum(each.panels.nbytes for each in packed) + sum(tensor.nbytes for tensor in others)
