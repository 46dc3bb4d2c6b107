"""Matrix multiplications with quantised weights compared with multiplications by the dequantised weights."""

import random
from dataclasses import replace

import pytest
import torch

from pagewire.kernels.triton import experts, linear
from pagewire.kernels.weight import FLOAT8, StoredFormat, StoredWeight
from pagewire.network.expert_routing import ExpertRouting
from testing.kernel_checks.linear import PACKED, Layer, check_alone, check_experts, check_layer, held_bytes, make_weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYER = Layer(3, 24, 96)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", PACKED)
def test_products(device, codes, dtype, is_exact):
    check_layer(device, replace(LAYER, codes=codes, dtype=dtype, is_exact=is_exact, has_bias=is_exact), seed=1)


@pytest.mark.parametrize("seed", range(24))
def test_layers_of_all_kinds(device, seed):
    """No tile divides the sizes; half of the layers are exact."""
    choose = random.Random(seed).choice
    codes, group_size = choose(list(PACKED)), choose((16, 32, 48, 64, 128, 0))
    has_factors = group_size in (16, 32, 64, 128) and codes != "fp8" and choose((False, True))
    in_size = choose((256, 512)) if has_factors else (group_size or 16) * choose((1, 3, 5))
    if codes == "fp8":
        in_size += choose((0, 16, 8))  # the last block is shorter
    is_integer = codes not in ("fp8", "e2m1")
    layer = Layer(
        choose((1, 2, 17, 40, 70)),
        choose((1, 24, 65, 150)),
        in_size,
        codes,
        group_size,
        choose(DTYPES),
        has_half_scales=choose((False, True)),
        has_zeros=is_integer and choose((False, True)),
        has_minima=is_integer and choose((False, True)),
        has_factors=has_factors,
        has_bias=choose((False, True)),
        is_exact=choose((False, True)),
    )
    print(layer, seed)
    check_layer(device, layer, seed)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the other rows' infinities
@pytest.mark.parametrize("num_rows", [5, 20, 40])
@pytest.mark.parametrize("codes", PACKED)
def test_a_row_depends_on_no_other(device, codes, num_rows):
    check_alone(device, replace(LAYER, codes=codes, num_rows=num_rows), seed=2)


@pytest.mark.parametrize(
    "codes", [range(-128, -112), range(112, 128), range(-3, 13), [7] * 16, range(-8, 8), range(16)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_around_anything_take_4_bits(device, codes, dtype):
    weight = StoredWeight(torch.tensor([list(codes)] * 2, dtype=torch.int8), torch.ones(2, 1), 16)
    packed = linear.pack(weight, device)
    assert packed.bits == 4
    x = torch.eye(16, device=device).to(dtype)
    assert linear.multiply(x, packed).T.tolist() == weight.values.tolist()


@pytest.mark.parametrize(("zero", "bits"), [(120, 4), (-120, 8)])
def test_zeros_around_anything(device, zero, bits):
    codes = torch.arange(-128, -112).char()[None]
    weight = StoredWeight(codes, torch.ones(1, 1), 16, zero=torch.tensor([[-zero]], dtype=torch.int8))
    packed = linear.pack(weight, device)
    assert packed.bits == bits  # with codes shifted by 120, a zero of 120 would become 240
    x = torch.eye(16, device=device).to(torch.bfloat16)
    assert linear.multiply(x, packed).T.tolist() == (codes.int() + zero).tolist()


def test_scales_that_no_half_float_holds_stay(device):
    for scale, dtype in ((65504.0, torch.float16), (2.0**17, torch.float32), (0.1, torch.float32)):
        packed = linear.pack(StoredWeight(torch.ones(1, 16).char(), torch.tensor([[scale]]), 16), device)
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
        ("make it .* its last dimension dense", (x.T.contiguous().T, packed)),
        (r"bias is \[23\] .* make it \[24\] torch.float32", (x, packed, torch.zeros(23))),
        ("bias is .* make it", (x, packed, torch.zeros(24).half())),
        (r"output is \[2, 24\] torch.float16 .* make it", (x, packed, None, torch.zeros(2, 24).half())),
        (r"output is \[2, 23\] .* make it \[2, 24\]", (x, packed, None, torch.zeros(2, 23))),
        ("output is .* dense", (x, packed, None, torch.zeros(24, 2).T)),
    ):
        with pytest.raises(ValueError, match=text):
            linear.multiply(*arguments)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", PACKED)
def test_experts(device, codes, dtype, is_exact):
    layer = replace(LAYER, codes=codes, dtype=dtype, is_exact=is_exact, has_bias=is_exact)
    check_experts(device, layer, [{}] * 5, ExpertRouting(2), seed=3)


def test_many_slots_of_experts(device):
    layer = replace(LAYER, num_rows=150, out_size=70, has_minima=True, has_zeros=True, group_size=16)
    check_experts(device, layer, [{}] * 3, ExpertRouting(2), seed=4)


@pytest.mark.parametrize(
    ("changes", "bits"),
    [
        ([{"codes": "uint4"}, {"codes": "int4"}], 8),
        ([{"codes": "e2m1"}, {"codes": "int4"}], 8),
        ([{"codes": "int8"}, {"codes": "int4"}, {"codes": "e2m1"}], 8),
        ([{"has_zeros": True}, {}, {"has_minima": True}], 4),
        ([{}, {"has_half_scales": False}, {"has_minima": True, "has_half_scales": False}], 4),
        ([{"has_minima": True}, {"has_minima": True, "has_half_scales": False}], 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_size", [96, 160])  # groups that fill words, and groups that do not
def test_experts_that_differ(device, changes, bits, in_size):
    layer = replace(LAYER, num_rows=8, in_size=in_size, dtype=torch.float32)
    check_experts(device, layer, changes, ExpertRouting(1), seed=5)
    generator = torch.Generator(device).manual_seed(5)
    joined = linear.join([linear.pack(make_weight(replace(layer, **each), generator), device) for each in changes])
    assert joined.bits == bits


def test_experts_whose_codes_need_fewer_bits_by_chance(device):
    """One expert has no positive codes above 7, the other no negative ones: all fit 4 bits with either offset."""
    low, high = torch.arange(16).char() - 8, torch.arange(16).char() % 8
    weights = [StoredWeight(codes[None], torch.ones(1, 1), 16) for codes in (low, high)]
    joined = linear.join([linear.pack(weight, device) for weight in weights])
    assert (joined.bits, joined.offset) == (4, -8)
    weights[0] = replace(weights[0], values=(torch.arange(16).char())[None])
    joined = linear.join([linear.pack(weight, device) for weight in weights])
    assert (joined.bits, joined.offset) == (4, 0)
    assignment = experts.assign(torch.tensor([[0, 1]], device=device), 2, torch.float32)
    slots = linear.multiply_routed(torch.eye(16, device=device)[9:10], joined, assignment)
    assert slots.tolist() == [[9.0], [1.0]]


def test_experts_refuse(device):
    packed = [linear.pack(make_weight(LAYER, torch.Generator().manual_seed(seed)), device) for seed in range(3)]
    fp8 = linear.pack(make_weight(replace(LAYER, codes="fp8"), torch.Generator().manual_seed(1)), device)
    other = linear.pack(make_weight(replace(LAYER, out_size=25), torch.Generator().manual_seed(1)), device)
    joined = linear.join(packed)
    for weights in ([], [packed[0], fp8], [packed[0], other], [joined, joined]):
        with pytest.raises(ValueError, match="make them equal, with 2 dimensions"):
            linear.join(weights)
    assignment = experts.assign(torch.tensor([[0, 1], [1, 2]], device=device), 3, torch.float32)
    x = torch.zeros(2, 96, device=device)
    for text, arguments in (
        (r"the weight is \[2, .* build one for 3 experts with `join`", (x, linear.join(packed[:2]), assignment)),
        ("build one for 3 experts", (x, packed[0], assignment)),
        (r"x is \[2, 95\] .* make it \[rows, 96\]", (x[:, :95], joined, assignment)),
        ("x has 3 rows; pass 2 rows, one per token, or 4, one per slot", (torch.zeros(3, 96), joined, assignment)),
        (r"biases is \[3, 25\] .* make it \[3, 24\]", (x, joined, assignment, torch.zeros(3, 25))),
    ):
        with pytest.raises(ValueError, match=text):
            linear.multiply_routed(*arguments)
    with pytest.raises(ValueError, match="has 3 experts; use `multiply_routed`"):
        linear.multiply(x, joined)
    nothing = experts.assign(torch.empty(0, 2, dtype=torch.int64, device=device), 3, torch.float32)
    assert linear.multiply_routed(x[:0], joined, nothing).shape == (0, 24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        *({"codes": codes} for codes in PACKED),
        {"codes": "fp8", "in_size": 100, "group_size": 48, "has_half_scales": False},
        {"codes": "fp8", "in_size": 100, "group_size": 0},
        {"in_size": 112, "group_size": 16, "has_zeros": True, "has_minima": True, "has_half_scales": False},
        {"in_size": 256, "has_factors": True, "has_minima": True, "codes": "uint4"},
    ],
    ids=str,
)
def test_rows_that_are_taken(device, dtype, changes):
    weight = make_weight(replace(LAYER, **changes), torch.Generator(device).manual_seed(6))
    packed, indexes = linear.pack(weight, device), torch.tensor([3, 0, 23, 3], device=device)
    assert torch.equal(linear.lookup_rows(packed, indexes, dtype), weight.dequantized()[indexes].to(dtype))
    assert linear.lookup_rows(packed, indexes[:0], dtype).shape == (0, weight.dequantized().shape[1])


def test_taking_rows_refuses(device):
    packed = linear.pack(make_weight(LAYER, torch.Generator().manual_seed(1)), device)
    indexes = torch.zeros(2, dtype=torch.int64, device=device)
    for arguments in ((packed, indexes.int()), (packed, indexes[None]), (linear.join([packed] * 2), indexes)):
        with pytest.raises(ValueError, match=r"pass indexes \[T\] torch.int64 and a weight with 2 dimensions"):
            linear.lookup_rows(*arguments, torch.float32)


@pytest.mark.parametrize("seed", range(12))
def test_memory_is_bounded_by_the_format(device, seed):
    choose = random.Random(seed).choice
    codes, group_size, in_size = choose(list(PACKED)), choose((16, 32, 128)), choose((128, 640, 1152))
    is_integer, out_size = codes not in ("fp8", "e2m1"), choose((16, 40))
    layer = Layer(
        1,
        out_size,
        in_size,
        codes,
        group_size,
        has_half_scales=choose((False, True)),
        has_zeros=is_integer and choose((False, True)),
        has_minima=is_integer and choose((False, True)),
    )
    print(layer, seed)
    form = StoredFormat(FLOAT8, group_size)
    if codes != "fp8":
        bits = 8 if codes == "int8" else 4
        form = StoredFormat(torch.int8, group_size, bits, layer.has_half_scales, layer.has_minima, layer.has_zeros)
    packed = linear.pack(make_weight(layer, torch.Generator(device).manual_seed(seed)), device)
    bound, held = linear.num_bytes(form, out_size, in_size), held_bytes(packed)
    scales = sum(part.nbytes for part in (packed.scale, packed.minimum) if part is not None)
    assert held <= bound <= held + scales + out_size * (in_size // group_size + 3)


def test_memory_of_codes_around_anything_counts_their_zeros(device):
    codes = (torch.arange(16 * 160, device=device) % 16 - 3).to(torch.int8).view(16, 160)
    packed = linear.pack(StoredWeight(codes, torch.full((16, 10), 1 + 2**-20, device=device), 16), device)
    assert packed.zero is not None
    assert linear.num_bytes(StoredFormat(torch.int8, 16, 4), 16, 160) == held_bytes(packed)


def test_what_cannot_be_packed(device):
    assert linear.can_pack(48, 100)
    assert linear.can_pack(40, 40)
    assert linear.can_pack(16, 160)
    assert not linear.can_pack(40, 100)
    values = torch.zeros(2, 100).to(FLOAT8)
    with pytest.raises(ValueError, match="groups of 40 of 100 inputs are not supported; make them a multiple of 16"):
        linear.pack(StoredWeight(values, torch.ones(2, 3), 40), device)


@pytest.mark.parametrize("is_e2m1", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_instructions_that_decode(dtype, is_e2m1):
    """The instructions are run by hand, on every byte at each position of a word: interpreted programs lack them."""
    pairs = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 8), (7, 12))
    e2m1 = dict(pairs) | {code + 8: -number for code, number in pairs}
    for half in range(2):
        for byte in range(256):
            codes = [byte, (byte + 85) % 256, 255 - byte, (byte * 7) % 256]
            word = sum(code << 8 * place for place, code in enumerate(codes))
            first, second = run_ptx(linear.decoder(dtype, is_e2m1, half), word)
            bits = torch.tensor([first, second], dtype=torch.uint32).view(dtype).double()
            nibbles = [code >> 4 * half & 15 for code in codes]
            if is_e2m1:
                assert (bits * 2.0 ** (15 if dtype == torch.float16 else 127)).tolist() == [e2m1[n] for n in nibbles]
            else:
                assert (bits - (1024 if dtype == torch.float16 else 128)).tolist() == nibbles


def run_ptx(text: str, word: int) -> tuple[int, int]:
    """Return the values of $0 and $1 after running the instructions on the word in $2.

    An output may use an input's register, so no input may be read after an output was written.
    """
    values, is_written = {"$2": word}, False
    for line in text.strip("{}").split(";")[1:-1]:
        name, target, *operands = line.replace(",", " ").split()
        assert not (is_written and "$2" in operands), f"{line} may read what was overwritten"
        is_written |= target.startswith("$")
        numbers = [values[each] if each in values else int(each, 0) for each in operands]
        values[target] = _INSTRUCTIONS[name](*numbers) & 0xFFFFFFFF
    return values["$0"], values["$1"]


def permute_bytes(low: int, high: int, selector: int) -> int:
    found = [(high << 32 | low) >> 8 * (selector >> 4 * place & 15) & 255 for place in range(4)]
    return sum(byte << 8 * place for place, byte in enumerate(found))


_INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "mov.b32": lambda a: a,
    "prmt.b32": permute_bytes,
}
