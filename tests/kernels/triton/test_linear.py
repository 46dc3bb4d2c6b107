"""Products with quantised weights against those with what the weights mean."""

import random
from dataclasses import replace

import pytest
import torch

from pagewire.kernels.float8 import Float8Format, Float8Weight
from pagewire.kernels.quantized import QuantizedFormat, QuantizedWeight
from pagewire.kernels.triton import linear
from tests.kernels.triton.checks.linear import PACKED, Layer, check_alone, check_layer, make_rows, make_weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYER = Layer(3, 24, 96)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", PACKED)
def test_products(device, codes, dtype, is_exact):
    check_layer(device, replace(LAYER, codes=codes, dtype=dtype, is_exact=is_exact, has_bias=is_exact), seed=1)


@pytest.mark.parametrize("seed", range(24))
def test_layers_of_all_kinds(device, seed):
    """Sizes divide no tile; half of the layers are exact."""
    choose = random.Random(seed).choice
    codes, group_size = choose(list(PACKED)), choose((16, 32, 48, 64, 128, 0))
    has_factors = group_size in (16, 32, 64, 128) and codes != "fp8" and choose((False, True))
    in_size = choose((256, 512)) if has_factors else (group_size or 16) * choose((1, 3, 5))
    if codes == "fp8":
        in_size += choose((0, 16, 8))  # the last block is shorter
    is_integer = codes not in ("fp8", "e2m1")
    layer = Layer(
        *(choose((1, 2, 17, 70)), choose((1, 24, 65, 150)), in_size, codes, group_size, choose(DTYPES)),
        has_half_scales=choose((False, True)),
        has_zeros=is_integer and choose((False, True)),
        has_minima=is_integer and choose((False, True)),
        has_factors=has_factors,
        has_bias=choose((False, True)),
        is_exact=choose((False, True)),
    )
    print(layer, seed)
    check_layer(device, layer, seed)


@pytest.mark.parametrize("num_rows", [5, 20])
@pytest.mark.parametrize("codes", PACKED)
def test_a_row_depends_on_no_other(device, codes, num_rows):
    check_alone(device, replace(LAYER, codes=codes, num_rows=num_rows), seed=2)


@pytest.mark.parametrize("codes", [range(-128, -112), range(112, 128), range(-3, 13), [7] * 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_around_anything_take_4_bits(device, codes, dtype):
    weight = QuantizedWeight(torch.tensor([list(codes)] * 2, dtype=torch.int8), torch.ones(2, 1), None, 16)
    packed = linear.pack(weight, device)
    assert packed.bits == 4
    x = torch.eye(16, device=device).to(dtype)
    assert linear.multiply(x, packed).T.tolist() == weight.codes.tolist()


def test_scales_that_no_half_float_holds_stay(device):
    for scale, dtype in ((65504.0, torch.float16), (2.0**17, torch.float32), (0.1, torch.float32)):
        packed = linear.pack(QuantizedWeight(torch.ones(1, 16).char(), torch.tensor([[scale]]), None, 16), device)
        assert packed.scale.dtype == dtype
        product = linear.multiply(torch.eye(16, device=device)[:1], packed)
        assert product.tolist() == [[torch.tensor(scale).item()]]


def test_no_rows_are_no_error(device):
    packed = linear.pack(make_weight(LAYER, torch.Generator().manual_seed(1)), device)
    assert linear.multiply(torch.empty(0, 96, device=device), packed).shape == (0, 24)


def test_products_refuse(device):
    packed = linear.pack(make_weight(LAYER, torch.Generator().manual_seed(1)), device)
    x = torch.zeros(2, 96, device=device)
    for text, arguments in (
        (r"x is \[2, 95\] .* make it \[rows, 96\]", (x[:, :95], packed)),
        (r"x is \[2, 96\] torch.float64", (x.double(), packed)),
        ("make it .* rows dense", (x.T.contiguous().T, packed)),
        (r"the bias is \[23\] .* make it \[24\] torch.float32", (x, packed, torch.zeros(23))),
        ("the bias is .* make it", (x, packed, torch.zeros(24).half())),
        ("the output is to be torch.float16; make it torch.float32", (x, packed, None, torch.float16)),
    ):
        with pytest.raises(ValueError, match=text):
            linear.multiply(*arguments)


def test_what_cannot_be_packed(device):
    assert linear.can_pack(Float8Format(48), 100)
    assert linear.can_pack(Float8Format(40), 40)
    assert linear.can_pack(QuantizedFormat(4, 16, True, False), 160)
    assert not linear.can_pack(Float8Format(40), 100)
    values = torch.zeros(2, 100).to(linear.E4M3)
    with pytest.raises(ValueError, match="blocks of 40 of 100 inputs are not served; make them a multiple of 16"):
        linear.pack(Float8Weight(values, torch.ones(2, 3), 40), device)
