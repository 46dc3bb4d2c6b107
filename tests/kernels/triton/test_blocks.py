"""`pagewire.kernels.triton.blocks` compared with its specification."""

import pytest
import torch

from pagewire.kernels.triton import blocks
from testing.kernel_checks.blocks import LAYOUTS, OPERATIONS, Shape, check_blocks

SHAPE = Shape(num_blocks=8, num_layers=2, block_size=16, num_kv_heads=2, head_dim=32)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_layout(device, dtype, layout, operation):
    staging_layout = "block_major" if layout == "layer_major" else layout
    check_blocks(device, operation, dtype, SHAPE, layout=layout, staging_layout=staging_layout)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
@pytest.mark.parametrize(("layout", "staging_layout"), [("block_major", "layer_major"), ("layer_major", "layer_major")])
def test_layouts_of_both_ends(device, layout, staging_layout, operation):
    check_blocks(device, operation, torch.float16, SHAPE, layout=layout, staging_layout=staging_layout, seed=1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(5, 1, 16, 1, 32),
        Shape(5, 3, 48, 1, 80),  # a partial last chunk
        Shape(5, 1, 16, 8, 128),  # a piece is one chunk
        Shape(5, 1, 256, 1, 112),
    ],
    ids=str,
)
def test_every_size(device, shape, layout, operation):
    check_blocks(device, operation, torch.bfloat16, shape, layout=layout, num_ids=2, ids_dtype=torch.int32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_piece_of_a_few_bytes(device, operation):
    check_blocks(device, operation, torch.float8_e4m3fn, Shape(5, 1, 1, 1, 16), num_ids=2)


def test_no_ids_move_nothing(device):
    cache = torch.randn(4, 2, 16, 2, 32, device=device)
    before, ids = cache.clone(), torch.zeros(0, dtype=torch.int64, device=device)
    blocks.copy_blocks(cache, ids, ids)
    blocks.gather_blocks(cache, ids, cache[:0].clone())
    assert torch.equal(cache, before)


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0)])
def test_blocks_beyond_32_bits_of_words_are_found(device, make_sparse, source, target):
    distance = (2**30 + 64) * 4  # bytes: block 2 begins past 2 ** 31 words
    cache = make_sparse(2 * distance + 64).as_strided((3, 64), (distance, 1))
    cache[source], cache[target] = 5, 0
    blocks.copy_blocks(cache, torch.tensor([source], device=device), torch.tensor([target], device=device))
    assert cache[target].unique().tolist() == [5]


CACHE = torch.zeros(4, 2, 16, 2, 32)
IDS = torch.tensor([1, 2])
REFUSALS = [
    (r"block ids is \[2\] torch.float32", CACHE, IDS.float(), CACHE[:2]),
    (r"block ids is \[3\] .* make it \[2\]", CACHE, torch.tensor([1, 2, 3]), CACHE[:2]),
    ("make them equal", CACHE, IDS, CACHE[:2, :1]),
    ("make them equal", CACHE, IDS, CACHE[:2].half()),
    ("make them dense pieces", CACHE.transpose(3, 4).contiguous().transpose(3, 4), IDS, CACHE[:2]),
    ("make them dense pieces", torch.zeros(4, 4, 32, 2, 32)[:, ::2, ::2], IDS, CACHE[:2]),
    ("has 8 bytes; make it a multiple of 16", torch.zeros(4, 2), IDS, torch.zeros(2, 2)),
    ("begin at address", torch.zeros(33)[1:].view(4, 8), IDS, torch.zeros(2, 8)),
]


@pytest.mark.parametrize(("text", "cache", "ids", "staging"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_refuses(text, cache, ids, staging):
    with pytest.raises(ValueError, match=text):
        blocks.gather_blocks(cache, ids, staging)
    with pytest.raises(ValueError, match=text):
        blocks.scatter_blocks(staging, cache, ids)
