"""Weights of every element type, their parts and joined weights, compared with their formula."""

import pytest
import torch

from pagewire.kernels.weight import FLOAT8, StoredFormat, StoredWeight
from tests.kernels.random_products import compact

OUT_SIZE, IN_SIZE = 70, 9 * 256


def floats(dtype):
    return StoredWeight(torch.randn(OUT_SIZE, IN_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype))


def float8(group_size):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(OUT_SIZE, IN_SIZE, generator=generator).to(FLOAT8)
    return StoredWeight(values, torch.rand(OUT_SIZE, -(-IN_SIZE // group_size), generator=generator), group_size)


WEIGHTS = {
    "float32": floats(torch.float32),
    "bfloat16": floats(torch.bfloat16),
    "float8 in blocks": float8(128),
    "float8 in blocks, the last shorter": float8(1000),
    "float8 by channel": float8(IN_SIZE),
    "codes": compact(3, 8, 32, has_minima=False, has_factors=False),
    "codes with minima and zeros": compact(4, 4, 32, has_minima=True, has_factors=False),
    "codes with factors": compact(5, 4, 32, has_minima=True, has_factors=True),
    "codes with factors of scales alone": compact(6, 8, 16, has_minima=False, has_factors=True),
}
EVERY = pytest.mark.parametrize("name", WEIGHTS)


def meant(weight):
    """Return selected elements of the weight by its formula, computed from single numbers."""
    rows, columns = torch.tensor([0, 5, OUT_SIZE - 1]), torch.tensor([0, 31, 32, 1000, IN_SIZE - 1])
    found = weight.values.float()[rows][:, columns]

    def of(part, group_size):
        return part[rows][:, columns // group_size].float()

    if weight.zero is not None:
        found = found - of(weight.zero, weight.group_size)
    for part, factor in ((weight.scale, weight.scale_factor), (weight.minimum, weight.minimum_factor)):
        if part is not None:
            whole = of(part, weight.group_size) * (1 if factor is None else of(factor, 256))
            found = found * whole if part is weight.scale else found - whole
    return rows, columns, found


@EVERY
def test_numbers_are_those_of_the_formula(name):
    rows, columns, expected = meant(WEIGHTS[name])
    before = WEIGHTS[name].values.clone()
    assert torch.equal(WEIGHTS[name].dequantized()[rows][:, columns], expected)
    assert torch.equal(WEIGHTS[name].to_floats(torch.bfloat16)[rows][:, columns], expected.bfloat16())
    assert torch.equal(WEIGHTS[name].values.float(), before.float())


@EVERY
def test_parts_mean_what_they_meant_in_the_whole(name):
    weight, whole = WEIGHTS[name], WEIGHTS[name].dequantized()
    rows = torch.tensor([7, 7, 69, 0])
    assert torch.equal(weight[rows].dequantized(), whole[rows])
    for start, stop in ((0, 256), (1000, 2000), (2000, IN_SIZE), (0, IN_SIZE)):
        size = 1 if weight.group_size == IN_SIZE else weight.group_size or 1
        first, end = start // size * size, min(IN_SIZE, -(-stop // size) * size)
        cut = weight[3:40].cut(slice(first, end))
        assert all(part.is_contiguous() for part in cut.parts().values())
        assert torch.equal(cut.dequantized(), whole[3:40, first:end])


@EVERY
@pytest.mark.parametrize("other", WEIGHTS)
def test_weights_one_below_the_other(name, other):
    weights = [WEIGHTS[name], WEIGHTS[other], WEIGHTS[name]]
    joined = StoredWeight.join(weights)
    assert torch.equal(joined.dequantized(), torch.cat([weight.dequantized() for weight in weights]))
    elements = {weight.element for weight in weights}
    assert joined.element == (elements.pop() if len(elements) == 1 else torch.float32)


def test_a_format_holds_all_of_which_it_is_joined():
    codes = StoredFormat(torch.int8, 32, 4, has_half_scales=True, rounds_inputs=True)
    joined = StoredFormat.join([codes, StoredFormat(torch.int8, 48, 6, has_minima=True, rounds_inputs=True)])
    assert joined == StoredFormat(torch.int8, 16, 6, has_minima=True, rounds_inputs=True)
    assert (codes.describe(), joined.describe()) == ("codes of 4 bits", "codes of 6 bits")
    assert StoredFormat(FLOAT8, 128).describe() == "float8"
