"""`pagewire.kernels.triton.cache` compared with its specification."""

import dataclasses

import pytest
import torch

from pagewire.kernels.triton import cache
from testing.kernel_checks.cache import E4M3, LAYOUTS, Shape, check_reshape_and_cache, make_caches, make_step

SHAPE = Shape(num_tokens=7, num_kv_heads=3, head_dim=32, block_size=16, num_blocks=3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_come_to_their_slots(device, dtype, layout):
    check_reshape_and_cache(device, dtype, dtype, dataclasses.replace(SHAPE, layout=layout))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 256, 320, 512])
@pytest.mark.parametrize("block_size", [8, 16, 48, 256])
def test_every_size(device, head_dim, block_size):
    shape = Shape(5, 2, head_dim, block_size, 2, is_slot_wide=False)
    check_reshape_and_cache(device, torch.float16, torch.float16, shape, seed=head_dim + block_size)


@pytest.mark.parametrize("num_kv_heads", [1, 8, 40])
@pytest.mark.parametrize("num_tokens", [1, 2, 64, 65])
def test_every_number_of_rows(device, num_tokens, num_kv_heads):
    shape = Shape(num_tokens, num_kv_heads, 32, 16, 5)
    check_reshape_and_cache(device, torch.float32, torch.float32, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_caches_of_8_bit_floats(device, dtype, layout):
    check_reshape_and_cache(device, dtype, E4M3, dataclasses.replace(SHAPE, layout=layout))


def test_a_step_without_tokens_writes_nothing(device):
    key, value, slots = make_step(SHAPE, torch.float32, device, 0)
    storage, key_cache, value_cache = make_caches(SHAPE, torch.float32, device)
    cache.reshape_and_cache(key[:0], value[:0], key_cache, value_cache, slots[:0])
    assert storage.isnan().all()


def test_a_slot_beyond_32_bits_of_elements_is_found(device, make_sparse):
    """The blocks of one layer of a large allocation are far apart: here the last block begins past 2 ** 31."""
    distance = 2**30 + 64
    caches = make_sparse(2 * distance + 16 * 32).view(E4M3).as_strided((3, 16, 1, 32), (distance, 32, 32, 1))
    caches[2] = torch.zeros((16, 1, 32), device=device).to(E4M3)
    key = torch.ones((1, 1, 32), device=device)
    cache.reshape_and_cache(key, key, caches, caches, torch.tensor([2 * 16 + 3], device=device))
    assert caches[2].float().sum(dim=(1, 2)).tolist() == [0.0] * 3 + [32.0] + [0.0] * 12


def refusals():
    key, value, slots = make_step(SHAPE, torch.float32, torch.device("cpu"), 0)
    _, key_cache, value_cache = make_caches(SHAPE, torch.float32, torch.device("cpu"))
    good = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slots}
    small = torch.zeros(3, 4, 3, 32)
    yield "block_size is 4; choose a multiple of 8", good | {"key_cache": small, "value_cache": small}
    odd = torch.zeros(3, 16, 3, 20)
    yield "head_dim is 20; the kernels support", good | {"key_cache": odd, "value_cache": odd}
    yield r"value_cache is \[3, 4, 3, 32\] .* make it \[3, 16, 3, 32\]", good | {"value_cache": small}
    yield "value_cache is .* torch.float16 .* torch.float32", good | {"value_cache": value_cache.half()}
    yield "key_cache is .* make it .* its last dimension dense", good | {"key_cache": torch.zeros(3, 16, 32, 3).mT}
    yield r"key is \[7, 2, 32\] .* make it \[7, 3, 32\]", good | {"key": key[:, :2]}
    yield r"key is \[7, 3, 32\] .* make it \[6, 3, 32\]", good | {"slot_mapping": slots[:6]}
    yield r"slot_mapping is \[7\] torch.int16", good | {"slot_mapping": slots.short()}
    yield "key is .* torch.float16 .* torch.float32", good | {"key": key.half()}
    yield "key is .* its last dimension dense", good | {"key": key.mT.contiguous().mT}


@pytest.mark.parametrize(("text", "arguments"), [*refusals()], ids=lambda case: case if isinstance(case, str) else "")
def test_refuses(text, arguments):
    with pytest.raises(ValueError, match=text):
        cache.reshape_and_cache(**arguments)
